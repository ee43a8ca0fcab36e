"""The bounds of everything that a stranger sends, in one table. Its numbers are those of the code.

``docs/protocol.md`` has the table, and ``test_bounds.py`` sends what is at a bound, and one above it.
"""

from __future__ import annotations

from dataclasses import dataclass

from waymark.api.activity import CLIENTS_MAX
from waymark.api.decision_bodies import NAMES_MAX, RELEASES_MAX
from waymark.api.events import EVENT_HASHES_MAX
from waymark.api.http.bodies import CONTAINERS_MAX
from waymark.api.policies import DECISIONS_MAX, FILE_MAX
from waymark.api.registration_schemas import MEDIA_MAX
from waymark.apply.options import ApplyOptions
from waymark.base import samples
from waymark.base.bounded_json import DEPTH_MAX, PARTS_MAX, VALUES_MAX
from waymark.base.event_streams import EVENT_BYTES_MAX
from waymark.base.samples import LINE_BYTES_MAX, LINES_MAX
from waymark.base.settings import PREFIX, Settings
from waymark.discovery import describe, kubernetes
from waymark.discovery.describe import RANKS_MAX
from waymark.discovery.pods import LABELS_READ_MAX
from waymark.domain.multimodal import ITEMS_MAX
from waymark.domain.names import NAME_BYTES_MAX
from waymark.domain.targets import ADAPTERS_MAX, LABEL_BYTES_MAX, LABELS_MAX
from waymark.engines.wire import BLOCK_SIZE_MAX
from waymark.epp import radix_index
from waymark.epp.server import MORE_BYTES_MAX
from waymark.ingest import scraping, snapshot, unfinished
from waymark.serving.limits import AHEAD_MAX, HEAD_BYTES_MAX, HEAD_FIELDS_MAX
from waymark.store.index_file import RECORD_BYTES_MAX
from waymark.tokenization import encoders, places, remote, rendering
from waymark.tokenization.local import TEXT_BYTES_MAX, TOKENIZER_BYTES_MAX
from waymark.tokenization.templates import SOURCE_MAX


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound."""

    what: str
    source: str | int
    """The name of a setting, or a constant of the code."""
    above: str
    """What happens above it."""
    unit: str = ""
    follows: str | None = None
    """The name of the setting that a bound of the code follows in proportion."""

    @property
    def setting(self) -> str | None:
        name = self.follows if isinstance(self.source, int) else self.source
        return None if name is None else PREFIX + name.upper()

    @property
    def value(self) -> int:
        """The bound as the code has it; the default of a setting."""
        return int(getattr(Settings, self.source)) if isinstance(self.source, str) else self.source


_BYTES, _SECONDS = "bytes", "s"
_NO_ENTRY = "400 that names the field"
_NO_GAUGES = "none of them is read"
_ENDED = "the connections with most bytes are closed for 30 s; a replay or a snapshot ends"
_NOT_SAID = "what it would have said is not known, and the registration says so"
_NO_SNAPSHOT = "it is refused, and asked for again later"
_NO_TOKENIZER = "text of the model is refused with the reason"
_NO_TEMPLATE = "conversations of the model are refused with the reason"
_NO_PODS = "the list counts as failed, and nothing changes"
_LEFT_OUT = "the others are left out"
_NO_TOKENS = "the next engine of the model is asked, then 503"
_LOST = "the batch is lost, counted, and the others are applied"

BOUNDS: dict[str, tuple[Bound, ...]] = {
    "HTTP": (
        Bound("the head of a request", HEAD_BYTES_MAX, "431", _BYTES),
        Bound("lines of a head", HEAD_FIELDS_MAX, "431"),
        Bound("requests sent ahead on one connection", AHEAD_MAX, "the connection is closed"),
        Bound("time for a request to arrive, and for its answer to be read", "request_seconds", "408", _SECONDS),
        Bound("connections", "connections_max", "the one that is idle longest is closed"),
        Bound("the body of a request", "max_body_bytes", "413", _BYTES),
        Bound("bodies at once", 16 * 16 * 2**20, "503 to the one that has taken longest", _BYTES, "max_body_bytes"),
        Bound("lists and objects of a body", CONTAINERS_MAX, "413"),
        Bound("lists and objects of a body of the gateway", PARTS_MAX, "413"),
        Bound("commas of a body of the gateway", VALUES_MAX, "413"),
        Bound("lists and objects within each other, at the gateway", DEPTH_MAX, "400"),
    ),
    "Fields": (
        Bound("token ids, or hashes, of a request", "max_tokens", "413"),
        Bound("the text of a request", 2 * 2**20, "413", _BYTES, "max_tokens"),
        Bound("a name of a model, tenant, instance or salt", NAME_BYTES_MAX, _NO_ENTRY, _BYTES),
        Bound("candidates of a decision", NAMES_MAX, _NO_ENTRY),
        Bound("reservations of one release", RELEASES_MAX, _NO_ENTRY),
        Bound("labels of a registration", LABELS_MAX, _NO_ENTRY),
        Bound("a label", LABEL_BYTES_MAX, _NO_ENTRY, _BYTES),
        Bound("media of a registration with sockets of their own", MEDIA_MAX, _NO_ENTRY),
        Bound("media of items of a prompt", ITEMS_MAX, _NO_ENTRY),
        Bound("hashes of one event of `POST /events`", EVENT_HASHES_MAX, _NO_ENTRY),
        Bound("characters of the file of `POST /policies/replay`", FILE_MAX, _NO_ENTRY),
        Bound("kept decisions of one comparison", DECISIONS_MAX, "the newest are compared"),
    ),
    "Engines": (
        Bound("a frame", "frame_bytes_max", _LOST, _BYTES),
        Bound("events of a batch", ApplyOptions().batch_events_max, _LOST, "", "frame_bytes_max"),
        Bound("hashes of an event", ApplyOptions().event_hashes_max, _LOST, "", "frame_bytes_max"),
        Bound("tokens of a block", BLOCK_SIZE_MAX, "the event is ignored and counted"),
        Bound("blocks of a stream", "stream_blocks_max", "further blocks are ignored and counted"),
        Bound("growth of a worker by messages without an end", unfinished.MEMORY_BYTES_MAX, _ENDED, _BYTES),
        Bound("a snapshot", snapshot.BYTES_MAX, _NO_SNAPSHOT, _BYTES),
        Bound("parts of a snapshot", snapshot.PARTS_MAX, _NO_SNAPSHOT),
        Bound("records of a snapshot", snapshot.RECORDS_MAX, _NO_SNAPSHOT),
        Bound("ranks that an engine names", RANKS_MAX, "400 that names what to give"),
        Bound("a line of an engine's metrics that is read", LINE_BYTES_MAX, _NO_GAUGES, _BYTES),
        Bound("such lines", LINES_MAX, _NO_GAUGES),
        Bound("all such lines together", samples.BYTES_MAX, _NO_GAUGES, _BYTES),
        Bound("an answer with an engine's metrics", scraping.BYTES_MAX, _NO_GAUGES, _BYTES),
        Bound("an answer by which an engine describes itself", describe.ANSWER_BYTES_MAX, _NOT_SAID, _BYTES),
        Bound("names of models that an engine serves", ADAPTERS_MAX, _LEFT_OUT),
        Bound("characters of such a name", describe.NAME_MAX, "it is left out"),
        Bound(
            "an answer with the token ids of a text", remote.answer_bytes_max(2**21), _NO_TOKENS, _BYTES, "max_tokens"
        ),
        Bound("an answer with the token ids of a prompt with media", remote.MEDIA_BYTES_MAX, _NO_TOKENS, _BYTES),
        Bound("an event of an answer that the gateway reads", EVENT_BYTES_MAX, "it is not read", _BYTES),
        Bound("a conversation that is stored", 2**20, "it is not stored", _BYTES, "answers_bytes"),
    ),
    "Files of models": (
        Bound("`tokenizer.json`", TOKENIZER_BYTES_MAX, _NO_TOKENIZER, _BYTES),
        Bound("any other file of a tokenizer", TEXT_BYTES_MAX, _NO_TOKENIZER, _BYTES),
        Bound("CPU to open a tokenizer", int(encoders.OPEN_SECONDS_MAX), _NO_TOKENIZER, _SECONDS),
        Bound("memory of a tokenizer", encoders.memory_bytes_max(2 * 2**20), "400", _BYTES, "max_tokens"),
        Bound("CPU of a tokenizer for a text", int(encoders.TEXT_SECONDS_MAX), "400", _SECONDS, "max_tokens"),
        Bound(
            "tokenizers that are open",
            places.OPEN_MAX,
            "the idle one that was used least recently is closed; without an idle one 503 after 2 s",
        ),
        Bound(
            "long texts that are encoded at the same time",
            places.TEXTS_MAX * 2**21,
            "503 after 2 s",
            _BYTES,
            "max_tokens",
        ),
        Bound("such texts of one model", places.TEXTS_OF_ONE_MAX * 2**21, "503 after 2 s", _BYTES, "max_tokens"),
        Bound("characters of a chat template", SOURCE_MAX, _NO_TEMPLATE),
        Bound("steps of a chat template", rendering.STEPS_MAX, "400"),
        Bound("memory of a chat template", rendering.MEMORY_BYTES_MAX, "400", _BYTES),
    ),
    "Others": (
        Bound(
            "streams of a picker",
            "connections_max",
            "of the connection with the most waiting streams, the oldest waiting one is ended",
        ),
        Bound("a message to a picker, beside the body", MORE_BYTES_MAX, "the stream is ended", _BYTES),
        Bound("blocks of one call of the RadixIndex", radix_index.BLOCKS_MAX, "it is answered as too long"),
        Bound("a record of a file to import", RECORD_BYTES_MAX, "the file is refused", _BYTES),
        Bound("pods of Kubernetes", kubernetes.PODS_MAX, _NO_PODS),
        Bound("a page of pods", kubernetes.PAGE_BYTES_MAX, _NO_PODS, _BYTES),
        Bound("items of a page of pods", kubernetes.PAGE_ITEMS_MAX, _NO_PODS),
        Bound("pages of a list of pods", kubernetes.PAGES_MAX, _NO_PODS),
        Bound("characters of the version of a list of pods", kubernetes.TOKEN_CHARACTERS_MAX, "it counts as none"),
        Bound("labels of a pod that are read", LABELS_READ_MAX, _LEFT_OUT),
        Bound("an event of a watch", kubernetes.LINE_BYTES_MAX, "the pods are listed again", _BYTES),
        Bound("followers of `GET /activity`", CLIENTS_MAX, "503"),
    ),
}  # fmt: skip


def shown_value(bound: Bound) -> str:
    """With its unit; powers of two as people write them."""
    if bound.unit == _BYTES:
        for power, name in ((20, "MiB"), (10, "KiB")):
            if bound.value % 2**power == 0:
                return f"{bound.value >> power:,} {name}"
    return f"{bound.value:,} {bound.unit}".strip()


def markdown_table() -> str:
    """The rows, as a page has them."""
    lines = ["| What | Bound | Setting | Above it |", "|---|---|---|---|"]
    for of, bounds in BOUNDS.items():
        lines.append(f"| **{of}** | | | |")
        for each in bounds:
            setting = "" if each.setting is None else f"`{each.setting}`"
            lines.append(f"| {each.what} | {shown_value(each)} | {setting} | {each.above} |")
    return "\n".join(lines)


def bound_of(what: str) -> Bound:
    """The row with this text."""
    (found,) = (each for bounds in BOUNDS.values() for each in bounds if each.what == what)
    return found
