/* Plain removals: blocks that are all in the table are removed together. */

#include "parts.h"
#include "plain.h"

int are_beside(KnownBlocks *known, PyObject *gone)
{
    int is_right = PyTuple_Check(gone);
    for (Py_ssize_t i = 0; is_right && i < PyTuple_Size(gone); i++)
        is_right = is_beside(known, PyTuple_GetItem(gone, i));
    if (!is_right)
        PyErr_Format(PyExc_TypeError, "what is gone is a tuple of other KnownBlocks of the same Places");
    return is_right;
}

void discard_beside(PyObject *gone, const uint64_t *hashes, size_t count)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(gone); i++)
        discard_blocks((KnownBlocks *)PyTuple_GetItem(gone, i), hashes, count);
}

int collect(KnownBlocks *known, const uint64_t *hashes, size_t count, Block *blocks, uint32_t *numbers, int *are_last)
{
    int outcome = 1;
    size_t collected = 0, fetched = 0;
    Candidate candidates[FETCHED];
    *are_last = 1;
    while (outcome && collected < count) {
        if (collected == fetched)
            fetched += fetch_candidates(known, hashes + fetched, count - fetched, candidates);
        const int64_t number = find_fetched(known, hashes[collected], candidates[collected % FETCHED]);
        Block *block = number < 0 ? NULL : block_at(known, (uint32_t)number);
        /* A removal is not plain if a block is missing, is named twice, or has further hashes. */
        outcome = block != NULL && !block->is_collected && block->copies > 0;
        if (!outcome)
            break;
        *are_last = *are_last && block->copies == 1 && !block->is_left;
        blocks[collected] = *block;
        numbers[collected++] = (uint32_t)number;
        block->is_collected = 1;
        fetch_slot(&known->by_key, spread(block->key));
    }
    for (size_t i = 0; i < collected; i++)
        block_at(known, numbers[i])->is_collected = 0;
    return outcome;
}

int move_blocks(KnownBlocks *known, KnownBlocks *gone, const uint64_t *hashes, const uint32_t *numbers, size_t count)
{
    Candidate candidates[FETCHED];
    for (size_t start = 0, some; start < count; start += some) {
        some = fetch_candidates(gone, hashes + start, count - start, candidates);
        for (size_t i = start; i < start + some; i++)
            if (!move_block(known, numbers[i], gone, find_fetched(gone, hashes[i], candidates[i - start])))
                return 0;
    }
    return 1;
}

size_t end_of_group(const Block *blocks, size_t start, size_t count)
{
    /* Until Redis says that a row is full, any number of blocks may be at the place of its piece. */
    size_t end = start + 1;
    while (end < count && end - start < PART_BLOCKS && blocks[end].place == blocks[start].place)
        end++;
    return end;
}

/* Describe blocks of one place that are taken together: (place, namespace, slots, engine hashes). */
static PyObject *describe_group(KnownBlocks *known, const Block *blocks, size_t count)
{
    PyObject *place = make_place(known->places, blocks[0].place), *slots, *hashes;
    if (place == NULL || !pack_blocks(blocks, count, &slots, &hashes)) {
        Py_XDECREF(place);
        return NULL;
    }
    return Py_BuildValue("NKNN", place, known->places->places[blocks[0].place].namespace, slots, hashes);
}

/* Move the collected blocks of hashes to `gone`, and describe them by places: a list, or NULL with an exception. */
static PyObject *take_blocks(KnownBlocks *known, KnownBlocks *gone, const uint64_t *hashes, const Block *blocks,
                             const uint32_t *numbers, size_t count)
{
    PyObject *groups = PyList_New(0);
    for (size_t start = 0, end; groups != NULL && start < count; start = end) {
        end = end_of_group(blocks, start, count);
        PyObject *group = describe_group(known, blocks + start, end - start);
        if (group == NULL || PyList_Append(groups, group) < 0)
            Py_CLEAR(groups);
        Py_XDECREF(group);
    }
    if (groups != NULL && !move_blocks(known, gone, hashes, numbers, count))
        Py_CLEAR(groups);
    return groups;
}

/* take(engine_hashes: Sequence, gone: tuple[KnownBlocks, ...])
 *     -> list[tuple[Place, int, bytes, bytes]] | None
 *
 * Move the blocks of all these engine hashes to the first of `gone`, and take the hashes out of the others. Up to 64
 * consecutive blocks of one place are returned together. None if one of them is not in the table, comes twice, or has
 * several copies or hashes; nothing has changed then.
 */
PyObject *known_take(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    KnownBlocks *known = (KnownBlocks *)self;
    size_t count = 0;
    if (!has_arguments("take", nargs, 2))
        return NULL;
    if (!are_beside(known, args[1]))
        return NULL;
    if (PyTuple_Size(args[1]) == 0)
        return PyErr_Format(PyExc_TypeError, "take() takes a place for what is gone");
    uint64_t *hashes = read_numbers(args[0], &count);
    Block *blocks = hashes == NULL ? NULL : PyMem_New(Block, count);
    uint32_t *numbers = blocks == NULL ? NULL : PyMem_New(uint32_t, count);
    PyObject *groups = NULL;
    if (numbers != NULL) {
        int are_last;
        if (collect(known, hashes, count, blocks, numbers, &are_last) && are_last)
            groups = take_blocks(known, (KnownBlocks *)PyTuple_GetItem(args[1], 0), hashes, blocks, numbers, count);
        else
            groups = Py_NewRef(Py_None);
    } else if (hashes != NULL)
        PyErr_NoMemory();
    PyMem_Free(hashes);
    PyMem_Free(blocks);
    PyMem_Free(numbers);
    return groups;
}
