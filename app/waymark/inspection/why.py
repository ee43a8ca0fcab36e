"""Why is there no match? Reasons for a prompt without a match, as far as Redis can show them.

The registrations and their streams come first; then the prompt is looked up once more, its first block only, under the
usual other readings: another block size, adapter, salt, tenant, seed, or without the first token. A salt may be a
secret of its tenant: it is tried, never shown.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from waymark.base.shown import shown
from waymark.domain.hashing import DEFAULT_SEED
from waymark.domain.names import GroupName, Registration
from waymark.domain.rows import parse_entry, parse_field
from waymark.domain.status import StreamStatus
from waymark.domain.table import HolderTable
from waymark.inspection.complaint import complaint
from waymark.inspection.holding import PromptHoldings, not_counted
from waymark.inspection.inspector import InspectedGroup, Inspector
from waymark.inspection.prompt import InspectedPrompt
from waymark.store import keys
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
    known = (
        f"tenant {shown(wanted.tenant_id)} has {_names(models)}" if models else "this tenant has no registered model"
    )
    return f"model {shown(wanted.model_name)} is not registered; {known}"


def of_instances(holding: PromptHoldings, states: Sequence[PublisherState]) -> dict[str, str]:
    """Return the reason in its own streams for each instance without a match, if they show one."""
    reasons: dict[str, str] = {}
    if not holding.keys:  # which is the reason, for every instance
        return reasons
    for lines in holding.instances:
        if not lines.match:
            own = [state for state in states if state.registration.instance_id == lines.instance_id]
            held = sum(sum(state.blocks.values()) for state in own)
            reason = (
                f"its {held} blocks belong to other prompts, or to this one under another salt or adapter"
                if own
                else ""
            )
            reason = next(filter(None, (_of_stream(state, holding.block_size) for state in own)), reason)
            if lines.blocks and not any(line.not_counted for line in lines.holders):
                reason = f"though it has {lines.blocks} of the blocks: the first one is missing"
            reasons[lines.instance_id] = reason
    return reasons


def ends(holding: PromptHoldings) -> dict[str, str]:
    """Return the next block, and its holders, for each instance whose match ends before the prompt does."""
    said: dict[str, str] = {}
    known: dict[int, str] = {}  # by block: many instances may end at the same
    for lines in holding.instances:
        block = lines.match
        if lines.is_pool or not 0 < block < len(holding.keys):
            continue
        if block not in known:
            known[block] = _who_has(holding, block)
        behind = sum(at + n - max(at, block) for at, n in lines.runs if at + n > block)
        more = f"; {behind} of its blocks are behind the missing one and do not count" if behind else ""
        said[lines.instance_id] = f"block {block} is next, and {known[block]}{more}"
    return said


def _who_has(holding: PromptHoldings, block: int) -> str:
    if others := [other.instance_id for other in holding.instances if other.counts(block)]:
        return f"{_names(others)} {'has' if len(others) == 1 else 'have'} it"
    uncounted = [each.instance_id for each in holding.instances if any(block in line.has for line in each.holders)]
    return f"no instance has it except {_names(uncounted)} (not counted)" if uncounted else "no instance has it"


def _of_stream(state: PublisherState, block_size: int) -> str:
    """Return why a stream could not lead to a match; an empty text if it could."""
    of = state.registration
    if of.block_size != block_size:
        return f"it is registered with block size {of.block_size}, and the query is for {block_size}"
    said = f" ({reason})" if (reason := complaint(state)) else ""
    if state.status in (StreamStatus.LOST, StreamStatus.FAILED):
        return f"its stream is {state.status}{said}"
    # A stream over HTTP does not have a watermark.
    if state.watermark is None and not any(n for name, n in state.counters.items() if name.startswith("events.")):
        why = said or (": it had no request, or its KV events are off" if state.status is StreamStatus.ACTIVE else "")
        return f"it has sent no event, status {state.status}{why}"
    return "" if any(state.blocks.values()) else f"it has sent events and holds no blocks{said}"


async def of_prompt(
    inspector: Inspector,
    prompt: InspectedPrompt,
    holding: PromptHoldings,
    table: HolderTable,
    groups: Sequence[InspectedGroup],
    states: Sequence[PublisherState],
) -> list[str]:
    """Why no instance has a match, only the surest reasons; ``states`` are of the group's publishers."""
    if not holding.keys:
        size = holding.block_size
        return [f"The prompt has {prompt.count} tokens, less than one block of {size}: there is nothing to find"]
    if not states:
        return ["No publisher is registered for this model now"]
    silent = sorted({line.holder.instance_id for lines in holding.instances for line in lines.holders if 0 in line.has})
    if silent:
        return [f"It is held by {_names(silent)}, whose blocks are currently not counted"]
    found = await of_other_readings(inspector, prompt, holding, groups)
    elsewhere = "" if found else await of_other_namespaces(inspector, prompt, holding, table)
    return found or [elsewhere or last_resort(prompt, states)]


async def of_other_readings(
    inspector: Inspector, prompt: InspectedPrompt, holding: PromptHoldings, groups: Sequence[InspectedGroup]
) -> list[str]:
    """Return the readings of the prompt under which its first block has a holder."""
    registered = [claim.registration for claim in await inspector.claims(holding.group.name)]
    found: list[str] = []
    for sentence, group, other, block_size in islice(_readings(prompt, holding, groups, registered), _TRIES_MAX):
        first = other.block_keys(block_size, 1)
        table = await inspector.table(group) if first else None
        if table is not None:
            (holders,) = await inspector.holders(group, first, has_singles=table.has_singles)
            live = {each for each in table.holders.keys() & holders if not not_counted(table, table.holders[each])}
            if live:
                owners = _names(sorted({table.holders[holder].instance_id for holder in live}))
                found.append(f"{sentence} it is held by {owners}")
    return found


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
        for other in sorted({of.block_size for of in registered} - {size}):
            yield f"With block size {other}", group, prompt, other
    if prompt.namespace:
        yield "Without adapter and salts", group, replace(prompt, adapter=None, salts=()), size
        if prompt.adapter is not None and prompt.salts:
            yield "With its salts and without an adapter", group, replace(prompt, adapter=None), size
            yield "With its adapter and without salts", group, replace(prompt, salts=()), size
    spaces = {(of.lora_name, of.additional_salt): of.instance_id for of in reversed(registered)}
    for (lora_name, salt), instance_id in spaces.items():
        if lora_name and lora_name != prompt.adapter:
            yield f"With adapter {shown(lora_name)}", group, replace(prompt, adapter=lora_name), size
        if salt and salt not in prompt.salts:
            said = f"With the additional salt that {shown(instance_id)} is registered with"
            yield said, group, replace(prompt, salts=(salt, *prompt.salts)), size
            if prompt.salts:
                yield f"{said}, in place of the given ones", group, replace(prompt, salts=(salt,)), size
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
    """Return a sentence if the first block is held in a namespace that is not the prompt's; otherwise ''.

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
    held = sum(sum(state.blocks.values()) for state in states)
    if not held:
        return "No block of this model is held at all: 'waymark status' shows the state of the streams"
    seed = "" if prompt.tokens is None else f"; or its workers run with another WAYMARK_HASH_SEED than {prompt.seed}"
    return (
        f"{held} blocks of this model are held, and none begins this prompt: no engine has computed it, it was "
        f"evicted, or the tokens differ (tokenizer, chat template, special tokens){seed}"
    )


def _names(names: Sequence[str]) -> str:
    said = ", ".join(map(shown, names[:_NAMES_MAX]))
    return said if len(names) <= _NAMES_MAX else f"{said} and {len(names) - _NAMES_MAX} more"
