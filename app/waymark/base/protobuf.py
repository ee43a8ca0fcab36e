"""Messages of other projects' gRPC interfaces, from a table of the names and field numbers that these publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _FIELD.TYPE_STRING,
    "bool": _FIELD.TYPE_BOOL,
    "bytes": _FIELD.TYPE_BYTES,
    "fixed64": _FIELD.TYPE_FIXED64,
    "sfixed64": _FIELD.TYPE_SFIXED64,
    "uint32": _FIELD.TYPE_UINT32,
    "uint64": _FIELD.TYPE_UINT64,
    "int32": _FIELD.TYPE_INT32,
    "double": _FIELD.TYPE_DOUBLE,
}


def message_classes(file_name: str, package: str, messages: Mapping[str, str]) -> dict[str, Any]:
    """Return the classes of messages by name.

    ``messages`` lists the fields of each message in the order of their numbers: ``type name``, with ``*`` for a list
    and ``?`` for an optional one; a bare number is the number of the next field. The classes are in a pool of their
    own, because another package may know the same interface.
    """
    file = descriptor_pb2.FileDescriptorProto(name=file_name, package=package, syntax="proto3")
    for name, text in messages.items():
        message = file.message_type.add(name=name)
        number = 1
        for word in filter(None, text.split(", ")):
            if word.isdigit():
                number = int(word)
                continue
            kind, _, field_name = word.partition(" ")
            bare = kind.rstrip("*?")
            field = message.field.add(name=field_name, number=number)
            field.label = _FIELD.LABEL_REPEATED if kind.endswith("*") else _FIELD.LABEL_OPTIONAL
            field.type = _SCALARS.get(bare, _FIELD.TYPE_MESSAGE)
            if bare not in _SCALARS:
                field.type_name = f".{package}.{bare}"
            if kind.endswith("?"):
                field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field_name}")
            number += 1
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages}


def reader_of(message_class: Any) -> Callable[[bytes], Any]:
    """Return a function that reads a message, or returns None for other bytes, for which gRPC would log a traceback."""

    def message_in(data: bytes) -> Any:
        try:
            return message_class.FromString(data)
        except DecodeError:
            return None

    return message_in
