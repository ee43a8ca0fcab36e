/* How an index grows and shrinks, and what a deletion moves: see index.h. */

#include "index.h"

uint64_t index_secret;

int choose_secret(void)
{
    PyObject *word = PyUnicode_FromString("waymark"); /* its hash differs in each process */
    if (word == NULL)
        return 0;
    index_secret = (uint64_t)PyObject_Hash(word);
    Py_DECREF(word);
    return 1;
}

/* Give a segment another capacity. 0 without memory for it; the segment is unchanged then. */
static int resize(Index *index, Segment *segment, uint32_t capacity, HashOf *hash_of, const void *owner)
{
    Segment resized = {NULL, capacity, segment->used};
    if (capacity > 0 && (resized.slots = PyMem_Calloc(capacity, sizeof *resized.slots)) == NULL)
        return 0;
    /* The hashes of some things are read before the first of these is placed, so that the caches fetch them together. */
    enum { SOME = 32 };
    for (uint32_t i = 0, count = 0; i < segment->capacity; count = 0) {
        uint32_t numbers[SOME];
        uint64_t hashes[SOME];
        for (; i < segment->capacity && count < SOME; i++)
            if (segment->slots[i] != 0)
                numbers[count++] = number_in(segment->slots[i]);
        for (uint32_t at = 0; at < count; at++)
            hashes[at] = hash_of(owner, numbers[at]);
        for (uint32_t at = 0; at < count; at++)
            place_in(&resized, hashes[at], numbers[at], hash_of, owner);
    }
    index->bytes += sizeof *resized.slots * capacity;
    index->bytes -= sizeof *resized.slots * segment->capacity;
    PyMem_Free(segment->slots);
    *segment = resized;
    return 1;
}

int grow_segment(Index *index, Segment *segment, HashOf *hash_of, const void *owner)
{
    const uint32_t before = segment->capacity, more = before < CAPACITY_SMALL ? before : before * 2 / 5;
    if (resize(index, segment, before < CAPACITY_MIN ? CAPACITY_MIN : before + more, hash_of, owner))
        return 1;
    PyErr_NoMemory();
    return 0;
}

/* The things after a removed one move up, up to the first that is where it belongs, so that no search ends at a gap. */
void delete_slot(Index *index, uint64_t hash, uint32_t number, HashOf *hash_of, const void *owner)
{
    Segment *segment = segment_of(index, hash);
    uint32_t gap = home_of(segment, hash);
    while (number_in(segment->slots[gap]) != number)
        gap = next_slot(segment, gap);
    for (uint32_t at = next_slot(segment, gap); segment->slots[at] >> NUMBER_BITS != 0; at = next_slot(segment, at)) {
        const uint32_t steps = steps_to(segment, at, hash_of, owner);
        segment->slots[gap] = distance_bits(steps - 1) | (segment->slots[at] & THINGS_MAX);
        gap = at;
    }
    segment->slots[gap] = 0;
    segment->used--;
    if (segment->capacity > CAPACITY_MIN && segment->used < segment->capacity / 8) {
        const uint32_t shrunk = segment->capacity / 4;
        resize(index, segment, shrunk < CAPACITY_MIN ? CAPACITY_MIN : shrunk, hash_of, owner);
    }
}

void empty_index(Index *index)
{
    for (int i = 0; i < SEGMENTS; i++) {
        Segment *segment = &index->segments[i];
        if (segment->used > 0)
            memset(segment->slots, 0, segment->capacity * sizeof *segment->slots);
        segment->used = 0;
    }
}

void clear_index(Index *index)
{
    for (int i = 0; i < SEGMENTS; i++)
        PyMem_Free(index->segments[i].slots);
    memset(index, 0, sizeof *index);
}
