"""Engines and Redis are killed in the middle of streams: see ``gateway_chaos``."""

from __future__ import annotations

import pytest

from tests.e2e.gateway_chaos import check_free, fleet, run
from tests.patience import within

pytestmark = pytest.mark.outside


async def test_no_answer_crosses_and_no_reservation_stays() -> None:
    async with fleet() as running:
        async with within(120):
            ends = await run(running, 150)
        assert ends["whole"] > 75, ends
        assert sum(ends.values()) == 150
        await check_free(running)
