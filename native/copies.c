/* Copies of blocks: an engine may store a block again, and then removes each copy.
 *
 * app/waymark/domain/copies.py has the same in Python, and the blocks with several hashes.
 */

#include "runs.h"

/* ---- single blocks -------------------------------------------------------------------------------- */

/* copies(key: int) -> tuple[int, bool] */
PyObject *known_copies(PyObject *self, PyObject *key)
{
    const Block *block = first_block((KnownBlocks *)self, key);
    return block == NULL ? NULL
                         : Py_BuildValue("kN", (unsigned long)block->copies, PyBool_FromLong((long)block->is_left));
}

/* set_copies(key: int, copies: int, is_left: bool) -> None */
PyObject *known_set_copies(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments("set_copies", nargs, 3))
        return NULL;
    const size_t copies = PyLong_AsSize_t(args[1]);
    Block *block = PyErr_Occurred() ? NULL : first_block((KnownBlocks *)self, args[0]);
    if (block == NULL)
        return NULL;
    if (copies > COPIES_MAX)
        return PyErr_Format(PyExc_ValueError, "copies is %zu; a table counts up to %d", copies, COPIES_MAX);
    set_copies((KnownBlocks *)self, block, (uint32_t)copies, args[2] == Py_True);
    return Py_NewRef(Py_None);
}

/* left() -> list[int] */
PyObject *known_left(PyObject *self, PyObject *ignored)
{
    const KnownBlocks *known = (KnownBlocks *)self;
    PyObject *hashes = PyList_New(0);
    for (uint32_t number = 0; hashes != NULL && known->left > 0 && number < known->count; number++) {
        const Block *block = block_at(known, number);
        if (block->place == NO_PLACE || !block->is_left)
            continue;
        PyObject *hash = PyLong_FromUnsignedLongLong(block->hash);
        if (hash == NULL || PyList_Append(hashes, hash) < 0)
            Py_CLEAR(hashes);
        Py_XDECREF(hash);
    }
    return hashes;
}

/* ---- events --------------------------------------------------------------------------------------- */

/* Return the bytes that Redis keeps for this number of copies. NULL with an exception. */
static PyObject *text_of(uint32_t copies)
{
    return copies < 2 ? PyBytes_FromString("0") : PyBytes_FromFormat("%u", copies);
}

/* Add a single block that has this number of copies from now on. 0 with an exception. */
static int add_counted(Run *run, Part *part, int64_t position, const Block *block, uint32_t copies)
{
    PyObject *text = text_of(copies);
    const int is_done = text != NULL && (part->kind == '-' ? add_removed(run, part, position, block, 1, text)
                                                           : add_blocks(run, part, position, block, 1, text));
    Py_XDECREF(text);
    return is_done;
}

/* Return whether the first blocks of a store are in the table as the store has them: in the same order, and each with a
 * single hash. *count gets their number. No chain continues from a single, or in another namespace. */
static int are_repeated(KnownBlocks *known, Run *run, const Store *store, size_t *count)
{
    int depth = store->depth;
    *count = 0;
    fetch_blocks(known, &known->by_hash, store->hashes, store->count);
    for (size_t i = 0; i < store->count; i++, depth = (depth + 1) % run->piece_blocks) {
        const int64_t number = find_hash(known, store->hashes[i]);
        if (number < 0)
            break;
        const Block *block = block_at(known, (uint32_t)number);
        const Place *place = &known->places->places[block->place];
        if (block->key != store->keys[i] || !block->is_first || block->copies == 0 || block->copies == COPIES_MAX ||
            (int)block->depth != depth || place->kind == SINGLE || place->namespace != store->namespace)
            return 0;
        run->numbers[i] = (uint32_t)number;
        ++*count;
    }
    return 1;
}

int add_again(KnownBlocks *known, Run *run, const PlainEvent *event, Block *block, Part *part, int64_t position)
{
    const int counts = run->may & COUNTS && event->origin != FROM_REUSE;
    const uint32_t before = block->copies, after = run->may & REPLACES ? 1 : before + (counts != 0);
    run->restored += counts && block->is_left && !(run->may & REMOVED_EACH);
    set_copies(known, block, after, block->is_left && !counts && (after == before || after > 1));
    return after == before ? add_blocks(run, part, position, block, 1, NULL)
                           : add_counted(run, part, position, block, after);
}

/* Repeat the store of a block that is in the table, at `depth` in its piece. 0 with an exception. */
static int store_repeated(KnownBlocks *known, Run *run, const PlainEvent *event, const Store *store, const uint64_t *above,
                          size_t i, int depth, int64_t position)
{
    Block *block = block_at(known, run->numbers[i]);
    Part part = part_at(known, block->place, run->holder);
    part.kind = '+';
    part.is_known = 1;
    part.has_parent = depth > 0;
    part.parent = i > 0 ? store->keys[i - 1] : store->parent;
    if (run->waves != NULL && (!note_stored(run, store, i, i + 1, above, &part) ||
                               !use_block(run->waves, block->key ^ part.namespace, shard_of(run->waves, part.head))))
        return 0;
    return add_again(known, run, event, block, &part, position);
}

int store_again(KnownBlocks *known, Run *run, const PlainEvent *event, Store *store, const uint64_t *above,
                int64_t position, size_t *known_blocks)
{
    size_t at = 0;
    if (!are_repeated(known, run, store, &at) || at == 0)
        return 0;
    const int has_repeated = has_repeats(store->hashes, at);
    const int are_new = has_repeated ? 0 : are_new_to_all(known, run, store, at);
    if (has_repeated < 0 || are_new != 1)
        return has_repeated < 0 || are_new < 0 ? -1 : 0;
    *known_blocks = at;
    int depth = (int)((store->depth + at) % (size_t)run->piece_blocks);
    const uint32_t place = block_at(known, run->numbers[at - 1])->place;
    const int is_full = at < store->count && depth > 0 ? is_in(run->full, known->places, place) : 0;
    if (is_full)
        return is_full < 0 ? -1 : 0;
    for (size_t i = 0; i < at; i++)
        if (!store_repeated(known, run, event, store, above, i, (int)((store->depth + i) % (size_t)run->piece_blocks),
                            position + (int64_t)i))
            return -1;
    /* In the piece of the last known block, new blocks are added one by one, and each is marked as used on its shard.
     * */
    Store one = *store;
    for (; at < store->count && depth > 0; at++, depth = (depth + 1) % run->piece_blocks) {
        one.count = at + 1;
        if (!store_new(known, run, &one, above, at, place, depth, position))
            return -1;
        if (run->waves != NULL && !use_block(run->waves, store->keys[at] ^ store->namespace,
                                             shard_of(run->waves, known->places->places[place].head)))
            return -1;
    }
    return store_new(known, run, store, above, at, -1, 0, position) ? 1 : -1;
}

int remove_copies(KnownBlocks *known, Run *run, const PlainEvent *event, int64_t position)
{
    KnownBlocks *gone = (KnownBlocks *)PyTuple_GetItem(run->gone, 0);
    const int counts = run->may & COUNTS && !event->leaves_none;
    for (size_t i = 0; i < event->hashes_count; i++) {
        Block *block = &run->blocks[i], *held = block_at(known, run->numbers[i]);
        const uint32_t copies = counts ? block->copies - 1 : 0;
        Part part = part_at(known, block->place, run->holder);
        part.kind = copies > 0 ? '*' : '-';
        part.is_known = 1;
        run->miscounted += event->leaves_none && run->may & COUNTS && block->copies != 1;
        run->may |= block->is_left ? REMOVED_EACH : 0;
        if (!(block->copies > 1 ? add_counted(run, &part, position + (int64_t)i, block, copies)
                                : add_removed(run, &part, position + (int64_t)i, block, 1, NULL)))
            return -1;
        if (copies > 0)
            set_copies(known, held, copies, run->may & NOTES_LEFT);
        else if (!move_block(known, run->numbers[i], gone, find_hash(gone, block->hash)))
            return -1;
        run->removed += copies == 0;
    }
    return 1;
}
