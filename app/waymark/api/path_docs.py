"""The purpose, input and answers of each path, for the contract and the page made from it."""

from __future__ import annotations

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

_TEXT, _HTML = "text/plain", "text/html"

_NOTE = {"X-Waymark-Note": "explains why Waymark needs no dump and no peers: the index is in Redis"}

PARTIAL = {
    "X-Waymark-Partial": "true if the query reached its deadline, so that the real numbers may be higher; else absent"
}
_OF_QUERY = PARTIAL | {
    "X-Waymark-Note": "why every number is zero, if no engine has this model or block size; else absent",
    "X-Waymark-Unknown": "the field of the request that the note is about, model or block_size; else absent",
}
QUERY = Doc(
    "Returns how much of a prompt each instance has; the prompt is given as tokens, text or messages.",
    query_schemas.QueryRequest,
    prompts.QueryAnswer,
    headers=_OF_QUERY,
    reach="body",
)
QUERY_BY_HASH = Doc(
    "Returns how much of a prompt each instance has; the prompt is given as the rolling hashes of its blocks.",
    query_schemas.QueryByHashRequest,
    prompts.QueryAnswer,
    headers=_OF_QUERY,
    reach="body",
)

HEALTH = Doc("Answers 200 while the process is alive.", answer=publishers.HealthAnswer, needs_redis=False, reach="none")
READY = Doc("Answers 200 when the process can answer queries.", answer=publishers.ReadyAnswer, reach="none")
DYNAMO_HEALTH = Doc(
    "Answers 200 without a body while the process is alive.", media_type=_TEXT, needs_redis=False, reach="none"
)
METRICS = Doc("Returns the metrics as Prometheus text.", media_type=_TEXT, needs_redis=False)
DYNAMO_METRICS = Doc(
    "Returns the metrics as Prometheus text, and those of the released indexer by its names.",
    media_type=_TEXT,
    needs_redis=False,
)
OPENAPI = Doc("Returns this contract.", needs_redis=False, reach="none")
SERVICES = Doc("Lists every registration.", answer=publishers.ServicesAnswer, reach="filtered")
WORKERS = Doc(
    "Lists publishers and ingest workers with their state.", answer=publishers.WorkersAnswer, reach="filtered"
)
BOOKS = Doc(
    "Returns what decisions promised and what engines delivered, in tokens, since a time such as 30m or 2h ago (1h).",
    answer=results.BooksAnswer,
    parameters=books.PARAMETERS,
    errors=(400,),
    reach="filtered",
)
COMPARE = Doc(
    "Returns how often shadows prefer other targets than those that were chosen, and an estimate of the consequences.",
    answer=results.PoliciesAnswer,
    parameters=policies.PARAMETERS,
    errors=(400,),
    reach="filtered",
)
REPLAY = Doc(
    "Returns the same for a policy or a picker file that decides again over the kept decisions.",
    policies.TryPolicyRequest,
    results.PoliciesAnswer,
    reach="filtered",
)
PLACEMENT = Doc(
    "Returns the tokens that would be lost with the cache of each engine, the cheapest of a model first.",
    answer=results.PlacementAnswer,
    parameters=placement.PARAMETERS,
    reach="filtered",
)
PLACEMENT_WARM = Doc(
    "Returns the prefixes that an engine should pull first, up to a number of tokens (100,000), and where they are.",
    answer=results.WarmAnswer,
    parameters=placement.WARM_PARAMETERS,
    errors=(400, 404),
    reach="filtered",
)
ROOT = Doc("Redirects to the page, /ui.", status=307, media_type=_TEXT, needs_redis=False, reach="none")
PAGE = Doc(
    "Returns the web page that shows engines, prompts and recent events.",
    media_type=_HTML,
    errors=(404,),
    needs_redis=False,
    reach="none",
)
PAGE_FILE = Doc(
    "Returns a file of the page.", media_type="text/javascript", errors=(404,), needs_redis=False, reach="none"
)
ACTIVITY = Doc(
    "Streams the activity as server-sent events: registrations, drains, restarts, losses, takeovers and sweeps.",
    media_type="text/event-stream",
    request_headers=("Last-Event-ID",),
    parameters=activity.PARAMETERS,
    reach="filtered",
)
GLOBAL_VIEW = Doc(
    "Lists each combination of model, tenant, block size, adapter and salt, with its instances and block counts.",
    answer=publishers.GlobalViewAnswer,
    reach="filtered",
)
INSPECT_PROMPT = Doc(
    "Returns which blocks of a prompt each instance has and where, and why no instance has a match.",
    query_schemas.InspectRequest,
    inspection_answers.InspectAnswer,
    reach="body",
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
INDEX_BACKENDS = Doc(
    "Returns the event counts of each publisher.", answer=admin_answers.IndexBackends, reach="filtered"
)
INDEX_CLEAR = Doc(
    "Removes all opaque prefixes from the index, or the entries of all publishers.",
    admin.ClearRequest,
    admin_answers.ClearAnswer,
    reach="filtered",
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
REGISTER = Doc(
    "Registers a publisher, or all ranks of an engine by its URL, and subscribes to its events.",
    registration_schemas.AnyRegisterRequest,
    publishers.RegisterAnswer,
    errors=(409,),
    reach="body",
)
UNREGISTER = Doc(
    "Removes a publisher and its blocks.",
    registration_schemas.UnregisterRequest,
    publishers.UnregisterAnswer,
    errors=(404,),
    reach="body",
)
WEIGHT = Doc(
    "Changes the weight of an engine; with weight 0 it gets no new requests.",
    registration_schemas.WeightRequest,
    publishers.WeightAnswer,
    errors=(404, 409),
    reach="body",
)
REPAIR = Doc(
    "Asks the worker of an engine for a snapshot of the engine's cache, or without one for all batches of its life.",
    registration_schemas.RepairRequest,
    publishers.RepairAnswer,
    errors=(404, 409),
    reach="body",
)
EVENTS = Doc(
    "Applies events in the KV Events format (type standard). A publisher without a ZMQ socket sends its events here.",
    events.EventsRequest,
    publishers.EventsAnswer,
    errors=(404, 409),
    may_be_list=True,
    reach="body",
)
SCORE = Doc(
    "Returns the score of each target for a prompt, under one policy.",
    decision_bodies.ScoreRequest,
    prompts.ScoreAnswer,
    headers=PARTIAL,
    reach="body",
)
SELECT = Doc(
    "Picks the target for a prompt, and by default makes a reservation.",
    decision_bodies.SelectRequest,
    prompts.SelectAnswer,
    errors=(404, 429),
    queue="decide",
    reach="body",
)
RELEASE = Doc(
    "Ends reservations, renews them, or reports that their prefill is done.",
    decision_bodies.ReleaseRequest,
    prompts.ReleaseAnswer,
    queue="decide",
    reach="filtered",
)
TOKENIZE = Doc(
    "Returns the token ids of a text or of messages.",
    query_schemas.TokenizeRequest,
    prompts.TokenizeAnswer,
    errors=(503,),
    needs_redis=False,
    reach="none",
)
DETOKENIZE = Doc(
    "Returns the text of token ids.",
    query_schemas.DetokenizeRequest,
    prompts.DetokenizeAnswer,
    errors=(503,),
    needs_redis=False,
    reach="none",
)
DYNAMO_QUERY = Doc(
    "Returns how much of a prompt each worker has.",
    dynamo_bodies.DynamoQueryRequest,
    dynamo.DynamoQueryAnswer,
    errors=(404,),
    headers=PARTIAL,
    reach="body",
)
DYNAMO_QUERY_BY_HASH = Doc(
    "Returns how much of a prompt of the base model each worker has; the prompt is given as its local hashes.",
    dynamo_bodies.DynamoQueryByHashRequest,
    dynamo.DynamoQueryAnswer,
    errors=(404,),
    headers=PARTIAL,
    reach="body",
)
DYNAMO_QUERY_TIERED = Doc(
    "Returns how many blocks of a prompt of the base model each worker has, tier by tier.",
    dynamo_bodies.DynamoQueryByHashRequest,
    dynamo.DynamoTieredAnswer,
    errors=(404,),
    headers=PARTIAL,
    reach="body",
)
DYNAMO_REGISTER = Doc(
    "Registers an engine and subscribes to its events.",
    dynamo_bodies.DynamoRegisterRequest,
    dynamo.DynamoStatus,
    201,
    errors=(409,),
    reach="body",
)
DYNAMO_UNREGISTER = Doc(
    "Removes an instance and its blocks.",
    dynamo_bodies.DynamoUnregisterRequest,
    dynamo.DynamoStatus,
    errors=(404,),
    reach="filtered",
)
DYNAMO_WORKERS = Doc(
    "Lists the registered workers, in order of registration. The id of a worker is a decimal number.",
    answer=list[dynamo.DynamoWorker],
    reach="filtered",
)
DUMP = Doc(
    "Lists the groups by model:group. They contain no events, because the index is in Redis.",
    answer=dict[str, dynamo.DynamoDumpedGroup],
    headers=_NOTE,
    reach="filtered",
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
CONTRACT_PAGE = Doc("Returns this contract as a page.", media_type=_HTML, needs_redis=False, reach="none")
WORKER_READY = Doc("Answers 200 when Redis answers.")
