/* Plain removals: blocks that are all here go together. */

#include "parts.h"
#include "plain.h"

int are_beside(KnownBlocks *known, PyObject *gone)
{
    int is_right = PyTuple_Check(gone);
    for (Py_ssize_t i = 0; is_right && i < PyTuple_Size(gone); i++) {
        PyObject *each = PyTuple_GetItem(gone, i);
        is_right = Py_TYPE(each) == Py_TYPE((PyObject *)known) && each != (PyObject *)known &&
                   ((KnownBlocks *)each)->places == known->places;
    }
    if (!is_right)
        PyErr_Format(PyExc_TypeError, "what is gone is a tuple of other KnownBlocks of the same Places");
    return is_right;
}

void discard_beside(PyObject *gone, const uint64_t *hashes, size_t count)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(gone); i++)
        discard_blocks((KnownBlocks *)PyTuple_GetItem(gone, i), hashes, count);
}

/* Whether a block is in a dict by its key: 1 or 0, -1 with an exception. */
static int is_among(PyObject *several, const Block *block)
{
    PyObject *key = PyLong_FromUnsignedLongLong(block->key);
    const int found = key == NULL ? -1 : PyDict_Contains(several, key);
    Py_XDECREF(key);
    return found;
}

int collect(KnownBlocks *known, const uint64_t *hashes, size_t count, PyObject *several, Block *blocks,
            uint32_t *numbers)
{
    const int has_several = PyDict_Size(several) > 0;
    int outcome = 1;
    size_t collected = 0;
    fetch_blocks(known, &known->by_hash, hashes, count);
    while (outcome == 1 && collected < count) {
        const int64_t number = find_hash(known, hashes[collected]);
        Block *block = number < 0 ? NULL : block_at(known, (uint32_t)number);
        if (block == NULL || block->is_first & IS_COLLECTED) { /* nobody has it, or it is there twice */
            outcome = 0;
            break;
        }
        blocks[collected] = *block;
        numbers[collected++] = (uint32_t)number;
        block->is_first |= IS_COLLECTED;
        fetch_slot(&known->by_key, spread(block->key));
        if (has_several) {
            const int found = is_among(several, block);
            outcome = found < 0 ? -1 : !found;
        }
    }
    for (size_t i = 0; i < collected; i++)
        block_at(known, numbers[i])->is_first &= ~IS_COLLECTED;
    return outcome;
}

int move_blocks(KnownBlocks *known, KnownBlocks *gone, const uint64_t *hashes, const uint32_t *numbers, size_t count)
{
    fetch_blocks(gone, &gone->by_hash, hashes, count);
    for (size_t i = 0; i < count; i++)
        if (!move_block(known, numbers[i], gone))
            return 0;
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

/* Blocks of one place that are taken together: (place, namespace, slots, engine hashes). */
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

/* take(engine_hashes: Sequence, gone: tuple[KnownBlocks, ...], several: dict[int, object])
 *     -> list[tuple[Place, int, bytes, bytes]] | None
 *
 * Move the blocks of all these engine hashes to the first of `gone`, and take the hashes out of the others. Up to 64
 * blocks of one place that follow each other are told together.
 * None where one of them is not here, comes twice, or is among `several`; nothing has changed then.
 */
PyObject *known_take(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    KnownBlocks *known = (KnownBlocks *)self;
    size_t count = 0;
    if (!has_arguments("take", nargs, 3))
        return NULL;
    if (!are_beside(known, args[1]))
        return NULL;
    if (PyTuple_Size(args[1]) == 0 || !PyDict_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "take() takes a place for what is gone, and a dict");
    uint64_t *hashes = read_numbers(args[0], &count);
    Block *blocks = hashes == NULL ? NULL : PyMem_New(Block, count);
    uint32_t *numbers = blocks == NULL ? NULL : PyMem_New(uint32_t, count);
    PyObject *groups = NULL;
    if (numbers != NULL) {
        const int is_plain = collect(known, hashes, count, args[2], blocks, numbers);
        if (is_plain == 1)
            groups = take_blocks(known, (KnownBlocks *)PyTuple_GetItem(args[1], 0), hashes, blocks, numbers, count);
        else if (is_plain == 0)
            groups = Py_NewRef(Py_None);
    } else if (hashes != NULL)
        PyErr_NoMemory();
    PyMem_Free(hashes);
    PyMem_Free(blocks);
    PyMem_Free(numbers);
    return groups;
}
