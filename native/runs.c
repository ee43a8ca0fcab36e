/* Runs of plain events: each goes the short way of a store or of a removal, and its parts go to where Redis gets them. */

#include "events.h"
#include "parts.h"
#include "plain.h"
#include "waves.h"

/* The last position of a hash: that of its block in a part is STEP times as high, and 1 more. */
#define HASH_POSITION_MAX ((POSITION_MAX - 1) / STEP)

/* The position of the first hash of a batch that follows. */
enum { FIRST_POSITION = 1 };

/* What all events of a run share, and memory for one of them. */
typedef struct {
    const Events *events;
    Parts *parts;
    Waves *waves; /* NULL with one shard */
    PyObject *full, *gone, *several;
    uint64_t holder, namespace;
    uint64_t *keys;
    Block *blocks;
    uint32_t *numbers; /* of those blocks */
    PartBlock *some;
    size_t room; /* of these four, in hashes */
    Xxh3 state;
    int piece_blocks, may_store, may_remove;
    Py_ssize_t stores, stored, removed;
} Run;

/* What is said of the blocks at a place, besides the kind. */
static Part part_at(const KnownBlocks *known, uint32_t number, uint64_t holder)
{
    const Place *place = &known->places->places[number];
    return (Part){.holder = holder,
                  .head = place->head,
                  .branch = place->branch,
                  .namespace = place->namespace,
                  .place_kind = place->kind};
}

/* Add blocks that follow each other in an event, the first at `position`. 0 with an exception. */
static int add_blocks(Run *run, const Part *part, int64_t position, const Block *blocks, size_t count)
{
    for (size_t i = 0; i < count; i++)
        run->some[i] = (PartBlock){blocks[i].key, blocks[i].hash, blocks[i].depth};
    return add_to_parts(run->parts, part, STEP * position + 1, run->some, count, NULL);
}

/* Free the memory for an event. */
static void free_room(Run *run)
{
    PyMem_Free(run->keys);
    PyMem_Free(run->blocks);
    PyMem_Free(run->numbers);
    PyMem_Free(run->some);
}

/* Memory for the blocks of an event. 0 with an exception. */
static int make_room(Run *run, size_t hashes)
{
    if (hashes <= run->room)
        return 1;
    free_room(run);
    run->room = hashes + PIECE_BLOCKS;
    run->keys = PyMem_New(uint64_t, run->room);
    run->blocks = PyMem_New(Block, run->room);
    run->numbers = PyMem_New(uint32_t, run->room);
    run->some = PyMem_New(PartBlock, run->room);
    if (run->keys != NULL && run->blocks != NULL && run->numbers != NULL && run->some != NULL)
        return 1;
    PyErr_NoMemory();
    return 0;
}

/* Whether a block of a store's piece, or the former one of its hash, has left another shard in this wave. */
static int waits_for_others(const Run *run, const Store *store, size_t start, size_t end, int shard)
{
    for (size_t i = start; i < end; i++) {
        if (has_left_elsewhere(run->waves, store->keys[i] ^ store->namespace, shard))
            return 1;
        int64_t number = -1;
        for (Py_ssize_t set = 0; number < 0 && set < PyTuple_Size(run->gone); set++) {
            KnownBlocks *gone = (KnownBlocks *)PyTuple_GetItem(run->gone, set);
            number = find_hash(gone, store->hashes[i]);
            const Block *former = number < 0 ? NULL : block_at(gone, (uint32_t)number);
            if (former != NULL &&
                has_left_elsewhere(run->waves, former->key ^ gone->places->places[former->place].namespace, shard))
                return 1;
        }
    }
    return 0;
}

/* The part stores a piece of a store that goes on from `parent`, the seq_hash of a block, or NULL: it may have to wait.
 * 0 with an exception. */
static int note_stored(const Run *run, const Store *store, size_t start, size_t end, const uint64_t *parent, Part *part)
{
    const int shard = shard_of(run->waves, part->head);
    part->waits = run->waves->left > 0 && waits_for_others(run, store, start, end, shard);
    if (part->waits)
        begin_wave(run->waves);
    return parent == NULL || use_block(run->waves, *parent, shard);
}

/* Add blocks that leave the place of a part, and which nothing on another shard uses. 0 with an exception. */
static int add_leaving(Run *run, const Part *part, int64_t position, const Block *blocks, size_t count)
{
    for (size_t i = 0; run->waves != NULL && i < count; i++)
        if (!leave_block(run->waves, blocks[i].key ^ part->namespace, shard_of(run->waves, part->head)))
            return 0;
    return add_blocks(run, part, position, blocks, count);
}

/* Add blocks that leave the place of a part; they wait from the first that a part on another shard uses. 0 with an
 * exception. */
static int add_removed(Run *run, Part *part, int64_t position, const Block *blocks, size_t count)
{
    size_t ready = 0;
    while (ready < count && (run->waves == NULL || !is_used_elsewhere(run->waves, blocks[ready].key ^ part->namespace,
                                                                     shard_of(run->waves, part->head))))
        ready++;
    if (ready > 0 && !add_leaving(run, part, position, blocks, ready))
        return 0;
    if (ready == count)
        return 1;
    begin_wave(run->waves);
    part->waits = 1;
    return add_leaving(run, part, position + (int64_t)ready, blocks + ready, count - ready);
}

/* A store of a run, at `position`. 1 where it was plain, 0 where not and nothing has changed, -1 with an
 * exception; some of it may be done then. */
static int run_store(KnownBlocks *known, Run *run, const PlainEvent *event, int64_t position)
{
    Chain chain = {.state = run->state};
    Store store = {.hashes = run->events->hashes + event->hashes, .keys = run->keys, .count = event->hashes_count,
                   .place = -1, .namespace = run->namespace};
    const size_t width = sizeof(uint32_t) * event->block_size;
    for (size_t i = 0; i < store.count; i++)
        if (store.hashes[i] == UINT64_MAX) /* SAME_HASH: an entry cannot tell it */
            return 0;
    int is_plain = find_parent(known, event->has_parent ? &event->parent : NULL, run->full, run->piece_blocks, &store, &chain);
    const uint64_t parent = chain.has_parent ? chain.parent : 0;
    const uint64_t *above = chain.has_parent ? &parent : NULL;
    if (is_plain == 1)
        is_plain = hash_new_blocks(known, &store, &chain, (const char *)(run->events->tokens + event->tokens), width);
    if (is_plain != 1)
        return is_plain;
    int depth = store.depth;
    for (size_t start = 0, end; start < store.count; start = end, depth = 0) {
        end = end_of_piece(&store, start, depth, run->piece_blocks);
        const int64_t place = put_piece(known, &store, start, end, depth, run->blocks);
        if (place < 0)
            return -1;
        Part part = part_at(known, (uint32_t)place, run->holder);
        part.kind = '+';
        part.has_parent = depth > 0;
        part.parent = store.parent;
        if (run->waves != NULL && !note_stored(run, &store, start, end, above, &part))
            return -1;
        if (!add_blocks(run, &part, position + (int64_t)start, run->blocks, end - start))
            return -1;
    }
    discard_beside(run->gone, store.hashes, store.count);
    run->stores++;
    run->stored += (Py_ssize_t)store.count;
    return 1;
}

/* The same with a removal. */
static int run_removal(KnownBlocks *known, Run *run, const PlainEvent *event, int64_t position)
{
    const uint64_t *hashes = run->events->hashes + event->hashes;
    const size_t count = event->hashes_count;
    KnownBlocks *gone = (KnownBlocks *)PyTuple_GetItem(run->gone, 0);
    const int is_plain = collect(known, hashes, count, run->several, run->blocks, run->numbers);
    if (is_plain != 1)
        return is_plain;
    for (size_t start = 0, end; start < count; start = end) {
        end = end_of_group(run->blocks, start, count);
        Part part = part_at(known, run->blocks[start].place, run->holder);
        part.kind = '-';
        part.is_known = 1;
        if (!add_removed(run, &part, position + (int64_t)start, run->blocks + start, end - start))
            return -1;
    }
    if (!move_blocks(known, gone, hashes, run->numbers, count))
        return -1;
    run->removed += (Py_ssize_t)count;
    return 1;
}

/* The events from *at on, up to the first that is not plain, or whose hashes have no positions, or after so many hashes.
 * 0 with an exception, also where the first event has no positions. */
static int run_events(KnownBlocks *known, Run *run, size_t *at, int64_t *position, size_t hashes_max)
{
    const size_t first = *at;
    size_t hashes = 0;
    for (; *at < run->events->count && hashes < hashes_max; ++*at) {
        const PlainEvent *event = &run->events->events[*at];
        if (!(event->kind == STORE ? run->may_store : run->may_remove))
            break;
        if (!are_positions(*position, event->hashes_count, 1, HASH_POSITION_MAX))
            return *at > first || refuse_positions(*position, event->hashes_count, HASH_POSITION_MAX);
        if (!make_room(run, event->hashes_count))
            return 0;
        const int is_plain = event->kind == STORE ? run_store(known, run, event, *position)
                                                  : run_removal(known, run, event, *position);
        if (is_plain < 0)
            return 0;
        if (!is_plain)
            break;
        *position += event->hashes_count;
        hashes += event->hashes_count;
    }
    return 1;
}

/* The next of the batches `following`, a list of (seq, events), if its events are of the kind of `events`: 1, and the run
 * is at its beginning. 0 where there is none or it is of another kind, -1 with an exception. */
static int begin_next(Run *run, const Events *events, PyObject *following, Py_ssize_t next)
{
    if (next == PyList_Size(following))
        return 0;
    PyObject *pair = PyList_GetItem(following, next);
    if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        PyErr_Format(PyExc_TypeError, "what follows is a list of seqs with events");
        return -1;
    }
    const Events *more = as_events(PyTuple_GetItem(pair, 1));
    const uint64_t seq = more == NULL ? 0 : PyLong_AsUnsignedLongLong(PyTuple_GetItem(pair, 0));
    if (PyErr_Occurred())
        return -1;
    const int is_of_kind = are_of_one_kind(events, more);
    if (is_of_kind == 1) {
        run->events = more;
        run->parts->seq = seq;
    }
    return is_of_kind;
}

/* The events of a batch from *at on, and then those of the batches that follow: as run_events. In *begun how many of
 * these have begun; *at and *position are of the last of them. 0 with an exception. */
static int run_batches(KnownBlocks *known, Run *run, size_t *at, int64_t *position, size_t hashes_max,
                       PyObject *following, Py_ssize_t *begun)
{
    const Events *events = run->events;
    for (;;) {
        const Py_ssize_t before = run->stored + run->removed;
        if (!run_events(known, run, at, position, hashes_max))
            return 0;
        const size_t hashes = (size_t)(run->stored + run->removed - before);
        if (*at < run->events->count || hashes >= hashes_max)
            return 1;
        hashes_max -= hashes;
        const int is_next = begin_next(run, events, following, *begun);
        if (is_next != 1)
            return is_next == 0;
        ++*begun;
        *at = 0;
        *position = FIRST_POSITION;
    }
}

/* run(events: Events, at: int, position: int, hashes_max: int, parts: Parts, holder: int, seed: int, namespace: int,
 *     full: dict[Place, object], piece_blocks: int, gone: tuple[KnownBlocks, ...], several: dict[int, object],
 *     may_store: bool, may_remove: bool, following: list[tuple[int, Events]], waves: Waves)
 *     -> tuple[int, int, int, int, int, int]
 *
 * What extend and take do with the events from the one with number `at` on: their parts are added to `parts`. Ends
 * before the first event that is not plain, and after `hashes_max` hashes or somewhat more. At the end of the events it
 * goes on with those of the batches that follow, each with its seq, up to the first of another kind. Returns the number
 * of the next event, its position, how many stores there were, how many blocks were stored and removed, and how many of
 * the batches that follow have begun; the number and the position are of the last of these.
 */
PyObject *known_run(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    KnownBlocks *known = (KnownBlocks *)self;
    Run run = {0};
    if (!has_arguments("run", nargs, 16))
        return NULL;
    run.events = as_events(args[0]);
    run.parts = run.events == NULL ? NULL : as_parts(args[4]);
    Waves *waves = run.parts == NULL ? NULL : as_waves(args[15]);
    if (waves == NULL || !are_beside(known, args[10]))
        return NULL;
    run.waves = waves->shards > 1 ? waves : NULL;
    size_t at = PyLong_AsSize_t(args[1]);
    int64_t position = PyErr_Occurred() ? 0 : PyLong_AsLongLong(args[2]);
    const size_t hashes_max = PyErr_Occurred() ? 0 : PyLong_AsSize_t(args[3]);
    run.holder = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[5]);
    const uint64_t seed = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[6]);
    run.namespace = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[7]);
    const long piece_blocks = PyErr_Occurred() ? 0 : PyLong_AsLong(args[9]);
    if (PyErr_Occurred())
        return NULL;
    if (at > run.events->count)
        return PyErr_Format(PyExc_ValueError, "at is %zu, and there are %zu events", at, run.events->count);
    run.full = args[8], run.gone = args[10], run.several = args[11];
    run.may_store = args[12] == Py_True, run.may_remove = args[13] == Py_True;
    if (piece_blocks < 1 || piece_blocks > PIECE_BLOCKS || !PyDict_Check(run.full) || !PyList_Check(args[14]) ||
        !PyDict_Check(run.several) || PyTuple_Size(run.gone) == 0 || !known->has_keys)
        return PyErr_Format(PyExc_ValueError, "run() takes pieces of up to 32 blocks, two dicts, a list, and a place for what is gone");
    run.piece_blocks = (int)piece_blocks;
    const size_t width = sizeof(uint32_t) * run.events->block_size;
    xxh3_prepare(&run.state, seed, width > 2 * KEY ? width : 2 * KEY);
    Py_ssize_t begun = 0;
    const int is_done = run_batches(known, &run, &at, &position, hashes_max, args[14], &begun);
    free_room(&run);
    return is_done ? Py_BuildValue("nLnnnn", (Py_ssize_t)at, (long long)position, run.stores, run.stored, run.removed, begun)
                   : NULL;
}
