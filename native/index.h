/* An index of numbered things by their hashes, in about six bytes for each thing.
 *
 * Open addressing with linear probing, in segments that grow one at a time: no insertion takes longer than a millisecond,
 * however many things there are. As a rule a large segment is between 0.57 and 0.8 full; a segment that loses things
 * keeps its memory, as tables keep that of their blocks.
 *
 * A slot has the number of its thing and how far the slot is from where the thing belongs. So a search reads only
 * things that belong to its slot, and a deletion reads none: each such read misses the caches. Things are in the order
 * of the slots where they belong. So a search for an absent thing ends at the first thing that belongs to a later slot,
 * and a deletion moves things up only as far as the first that is where it belongs.
 */

#ifndef WAYMARK_INDEX_H
#define WAYMARK_INDEX_H

#include "native.h"
#include "xxh3.h"

/* Bits of a slot for the number of a thing. A test defines fewer, so that it can use up the numbers. */
#ifndef NUMBER_BITS
#define NUMBER_BITS 27
#endif

#include "four.h"

enum {
    SEGMENT_BITS = 6,
    SEGMENTS = 1 << SEGMENT_BITS,
    CAPACITY_MIN = 8,
    CAPACITY_SMALL = 512, /* below it a segment grows to twice its size, then by two fifths */
    THINGS_MAX = (1 << NUMBER_BITS) - 1,
    FAR = (1 << (32 - NUMBER_BITS)) - 1, /* this distance, or more */
};

typedef struct {
    uint32_t *slots; /* distance << NUMBER_BITS | 1 more than the number of a thing; 0 if there is none */
    uint32_t capacity, used;
} Segment;

typedef struct {
    Segment segments[SEGMENTS];
    size_t bytes;
} Index;

/* A secret number: without it no client can choose things whose hashes collide. */
extern uint64_t index_secret __attribute__((visibility("hidden")));

/* Choose this number, once in each process. 0 with an exception. */
int choose_secret(void);

/* Return the hash of a number. */
static inline uint64_t spread(uint64_t number)
{
    return fold_product(number ^ index_secret, PRIME64_1 ^ index_secret);
}

/* The hash of thing `number` of `owner`; all of its bits count. */
typedef uint64_t HashOf(const void *owner, uint32_t number);

/* Return the segment for a hash: by its highest bits. */
static inline Segment *segment_of(Index *index, uint64_t hash)
{
    return &index->segments[hash >> (64 - SEGMENT_BITS)];
}

/* Return where a hash belongs in its segment: the bits after those of the segment, scaled to the capacity. */
static inline uint32_t home_of(const Segment *segment, uint64_t hash)
{
    return (uint32_t)(((unsigned __int128)(hash << SEGMENT_BITS) * segment->capacity) >> 64);
}

/* Return the slot after `at`; the first one follows the last. */
static inline uint32_t next_slot(const Segment *segment, uint32_t at)
{
    return at + 1 == segment->capacity ? 0 : at + 1;
}

/* Return the number of the thing in a slot that is not empty. */
static inline uint32_t number_in(uint32_t slot)
{
    return (slot & THINGS_MAX) - 1;
}

/* Return the first bits of a slot that is `steps` from where its thing belongs. */
static inline uint32_t distance_bits(uint32_t steps)
{
    return (steps < FAR ? steps : FAR) << NUMBER_BITS;
}

/* Make a segment larger. 0 with an exception; the segment is unchanged then. */
int grow_segment(Index *index, Segment *segment, HashOf *hash_of, const void *owner);

/* Make room for one more thing with this hash. 0 with an exception; the index is unchanged then. */
static inline int reserve_slot(Index *index, uint64_t hash, HashOf *hash_of, const void *owner)
{
    Segment *segment = segment_of(index, hash);
    return segment->used + 1 <= (uint64_t)segment->capacity * 4 / 5 || grow_segment(index, segment, hash_of, owner);
}

/* Return how far the slot `at`, which is not empty, is from where its thing belongs. */
static inline uint32_t steps_to(const Segment *segment, uint32_t at, HashOf *hash_of, const void *owner)
{
    const uint32_t slot = segment->slots[at], steps = slot >> NUMBER_BITS;
    if (steps < FAR)
        return steps;
    const uint32_t home = home_of(segment, hash_of(owner, number_in(slot)));
    return home <= at ? at - home : segment->capacity - home + at;
}

/* Put a thing where it belongs; things that belong to later slots move down. There is room. */
static inline void place_in(Segment *segment, uint64_t hash, uint32_t number, HashOf *hash_of, const void *owner)
{
    uint32_t at = home_of(segment, hash), steps = 0;
    for (; segment->slots[at] != 0; at = next_slot(segment, at), steps++) {
        const uint32_t there = steps_to(segment, at, hash_of, owner);
        if (there >= steps)
            continue;
        const uint32_t moved = number_in(segment->slots[at]);
        segment->slots[at] = distance_bits(steps) | (number + 1);
        number = moved;
        steps = there;
    }
    segment->slots[at] = distance_bits(steps) | (number + 1);
}

/* Add a thing that is not in the index; there is room for it. */
static inline void insert_slot(Index *index, uint64_t hash, uint32_t number, HashOf *hash_of, const void *owner)
{
    Segment *segment = segment_of(index, hash);
    place_in(segment, hash, number, hash_of, owner);
    segment->used++;
}

/* Remove a thing that is in the index. Then there is room for another thing with its hash. */
void delete_slot(Index *index, uint64_t hash, uint32_t number, HashOf *hash_of, const void *owner);

/* Remove all things from an index, which keeps its memory. */
void empty_index(Index *index);

/* Free the memory of an index, which is empty then. */
void clear_index(Index *index);

/* Have the caches fetch the slot where a thing with a hash belongs. */
static inline void fetch_slot(const Index *index, uint64_t hash)
{
    const Segment *segment = &index->segments[hash >> (64 - SEGMENT_BITS)];
    if (segment->capacity > 0)
        __builtin_prefetch(&segment->slots[home_of(segment, hash)]);
}

/* A search through the things that belong to the slot of a hash. */
typedef struct {
    const Segment *segment;
    uint32_t at, steps; /* the next slot to look at by itself */
    unsigned found;     /* those of the four slots before it whose things are not returned yet, as bits */
    int is_over;        /* whether there is no slot to look at by itself */
} Search;

/* Begin a search for a hash. A change of the index makes it invalid. */
static inline Search begin_search(Index *index, uint64_t hash)
{
    const Segment *segment = segment_of(index, hash);
    if (segment->capacity == 0)
        return (Search){segment, .is_over = 1};
    const uint32_t home = home_of(segment, hash);
#ifdef HAS_FOUR
    if (home + FOUR < segment->capacity) {
        const uint32_t *slots = &segment->slots[home], last = FOUR - 1;
        return (Search){segment, home + FOUR, FOUR, four_of_first(load_four(slots)), slots[last] >> NUMBER_BITS < last};
    }
#endif
    return (Search){segment, home};
}

/* Return whether there may be a next thing. */
static inline int may_find(const Search *search)
{
    return search->found != 0 || !search->is_over;
}

/* Return the number of the next thing, which may have the hash; -1 after the last one. */
static inline int64_t next_found(Search *search)
{
    const Segment *segment = search->segment;
    if (search->found != 0) {
        const uint32_t lane = (uint32_t)__builtin_ctz(search->found);
        search->found &= search->found - 1;
        return number_in(segment->slots[search->at - FOUR + lane]);
    }
    while (!search->is_over && segment->slots[search->at] != 0) {
        const uint32_t slot = segment->slots[search->at], steps = search->steps < FAR ? search->steps : FAR;
        if (slot >> NUMBER_BITS < steps)
            return -1; /* it belongs to a later slot, as do all that follow */
        search->at = next_slot(segment, search->at);
        search->steps++;
        if (slot >> NUMBER_BITS == steps)
            return number_in(slot);
    }
    return -1;
}

#endif
