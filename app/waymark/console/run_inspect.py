"""Runs ``waymark inspect`` once its flags are parsed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from waymark.base.errors import InvalidValue, NotFound
from waymark.base.settings import Settings
from waymark.console import cells, lookups
from waymark.console.prompts import read_file, read_hash, read_hashes, read_prompt, read_tokens
from waymark.console.screen import Screen, ScreenPart, joined, text
from waymark.domain.hashing import pack_tokens
from waymark.domain.names import Adapter, GroupName
from waymark.inspection.blocks import find_block
from waymark.inspection.explanation import PromptExplanation, every_key, explain
from waymark.inspection.holders import find_holder
from waymark.inspection.inspector import InspectedGroup, Inspector, open_inspector, pick
from waymark.inspection.prompt import InspectedPrompt
from waymark.inspection.redis_cli import RedisCli
from waymark.inspection.why import unknown_group


async def run_inspect(arguments: argparse.Namespace, settings: Settings, screen: Screen) -> None:
    """Draw one inspection. Raise ``NotFound`` if the named object does not exist."""
    if arguments.what == "namespace":
        key = None if arguments.seq_hash is None else read_hash(arguments.seq_hash, option="--seq-hash")
        screen.show(lookups.of_namespace(_adapter(arguments), arguments.salt, key))
        return
    async with open_inspector(settings) as inspector:
        groups = await inspector.groups()
        cli = RedisCli(settings)
        if arguments.what == "prompt":
            await _prompt(arguments, settings, screen, inspector, groups, cli)
            return
        picked = pick(groups, group_id=arguments.group, model=arguments.model, tenant=arguments.tenant)
        if arguments.what == "block":
            block_key = read_hash(arguments.key, option="block")
            if arguments.keys:
                lines = [line for group in picked for line in cli.block(group, block_key) + cli.table(group)]
                _write(screen, cli, lines)
            else:
                screen.show(lookups.block(await find_block(inspector, picked, block_key)))
        elif arguments.what == "holder":
            if arguments.keys:
                _write(
                    screen,
                    cli,
                    [line for group in picked for line in await _of_holder(inspector, cli, group, arguments.id)],
                )
            else:
                screen.show(lookups.holder(await find_holder(inspector, picked, arguments.id)))
        else:
            screen.write(str(await every_key(inspector, picked, cli)))


async def _of_holder(inspector: Inspector, cli: RedisCli, group: InspectedGroup, holder: int) -> list[str]:
    table = await inspector.table(group)
    lines = [*cli.holder(group, holder), *cli.entries(group, holder)]
    if table is not None and holder in table.holders:
        lines += cli.publisher(group, table.holders[holder].publisher)
    return lines


def _write(screen: Screen, cli: RedisCli, lines: Sequence[str]) -> None:
    screen.write("\n".join([*cli.notes, *lines]))


def _adapter(arguments: argparse.Namespace) -> Adapter:
    return arguments.lora if arguments.lora_id is None else int(arguments.lora_id)


async def _asked(arguments: argparse.Namespace, settings: Settings, inspector: Inspector) -> InspectedPrompt:
    tokens, seq_hashes = None, None
    if arguments.hashes is not None:
        seq_hashes = read_hashes(arguments.hashes, option="--hashes")
    elif arguments.tokens_file is not None:
        tokens = pack_tokens(
            read_tokens(read_file(arguments.tokens_file, option="--tokens-file"), option="--tokens-file")
        )
    elif arguments.tokens is not None:
        tokens = pack_tokens(read_tokens(arguments.tokens, option="--tokens"))
    else:
        # Only a prompt in words needs tokenizers.
        from waymark.base.metrics import Metrics
        from waymark.tokenization.tokenizers import Tokenizers

        prompt = read_prompt(arguments.text, arguments.messages)

        async def addresses(group: GroupName) -> Sequence[str]:
            registrations = [claim.registration for claim in await inspector.claims(group)]
            return [
                registration.target.address
                for registration in registrations
                if registration.target.address and registration.scope == "instance"
            ]

        tokenizers = Tokenizers.of(settings, Metrics(), addresses)
        try:
            tokens = (await tokenizers.tokens(arguments.model, prompt, arguments.tenant)).ids
        finally:
            await tokenizers.close()
    return InspectedPrompt(tokens, seq_hashes, _adapter(arguments), tuple(arguments.salt), settings.hash_seed)


async def _prompt(
    arguments: argparse.Namespace,
    settings: Settings,
    screen: Screen,
    inspector: Inspector,
    groups: list[InspectedGroup],
    cli: RedisCli,
) -> None:
    prompt = await _asked(arguments, settings, inspector)
    name = GroupName(arguments.tenant, arguments.model)
    group = next((group for group in groups if group.name == name), None)
    if group is None:
        raise NotFound(unknown_group(name, groups))
    claims = await inspector.claims(name)
    block_size = _block_size(arguments.block_size, sorted({claim.registration.block_size for claim in claims}))
    if arguments.keys:
        _write(screen, cli, cli.rows(group, prompt.block_keys(block_size)) + cli.table(group))
        return
    explanation = await explain(inspector, prompt, group, block_size, groups, claims)
    screen.show(drawn(explanation, screen, top=arguments.top))


def drawn(explanation: PromptExplanation, screen: Screen, *, top: int) -> list[ScreenPart]:
    """Return the drawing of an explanation. Raise ``NotFound`` if no group was looked up."""
    if explanation.holding is None:
        raise NotFound(" ".join(explanation.reasons))
    parts = cells.parts(
        explanation.holding, explanation.of_instances, width=screen.width, is_ascii=screen.is_ascii, top=max(1, top)
    )
    for i, reason in enumerate(explanation.reasons):
        parts += [text("")] * (not i) + [joined(text("Why nothing? ", "bold yellow"), text(reason))]
    return parts


def _block_size(wanted: int | None, registered: Sequence[int]) -> int:
    if wanted is None:
        if len(registered) == 1:
            return registered[0]
        sizes = ", ".join(map(str, registered))
        problem = f"several are registered: {sizes}" if sizes else "no publisher is registered with one"
        raise InvalidValue(f"--block-size is needed: {problem}", field="block_size")
    if not 1 <= wanted <= 65536:
        raise InvalidValue(f"--block-size is {wanted}; give 1 to 65536", field="block_size")
    return wanted
