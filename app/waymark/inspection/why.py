"""Why is there no match? Reasons for a prompt without a match, as far as Redis can show them.

The registrations and their streams come first; then the prompt is looked up once more, its first block only, under the
usual other readings: another block size, adapter, salt, tenant, seed, or without the first token. A salt may be a
secret of its tenant: it is tried, never shown.

An explanation has each instance's match, and why it is not longer; for the shell and over HTTP. Its JSON form
has the ids of groups and holders only for somebody who may read Redis: they are counted over all tenants.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import accumulate, islice

from waymark.base.record import record
from waymark.base.shown import several, shown
from waymark.contract.inspections import Explanation, HolderRuns, InspectedInstance
from waymark.domain.hashing import DEFAULT_SEED
from waymark.domain.names import GroupName, Registration
from waymark.domain.rows import parse_entry, parse_field
from waymark.domain.status import StreamStatus
from waymark.domain.table import HolderTable
from waymark.inspection.holding import InspectedPrompt, InstanceLines, PromptHoldings, hold, not_counted, runs
from waymark.inspection.inspector import InspectedGroup, Inspector
from waymark.inspection.status import complaint
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.publisher_states import PublisherState

#: The bound on other readings of a prompt to try.
_TRIES_MAX = 64
_NAMES_MAX = 5
#: HSCAN calls in search of the prompt's first block in other namespaces, and their size.
_STEPS_MAX = 64
_STEP_ENTRIES = 1000


def unknown_group(wanted: GroupName, groups: Sequence[InspectedGroup]) -> str:
    """Return the sentence for a tenant and model that were never registered, with the likely names."""
    tenants = [group.name.tenant_id for group in groups if group.name.model_name == wanted.model_name]
    if tenants:
        tenant, model = shown(wanted.tenant_id), shown(wanted.model_name)
        return f"tenant {tenant} has no model {model}; it is registered under {_names(tenants)}"
    models = [group.name.model_name for group in groups if group.name.tenant_id == wanted.tenant_id]
    near = difflib.get_close_matches(wanted.model_name, models, n=3, cutoff=0.5)
    if near:
        return f"model {shown(wanted.model_name)} is not registered; did you mean {_names(near)}?"
    choices = (
        f"tenant {shown(wanted.tenant_id)} has {_names(models)}" if models else "this tenant has no registered model"
    )
    return f"model {shown(wanted.model_name)} is not registered; {choices}"


def of_instances(holding: PromptHoldings, states: Sequence[PublisherState]) -> dict[str, str]:
    """Return, for each instance without a match, the reason that its streams show, if they show one."""
    reasons: dict[str, str] = {}
    if not holding.keys:  # which is the reason, for every instance
        return reasons
    streams: dict[str, list[PublisherState]] = {}
    for state in states:
        streams.setdefault(state.registration.instance_id, []).append(state)
    for lines in holding.instances:
        if not lines.match:
            own = streams.get(lines.instance_id, [])
            blocks = sum(sum(state.blocks.values()) for state in own)
            are = "its 1 block is not" if blocks == 1 else f"none of its {blocks} blocks is"
            reason = f"{are} of this prompt" if own and holding.best else ""
            reason = next(filter(None, (_of_stream(state, holding.block_size) for state in own)), reason)
            if lines.blocks and not any(line.not_counted for line in lines.holders):
                reason = f"though it has {several(lines.blocks, 'block')} of it: the first one is missing"
            reasons[lines.instance_id] = reason
    return reasons


def ends(holding: PromptHoldings) -> dict[str, str]:
    """Return the next block, and its holders, for each instance whose match ends before the prompt does."""
    sentences: dict[str, str] = {}
    sentence_of: dict[int, str] = {}  # by block, because many matches may end at the same one
    counts = _counts(holding)
    for lines in holding.instances:
        block = lines.match
        if lines.is_pool or not 0 < block < len(holding.keys):
            continue
        if block not in sentence_of:
            sentence_of[block] = _who_has(holding, block, counts[block])
        blocks_behind = sum(first + n - max(first, block) for first, n in lines.runs if first + n > block)
        are = "is behind the missing one and does" if blocks_behind == 1 else "are behind the missing one and do"
        more = f"; {blocks_behind} of its blocks {are} not count" if blocks_behind else ""
        sentences[lines.instance_id] = f"block {block} is next, and {sentence_of[block]}{more}"
    return sentences


def _counts(holding: PromptHoldings) -> list[int]:
    """Return the number of instances for each block whose match includes it."""
    changes = [0] * (len(holding.keys) + 1)
    for instance in holding.instances:
        for first, n in instance.counted_runs:
            changes[first] += 1
            changes[first + n] -= 1
    return list(accumulate(changes))


def _who_has(holding: PromptHoldings, block: int, count: int) -> str:
    if count:
        # Those with the longest match come first, so few are asked.
        candidates = (instance.instance_id for instance in holding.instances if instance.counts(block))
        return f"{_names(list(islice(candidates, _NAMES_MAX)), count)} {'has' if count == 1 else 'have'} it"
    uncounted = [
        instance.instance_id for instance in holding.instances if any(block in line.has for line in instance.holders)
    ]
    return f"no instance has it except {_names(uncounted)} (not counted)" if uncounted else "no instance has it"


def _of_stream(state: PublisherState, block_size: int) -> str:
    """Return why a stream could not lead to a match; an empty text if it could."""
    registration = state.registration
    if registration.block_size != block_size:
        return f"it is registered with block size {registration.block_size}, and the query is for {block_size}"
    reason_text = f" ({reason})" if (reason := complaint(state)) else ""
    if state.status in (StreamStatus.LOST, StreamStatus.FAILED):
        return f"its stream is {state.status}{reason_text}"
    # A stream over HTTP does not have a watermark.
    if state.watermark is None and not any(n for name, n in state.counters.items() if name.startswith("events.")):
        why = reason_text or (
            ": it had no request, or its KV events are off" if state.status is StreamStatus.ACTIVE else ""
        )
        return f"it has sent no event, status {state.status}{why}"
    return "" if any(state.blocks.values()) else f"it has sent events and holds no blocks{reason_text}"


async def of_prompt(
    inspector: Inspector,
    prompt: InspectedPrompt,
    holding: PromptHoldings,
    table: HolderTable,
    groups: Sequence[InspectedGroup],
    states: Sequence[PublisherState],
) -> list[str]:
    """Return why no instance has a match, only the surest reasons; ``states`` are those of the group's publishers."""
    if not holding.keys:
        size = holding.block_size
        return [
            f"The prompt has {several(prompt.count, 'token')}, less than one block of {size}: there is nothing to find"
        ]
    if not states:
        return ["No publisher is registered for this model now"]
    silent = sorted({line.holder.instance_id for lines in holding.instances for line in lines.holders if 0 in line.has})
    if silent:
        return [f"It is held by {_names(silent)}, whose blocks are currently not counted"]
    readings = await of_other_readings(inspector, prompt, holding, table, groups)
    elsewhere = "" if readings else await of_other_namespaces(inspector, prompt, holding, table)
    return readings or [elsewhere or last_resort(prompt, states)]


async def of_other_readings(
    inspector: Inspector,
    prompt: InspectedPrompt,
    holding: PromptHoldings,
    own_table: HolderTable,
    groups: Sequence[InspectedGroup],
) -> list[str]:
    """Return the readings of the prompt under which its first block has a holder."""
    registered = [claim.registration for claim in await inspector.claims(holding.group.name)]
    sentences: list[str] = []
    for sentence, group, reading, block_size in islice(_readings(prompt, holding, groups, registered), _TRIES_MAX):
        first = reading.block_keys(block_size, 1)
        table = own_table if group is holding.group else await inspector.table(group)
        if first and table is not None:
            (holders,) = await inspector.holders(group, first, has_singles=table.has_singles)
            live = {
                holder for holder in table.holders.keys() & holders if not not_counted(table, table.holders[holder])
            }
            if live:
                owners = _names(sorted({table.holders[holder].instance_id for holder in live}))
                sentences.append(f"{sentence} it is held by {owners}")
    return sentences


def _readings(
    prompt: InspectedPrompt,
    holding: PromptHoldings,
    groups: Sequence[InspectedGroup],
    registered: Sequence[Registration],
) -> Iterator[tuple[str, InspectedGroup, InspectedPrompt, int]]:
    """Yield (description, group, prompt, block size) of each other reading, the likely ones first."""
    group, size = holding.group, holding.block_size
    is_plain = prompt.tokens is not None and not prompt.items
    if is_plain:
        for other_size in sorted({registration.block_size for registration in registered} - {size}):
            yield f"With block size {other_size}", group, prompt, other_size
    if prompt.namespace:
        yield "Without adapter and salts", group, replace(prompt, adapter=None, salts=()), size
        if prompt.adapter is not None and prompt.salts:
            yield "With its salts and without an adapter", group, replace(prompt, adapter=None), size
            yield "With its adapter and without salts", group, replace(prompt, salts=()), size
    spaces = {
        (registration.lora_name, registration.additional_salt): registration.instance_id
        for registration in reversed(registered)
    }
    for (lora_name, salt), instance_id in spaces.items():
        if lora_name and lora_name != prompt.adapter:
            yield f"With adapter {shown(lora_name)}", group, replace(prompt, adapter=lora_name), size
        if salt and salt not in prompt.salts:
            sentence_start = f"With the additional salt that {shown(instance_id)} is registered with"
            yield sentence_start, group, replace(prompt, salts=(salt, *prompt.salts)), size
            if prompt.salts:
                yield f"{sentence_start}, in place of the given ones", group, replace(prompt, salts=(salt,)), size
    if len(prompt.salts) > 1:
        yield "With its salts in the other order", group, replace(prompt, salts=prompt.salts[::-1]), size
    if prompt.tokens is not None and prompt.seed != DEFAULT_SEED:
        yield f"With the usual hash seed {DEFAULT_SEED}", group, replace(prompt, seed=DEFAULT_SEED), size
    if is_plain:
        yield "Without its first token", group, prompt.without_first_token(), size
    for other_group in groups:
        if other_group.id != group.id and other_group.name.model_name == group.name.model_name:
            yield f"For tenant {shown(other_group.name.tenant_id)}", other_group, prompt, size


async def of_other_namespaces(
    inspector: Inspector, prompt: InspectedPrompt, holding: PromptHoldings, table: HolderTable
) -> str:
    """Return a sentence if the first block is held in another namespace than the prompt's; otherwise ''.

    Entries name the namespace of their row, and their field its head; a bounded number is read.
    """
    if not holding.keys:
        return ""
    first = holding.keys[0] ^ prompt.namespace
    steps = _STEPS_MAX
    for holder in table.holders.values():
        for shard in range(holding.group.entry.shards):
            cursor = None
            while cursor != 0 and steps:
                steps -= 1
                engine = keys.engine(holding.group.id, shard, holder.id)
                cursor, entries = await inspector.client.hscan(engine, cursor or 0, _STEP_ENTRIES)
                for name, value in entries.items():
                    try:
                        head, ns = parse_field(name).head, parse_entry(value).namespace
                    except ValueError:
                        continue  # a mark, or no entry of ours
                    if ns != prompt.namespace and head == first ^ ns:
                        return (
                            f"Its first block is held by {shown(holder.instance_id)} in namespace {ns:016x}, and this "
                            f"prompt is in namespace {prompt.namespace:016x}: its adapter or salts are different; "
                            "'waymark inspect namespace' computes the number of an adapter and salts"
                        )
    return ""


def last_resort(prompt: InspectedPrompt, states: Sequence[PublisherState]) -> str:
    """Return the last possible sentence if the first block has no holder."""
    blocks = sum(sum(state.blocks.values()) for state in states)
    if not blocks:
        return "No block of this model is held at all: 'waymark status' shows the state of the streams"
    seed = "" if prompt.tokens is None else f"; or its workers run with another WAYMARK_HASH_SEED than {prompt.seed}"
    return (
        f"{blocks} blocks of this model are held, and none begins this prompt: no engine has computed it, it was "
        f"evicted, or the tokens differ (tokenizer, chat template, special tokens){seed}"
    )


def _names(names: Sequence[str], count: int | None = None) -> str:
    """Return the first of the names, and how many of ``count`` (by default all of them) are left out."""
    count = len(names) if count is None else count
    text = ", ".join(map(shown, names[:_NAMES_MAX]))
    return text if count <= _NAMES_MAX else f"{text} and {count - _NAMES_MAX} more"


#: Runs of blocks in the JSON form, of all instances.
RUNS_MAX = 10_000


@record(frozen=True, slots=True)
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
    table = await inspector.table(group) or HolderTable(b"", group.name, {}, {})  # the group's own has gone
    holding = await hold(inspector, group, table, prompt, block_size)
    states = await inspector.states(claims)
    instance_reasons = of_instances(holding, states)
    await asyncio.sleep(0)
    instance_reasons |= ends(holding)
    await asyncio.sleep(0)
    reasons = [] if holding.best else await of_prompt(inspector, prompt, holding, table, groups, states)
    return PromptExplanation(group.name, prompt.count, holding, instance_reasons, reasons)


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
