/* The generations of a run's holder, and the other tables of its rank: where a block may be besides the table itself.
 *
 * Each generation has a table of its own, which is freed as a whole when the generation ends.
 */

#include "runs.h"

/* The owner of a block that is not found yet. */
#define NOWHERE UINT32_MAX

/* Read the neighbours of a run: a tuple of (holder, KnownBlocks, whether it is a generation). 0 with an exception. */
int read_neighbours(KnownBlocks *known, Run *run, PyObject *given)
{
    if (!PyTuple_Check(given))
        return PyErr_Format(PyExc_TypeError, "neighbours are a tuple"), 0;
    const Py_ssize_t count = PyTuple_Size(given);
    run->neighbours = PyMem_New(Neighbour, count);
    if (run->neighbours == NULL)
        return PyErr_NoMemory() != NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *each = PyTuple_GetItem(given, i);
        PyObject *table = PyTuple_Check(each) && PyTuple_Size(each) == 3 ? PyTuple_GetItem(each, 1) : NULL;
        if (table == NULL || !is_beside(known, table))
            return PyErr_Format(PyExc_TypeError, "a neighbour is a holder, its KnownBlocks, and whether it is a generation"), 0;
        run->neighbours[i] = (Neighbour){(KnownBlocks *)table, PyLong_AsUnsignedLongLong(PyTuple_GetItem(each, 0)),
                                         PyTuple_GetItem(each, 2) == Py_True};
        if (PyErr_Occurred())
            return 0;
    }
    run->neighbours_count = (size_t)count;
    return 1;
}

/* Return the table that has an engine hash: the run's own, or the first of its neighbours; NULL if there is none. */
KnownBlocks *table_with(KnownBlocks *known, const Run *run, uint64_t hash)
{
    if (run->neighbours_count == 0 || find_hash(known, hash) >= 0)
        return known;
    for (size_t i = 0; i < run->neighbours_count; i++)
        if (find_hash(run->neighbours[i].known, hash) >= 0)
            return run->neighbours[i].known;
    return NULL;
}

/* Return whether none of these numbers is found in a table. */
static int are_absent(KnownBlocks *known, const uint64_t *numbers, size_t count, Index *index, Find *find)
{
    fetch_blocks(known, index, numbers, count);
    for (size_t i = 0; i < count; i++)
        if (find(known, numbers[i]) >= 0)
            return 0;
    return 1;
}

int are_new_to_all(KnownBlocks *known, const Run *run, const Store *store, size_t start)
{
    const int are_new = are_new_from(known, store, start);
    const size_t count = store->count - start;
    for (size_t i = 0; are_new == 1 && i < run->neighbours_count; i++) {
        KnownBlocks *other = run->neighbours[i].known;
        if (run->neighbours[i].is_generation && other->used > 0 &&
            !(are_absent(other, store->hashes + start, count, &other->by_hash, find_hash) &&
              are_absent(other, store->keys + start, count, &other->by_key, find_key)))
            return 0;
    }
    return are_new;
}

/* Find the blocks of the hashes that the table itself does not have, in its generations, as `collect` does. Only blocks
 * with a single copy are found there. */
static int find_in_generations(Run *run, const uint64_t *hashes, size_t count)
{
    for (size_t i = 0; i < run->neighbours_count; i++) {
        KnownBlocks *other = run->neighbours[i].known;
        if (!run->neighbours[i].is_generation || other->used == 0)
            continue;
        fetch_blocks(other, &other->by_hash, hashes, count);
        for (size_t at = 0; at < count; at++) {
            const int64_t number = run->owners[at] == NOWHERE ? find_hash(other, hashes[at]) : -1;
            if (number < 0)
                continue;
            run->blocks[at] = *block_at(other, (uint32_t)number);
            run->numbers[at] = (uint32_t)number;
            run->owners[at] = (uint32_t)i + 1;
        }
    }
    for (size_t at = 0; at < count; at++)
        if (run->owners[at] == NOWHERE || (run->owners[at] > 0 && (run->blocks[at].copies != 1 || run->blocks[at].is_left)))
            return 0;
    return 1;
}

/* Do the same as `collect`, in all generations. */
int collect_in_all(KnownBlocks *known, Run *run, const uint64_t *hashes, size_t count, int *are_last)
{
    if (collect(known, hashes, count, run->blocks, run->numbers, are_last)) {
        for (size_t i = 0; i < count; i++)
            run->owners[i] = 0;
        return 1;
    }
    const int are_repeated = run->neighbours_count == 0 ? 1 : has_repeats(hashes, count);
    if (are_repeated != 0)
        return are_repeated < 0 ? -1 : 0;
    *are_last = 1;
    for (size_t i = 0; i < count; i++) {
        const int64_t number = find_hash(known, hashes[i]);
        run->owners[i] = number < 0 ? NOWHERE : 0;
        if (number < 0)
            continue;
        run->blocks[i] = *block_at(known, (uint32_t)number);
        run->numbers[i] = (uint32_t)number;
        if (run->blocks[i].copies != 1 || run->blocks[i].is_left)
            return 0;
    }
    return find_in_generations(run, hashes, count);
}

/* Return the table with a block of a removal. */
KnownBlocks *owner_of(KnownBlocks *known, const Run *run, size_t at)
{
    return run->owners[at] == 0 ? known : run->neighbours[run->owners[at] - 1].known;
}

/* Return the end of the blocks from `start` on that one part can have: as `end_of_group`, within one table. */
size_t end_of_owned(const Run *run, size_t start, size_t count)
{
    size_t end = start + 1;
    for (const size_t most = end_of_group(run->blocks, start, count); end < most; end++)
        if (run->owners[end] != run->owners[start])
            break;
    return end;
}
