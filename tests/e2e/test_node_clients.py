"""The Node clients of OpenAI and Anthropic get from a gateway what an engine gives.

``npm install --prefix DIR openai @anthropic-ai/sdk``, and ``WAYMARK_TEST_NODE_MODULES=DIR/node_modules`` for the test.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from tests.e2e.test_gateway import pair
from tests.patience import within

MODULES = os.environ.get("WAYMARK_TEST_NODE_MODULES")

pytestmark = [
    pytest.mark.outside,
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no node"),
    pytest.mark.skipif(MODULES is None, reason="WAYMARK_TEST_NODE_MODULES does not name the packages of npm"),
]


async def test_node_s_clients_get_what_an_engine_gives() -> None:
    async with pair() as running:
        process = await asyncio.create_subprocess_exec(
            *("node", str(Path(__file__).with_name("clients.cjs")), running.url),
            env={"PATH": os.environ["PATH"], "NODE_PATH": str(MODULES)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with within(60):
            said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()
        assert said.decode().split() == ["openaiAnswers", "openaiGoesOn", "openaiFails", "anthropicAnswers"]
