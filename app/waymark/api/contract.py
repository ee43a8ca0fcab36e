"""``/openapi.json`` and ``/docs``: the contract, generated from the operations and the models that validate bodies.

``examples.json`` has a request and an answer of each operation, as a session of the tests recorded them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, get_args

import orjson
from pydantic import BaseModel, RootModel, TypeAdapter

from waymark import __version__
from waymark.api.dynamo.schemas import DynamoErrorBody
from waymark.api.http import docs_page
from waymark.api.http.access import BodyType, Doc
from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body, Format
from waymark.api.http.fields import ErrorBody, RequestBody
from waymark.api.operations import Operation
from waymark.base.shape import AnswerShape
from waymark.contract.prompts import InstanceRow

M = TypeVar("M", bound=BaseModel)

_REF = "#/components/schemas/{model}"
_EXAMPLES = Path(__file__).parent / "examples.json"

_ERRORS = {
    400: "The body cannot be read, or one of its fields or parameters is not valid.",
    401: "The bearer token that this service requires is missing or wrong.",
    404: "What the request names does not exist.",
    405: "This path does not support the method.",
    409: "The request contradicts what is registered. Nothing has changed.",
    413: "The body is longer, or has more tokens, than this service accepts.",
    415: "The body is neither JSON nor msgpack.",
    422: "One of the fields of the body is not valid.",
    429: "Every target has as many requests as it may have. Retry-After says when to try again.",
    500: "This service has failed. Its log contains the error.",
    503: "Redis, or the source of token ids, is unavailable. Retry-After says when to try again.",
}

#: Headers that every answer with this status has. The headers of a success are those of the operation.
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    405: {"Allow": "the methods that this path supports"},
    429: {"Retry-After": "the seconds after which to try again"},
    503: {"Retry-After": "the seconds after which to try again"},
}


class Contract:
    """Handlers of ``/openapi.json`` and ``/docs``; ``describe`` is called once, with all operations.

    Generating the document takes a second, so this is done at the first request, in a thread, and not at each start.
    """

    def __init__(self, *, has_ui: bool = False) -> None:
        self._has_ui = has_ui
        self._operations: Sequence[Operation] = ()
        self._document: dict[str, Any] | None = None

    def describe(self, operations: Sequence[Operation]) -> None:
        self._operations = operations

    async def openapi(self, _: Body) -> Answer:
        return Answer(orjson.dumps(await self._made()), media_type=b"application/json")

    async def docs(self, _: Body) -> Answer:
        writes = {(operation.method, operation.path) for operation in self._operations if operation.access == "write"}
        text = docs_page.page(await self._made(), writes, has_ui=self._has_ui)
        return Answer(text.encode(), media_type=b"text/html; charset=utf-8", headers=dict(docs_page.HEADERS))

    async def _made(self) -> dict[str, Any]:
        if self._document is None:
            self._document = await asyncio.to_thread(openapi, self._operations)
        return self._document


def statuses(operation: Operation) -> list[int]:
    """Return every status that an operation may answer with, that of success first."""
    codes = {405, 500, *operation.doc.errors}
    if operation.has_body:
        codes |= {400, 413, 415}
        if operation.api == "dynamo":
            codes.add(422)
    if operation.access != "open":
        codes.add(401)
    if operation.doc.needs_redis:
        codes.add(503)
    return [operation.doc.status, *sorted(codes)]


def openapi(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the operations."""
    contents, schemas = _schemas(operations)
    paths: dict[str, Any] = {}
    examples = orjson.loads(_EXAMPLES.read_bytes())
    for operation in operations:
        described = _operation(operation, contents)
        if (example := examples.get(f"{operation.method} {operation.path}")) is not None:
            _add_example(described, operation.path, example)
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Waymark",
            "version": __version__,
            "description": "Waymark reports which inference engine already has a prefix in its KV cache.",
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _schemas(operations: Sequence[Operation]) -> tuple[dict[BodyType, dict[str, Any]], dict[str, Any]]:
    """Return the schema of each body, and the named schemas to which these refer."""
    models: dict[BodyType, None] = dict.fromkeys((ErrorBody, DynamoErrorBody, InstanceRow))
    for operation in operations:
        models |= dict.fromkeys(model for model in (operation.doc.request, operation.doc.answer) if model is not None)
    for model in list(models):
        if _is_subclass(model, RootModel):  # its parts have their own spellings
            models |= dict.fromkeys(
                part for part in get_args(model.model_fields["root"].annotation) if _is_subclass(part, RequestBody)
            )
    return _schemas_of(tuple(models))


@lru_cache(maxsize=2)
def _schemas_of(models: tuple[BodyType, ...]) -> tuple[dict[BodyType, dict[str, Any]], dict[str, Any]]:
    """Return the schemas of the models, which must not be changed. A process with several applications, such as the
    tests, generates them once.
    """
    # pydantic reads the fields of dataclasses, so shapes become dataclasses, without generated methods, bases first.
    for shape in sorted(_shapes(AnswerShape), key=lambda shape: len(shape.__mro__)):
        dataclass(init=False, repr=False, eq=False)(shape)
    by_model, definitions = TypeAdapter.json_schemas(
        [(str(model), "validation", TypeAdapter(model)) for model in models], ref_template=_REF
    )
    contents = {model: by_model[str(model), "validation"] for model in models}
    schemas = definitions["$defs"]
    for shape in AnswerShape.__subclasses__():
        for derived in shape.__subclasses__():
            if derived.__name__ in schemas:
                _inherit_descriptions(schemas[derived.__name__], derived)
    for schema in schemas.values():
        _join_lines(schema)
    for model in models:
        if _is_subclass(model, RequestBody):
            _add_spellings(schemas[model.__name__], model)
            _allow_null(schemas[model.__name__])
    return contents, schemas


def _shapes(base: type[AnswerShape]) -> Iterator[type[AnswerShape]]:
    """Yield all direct and indirect subclasses of ``base``."""
    for shape in base.__subclasses__():
        yield shape
        yield from _shapes(shape)


def _inherit_descriptions(schema: dict[str, Any], derived: type[AnswerShape]) -> None:
    """Add the sentences of inherited fields, since pydantic reads only the source of the class itself."""
    for base in derived.__bases__:
        for name, field in TypeAdapter(base).json_schema()["properties"].items():
            if "description" in field:
                schema["properties"][name].setdefault("description", field["description"])


def _join_lines(schema: dict[str, Any]) -> None:
    """Join the lines of sentences wrapped in the source."""
    for described in (schema, *schema.get("properties", {}).values()):
        if "description" in described:
            described["description"] = " ".join(described["description"].split())


def _is_subclass(part: Any, base: type[M]) -> TypeGuard[type[M]]:
    return isinstance(part, type) and issubclass(part, base)


def _add_spellings(schema: dict[str, Any], model: type[RequestBody]) -> None:
    for name in model.model_fields:
        usual, *aliases = model.spellings(name)
        if aliases:
            schema["properties"][usual]["description"] += "; also accepted as " + ", ".join(aliases)


def _allow_null(schema: dict[str, Any]) -> None:
    """Mark each field that may be absent as nullable, because a null in a request means an absent field."""
    for name, field in schema.get("properties", {}).items():
        if name in schema.get("required", ()):
            continue
        match field:
            case {"anyOf": choices}:
                if {"type": "null"} not in choices:
                    choices.append({"type": "null"})
            case {"type": str(one)} if not {"enum", "const"} & field.keys():
                field["type"] = [one, "null"]
            case {"type": _} | {"$ref": _}:
                outside = {word: field.pop(word) for word in ("title", "description", "default") if word in field}
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **outside}


def _operation(operation: Operation, contents: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    doc = operation.doc
    described: dict[str, Any] = {"summary": doc.summary, "tags": [operation.api], "responses": {}}
    if doc.request is not None:
        described["requestBody"] = {"required": True, "content": _content(contents[doc.request], tuple(Format))}
    parameters = [_parameter(name, "path") for name in re.findall(r"{(\w+)}", operation.path)]
    parameters += [_parameter(name, "query") for name in doc.parameters]
    parameters += [_parameter(name, "header") for name in doc.request_headers]
    if parameters:
        described["parameters"] = parameters
    if operation.access != "open":
        described["security"] = [{"token": []}, {}]
    error = DynamoErrorBody if operation.api == "dynamo" else ErrorBody
    # An answer has the format of its request; without a body it is JSON.
    formats = tuple(Format) if operation.has_body else (Format.JSON,)
    for status in statuses(operation):
        is_success = status == doc.status
        model = doc.answer if is_success else error
        answer: dict[str, Any] = {
            "description": "The request succeeded." if is_success else _ERRORS[status],
            "content": _plain_content(doc, formats) if model is None else _content(contents[model], formats),
        }
        headers = doc.headers if is_success else _HEADERS.get(status)
        if headers:
            answer["headers"] = {
                name: {"description": sentence, "schema": {"type": "string"}} for name, sentence in headers.items()
            }
        described["responses"][str(status)] = answer
    return described


def _add_example(described: dict[str, Any], path: str, example: dict[str, Any]) -> None:
    """Add the recorded request and answer to the description of their operation."""
    if "body" in example:
        described["requestBody"]["content"][Format.JSON.value.decode()]["example"] = example["body"]
    content = described["responses"][str(example["status"])]["content"]
    next(iter(content.values()))["example"] = example["answer"]
    values = re.fullmatch(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path), example["path"])
    for parameter in described.get("parameters", ()):
        if values is not None and parameter["in"] == "path":
            parameter["example"] = values[parameter["name"]]


def _parameter(name: str, location: str) -> dict[str, Any]:
    return {"name": name, "in": location, "required": location == "path", "schema": {"type": "string"}}


def _plain_content(doc: Doc, formats: Sequence[Format]) -> dict[str, Any]:
    """Return the content of an answer without a model, by media type."""
    if doc.media_type != "application/json":
        return {doc.media_type: {}}
    return {body_format.value.decode(): {} for body_format in formats}


def _content(schema: dict[str, Any], formats: Sequence[Format]) -> dict[str, Any]:
    return {body_format.value.decode(): {"schema": schema} for body_format in formats}
