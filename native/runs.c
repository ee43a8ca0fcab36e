/* Runs of plain events: each is stored or removed as a whole, and its parts are added to the list for Redis. */

#include "runs.h"

/* The position of the first hash of a batch that follows. */
enum { FIRST_POSITION = 1 };

Part part_at(const KnownBlocks *known, uint32_t number, uint64_t holder)
{
    const Place *place = &known->places->places[number];
    return (Part){.holder = holder,
                  .head = place->head,
                  .branch = place->branch,
                  .namespace = place->namespace,
                  .place_kind = place->kind};
}

int add_blocks(Run *run, const Part *part, int64_t position, const Block *blocks, size_t count, PyObject *copies)
{
    for (size_t i = 0; i < count; i++)
        run->some[i] = (PartBlock){blocks[i].key, blocks[i].hash, (uint8_t)blocks[i].depth};
    return add_to_parts(run->parts, part, STEP * position + 1, run->some, count, copies);
}

void free_event_room(Run *run)
{
    PyMem_Free(run->keys);
    PyMem_Free(run->blocks);
    PyMem_Free(run->numbers);
    PyMem_Free(run->owners);
    PyMem_Free(run->some);
}

int make_event_room(Run *run, size_t hashes)
{
    if (hashes <= run->room)
        return 1;
    free_event_room(run);
    run->room = hashes + PIECE_BLOCKS;
    run->keys = PyMem_New(uint64_t, run->room);
    run->blocks = PyMem_New(Block, run->room);
    run->numbers = PyMem_New(uint32_t, run->room);
    run->owners = PyMem_New(uint32_t, run->room);
    run->some = PyMem_New(PartBlock, run->room);
    if (run->keys != NULL && run->blocks != NULL && run->numbers != NULL && run->owners != NULL && run->some != NULL)
        return 1;
    PyErr_NoMemory();
    return 0;
}

/* Return whether a block of a store's piece, or the former block of its hash, has left another shard in this wave. */
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

int note_stored(const Run *run, const Store *store, size_t start, size_t end, const uint64_t *parent, Part *part)
{
    const int shard = shard_of(run->waves, part->head);
    part->waits = run->waves->left > 0 && waits_for_others(run, store, start, end, shard);
    if (part->waits)
        begin_wave(run->waves);
    return parent == NULL || use_block(run->waves, *parent, shard);
}

/* Add blocks that leave the place of a part, and that no part on another shard uses. 0 with an exception. */
static int add_leaving(Run *run, const Part *part, int64_t position, const Block *blocks, size_t count,
                       PyObject *copies)
{
    for (size_t i = 0; run->waves != NULL && i < count; i++)
        if (!leave_block(run->waves, blocks[i].key ^ part->namespace, shard_of(run->waves, part->head)))
            return 0;
    return add_blocks(run, part, position, blocks, count, copies);
}

int add_removed(Run *run, Part *part, int64_t position, const Block *blocks, size_t count, PyObject *copies)
{
    size_t ready = 0;
    while (ready < count && (run->waves == NULL || !is_used_elsewhere(run->waves, blocks[ready].key ^ part->namespace,
                                                                     shard_of(run->waves, part->head))))
        ready++;
    if (ready > 0 && !add_leaving(run, part, position, blocks, ready, copies))
        return 0;
    if (ready == count)
        return 1;
    begin_wave(run->waves);
    part->waits = 1;
    return add_leaving(run, part, position + (int64_t)ready, blocks + ready, count - ready, copies);
}

int store_new(KnownBlocks *known, Run *run, const Store *store, const uint64_t *above, size_t start, int64_t place,
              int depth, int64_t position)
{
    for (size_t end; start < store->count; start = end, depth = 0, place = -1) {
        end = end_of_piece(store, start, depth, run->piece_blocks);
        place = put_piece(known, store, place, start, end, depth, run->blocks);
        if (place < 0)
            return 0;
        Part part = part_at(known, (uint32_t)place, run->holder);
        part.kind = '+';
        part.has_parent = depth > 0;
        part.parent = start > 0 ? store->keys[start - 1] : store->parent;
        if (run->waves != NULL && !note_stored(run, store, start, end, above, &part))
            return 0;
        if (!add_blocks(run, &part, position + (int64_t)start, run->blocks, end - start, NULL))
            return 0;
    }
    return 1;
}

int run_store(KnownBlocks *known, Run *run, const PlainEvent *event, int64_t position)
{
    Chain chain = {.state = run->state};
    Store store = {.hashes = run->events->hashes + event->hashes, .keys = run->keys, .count = event->hashes_count,
                   .place = -1, .namespace = run->namespace};
    const size_t width = sizeof(uint32_t) * event->block_size;
    for (size_t i = 0; i < store.count; i++)
        if (store.hashes[i] == UINT64_MAX) /* SAME_HASH: an entry cannot contain it */
            return 0;
    KnownBlocks *above_in = event->has_parent ? table_with(known, run, event->parent) : known;
    int is_plain = above_in == NULL ? 0
                                    : find_parent(above_in, event->has_parent ? &event->parent : NULL, run->full,
                                                  run->piece_blocks, &store, &chain);
    if (is_plain != 1)
        return is_plain;
    const uint64_t parent = chain.has_parent ? chain.parent : 0;
    const uint64_t *above = chain.has_parent ? &parent : NULL;
    hash_store(&store, &chain, (const char *)(run->events->tokens + event->tokens), width);
    size_t known_blocks = 0;
    if (run->may & MAY_REPEAT && store.count > 0 && find_hash(known, store.hashes[0]) >= 0) {
        is_plain = store_again(known, run, event, &store, above, position, &known_blocks);
    } else {
        is_plain = are_new_to_all(known, run, &store, 0);
        if (is_plain == 1 && !store_new(known, run, &store, above, 0, store.place, store.depth, position))
            is_plain = -1;
    }
    if (is_plain != 1)
        return is_plain;
    const size_t count = store.count - known_blocks;
    discard_beside(run->gone, store.hashes + known_blocks, count);
    run->stores++;
    run->stored += (Py_ssize_t)count;
    return 1;
}

int run_removal(KnownBlocks *known, Run *run, const PlainEvent *event, int64_t position)
{
    const uint64_t *hashes = run->events->hashes + event->hashes;
    const size_t count = event->hashes_count;
    int are_last;
    const int is_plain = collect_in_all(known, run, hashes, count, &are_last);
    if (is_plain != 1)
        return is_plain;
    if (!are_last)
        return run->may & MAY_REPEAT ? remove_copies(known, run, event, position) : 0;
    for (size_t start = 0, end; start < count; start = end) {
        end = end_of_owned(run, start, count);
        const uint32_t owner = run->owners[start];
        Part part = part_at(known, run->blocks[start].place, owner == 0 ? run->holder : run->neighbours[owner - 1].holder);
        part.kind = '-';
        part.is_known = 1;
        if (!add_removed(run, &part, position + (int64_t)start, run->blocks + start, end - start, NULL))
            return -1;
    }
    for (size_t start = 0, end; start < count; start = end) {
        for (end = start + 1; end < count && run->owners[end] == run->owners[start];)
            end++;
        if (!move_blocks(owner_of(known, run, start), (KnownBlocks *)PyTuple_GetItem(run->gone, 0), hashes + start,
                         run->numbers + start, end - start))
            return -1;
    }
    run->removed += (Py_ssize_t)count;
    return 1;
}

/* Run the events from *at on, up to the first that is not plain, or whose hashes have no positions, or until they have
 * `hashes_max` hashes. 0 with an exception, also if the first event has no positions. */
static int run_events(KnownBlocks *known, Run *run, size_t *at, int64_t *position, size_t hashes_max)
{
    const size_t first = *at;
    size_t hashes = 0;
    for (; *at < run->events->count && hashes < hashes_max; ++*at) {
        const PlainEvent *event = &run->events->events[*at];
        if (event->kind > REMOVAL || !(run->may & (event->kind == STORE ? MAY_STORE : MAY_REMOVE)))
            break;
        if (!are_positions(*position, event->hashes_count, 1, HASH_POSITION_MAX))
            return *at > first || refuse_positions(*position, event->hashes_count, HASH_POSITION_MAX);
        if (!make_event_room(run, event->hashes_count))
            return 0;
        const int is_plain = event->kind == STORE ? run_store(known, run, event, *position)
                                                  : run_removal(known, run, event, *position);
        if (is_plain < 0)
            return 0;
        if (!is_plain)
            break;
        *position += event->hashes_count;
        hashes += event->hashes_count;
        run->hashes += event->hashes_count;
    }
    return 1;
}

/* Begin the next of the batches `following`, a list of (seq, events), if its events are of the kind of `events`. 1, or
 * 0 if there is none or it is of another kind, or -1 with an exception. */
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

/* Run the events of a batch from *at on, and then those of the batches that follow, as run_events does. *begun counts
 * the batches that follow and have begun; *at and *position are of the last of them. 0 with an exception. */
static int run_batches(KnownBlocks *known, Run *run, size_t *at, int64_t *position, size_t hashes_max,
                       PyObject *following, Py_ssize_t *begun)
{
    const Events *events = run->events;
    for (;;) {
        const size_t before = run->hashes;
        if (!run_events(known, run, at, position, hashes_max))
            return 0;
        if (run->restored + run->miscounted > 0)
            return 1; /* the caller judges the copies at the end of this batch */
        const size_t hashes = run->hashes - before;
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
 *     full: dict[Place, object], piece_blocks: int, gone: tuple[KnownBlocks, ...], may: int,
 *     following: list[tuple[int, Events]], waves: Waves, neighbours: tuple[tuple[int, KnownBlocks, bool], ...])
 *     -> tuple[int, int, int, int, int, int, int, int, int, bool]
 *
 * Run the events from number `at` on: store and remove their blocks, and add the parts to `parts`. `may` has bits of
 * `May`. Ends before the first event that is not plain, and after `hashes_max` hashes or somewhat more. At the end of
 * the events the run continues with those of the batches that follow, each with its seq, up to the first of another
 * kind. Returns the number of the next event, its position, how many stores there were, how many blocks were stored and
 * removed, how many hashes the events have, how many of the batches that follow have begun, how many blocks were stored
 * again after a removal had left a copy, how many blocks have copies that the engine counts differently, and whether a
 * copy that was left has been removed; the number and the position are of the last batch that has begun.
 */
PyObject *known_run(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    KnownBlocks *known = (KnownBlocks *)self;
    Run run = {0};
    if (!has_arguments("run", nargs, 15))
        return NULL;
    run.events = as_events(args[0]);
    run.parts = run.events == NULL ? NULL : as_parts(args[4]);
    Waves *waves = run.parts == NULL ? NULL : as_waves(args[13]);
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
    run.may = PyErr_Occurred() ? 0 : (int)PyLong_AsLong(args[11]);
    if (PyErr_Occurred())
        return NULL;
    if (at > run.events->count)
        return PyErr_Format(PyExc_ValueError, "at is %zu, and there are %zu events", at, run.events->count);
    run.full = args[8], run.gone = args[10];
    if (piece_blocks < 1 || piece_blocks > PIECE_BLOCKS || !PyDict_Check(run.full) || !PyList_Check(args[12]) ||
        PyTuple_Size(run.gone) == 0 || !known->has_keys)
        return PyErr_Format(PyExc_ValueError, "run() takes pieces of up to 32 blocks, a dict, a list, and a place for what is gone");
    run.piece_blocks = (int)piece_blocks;
    const size_t width = sizeof(uint32_t) * run.events->block_size;
    xxh3_prepare(&run.state, seed, width > 2 * KEY ? width : 2 * KEY);
    Py_ssize_t begun = 0;
    const int is_done = read_neighbours(known, &run, args[14]) &&
                        run_batches(known, &run, &at, &position, hashes_max, args[12], &begun);
    PyMem_Free(run.neighbours);
    free_event_room(&run);
    if (!is_done)
        return NULL;
    return Py_BuildValue("nLnnnnnnnN", (Py_ssize_t)at, (long long)position, run.stores, run.stored, run.removed,
                         (Py_ssize_t)run.hashes, begun, run.restored, run.miscounted,
                         PyBool_FromLong(run.may & REMOVED_EACH));
}
