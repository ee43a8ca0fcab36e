/* How an index grows, and what a deletion moves: see index.h. */

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

int grow_segment(Index *index, Segment *segment, HashOf *hash_of, const void *owner)
{
    const uint32_t before = segment->capacity, more = before < CAPACITY_SMALL ? before : before * 2 / 5;
    const uint32_t capacity = before < CAPACITY_MIN ? CAPACITY_MIN : before + more;
    Segment grown = {PyMem_Calloc(capacity, sizeof *grown.slots), capacity, segment->used};
    if (grown.slots == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    /* The hashes of some things are read before the first of these is placed, so that the caches fetch them together. */
    enum { SOME = 32 };
    for (uint32_t i = 0, count = 0; i < before; count = 0) {
        uint32_t numbers[SOME];
        uint64_t hashes[SOME];
        for (; i < before && count < SOME; i++)
            if (segment->slots[i] != 0)
                numbers[count++] = number_in(segment->slots[i]);
        for (uint32_t at = 0; at < count; at++)
            hashes[at] = hash_of(owner, numbers[at]);
        for (uint32_t at = 0; at < count; at++)
            place_in(&grown, hashes[at], numbers[at], hash_of, owner);
    }
    index->bytes += sizeof *grown.slots * (capacity - before);
    PyMem_Free(segment->slots);
    *segment = grown;
    return 1;
}

/* Return the slot of a thing that is in a segment. */
static uint32_t slot_of(const Segment *segment, uint64_t hash, uint32_t number)
{
    uint32_t at = home_of(segment, hash);
#ifdef HAS_FOUR
    if (at + FOUR < segment->capacity) {
        const unsigned found = four_with(load_four(segment->slots + at), THINGS_MAX, number + 1);
        at += found == 0 ? FOUR : (uint32_t)__builtin_ctz(found);
    }
#endif
    while (number_in(segment->slots[at]) != number)
        at = next_slot(segment, at);
    return at;
}

/* Empty a slot. The things after it move up, as far as the first that is where it belongs, so that no search ends at a
 * gap. */
static void move_up(Segment *segment, uint32_t gap, HashOf *hash_of, const void *owner)
{
    uint32_t *slots = segment->slots;
#ifdef HAS_FOUR
    const uint32_t step = (uint32_t)1 << NUMBER_BITS, far = (uint32_t)FAR << NUMBER_BITS;
    for (; gap + FOUR < segment->capacity; gap += FOUR) {
        const __m128i next = load_four(slots + gap + 1);
        if (four_with(next, far, far) != 0)
            break; /* the distances must be computed */
        const unsigned in_place = four_with(next, far, 0);
        move_four_up(slots + gap, next, in_place == 0 ? FOUR : __builtin_ctz(in_place), step);
        if (in_place != 0)
            return;
    }
#endif
    for (uint32_t at = next_slot(segment, gap); slots[at] >> NUMBER_BITS != 0; at = next_slot(segment, at)) {
        const uint32_t steps = steps_to(segment, at, hash_of, owner);
        slots[gap] = distance_bits(steps - 1) | (slots[at] & THINGS_MAX);
        gap = at;
    }
    slots[gap] = 0;
}

void delete_slot(Index *index, uint64_t hash, uint32_t number, HashOf *hash_of, const void *owner)
{
    Segment *segment = segment_of(index, hash);
    move_up(segment, slot_of(segment, hash, number), hash_of, owner);
    segment->used--;
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
