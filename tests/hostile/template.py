"""A model whose files are hostile: templates that never end or become large, tokenizers of nonsense."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

from tests.hostile.attacker import Attacker, expect
from tests.patience import patient
from tests.tokenization import small

_MIB = 2**20
#: How long a conversation may take whose template is hostile.
RENDER_SECONDS = 5.0


def _grows(step: str, *, times: int = 60, first: str = "'a'", last: str = "{{ ns.x }}") -> str:
    """A template that begins with a value, and makes another of it so many times."""
    loop = f"{{% for i in range({times}) %}}{{% set ns.x = {step} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(x={first}) %}}{loop}{last}"


TEMPLATES: dict[str, str] = {
    "doubles": _grows("ns.x ~ ns.x"),
    "doubles by addition": _grows("ns.x + ns.x", last=""),
    "doubles a list": _grows("ns.x + ns.x", first="[1]", last=""),
    "repeats": "{{ 'a' * 10000000000 }}",
    "repeats a list": "{{ ([0] * 1000000000) | length }}",
    "formats": "{{ '%1000000000d' % 1 }}{{ '{:1000000000}'.format(1) }}{{ '%*d' | format(1000000000, 1) }}",
    "ranges": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "one range": "{{ range(10 ** 18) | list | length }}",
    "powers": "{{ 9 ** 9 ** 9 }}{{ 10 ** 10000000 }}",
    "shifts": "{{ (2 ** 100000) ** 100000 }}",
    "recurses": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recurses by a loop": "{% for m in messages recursive %}{{ loop([m]) }}{% endfor %}",
    "replaces": "{{ messages[0].content | replace('', 'x' * 10000) | replace('x', 'y' * 10000) }}",
    "joins": _grows("ns.x | join(ns.x)", times=40, first="'ab'"),
    "indents": _grows("(ns.x ~ ns.x) | indent(1000)", times=40, first="'a\\n'"),
    "centers": "{{ 'a' | center(10000000000) }}{{ 'a'.ljust(10000000000) }}",
    "sorts": "{{ range(3000000) | list | sort(reverse=true) | length }}",
    "nests parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "nests lists": "{{ " + "[" * 100_000 + "]" * 100_000 + " }}",
    "nests blocks": "{% if true %}" * 20_000 + "{% endif %}" * 20_000,
    "nests calls": "{{ " + "not " * 200_000 + "1 }}",
    "chains filters": "{{ 'a'" + " | upper" * 200_000 + " }}",
    "chains attributes": "{{ messages" + ".a" * 200_000 + " }}",
    "concatenates": "{{ " + " ~ ".join(["'a'"] * 200_000) + " }}",
    "nests data": _grows("[ns.x]", times=100_000, last="{{ ns.x | tojson }}"),
    "prints nested data": _grows("[ns.x]", times=100_000),
    "compares nested data": _grows(
        "[[ns.x[0]], [ns.x[1]]]", times=100_000, first="[1, 1]", last="{{ ns.x[0] == ns.x[1] }}"
    ),
    "escapes": "{{ ''.__class__.__mro__ }}{{ messages.__init__.__globals__ }}{{ cycler.__init__ }}",
    "includes": "{% include '/etc/passwd' %}{% import 'os' as os %}{% extends 'x' %}",
    "raises": "{{ raise_exception('x' * 1000000) }}",
    "is long": "a" * (8 * _MIB),
    "has many variables": "".join(f"{{% set v{n} = '{n}' %}}" for n in range(50_000)),
    "is not closed": "{% for a in b %}{{ a",
    "has surrogates": "{{ '\\ud800' }}{{ '\\x00' }}",
    "formats times": "{{ strftime_now('%Y' * 1000000) }}",
}


def _deep(key: str) -> bytes:
    return b'{"%b": %b1%b}' % (key.encode(), b"[" * 100_000, b"]" * 100_000)


def _config(path: Path, **fields: Any) -> None:
    (path / "tokenizer_config.json").write_text(json.dumps(fields))


def _instead(name: str, make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Something else in place of a file."""

    def replace(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return replace


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


FILES: dict[str, Callable[[Path], Any]] = {
    "a deep configuration": lambda path: (path / "tokenizer_config.json").write_bytes(_deep("chat_template")),
    "a deep tokenizer": lambda path: (path / "tokenizer.json").write_bytes(_deep("model")),
    "no JSON": lambda path: (path / "tokenizer.json").write_bytes(os.urandom(_MIB)),
    "a list as template": lambda path: _config(path, chat_template=[{"name": "default", "template": [1]}] * 1000),
    "a number as template": lambda path: _config(path, chat_template=1),
    "a list as beginning": lambda path: _config(path, chat_template=small.CHATML, bos_token=["x"] * 100_000),
    "a long beginning": lambda path: _config(path, chat_template="{{ bos_token }}" * 1000, bos_token="b" * _MIB),
    "a pipe as tokenizer": _instead("tokenizer.json", os.mkfifo),
    "a pipe as configuration": _instead("tokenizer_config.json", os.mkfifo),
    "zeros as tokenizer": _instead("tokenizer.json", _zeros),
    "zeros as configuration": _instead("tokenizer_config.json", _zeros),
    "a tokenizer of 4 GB": lambda path: os.truncate(path / "tokenizer.json", 4 * 2**30),
    "a configuration of 4 GB": lambda path: os.truncate(path / "tokenizer_config.json", 4 * 2**30),
    "a directory as tokenizer": _instead("tokenizer.json", Path.mkdir),
}


class Template(Attacker):
    async def _prepare(self) -> None:
        self._numbers = count()
        small.trained("byte-level")

    async def _converse(self, what: str, template: str, change: Callable[[Path], Any] | None = None) -> None:
        """A model with this template, and a conversation with it."""
        name = f"hostile-{next(self._numbers)}"
        path = Path(self.target["models"]) / name
        made = path.with_name(f".{name}")
        small.directory(made, template=template)
        if change is not None:
            change(made)
        made.rename(path)
        body = {"model": name, "messages": [{"role": "user", "content": f"hello {self.random.random()}"}]}
        began = monotonic()
        status, said = await self._post(f"{self.target['url']}/query", body)
        seconds = monotonic() - began
        expect(status in (200, 400, 413, 422, 503), f"a template that {what}: {status} {said[:300]!r}")
        expect(status == 200 or b'"error"' in said, f"a template that {what}: {status} without a sentence")
        expect(seconds < patient(RENDER_SECONDS), f"a template that {what} takes {seconds:.1f} s: {said[:200]!r}")

    async def templates_that_cost(self) -> None:
        for what in self._some(sorted(TEMPLATES), 7):
            await self._converse(what, TEMPLATES[what])

    async def files_that_are_no_model(self) -> None:
        for what in self._some(sorted(FILES), 4):
            await self._converse(f"comes with {what}", small.CHATML, FILES[what])

    async def conversations_that_cost(self) -> None:
        """A template as it should be, and messages that no template expects."""
        pick = self.random
        path = small.directory(Path(self.target["models"]) / f"plain-{next(self._numbers)}", template=small.CHATML)
        values: list[Any] = [
            "",
            "a" * _MIB,
            "\x00",
            "<|im_start|>" * 10_000,
            None,
            1,
            True,
            {},
            [],
            [{}],
            [[]],
            "\u202e" * 1000,
        ]
        for _ in range(self._times(12)):
            messages: Any = [{"role": pick.choice(["user", "", "x" * 5000, 1]), "content": pick.choice(values)}]
            messages = pick.choice(
                [
                    messages,
                    messages * (5000 if len(str(messages)) < 1000 else 2),
                    pick.choice(values),
                    [pick.choice(values)],
                ]
            )
            body = {"model": path.name, "messages": messages, "tools": pick.choice([None, values, [{}] * 1000])}
            body["chat_template_kwargs"] = pick.choice([None, {"a": values}, {"messages": []}])
            await self._post(f"{self.target['url']}/query", body)
        for depth in (63, 64, 65, 253, 254, 255, 1000, 50_000):
            nested = b'{"model": "%b", "messages": [{"role": "user", "content": %b%b}]}'
            await self._post(f"{self.target['url']}/query", nested % (path.name.encode(), b"[" * depth, b"]" * depth))
