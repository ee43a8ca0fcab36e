"""The purpose, input and answers of each path, for the contract and the page made from it."""

from __future__ import annotations

from functools import partial

from waymark.api import (
    activity,
    admin,
    books,
    decision_bodies,
    events,
    inspections,
    placement,
    policies,
    query_schemas,
    registration_schemas,
)
from waymark.api.dynamo import schemas as dynamo_bodies
from waymark.api.dynamo.select import USAGE
from waymark.api.http.access import Doc
from waymark.contract import admin as admin_answers
from waymark.contract import dynamo, prompts, publishers, results
from waymark.contract import inspections as inspection_answers

#: The descriptions of paths by the tenants that they concern: those of the caller, that of the body, or none, and then
#: they need no Redis either. ``Doc`` itself is that of a path of all tenants.
_filtered, _of_body = partial(Doc, reach="filtered"), partial(Doc, reach="body")
_unbound = partial(Doc, reach="none", needs_redis=False)
_TEXT, _HTML = "text/plain", "text/html"

_NOTE = {"X-Waymark-Note": "explains why Waymark needs no dump and no peers: the index is in Redis"}

PARTIAL = {
    "X-Waymark-Partial": "true if the query reached its deadline, so that the real numbers may be higher; else absent"
}
_OF_QUERY = PARTIAL | {
    "X-Waymark-Note": "why every number is zero, if no engine has this model or block size; else absent",
    "X-Waymark-Unknown": "the field of the request that the note is about, model or block_size; else absent",
}
QUERY = _of_body(
    "Returns how much of a prompt each instance has; the prompt is given as tokens, text or messages.",
    query_schemas.QueryRequest,
    prompts.QueryAnswer,
    headers=_OF_QUERY,
)
QUERY_BY_HASH = _of_body(
    "Returns how much of a prompt each instance has; the prompt is given as the rolling hashes of its blocks.",
    query_schemas.QueryByHashRequest,
    prompts.QueryAnswer,
    headers=_OF_QUERY,
)

HEALTH = _unbound("Answers 200 while the process is alive.", answer=publishers.HealthAnswer)
READY = Doc("Answers 200 when the process can answer queries.", answer=publishers.ReadyAnswer, reach="none")
DYNAMO_HEALTH = _unbound("Answers 200 without a body while the process is alive.", media_type=_TEXT)
METRICS = Doc("Returns the metrics as Prometheus text.", media_type=_TEXT, needs_redis=False)
DYNAMO_METRICS = Doc(
    "Returns the metrics as Prometheus text, and those of the released indexer by its names.",
    media_type=_TEXT,
    needs_redis=False,
)
OPENAPI = _unbound("Returns this contract.")
SERVICES = _filtered("Lists every registration.", answer=publishers.ServicesAnswer)
WORKERS = _filtered("Lists publishers and ingest workers with their state.", answer=publishers.WorkersAnswer)
BOOKS = _filtered(
    "Returns what decisions promised and what engines delivered, in tokens, since a time such as 30m or 2h ago (1h).",
    answer=results.BooksAnswer,
    parameters=books.PARAMETERS,
    errors=(400,),
)
COMPARE = _filtered(
    "Returns how often shadows prefer other targets than those that were chosen, and an estimate of the consequences.",
    answer=results.PoliciesAnswer,
    parameters=policies.PARAMETERS,
    errors=(400,),
)
REPLAY = _filtered(
    "Returns the same for a policy or a picker file that decides again over the kept decisions.",
    policies.TryPolicyRequest,
    results.PoliciesAnswer,
)
PLACEMENT = _filtered(
    "Returns the tokens that would be lost with the cache of each engine, the cheapest of a model first.",
    answer=results.PlacementAnswer,
    parameters=placement.PARAMETERS,
)
PLACEMENT_WARM = _filtered(
    "Returns the prefixes that an engine should pull first, up to a number of tokens (100,000), and where they are.",
    answer=results.WarmAnswer,
    parameters=placement.WARM_PARAMETERS,
    errors=(400, 404),
)
ROOT = _unbound("Redirects to the page, /ui.", status=307, media_type=_TEXT)
PAGE = _unbound("Returns the web page that shows engines, prompts and recent events.", media_type=_HTML, errors=(404,))
PAGE_FILE = _unbound("Returns a file of the page.", media_type="text/javascript", errors=(404,))
ACTIVITY = _filtered(
    "Streams the activity as server-sent events: registrations, drains, restarts, losses, takeovers and sweeps.",
    media_type="text/event-stream",
    request_headers=("Last-Event-ID",),
    parameters=activity.PARAMETERS,
)
GLOBAL_VIEW = _filtered(
    "Lists each combination of model, tenant, block size, adapter and salt, with its instances and block counts.",
    answer=publishers.GlobalViewAnswer,
)
INSPECT_PROMPT = _of_body(
    "Returns which blocks of a prompt each instance has and where, and why no instance has a match.",
    query_schemas.InspectRequest,
    inspection_answers.InspectAnswer,
)
INSPECT_STATUS = Doc(
    "Returns the state of Redis, of each ingest worker and of each stream. 'waymark status' prints the same.",
    answer=inspection_answers.StatusAnswer,
    parameters=inspections.PARAMETERS,
    errors=(400,),
)
INSPECT_BLOCK = Doc(
    "Returns where a block is in the index and which engines have it. 'waymark inspect block' prints the same.",
    inspections.InspectBlockRequest,
    inspection_answers.BlockAnswer,
    errors=(404,),
)
INSPECT_HOLDER = Doc(
    "Returns the engine that a holder id stands for, and its blocks. 'waymark inspect holder' prints the same.",
    inspections.InspectHolderRequest,
    inspection_answers.HolderAnswer,
    errors=(404,),
)
INSPECT_KEYS = Doc(
    "Returns redis-cli commands that show everything except the blocks. 'waymark inspect keys' prints the same.",
    inspections.InspectKeysRequest,
    inspection_answers.KeysAnswer,
    errors=(404,),
)
PREFIX_STATS = Doc(
    "Returns how many decisions the policy sticky made, in all replicas together.",
    answer=admin_answers.PrefixRoutingStats,
)
INDEX_STATS = Doc(
    "Returns what the index contains, and how many decisions used it, in all replicas together.",
    answer=admin_answers.IndexStats,
)
INDEX_BACKENDS = _filtered("Returns the event counts of each publisher.", answer=admin_answers.IndexBackends)
INDEX_CLEAR = _filtered(
    "Removes all opaque prefixes from the index, or the entries of all publishers.",
    admin.ClearRequest,
    admin_answers.ClearAnswer,
)
CACHE_STATS = Doc(
    "Returns what the response cache contains, and how often this gateway answered from it.",
    answer=admin_answers.ResponseCacheStats,
    needs_redis=False,
)
CACHE_CLEAR = Doc(
    "Clears the response cache of this gateway, or of all gateways if they share it in Redis.",
    admin.InvalidateRequest,
    admin_answers.InvalidateAnswer,
    needs_redis=False,
)
REGISTER = _of_body(
    "Registers a publisher, or all ranks of an engine by its URL, and subscribes to its events.",
    registration_schemas.AnyRegisterRequest,
    publishers.RegisterAnswer,
    errors=(409,),
)
UNREGISTER = _of_body(
    "Removes a publisher and its blocks.",
    registration_schemas.UnregisterRequest,
    publishers.UnregisterAnswer,
    errors=(404,),
)
WEIGHT = _of_body(
    "Changes the weight of an engine; with weight 0 it gets no new requests.",
    registration_schemas.WeightRequest,
    publishers.WeightAnswer,
    errors=(404, 409),
)
REPAIR = _of_body(
    "Asks the worker of an engine for a snapshot of the engine's cache, or without one for all batches of its life.",
    registration_schemas.RepairRequest,
    publishers.RepairAnswer,
    errors=(404, 409),
)
EVENTS = _of_body(
    "Applies events in the KV Events format (type standard). A publisher without a ZMQ socket sends its events here.",
    events.EventsRequest,
    publishers.EventsAnswer,
    errors=(404, 409),
    may_be_list=True,
)
SCORE = _of_body(
    "Returns the score of each target for a prompt, under one policy.",
    decision_bodies.ScoreRequest,
    prompts.ScoreAnswer,
    headers=PARTIAL,
)
SELECT = _of_body(
    "Picks the target for a prompt, and by default makes a reservation.",
    decision_bodies.SelectRequest,
    prompts.SelectAnswer,
    errors=(404, 429),
    queue="decide",
)
RELEASE = _filtered(
    "Ends reservations, renews them, or reports that their prefill is done.",
    decision_bodies.ReleaseRequest,
    prompts.ReleaseAnswer,
    queue="decide",
)
TOKENIZE = _unbound(
    "Returns the token ids of a text or of messages.",
    query_schemas.TokenizeRequest,
    prompts.TokenizeAnswer,
    errors=(503,),
)
DETOKENIZE = _unbound(
    "Returns the text of token ids.", query_schemas.DetokenizeRequest, prompts.DetokenizeAnswer, errors=(503,)
)
DYNAMO_QUERY = _of_body(
    "Returns how much of a prompt each worker has.",
    dynamo_bodies.DynamoQueryRequest,
    dynamo.DynamoQueryAnswer,
    errors=(404,),
    headers=PARTIAL,
)
DYNAMO_QUERY_BY_HASH = _of_body(
    "Returns how much of a prompt of the base model each worker has; the prompt is given as its local hashes.",
    dynamo_bodies.DynamoQueryByHashRequest,
    dynamo.DynamoQueryAnswer,
    errors=(404,),
    headers=PARTIAL,
)
DYNAMO_QUERY_TIERED = _of_body(
    "Returns how many blocks of a prompt of the base model each worker has, tier by tier.",
    dynamo_bodies.DynamoQueryByHashRequest,
    dynamo.DynamoTieredAnswer,
    errors=(404,),
    headers=PARTIAL,
)
DYNAMO_REGISTER = _of_body(
    "Registers an engine and subscribes to its events.",
    dynamo_bodies.DynamoRegisterRequest,
    dynamo.DynamoStatus,
    201,
    errors=(409,),
)
DYNAMO_UNREGISTER = _filtered(
    "Removes an instance and its blocks.", dynamo_bodies.DynamoUnregisterRequest, dynamo.DynamoStatus, errors=(404,)
)
DYNAMO_WORKERS = _filtered(
    "Lists the registered workers, in order of registration. The id of a worker is a decimal number.",
    answer=list[dynamo.DynamoWorker],
)
DUMP = _filtered(
    "Lists the groups by model:group. They contain no events, because the index is in Redis.",
    answer=dict[str, dynamo.DynamoDumpedGroup],
    headers=_NOTE,
)
REGISTER_PEER = Doc(
    "Adds a peer to a list that all replicas share.", dynamo_bodies.PeerRequest, dynamo.DynamoStatus, 201, headers=_NOTE
)
DEREGISTER_PEER = Doc(
    "Removes a peer from the list.", dynamo_bodies.PeerRequest, dynamo.DynamoStatus, errors=(404,), headers=_NOTE
)
PEERS = Doc("Lists the base URLs of the peers, as they were registered.", answer=list[str], headers=_NOTE)
ADD_WORKER = Doc(
    "Stores the description of a worker. Once the description is complete, Waymark registers the worker.",
    dynamo_bodies.WorkerRequest,
    dynamo.DynamoWorkerDescription,
    201,
)
CHANGE_WORKER = Doc(
    "Changes the description of a worker.", dynamo_bodies.WorkerPatch, dynamo.DynamoWorkerDescription, errors=(404, 409)
)
REMOVE_WORKER = Doc("Removes a worker and its blocks.", answer=dynamo.DynamoWorkerDescription, errors=(400, 404, 409))
DYNAMO_SELECT = Doc(
    "Picks the worker for a prompt; nothing is reserved.",
    dynamo_bodies.DynamoSelectRequest,
    dynamo.DynamoSelectAnswer,
    errors=(409, 429),
    queue="decide",
)
SELECT_AND_RESERVE = Doc(
    "Picks the worker for a prompt, and makes a reservation under an id.",
    dynamo_bodies.DynamoSelectRequest,
    dynamo.DynamoSelectAndReserveAnswer,
    errors=(409, 429),
    queue="decide",
)
RESERVE = Doc(
    "Makes a reservation for an earlier selection, or for a worker that the client picked.",
    dynamo_bodies.DynamoReservationRequest,
    dynamo.DynamoReservation,
    201,
    errors=(404, 409, 429),
    queue="decide",
)
PREFILL_COMPLETE = Doc(
    "Reports that the prefill of a reservation is done.", answer=dynamo.DynamoStatus, errors=(404,), queue="decide"
)
OUTPUT_BLOCK = Doc(
    "Renews a reservation.", dynamo_bodies.OutputBlockRequest, dynamo.DynamoStatus, errors=(404,), queue="decide"
)
END_RESERVATION = Doc(
    "Ends a reservation.", answer=dynamo.DynamoStatus, errors=(400, 404), queue="decide", parameters=USAGE
)
OVERLAP_SCORES = Doc(
    "Returns the blocks that each worker has of a prompt.",
    dynamo_bodies.DynamoPromptRequest,
    dynamo.DynamoOverlapScores,
)
POTENTIAL_LOADS = Doc(
    "Returns the load that each worker would have if it got a prompt.",
    dynamo_bodies.DynamoPromptRequest,
    list[dynamo.DynamoLoad],
)
LOADS = Doc(
    "Returns the loads of the workers, by model and group.",
    answer=list[dynamo.DynamoGroupLoads],
    parameters=("model_name", "routing_group"),
)
CONTRACT_PAGE = _unbound("Returns this contract as a page.", media_type=_HTML)
WORKER_READY = Doc("Answers 200 when Redis answers.")
