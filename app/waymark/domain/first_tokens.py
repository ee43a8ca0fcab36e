"""How long a target's requests waited for their first token, as sums from which a straight line follows."""

from __future__ import annotations

from typing import NamedTuple

#: Requests from which a prediction counts; less than 5, since older ones count for less.
_LEAST = 4.5
#: The slope cannot be estimated if the work of all requests is this close: a share of its mean, or of a token, squared.
_SPREAD = 1e-4


class FirstTokens(NamedTuple):
    """Sums over requests, of which older ones count for less: milliseconds, and prefill tokens until then (work)."""

    requests: float
    work: float
    ms: float
    work_squared: float
    work_ms: float

    @classmethod
    def parse(cls, value: bytes) -> FirstTokens | None:
        """Parse the value in Redis; None for any other value."""
        try:
            sums = cls(*map(float, value.split()))
        except (TypeError, ValueError):
            return None
        return sums if all(0 <= number < float("inf") for number in sums) else None

    @property
    def slope(self) -> float | None:
        """Estimate by least squares the milliseconds that a further prefill token takes. Return None after too few
        requests.

        More work never counts as faster.
        """
        if self.requests < _LEAST:
            return None
        spread = self.requests * self.work_squared - self.work**2
        if spread <= _SPREAD * max(self.work**2, 1.0):
            return 0.0
        return max(0.0, (self.requests * self.work_ms - self.work * self.ms) / spread)

    def predict(self, work: float) -> float | None:
        """Estimate the milliseconds to the first token behind so many prefill tokens. Return None after too few."""
        slope = self.slope
        if slope is None:
            return None
        return max(0.0, self.ms / self.requests + slope * (work - self.work / self.requests))
