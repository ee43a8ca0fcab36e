"""Engines and Redis are killed in the middle of streams: see ``gateway_chaos``."""

from __future__ import annotations

import pytest

from tests.e2e.gateway_chaos import check_free, fleet, run
from tests.patience import within

pytestmark = pytest.mark.outside


async def test_no_answer_crosses_and_no_reservation_stays() -> None:
    async with fleet() as running:
        async with within(120):
            ends = await run(running, 300)
        assert ends["whole"] > 150, ends
        assert sum(ends.values()) == 300
        await check_free(running)
