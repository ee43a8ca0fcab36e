"""How fast a target answers: the time to the first token of an answer, and the time of each further token.

Both are kept as sums over requests, to which a straight line is fitted: the first time grows with the prefill tokens
that the target had to compute, the second with the number of requests that it works on at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

#: The least sum of the weights of requests for a prediction. Older requests weigh less than 1, so it takes 5 requests.
_LEAST = 4.5
#: The slope cannot be estimated if the variance of the work is below this share of its squared mean.
_SPREAD = 1e-4
#: The least time per token that an engine needs. A shorter time shows that something has buffered the whole answer.
_TOKEN_MS_MIN = 0.1
#: The headers of the two times. The second name is that of llm-d's later releases; if both are present, the first one
#: counts.
_TTFT_HEADERS = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
_TPOT_HEADERS = ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms")
_MILLISECONDS = re.compile(r"[0-9]{1,7}(?:\.[0-9]{1,6})?", re.ASCII)
_MILLISECONDS_MAX = 3_600_000


class TimeSums(NamedTuple):
    """Sums over requests, in which older requests count for less: milliseconds, and the work on which they depend."""

    requests: float = 0.0
    work: float = 0.0
    ms: float = 0.0
    work_squared: float = 0.0
    work_ms: float = 0.0

    @property
    def slope(self) -> float | None:
        """Estimate by least squares the milliseconds that a further unit of work takes. Return None after too few
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
        """Estimate the milliseconds for this amount of work. Return None after too few requests."""
        slope = self.slope
        if slope is None:
            return None
        return max(0.0, self.ms / self.requests + slope * (work - self.work / self.requests))

    def plus(self, addend: TimeSums) -> TimeSums:
        """Return the sums over the requests of both."""
        return TimeSums(*map(float.__add__, map(float, self), map(float, addend)))

    @classmethod
    def of(cls, work: float, ms: float) -> TimeSums:
        """Return the sums of one request."""
        return cls(1.0, work, ms, work * work, work * ms)


NO_SUMS = TimeSums()
_NUMBERS = len(TimeSums._fields)


class AnswerTimes(NamedTuple):
    """The times of one target."""

    first_token: TimeSums
    """The time to the first token, by the prefill tokens computed until then."""
    further_tokens: TimeSums = NO_SUMS
    """The time of each further token, by the requests under way at the target."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """All sums, in the order in which Redis has them."""
        return (*self.first_token, *self.further_tokens)

    @classmethod
    def of_numbers(cls, numbers: tuple[float, ...]) -> AnswerTimes | None:
        """Return the times with these sums, or None for a wrong number of sums. The last five may be missing."""
        if len(numbers) not in (_NUMBERS, 2 * _NUMBERS) or not all(0 <= number < float("inf") for number in numbers):
            return None
        return cls(TimeSums(*numbers[:_NUMBERS]), TimeSums(*numbers[_NUMBERS:]))

    @classmethod
    def parse(cls, value: bytes) -> AnswerTimes | None:
        """Parse the value in Redis; None for any other value."""
        try:
            return cls.of_numbers(tuple(map(float, value.split())))
        except ValueError:
            return None


class AskedTimes(NamedTuple):
    """The times that a client asks for, in ms; None for a time that it does not ask for."""

    ttft_ms: float | None = None
    """The time to the first token."""
    tpot_ms: float | None = None
    """The time of each further token."""


NO_TIMES = AskedTimes()


def asked_times_of(header: Callable[[str], str | None]) -> AskedTimes:
    """Return the times that the headers of a request ask for. Any value other than a positive number of ms is ignored.

    ``header`` returns the value of a name in lower case.
    """

    def asked(names: Sequence[str]) -> float | None:
        text = next((value for name in names if (value := header(name))), "")
        ms = float(text) if _MILLISECONDS.fullmatch(text) else 0.0
        return ms if 0 < ms <= _MILLISECONDS_MAX else None

    return AskedTimes(asked(_TTFT_HEADERS), asked(_TPOT_HEADERS))


def tpot_ms(seconds: float, tokens: int | None) -> float | None:
    """Return the ms of each token after the first one, if an answer took ``seconds`` from its first token to its end.

    Return None if there is no second token or no token count, or if the whole answer came at once.
    """
    if tokens is None or tokens < 2:
        return None
    ms = 1e3 * seconds / (tokens - 1)
    return ms if ms >= _TOKEN_MS_MIN else None
