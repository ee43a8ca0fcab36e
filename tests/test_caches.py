"""No cache may outlive the Redis whose answers it holds: every container that outlives a call is named here.

A cache of answers of Redis is made by the ``Incarnation`` of its store, which empties it when Redis comes back empty.
Any other container that outlives a call is in the table below, with the reason why it cannot hold data of an earlier
Redis. The test fails for a new container of neither kind.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trees import tree_of
from waymark.api.conductor import Conductor
from waymark.api.texts import PromptTokenizer
from waymark.base.asker import Asker
from waymark.base.metrics import Metrics
from waymark.decide.asked_pools import AskedPools
from waymark.decide.served import PromptOptions, ServedNames
from waymark.store.hot import HotRows
from waymark.store.store import Store
from waymark.tokenization.tokenizers import Tokenizers

ROOT = Path(__file__).parents[1] / "app" / "waymark"
#: The parts that see answers of Redis; `domain` and `serving` keep only data that these pass to them.
PARTS = ("api", "apply", "ingest", "decide", "store")
CONTAINERS = {
    "dict", "set", "list", "deque", "defaultdict", "Counter", "OrderedDict", "WeakKeyDictionary", "WeakValueDictionary",
    "WeakSet", "BoundedCache",
}  # fmt: skip
DECORATORS = {"cache", "lru_cache", "cached_property"}

#: A container, or a class whose containers all have the same reason -> the reason.
ELSEWHERE = {
    "decide.asked_pools:AskedPools": "what masters of pools have answered; pools, by a table that never changes",
    "api.events:_Publishers": "of a FromClaims, good for as long as the claims",
    "api.http.fields:RequestBody": "names of fields",
    "api.probes:Probes._constant_warnings": "a warning about the settings",
    "api.contract:_schemas_of": "documentation",
    "api.decisions:_usual_text": "texts, which follow from their arguments alone",
    "api.first:LaterApplication": "the operations of the process",
    "api.http.answers:Answer": "one answer",
    "api.http.access:Doc": "documentation",
    "api.http.tokens_file:TokensFile._callers": "what a file says",
    "store.calls:ApplyCalls": "the parts of one fold, until its call is over",
    "store.alike_calls:AlikeCalls._holders": "one entry a shard",
    "store.alike_calls:AlikeCalls._templates": "words of calls, which follow from the grant",
    "store.alike_calls:SentCalls.under_way": "the calls for some frames, until they are over",
    "api.operations:Operation": "children of a counter",
    "store.reader:QueryCounts": "children of a counter",
    "store.quick:FirstPortions": "made by the incarnation",
    "store.quick:KnownRuns": "made by the incarnation, and bound to views of tables",
    "store.steps:TimeLimit._running": "steps under way",
    "store.steps:_tasks": "tasks under way",
    "store.redis.words:PackedWords": "the words of one command",
    "ingest.unfinished:_memory_file": "an open file of the system",
    "api.conductor:UnmatchedRows": "of AnswerCache, which keeps them no longer than their view",
    "api.conductor:AnswerCache": "made by the incarnation, and bound to views of tables",
    "api.conductor:AddressTables": "made by the incarnation, and bound to tables",
    "api.http.bodies:RequestCache": "what texts of requests say, by their bytes",
    "api.activity:ActivityFeed._clients": "connections of clients",
    "api.http.admission:AdmissionQueue": "requests that wait",
    "apply.applier:Applier._staged": "one snapshot, under one grant",
    "apply.resuming:KeptMemories": "made by the incarnation",
    "apply.options:ApplyOptions": "settings",
    "apply.slices:LoopTurns": "streams that wait for their turn, by event loop",
    "ingest.batch_decoder:BatchDecoder": "what the log says already",
    "ingest.prefix_stream:EventSource": "events that wait to be applied",
    "ingest.prefix_stream:PrefixStream": "one stream, under one grant",
    "ingest.frames:FrameBuffer": "frames that wait to be applied",
    "ingest.scraping:Scraper": "engines that are scraped, by URL",
    "ingest.polling:RegistrationKeeper": "publishers of the file whose refusal is in the log",
    "ingest.snapshot:RecordReply": "the chunks of one reply",
    "ingest.received:ReceivedFrames": "frames of one stream, until they are applied",
    "ingest.rank_streams:RankStreams": "one stream, under one grant",
    "ingest.life:Life": "one stream, under one grant",
    "ingest.straight:StraightWay": "one stream, under one grant",
    "ingest.sweeping:LostGroups._groups": "groups to write again, each only into a Redis that has its table",
    "ingest.polling:Poller._others": "workers that lived before Redis came back empty, to wait for",
    "ingest.polling:Poller.running": "streams under way, each under its grant",
    "ingest.polling:Poller._faults": "what the log says already",
    "ingest.replay_places:ReplayPlaces": "replays under way",
    "ingest.running:LeaseKeeper._kept": "the grants of the streams that run",
    "ingest.running:StreamRunner._errors": "what the log says already",
    "ingest.running:StreamRunner._starts": "starts under way, by server",
    "ingest.polling:Shares": "computed from ids and names alone",
    "ingest.sweeping:SweepPace": "how long steps have taken",
    "ingest.status_reporter:StatusReporter": "one stream, under one grant",
    "store.activity:Activity._waiting": "entries that are still to be written",
    "store.publisher_states:PublisherState": "one answer",
    "store.holder_tables:decode_holder": "what a record says, by its bytes",
    "store.index_file:IndexFile.publishers": "of one file, which was read whole",
    "store.holder_tables:_row": "what a record says, by its bytes",
    "store.holder_tables:_target": "what a record says, by its bytes",
    "decide.fail_open:OwnReservations": "what was decided while Redis is away",
    "decide.snapshot:SnapshotKeeper._readings": "made by the incarnation",
    "decide.snapshot:SnapshotKeeper._last": "what was known last, to decide by while Redis is away",
    "decide.snapshot:_Readings": "of SnapshotKeeper",
    "decide.policies.policy:Values": "constants of a policy, as the file has them",
    "decide.policies.plugins:Plugin": "parameters of a plugin, as the table has them",
    "decide.fleet:Fleet": "bound to a table, which never changes",
    "decide.reserve:PrefillProgress": "made by the incarnation",
    "decide.requests:RequestSelector._logged": "what the log says already",
    "decide.served:ServedNames": "made by the incarnation",
    "decide.group_loads:GroupLoads": "of SnapshotKeeper",
    "decide.shadows:Preferences._candidates": "computed from the arguments of one decision",
    "ingest.subscribers:Subscribers": "connections that are open",
    "decide.fleet:TargetSet": "of Fleet",
    "decide.group_loads:LoadOrder": "of Fleet, and of the loads that it was asked with last",
    "decide.group_loads:RequestSum": "of Fleet, and of the loads that it was asked with last",
    "decide.group_loads:LoadColumns": "of Fleet, and of the loads that it was asked with last",
    "decide.fleet_columns:FleetColumns": "computed from the arguments of one decision",
    "decide.policies.columns:CandidateColumns": "computed from the arguments of one decision",
    "decide.policies.columns:ColumnSums": "computed from the arguments of one decision",
    "decide.policies.columns:RankedColumns": "computed from the arguments of one decision",
    "decide.under_way:RequestsUnderWay": "requests under way",
    "store.chain:Chain": "one query",
    "store.chain:_PieceValues": "one query",
    "store.fetch:_of_group": "computed from an id and the prefix of keys alone",
    "store.reservations:Reservations._plain": "words of calls, which follow from an id and the terms alone",
    "store.redis.client:RedisClient._pipelines": "nodes",
    "store.redis.words:SharedPipeline": "calls under way",
    "store.redis.cluster:Cluster": "nodes, which the map of slots corrects",
    "store.redis.cluster:SlotMap": "nodes and slots, which MOVED corrects",
    "api.policies:FirstTokenLines": "one comparison",
    "api.policies:PolicySums": "one comparison",
    "decide.simulated_fleet:SimulatedFleet._targets": "of the decisions of one call",
    "decide.simulated_fleet:_Cache.sizes": "simulated, for one call",
    "decide.simulated_fleet:_PrefillQueue.answers": "simulated, for one call",
    "decide.simulated_fleet:_PrefillQueue.prefills": "simulated, for one call",
    "decide.shadows:Shadows._warned_at": "what the log says already",
    "store.kept_decisions:KeptDecisions": "made by the incarnation",
    "store.responses:ReplicaCounts": "what this process has counted and not added yet",
    "store.health:RedisHealth": "one answer",
    "store.hot:HotRows": "made by the incarnation",
    "store.reader:_Query": "one query",
    "store.incarnation:Incarnation": "the mechanism itself",
    "store.leases:Grant": "under one grant, which a Redis that came back empty does not know",
    "store.leases:Renewal": "under one grant",
    "store.pacing:Pacer": "calls under way",
    "store.pacing:_ServerQueue": "calls under way",
    "store.parsing:RecordParser": "made by the incarnation",
    "store.redis.read_connection:ReadConnection": "questions under way",
    "store.redis.read_connection:_PendingRead": "one answer",
    "store.records:StreamFields": "one record",
    "ingest.polling:Poller._wanted": "as of the present list of claims",
    "ingest.sweeping:UnclaimedWatch._claimed": "as of the present list of claims",
    "store.directory:PolledClaims._of_instances": "good for as long as _claims",
    "store.directory:PolledClaims._by_field": "good for as long as Redis has the last change, which an empty one lacks",
    "store.directory:PolledClaims._claims": "good for as long as _by_field",
    "store.directory:Directory._decoded": "each good for as long as Redis has the same bytes",
    "store.store:Store._background": "work under way",
}


def is_container(value: ast.expr | None) -> bool:
    match value:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(func=ast.Subscript(value=ast.Name(id=name)) | ast.Name(id=name) | ast.Attribute(attr=name)):
            factories = [keyword.value for keyword in value.keywords if keyword.arg == "default_factory"]
            return name in CONTAINERS or any(isinstance(each, ast.Name) and each.id in CONTAINERS for each in factories)
        case ast.IfExp():
            return is_container(value.body) or is_container(value.orelse)
        case ast.BoolOp():
            return any(map(is_container, value.values))
    return False


def containers(tree: ast.Module, module: str) -> Iterator[str]:
    """Yield ``module:Class.attribute`` for each container that outlives the call in which it is made, and for each
    cached function."""

    def of_body(body: list[ast.stmt], name: str) -> Iterator[str]:
        for statement in body:
            match statement:
                case ast.ClassDef():
                    yield from of_body(statement.body, f"{module}:{statement.name}.")
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    for decorator in statement.decorator_list:
                        words = {node.id for node in ast.walk(decorator) if isinstance(node, ast.Name)}
                        words |= {node.attr for node in ast.walk(decorator) if isinstance(node, ast.Attribute)}
                        if words & DECORATORS:
                            yield name + statement.name
                    yield from of_self(statement, name)
                case ast.Assign(targets=targets, value=value) if is_container(value):
                    yield from (name + target.id for target in targets if isinstance(target, ast.Name))
                case ast.AnnAssign(target=ast.Name(id=target), value=value) if is_container(value):
                    yield name + target

    def of_self(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[str]:
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.AnnAssign) and is_container(node.value):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    match target:
                        case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
                            yield name + attribute

    yield from of_body(tree.body, f"{module}:")


@functools.cache
def found() -> frozenset[str]:
    names: set[str] = set()
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            names.update(containers(tree_of(path.read_text(encoding="utf-8")), module))
    return frozenset(names)


def reason_of(name: str) -> str | None:
    return ELSEWHERE.get(name) or ELSEWHERE.get(name.rpartition(".")[0])


def test_every_container_is_made_by_the_incarnation_or_has_a_reason() -> None:
    strangers = sorted(name for name in found() if reason_of(name) is None)
    assert not strangers, (
        f"{strangers}: make a cache of what Redis answers by Incarnation.cache, so that it ends with that Redis; "
        "anything else needs its reason in ELSEWHERE"
    )


def test_every_reason_is_of_something_that_is_there() -> None:
    names = found()
    known = names | {name.rpartition(".")[0] for name in names}
    assert sorted(ELSEWHERE.keys() - known) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        pytest.param("class A:\n def __init__(self):\n  self._known: dict[int, int] = {}", {"m:A._known"}, id="a dict"),
        pytest.param("class A:\n def keep(self):\n  self.all = set[int]()", {"m:A.all"}, id="made late"),
        pytest.param("class A:\n seen = deque(maxlen=3)", {"m:A.seen"}, id="of the class"),
        pytest.param("class A:\n seen: X = field(default_factory=dict)", {"m:A.seen"}, id="of a dataclass"),
        pytest.param("_known: X = WeakKeyDictionary()", {"m:_known"}, id="of the module"),
        pytest.param("@functools.lru_cache(9)\ndef table(): ...", {"m:table"}, id="a remembering function"),
        pytest.param("class A:\n def f(self, x):\n  self.x = x or {}", {"m:A.x"}, id="a default"),
        pytest.param("class A:\n def f(self, i):\n  self.x = i.cache({})\n  y = {}", set(), id="made by it"),
    ],
)
def test_a_container_is_found(text: str, names: set[str]) -> None:
    assert set(containers(ast.parse(text), "m")) == names


def test_hot_rows_and_answers_are_emptied_by_it() -> None:
    hot = HotRows(60.0, 1 << 20)
    store = Store.open("memory://", hot=hot)
    conductor = Conductor(
        store,
        PromptOptions(),
        "auto",
        Metrics(),
        PromptTokenizer(functools.partial(Tokenizers, {}, None, Metrics()), 1),
        AskedPools(Asker(), Metrics()),
        ServedNames(store.directory, store.polled_claims, store.reader, store.begin, 1.0),
    )
    emptied = store.incarnation._caches
    assert any(each is store.parser for each in emptied)
    assert any(each is hot for each in emptied)
    assert any(each is conductor._rows for each in emptied)
