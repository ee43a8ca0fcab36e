"""What the answers of ``/score`` and ``/select`` say of targets."""

from __future__ import annotations

from typing import Any

from waymark.api.decision_schemas import SelectRequest
from waymark.api.http.answers import Answer
from waymark.decide.decision import SelectedTarget
from waymark.decide.policies.policy import Scored
from waymark.decide.policies.target import Candidate


def best_by_address(scored: list[Scored]) -> list[Scored]:
    """The best of each address; targets without one are left out."""
    best: dict[str, Scored] = {}
    for each in scored:
        if each.candidate.address is not None:
            best.setdefault(each.candidate.address, each)
    return list(best.values())


def score_row(scored: Scored, tokens: int, block_size: int, *, is_cost: bool, explain: bool) -> dict[str, Any]:
    candidate = scored.candidate
    row = {
        "instance_id": candidate.instance_id,
        "dp_rank": candidate.dp_rank,
        "address": candidate.address,
        "score": None if is_cost else scored.value,
        "cost": scored.value if is_cost else None,
        "device_tokens": candidate.device,
        "host_tokens": candidate.host,
        "disk_tokens": candidate.disk,
        "shared_tokens": candidate.shared,
        "expected_tokens": candidate.expected,
        "new_tokens": max(0, tokens - max(candidate.matched, candidate.expected)),
        "wait_tokens": candidate.wait,
        "active_requests": candidate.active,
        "health": candidate.health,
    }
    if explain:
        row["parts"] = dict(scored.parts)
        gauges = candidate.gauges
        row["gauges"] = gauges and {
            "waiting": gauges.waiting,
            "running": gauges.running,
            "kv_usage": gauges.kv_usage,
        }
    return row


def select_answer(selected: SelectedTarget, request: SelectRequest) -> Answer:
    prompt_tokens = selected.tokens
    is_cost = selected.policy.preset is not None and selected.policy.preset.is_cost

    def row(scored: Scored) -> dict[str, Any]:
        return score_row(scored, prompt_tokens, 0, is_cost=is_cost, explain=request.explain)

    by_address = request.by == "address"
    return Answer(
        {
            "target": row(selected.target),
            "others": [name for each in selected.others if (name := _name(each, by_address=by_address)) is not None],
            "prefill": None if selected.prefill is None else row(selected.prefill),
            "encode": [row(each) for each in selected.encode],
            "policy": selected.policy.name,
            "decision": selected.decision.value,
            "degraded": selected.is_degraded,
            "prefix_key": None if selected.prefix_key is None else selected.prefix_key.hex(),
            "reservation": ",".join(map(str, selected.reservations)) or None,
            "headers": dict(selected.headers),
        }
    )


def _name(candidate: Candidate, *, by_address: bool) -> str | None:
    return candidate.address if by_address else candidate.instance_id
