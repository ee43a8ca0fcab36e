"""Messages of ``envoy.service.ext_proc.v3``: the proxy's reports, and the answers to them.

The endpoint picker protocol of the Gateway API Inference Extension defines the names of headers and metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct, Value

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

DESTINATION = "x-gateway-destination-endpoint"
_SERVED = "x-gateway-destination-endpoint-served"
_LB = "envoy.lb"
_FILTER, _UPSTREAM = "envoy.filters.http.ext_proc", "upstream.address"
_SUBSET, _SUBSET_KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"

#: Bytes of a body in one answer: below 64 KiB including the rest of the message.
PIECE_BYTES = 62_000

NONE = ProcessingMode.NONE
BUFFERED = ProcessingMode.BUFFERED
DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED

_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


# ---- reports of the proxy ----------------------------------------------------------------------------


def headers_of(message: Any) -> dict[str, str]:
    """Return headers by name; of a repeated name the first value, as a proxy reads it."""
    headers: dict[str, str] = {}
    for header in message.headers.headers:
        value = header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value
        headers.setdefault(header.key.lower(), value)
    return headers


def subset_of(request: Any) -> frozenset[str] | None:
    """Return the ``host:port`` that the proxy allows; None for all."""
    value = _metadata(request, _SUBSET, _SUBSET_KEY)
    if value is None:
        return None
    if value.WhichOneof("kind") == "list_value":
        names = [value_of_list.string_value for value_of_list in value.list_value.values]
    else:
        names = value.string_value.split(",")
    return frozenset(name.strip() for name in names if name.strip())


def served_of(request: Any) -> str | None:
    """Return the ``host:port`` that answered, as the proxy reports it; None if it does not.

    A header would not do: an engine could send it, so that its own load and its own failures count as another's.
    """
    value = _metadata(request, _LB, _SERVED)
    if value is None and _FILTER in request.attributes:
        value = request.attributes[_FILTER].fields.get(_UPSTREAM)
    return None if value is None else value.string_value.strip() or None


def _metadata(request: Any, namespace: str, key: str) -> Any:
    if not request.HasField("metadata_context"):
        return None
    metadata = request.metadata_context.filter_metadata
    if namespace not in metadata or key not in metadata[namespace].fields:
        return None
    return metadata[namespace].fields[key]


# ---- answers to the proxy ----------------------------------------------------------------------------


def _mutation(headers: Mapping[str, str], remove: Iterable[str] = ()) -> Any:
    options = [
        HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE)
        for name, value in headers.items()
    ]
    return pb.HeaderMutation(set_headers=options, remove_headers=remove)


def picked(headers: Mapping[str, str], remove: Iterable[str], *, by_body: bool) -> Any:
    """Return the targets; ``headers`` has ``DESTINATION``, and ``remove`` are headers to remove from the request.

    ``by_body``: the message answers a body that was sent as a whole; else it answers the headers of the request.
    """
    common = pb.CommonResponse(header_mutation=_mutation(headers, remove), clear_route_cache=True)
    inner = Struct(fields={DESTINATION: Value(string_value=headers[DESTINATION])})
    metadata = Struct(fields={_LB: Value(struct_value=inner)})
    if by_body:
        return pb.ProcessingResponse(request_body=pb.BodyResponse(response=common), dynamic_metadata=metadata)
    return pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common), dynamic_metadata=metadata)


def pieces(body: bytes, *, is_request: bool, is_end: bool) -> Iterator[Any]:
    """Yield a body unchanged, in few pieces; with ``is_end`` neither more of the body nor trailers follow."""
    cut = [body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES)]
    if not cut and is_end:
        cut = [b""]
    for number, piece in enumerate(cut, 1):
        reply = pb.ProcessingResponse()
        # Its parts are made in place, in a third of the time of nested constructors: a stream has a thousand pieces.
        common = (reply.request_body if is_request else reply.response_body).response
        streamed = common.body_mutation.streamed_response
        streamed.body = piece
        streamed.end_of_stream = is_end and number == len(cut)
        yield reply


def answered(headers: Mapping[str, str], remove: Iterable[str]) -> Any:
    """Return an answer to the headers of an engine's answer that sets ``headers`` in it, and removes others."""
    common = pb.CommonResponse(header_mutation=_mutation(headers, remove))
    return pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=common))


#: Answers without a change.
GO_ON = {
    "request_headers": pb.ProcessingResponse(request_headers=pb.HeadersResponse()),
    "request_body": pb.ProcessingResponse(request_body=pb.BodyResponse()),
    "request_trailers": pb.ProcessingResponse(request_trailers=pb.TrailersResponse()),
    "response_headers": pb.ProcessingResponse(response_headers=pb.HeadersResponse()),
    "response_body": pb.ProcessingResponse(response_body=pb.BodyResponse()),
    "response_trailers": pb.ProcessingResponse(response_trailers=pb.TrailersResponse()),
}


def immediate(status: int, body: bytes, details: str, headers: Mapping[str, str]) -> Any:
    """Return an answer to the client in place of the engine's. ``details`` is a word for the proxy's access log."""
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=HttpStatus(code=status),
            headers=_mutation({"content-type": "application/json", **headers}),
            body=body,
            details=f"waymark_{details}",
        )
    )
