"""The README's commands give what it says they give."""

from __future__ import annotations

import json
import re
from pathlib import Path

from redis.asyncio import Redis

from tests.live import start

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
CURL = re.compile(r"^\$ curl -s localhost:13333(/\S+) -H \"\$J\" -d '(.*?)'\n(.*?)$", re.MULTILINE | re.DOTALL)
GET = re.compile(r"^\$ redis-cli (H?GET) '(\S+)'(?: (\S+))?\n(\".*\")$", re.MULTILINE)


async def test_what_is_tried_by_hand_answers_as_printed(redis_url: str, tmp_path: Path) -> None:
    requests = CURL.findall(README)
    lookups = GET.findall(README)
    assert [path for path, _, _ in requests] == ["/register", "/events", "/query"]
    assert len(lookups) == 2
    async with start("serve", redis_url, tmp_path / "log") as live, live.client() as client:
        for path, body, printed in requests:
            answer = await client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.text == printed
        redis = Redis.from_url(redis_url)
        # Redis' clock says where holder ids begin.
        (block, printed_id), *_ = [(key, json.loads(text)) for command, key, _, text in lookups if command == "GET"]
        value = await redis.get(block)
        assert isinstance(value, bytes)
        holder = value.decode()
        for command, key, field, printed in lookups:
            value = await (redis.hget(key, field.replace(printed_id, holder)) if command == "HGET" else redis.get(key))
            assert value == json.loads(printed).replace(printed_id, holder).encode()
        listed = re.search(r"^\$ redis-cli --scan.*\n((?:\"wm:.*\"\n)+)", README, re.MULTILINE)
        assert listed is not None
        found: list[bytes] = [bytes(key) for key in await redis.keys("wm:*") if isinstance(key, bytes)]
        assert set(re.findall(r"\"(\S+)\"", listed[1].replace(printed_id, holder))) == {
            str(key, "utf-8") for key in found
        }
        await redis.aclose()


def test_every_file_the_readme_names_is_there() -> None:
    named = re.findall(r"`((?:app|lua)/[\w/.]+)`", README) + re.findall(r"\]\(([\w/.]+)\)", README)
    assert len(named) > 8
    for name in named:
        assert (Path(__file__).parents[1] / name).exists(), name
