"""Hot blocks, as the metrics tell of them."""

from __future__ import annotations

from waymark.domain.keys import pack
from waymark.metrics import Metrics
from waymark.store.hot import HotBlocks


def test_what_is_kept_and_what_is_found_is_counted() -> None:
    metrics = Metrics()
    hot = HotBlocks(10.0, 1 << 20, metrics)
    value = metrics.registry.get_sample_value
    holders = b" ".join(b"%d" % holder for holder in range(100, 200))
    hot.keep(1, pack([7, 8]), [(holders, 2)], now=0.0)
    assert value("waymark_hot_block_bytes") == hot.bytes > len(holders)
    assert len(hot.find(1, pack([7, 8, 9]), now=1.0)) == 2
    assert value("waymark_hot_block_hits_total") == 2
    hot.find(1, pack([9]), now=1.0)
    assert value("waymark_hot_block_hits_total") == 2
    hot.find(1, pack([7]), now=11.0)
    assert (value("waymark_hot_block_bytes"), value("waymark_hot_block_hits_total")) == (0, 2)
