"""``/docs``: the contract as one page of HTML, with an example of each operation.

The page needs no further files. Its only script searches operations, and sends an example to this server when a person
asks for that.
"""

from __future__ import annotations

import json
import shlex
from base64 import b64encode
from collections.abc import Collection, Iterator
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any, Final

_BASE = "http://127.0.0.1:13333"
#: A wider value in an example is put on several lines.
_WIDTH = 96
#: Beginning of a path -> title of its group. The last one is for all other paths.
_GROUPS = (
    ("/dynamo", "Paths of dynamo.indexer and its selector"),
    ("/admin", "Paths for operators"),
    ("", "Paths of Waymark, some of them as the Mooncake Conductor Indexer has them"),
)

_STYLE = "\n" + Path(__file__).with_name("docs.css").read_text(encoding="utf-8")
_SCRIPT = (Path(__file__).parent.parent / "ui" / "examples.js").read_text(
    encoding="utf-8"
) + "\nofferToFind(document);\nofferToSend(document, (path, options) => fetch(path, options));\n"


def _source(text: str) -> str:
    """Return the source by which a content security policy allows exactly this inline text."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    f"connect-src 'self'; script-src {_source(_SCRIPT)}; style-src {_source(_STYLE)}",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page(document: dict[str, Any], writes: Collection[tuple[str, str]] = (), *, has_ui: bool = False) -> str:
    """Return the page of an OpenAPI document. ``writes`` are the methods and paths of operations that change something.
    ``has_ui``: whether ``/ui`` is shown.
    """
    groups = _grouped(document["paths"])
    back = ' <a href="ui">The page of this Waymark</a> shows its engines.' if has_ui else ""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Waymark: its HTTP API</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>Waymark {escape(document['info']['version'])}</h1>",
        '<p>This page shows what <a href="openapi.json">openapi.json</a> contains. Fields marked * are required.'
        f"{back}</p>",
        "<p>Waymark reports which inference engine has how much of a prompt in its KV cache. "
        "<code>POST /register</code> names an engine, <code>POST /query</code> says what "
        "each engine has, and <code>POST /select</code> decides which one a prompt goes to.</p>",
        '<p class="find"><a href="#contents">Contents</a></p><nav id="contents" aria-label="Contents">',
    ]
    for title, operations in groups.items():
        parts.append(f"<h2>{escape(title)}</h2><ul>")
        parts += [
            f'<li><a href="#{_anchor(method, path)}"><code>{method} {escape(path)}</code></a> '
            f"<span>{escape(operation['summary'])}</span>"
            for method, path, operation in operations
        ]
        parts.append("</ul>")
    parts.append("</nav><main>")
    for operations in groups.values():
        for method, path, operation in operations:
            changes = (method, path) in writes
            parts += _section(document["components"]["schemas"], method, path, operation, changes=changes)
    parts.append(f'</main><script type="module">{_SCRIPT}</script></body></html>')
    return "\n".join(parts)


def _grouped(paths: dict[str, Any]) -> dict[str, list[tuple[str, str, Any]]]:
    groups: dict[str, list[tuple[str, str, Any]]] = {title: [] for _, title in reversed(_GROUPS)}
    for path, methods in paths.items():
        title = next(title for beginning, title in _GROUPS if path.startswith(beginning))
        groups[title] += [(method.upper(), path, operation) for method, operation in methods.items()]
    return groups


def _anchor(method: str, path: str) -> str:
    words = "".join(letter if letter.isalnum() else " " for letter in path).split()
    return "-".join([method.lower(), *words])


def _section(
    schemas: dict[str, Any], method: str, path: str, operation: dict[str, Any], *, changes: bool
) -> Iterator[str]:
    anchor = _anchor(method, path)
    link = f'<a class="anchor" href="#{anchor}" aria-label="link to {method} {escape(path)}">#</a>'
    yield f'<section><h3 id="{anchor}"><code>{method} {escape(path)}</code> {link}</h3>'
    yield f"<p>{escape(operation['summary'])}</p>"
    yield from _example(method, path, operation, changes=changes)
    if "requestBody" in operation:
        yield f"<details><summary>Fields of the request</summary>{_fields(schemas, operation['requestBody'])}</details>"
    errors = [status for status in operation["responses"] if status >= "400"]
    for status, answer in operation["responses"].items():
        if status not in errors:
            yield _answer(status, answer)
        if status.startswith("2") and (fields := _fields(schemas, answer)):
            yield f"<details><summary>Fields of the answer</summary>{fields}</details>"
    if errors:
        yield f"<details><summary>Errors: {', '.join(errors)}</summary>"
        yield from (_answer(status, operation["responses"][status]) for status in errors)
        yield "</details>"
    yield "</section>"


def _answer(status: str, answer: dict[str, Any]) -> str:
    """Return the description and the headers of an answer with this status."""
    headers = "".join(
        f"<p><code>{escape(name)}</code> {escape(header['description'])}</p>"
        for name, header in answer.get("headers", {}).items()
    )
    return f"<p><b>{status}</b> {escape(answer['description'])}</p>{headers}"


def _example(method: str, path: str, operation: dict[str, Any], *, changes: bool) -> Iterator[str]:
    """Yield the command to type, a placeholder for the button that sends it, and its output."""
    for parameter in operation.get("parameters", ()):
        path = path.replace(f"{{{parameter['name']}}}", str(parameter.get("example", "")))
    attributes = f'data-method="{method}" data-path="{escape(path)}"' + (" data-changes" if changes else "")
    line = f"curl {'' if method in ('GET', 'POST') else f'-X {method} '}{_BASE}{path}"
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    if "example" in content:
        body = pretty(content["example"])
        line += f" -H 'Content-Type: application/json' \\\n  -d {shlex.quote(body)}"
        attributes += f' data-body="{escape(body)}"'
    elif method == "POST":
        line = line.replace("curl ", "curl -X POST ")
    yield _code("request", line)
    yield f'<div class="send" {attributes}></div>'
    status, answer = next(iter(operation["responses"].items()))
    for kind, example in answer["content"].items():
        if "example" in example:
            text = example["example"] if isinstance(example["example"], str) else pretty(example["example"])
            yield '<p class="recorded">An answer that was recorded with other engines:</p>'
            yield _code("answer", f"{status} {kind}\n{text}".rstrip())


def _code(name: str, text: str) -> str:
    return f'<pre tabindex="0" aria-label="example of {name}"><code>{escape(text)}</code></pre>'


def pretty(value: Any, indent: str = "") -> str:
    """Format JSON with short values on one line."""
    compact = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + len(compact) <= _WIDTH:
        return compact
    inner = indent + "  "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(name)}: {pretty(item, inner)}" for name, item in value.items()]
    else:
        lines = [inner + pretty(item, inner) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([opening, ",\n".join(lines), indent + closing])


def _fields(schemas: dict[str, Any], body: dict[str, Any]) -> str:
    names: dict[str, None] = {}
    _add_references(schemas, body["content"].get("application/json", {}), names)
    return "".join(_table(schemas[name]) for name in names)


def _add_references(schemas: dict[str, Any], value: Any, names: dict[str, None]) -> None:
    """Add the names of the schemas that a part of the document refers to, directly or indirectly."""
    if isinstance(value, dict):
        name = str(value.get("$ref", "")).rpartition("/")[2]
        if name and name not in names:
            names[name] = None
            _add_references(schemas, schemas[name], names)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _add_references(schemas, part, names)


def _table(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}"
        f"<td>{escape(field.get('description', ''))}"
        for name, field in schema.get("properties", {}).items()
    )
    return f'<p>{escape(schema.get("description", ""))}</p><div class="scroll"><table>{rows}</table></div>'
