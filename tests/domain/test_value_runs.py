"""Equal neighbours among the values of a chain, in C and in Python."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import IMPLEMENTATIONS
from waymark import native
from waymark.domain.match import value_runs

pytestmark = pytest.mark.usefixtures("implementation_kept")


@given(values=st.lists(st.sampled_from([b"1", b"2", b"1 2", b"", None]), max_size=12))
def test_runs_go_to_the_first_block_that_nobody_has(values: list[bytes | None]) -> None:
    head = values[: values.index(None)] if None in values else values
    expected = [(value, len(list(run))) for value, run in groupby(head)]
    for implementation in IMPLEMENTATIONS:
        native.select(implementation == "native")
        assert value_runs([None if value is None else bytes(bytearray(value)) for value in values]) == expected
