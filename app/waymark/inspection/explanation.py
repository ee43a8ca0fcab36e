"""One explanation of a prompt: each instance's share, and the reason why it is no longer; for the shell and over HTTP.

Its JSON form has the ids of groups and holders only for somebody who may read Redis: they are counted over all
tenants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from waymark.contract.inspections import Explanation, HolderRuns, InspectedInstance
from waymark.domain.names import GroupName
from waymark.domain.table import HolderTable
from waymark.inspection import why
from waymark.inspection.holding import InspectedPrompt, InstanceLines, PromptHoldings, hold, runs
from waymark.inspection.inspector import InspectedGroup, Inspector
from waymark.store.claims import Claim

#: Runs of blocks in the JSON form, of all instances.
RUNS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class PromptExplanation:
    """The holders of a prompt, and the reasons why the share of an instance ends."""

    name: GroupName
    tokens: int
    holding: PromptHoldings | None = None
    """The holders of the prompt; None if it was not looked up, for a reason in ``reasons``."""
    of_instances: Mapping[str, str] = field(default_factory=dict)
    """The reason why an instance has no match, or the end of its match, by instance."""
    reasons: Sequence[str] = ()
    """The reasons why no instance has a match; empty if one has."""


async def explain(
    inspector: Inspector,
    prompt: InspectedPrompt,
    group: InspectedGroup,
    block_size: int,
    groups: Sequence[InspectedGroup],
    claims: Sequence[Claim],
) -> PromptExplanation:
    """Look up a prompt. ``claims`` are the group's claims; a reason may name any group of ``groups``."""
    table = await inspector.table(group) or _empty_table(group)
    holding = await hold(inspector, group, table, prompt, block_size)
    states = await inspector.states(claims)
    reasons_of_streams = why.of_instances(holding, states)
    await asyncio.sleep(0)
    of_instances = reasons_of_streams | why.ends(holding)
    await asyncio.sleep(0)
    reasons = [] if holding.best else await why.of_prompt(inspector, prompt, holding, table, groups, states)
    return PromptExplanation(group.name, prompt.count, holding, of_instances, reasons)


def _empty_table(group: InspectedGroup) -> HolderTable:
    """Return a table for a group whose own has gone."""
    return HolderTable(b"", group.name, {}, {})


def described(
    explanation: PromptExplanation, *, top: int, instance_id: str | None = None, has_ids: bool = False
) -> Explanation:
    """Describe at most ``top`` instances, or one, and ``RUNS_MAX`` runs; ``has_ids`` adds ids of groups and holders."""
    holding = explanation.holding
    lines = (
        []
        if holding is None
        else [instance for instance in holding.instances if instance_id in (None, instance.instance_id)]
    )
    size = 0 if holding is None else holding.block_size
    instances: list[InspectedInstance] = []
    runs_left = RUNS_MAX
    for line in lines[:top]:
        instance = _instance(line, explanation.of_instances.get(line.instance_id, ""), size, has_ids=has_ids)
        runs_left -= sum(len(holder.runs) for holder in instance.holders)
        if runs_left < 0:
            break
        instances.append(instance)
    return Explanation(
        group=holding.group.id if has_ids and holding is not None else None,
        tenant_id=explanation.name.tenant_id,
        model=explanation.name.model_name,
        block_size=size or None,
        total_tokens=explanation.tokens,
        total_blocks=0 if holding is None else len(holding.keys),
        longest_matched=0 if holding is None else holding.best * size,
        blocks_held=0 if holding is None else holding.blocks_held,
        reasons=explanation.reasons,
        instances=instances,
        instances_left_out=len(lines) - len(instances),
    )


def _instance(lines: InstanceLines, note: str, block_size: int, *, has_ids: bool) -> InspectedInstance:
    return InspectedInstance(
        instance_id=lines.instance_id,
        is_pool=lines.is_pool,
        longest_matched=lines.match * block_size,
        note=note or None,
        holders=[
            HolderRuns(
                id=line.holder.id if has_ids else None,
                dp_rank=line.holder.dp_rank,
                medium=line.holder.medium,
                not_counted=line.not_counted or None,
                runs=list(runs(line.has)),
            )
            for line in lines.holders
        ],
    )
