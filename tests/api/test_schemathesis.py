"""The published contract against the running service: no 500, no answer that the contract does not know.

Requests are made up from ``/openapi.json``, both ones that fit and ones that do not, and sent to a real process over a
real Redis. What is made up is the same every time, so a run that fails fails again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgpack
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.live import ANSWER_SECONDS, start
from tests.patience import patient

pytestmark = pytest.mark.outside

CHECKS = [
    not_a_server_error,  # the first, see below
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
EXAMPLES = 2
#: As released, a model without a worker is a 503 here.
WITHOUT_WORKER = {"/dynamo/select", "/dynamo/select_and_reserve", "/dynamo/overlap_scores", "/dynamo/potential_loads"}
REGISTER = {"type": "vLLM", "endpoint": "tcp://127.0.0.1:9", "model": "m", "instance_id": "1", "block_size": 2}
#: Of queries that fit, every second one is about what is registered.
KNOWN: dict[str, str | None] = {"model": "m", "model_name": "m", "tenant_id": "default", "routing_group": "default"}
KNOWN |= {"modelname": "m", "lora_id": None, "instance_id": None}
#: Without what needs a tokenizer.
TEXT = {"prompt", "messages"}
#: Of decisions that fit, every second one is about a prompt by its tokens, for any target and by any policy.
KNOWN_DECISION: dict[str, Any] = {"model": "m", "tenant_id": "default", "token_ids": [1, 2, 3]}
LEFT_OUT = {"seq_hashes", "messages", "prompt", "prefix_hash", "overrides", "lora_id", "only", "exclude", "candidates"}
LEFT_OUT |= {"session_token", "block_size"}
#: And of events that fit, every second one is of a publisher that is there.
POOL = REGISTER | {"type": "standard", "endpoint": None, "instance_id": "pool"}
KNOWN_EVENT = {"backend_id": "pool", "tenant_id": None, "model_name": None, "block_size": None}


@schemathesis.serializer("application/msgpack")  # type: ignore[untyped-decorator]
def _packed(_: schemathesis.SerializationContext, value: Any) -> bytes:
    # What msgpack has no form for, such as an integer of 65 bits, goes as something else that does not fit.
    packed: bytes = msgpack.packb(value, default=lambda _: msgpack.ExtType(1, b""), unicode_errors="surrogatepass")
    return packed


@schemathesis.deserializer("application/msgpack")  # type: ignore[untyped-decorator]
def _unpacked(_: schemathesis.DeserializationContext, response: schemathesis.Response) -> Any:
    return msgpack.unpackb(response.content)


def explore(document: dict[str, Any], url: str) -> tuple[int, int, int]:
    """Ask everything of every operation; how many requests were made, answered with rows, and applied events."""
    made = rows = applied = 0
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url, request_timeout=patient(ANSWER_SECONDS))
    for result in schema.exclude(path="/activity").get_all_operations():  # its answer has no end
        operation: schemathesis.APIOperation = result.ok()
        # Without a body there is nothing that could not fit.
        has_body = "requestBody" in document["paths"][operation.path][operation.method]
        for mode in GenerationMode if operation.method == "post" and has_body else [GenerationMode.POSITIVE]:
            is_query = mode is GenerationMode.POSITIVE and "query" in operation.path
            is_decision = mode is GenerationMode.POSITIVE and operation.path in ("/score", "/select")
            is_events = mode is GenerationMode.POSITIVE and operation.path == "/events"

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                nonlocal made, rows, applied
                made += 1
                if is_query and made % 2:  # noqa: B023
                    assert isinstance(case.body, dict)
                    others = TEXT | ({"seq_hashes"} if operation.path == "/query" else set())  # noqa: B023
                    kept: dict[str, Any] = {name: value for name, value in case.body.items() if name not in others}
                    default: dict[str, Any] = {"token_ids": [1, 2, 3]} if operation.path == "/query" else {}  # noqa: B023
                    case.body = default | kept | KNOWN
                if is_events and made % 2:  # noqa: B023
                    events = case.body if isinstance(case.body, list) else [case.body]
                    case.body = [{**event, **KNOWN_EVENT} for event in events]
                if is_decision and made % 2:  # noqa: B023
                    assert isinstance(case.body, dict)
                    kept = {name: value for name, value in case.body.items() if name not in LEFT_OUT}
                    case.body = kept | KNOWN_DECISION
                answer = case.call()
                # No target is a 503 that is meant; whatever else ends in 5xx is not.
                is_meant = answer.status_code == 503 and (
                    b"no_target" in answer.content or operation.path in WITHOUT_WORKER  # noqa: B023
                )
                case.validate_response(answer, checks=CHECKS[is_meant:])
                content = answer.content
                rows += b"longest_matched" in content
                applied += is_events and b"applied" in content  # noqa: B023

            ask()
    return made, rows, applied


@pytest.mark.long
async def test_no_answer_is_undocumented(redis_url: str, tmp_path: Path) -> None:
    async with start("query", redis_url, tmp_path / "log") as live:
        async with live.client() as client:
            document = (await client.get("/openapi.json")).json()
            for body in (REGISTER, POOL):
                assert (await client.post("/register", json=body)).status_code == 200
        made, rows, applied = await asyncio.to_thread(explore, document, live.url)
        posts = [path for path, methods in document["paths"].items() if "post" in methods]
        assert made > len(posts) * EXAMPLES
        assert rows > EXAMPLES // 2
        assert applied > 0
    assert "Traceback" not in live.said()
