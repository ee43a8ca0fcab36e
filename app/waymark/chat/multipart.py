"""Forms with files (RFC 7578), such as the bodies of ``/v1/audio/transcriptions``: only the model is read."""

from __future__ import annotations

import re
from email.message import Message
from itertools import islice

#: The most parts of a form to search for the model: a body may have millions of lines that look like parts.
_FORM_PARTS_MAX = 256
_PART_HEAD = re.compile(rb"((?:[^\r\n]{1,1024}\r\n){1,16})\r\n")
_IS_MODEL = re.compile(rb'(?im)^content-disposition:[^\r\n]*[; ]name="?model"?\s*(;|$)')


def fields_of_form(body: bytes, content_type: bytes) -> dict[str, str] | None:
    """Return the model as the only field, or no field without a model; None if the body is not such a form."""
    if not _is_form(content_type):
        return None
    position = model_part(body, content_type)
    return {} if position is None else {"model": body[position].decode("utf-8", "replace")}


def model_part(body: bytes, content_type: bytes) -> slice | None:
    """Return the place of the field ``model`` in a form; None without a form, or if its first parts lack the field."""
    if not _is_form(content_type):
        return None
    header = Message()
    header["content-type"] = content_type.decode("latin-1")
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not boundary:
        return None
    delimiter = b"--" + re.escape(boundary.encode("latin-1"))
    for line in islice(re.finditer(delimiter + rb"\r\n", body), _FORM_PARTS_MAX):
        head = _PART_HEAD.match(body, line.end())
        if head is not None and _IS_MODEL.search(head[1]):
            end = re.compile(rb"\r\n" + delimiter).search(body, head.end())
            return None if end is None else slice(head.end(), end.start())
    return None


def _is_form(content_type: bytes) -> bool:
    return content_type.lower().startswith(b"multipart/form-data")
