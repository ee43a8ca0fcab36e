/* The table behind KnownBlocks: engine hashes, and the block of each.
 *
 * A block takes 24 bytes, and its slots in one index or two. The blocks of a table are in chunks that never move, so a
 * pointer to one is valid until the block is removed. Numbers of removed blocks are used again.
 */

#ifndef WAYMARK_BLOCKS_H
#define WAYMARK_BLOCKS_H

#include "places.h"

enum { PIECE_BLOCKS = 32, CHUNK_BLOCKS = 256, RELEASED_CHUNKS = 128, COPIES_MAX = (1 << 24) - 1 };
#define NO_PLACE UINT32_MAX

typedef struct {
    uint64_t hash; /* the engine hash; in a free block, 1 more than the number of the next free one */
    uint64_t key;
    uint32_t place; /* NO_PLACE in a free block */
    uint32_t depth : 5;
    uint32_t is_first : 1;     /* whether it is the first hash of its block */
    uint32_t is_collected : 1; /* set while a removal is checked */
    uint32_t is_left : 1;      /* the last event about the block was a removal that left a copy */
    uint32_t copies : 24;      /* of a block with only this hash; 0: Python has its hashes and copies */
} Block;

typedef struct {
    PyObject_HEAD
    Places *places; /* a reference */
    Block **chunks;
    uint32_t count, chunks_count, used;
    uint32_t free;   /* as in Places */
    uint32_t firsts; /* blocks that are found by their key */
    uint32_t left;   /* blocks with is_left */
    int has_keys;
    Index by_hash, by_key;
} KnownBlocks;

/* Return the block with this number, which is in use or free. */
static inline Block *block_at(const KnownBlocks *known, uint32_t number)
{
    return &known->chunks[number / CHUNK_BLOCKS][number % CHUNK_BLOCKS];
}

/* Return the number of the block with an engine hash; -1 if there is none. */
static inline int64_t find_hash(KnownBlocks *known, uint64_t hash)
{
    Search search = begin_search(&known->by_hash, spread(hash));
    int64_t found;
    while ((found = next_found(&search)) >= 0 && block_at(known, (uint32_t)found)->hash != hash)
        continue;
    return found;
}

/* Return the number of the first block with a key; -1 if there is none. */
static inline int64_t find_key(KnownBlocks *known, uint64_t key)
{
    Search search = begin_search(&known->by_key, spread(key));
    int64_t found;
    while ((found = next_found(&search)) >= 0 && block_at(known, (uint32_t)found)->key != key)
        continue;
    return found;
}

typedef int64_t Find(KnownBlocks *known, uint64_t number);

/* Let the caches fetch, for many numbers at once, the slots of `index` and then the blocks that a search looks at.
 * Single searches would each wait. */
void fetch_blocks(const KnownBlocks *known, Index *index, const uint64_t *numbers, size_t count);

/* The number of the first block that a search looks at, with SEVERAL if there may be others; NO_CANDIDATE for none. */
typedef uint32_t Candidate;
enum { FETCHED = 64 };
#define NO_CANDIDATE UINT32_MAX
#define SEVERAL ((uint32_t)1 << 31)

/* Do the same for the first FETCHED hashes at the most, and write the candidate of each. Return their number. */
size_t fetch_candidates(KnownBlocks *known, const uint64_t *hashes, size_t count, Candidate *candidates);

/* Return the number of the block with an engine hash; -1 if there is none. No block with this hash has been added since
 * the candidate was fetched. */
static inline int64_t find_fetched(KnownBlocks *known, uint64_t hash, Candidate candidate)
{
    if (candidate == NO_CANDIDATE)
        return -1;
    const uint32_t number = candidate & ~SEVERAL;
    const Block *block = block_at(known, number);
    if (block->hash == hash && block->place != NO_PLACE)
        return number;
    return candidate & SEVERAL ? find_hash(known, hash) : -1;
}

/* Add a block whose place exists. A former block with its engine hash is removed; a block with its key stays the first.
 * 0 with an exception; nothing has changed then. */
int put_block(KnownBlocks *known, uint64_t hash, uint64_t key, uint32_t place, uint8_t depth);

/* Do the same for a block whose engine hash and key are not in the table. */
int put_new_block(KnownBlocks *known, uint64_t hash, uint64_t key, uint32_t place, uint8_t depth);

/* Remove a block by its number. */
void remove_block(KnownBlocks *known, uint32_t number);

/* Set the copies of a block with a single hash. */
static inline void set_copies(KnownBlocks *known, Block *block, uint32_t copies, int is_left)
{
    known->left += (uint32_t)(is_left != 0) - block->is_left;
    block->copies = copies;
    block->is_left = is_left != 0;
}

/* Move a block to another table of the same places, as put_block adds one. Its copies are forgotten. `former` is the
 * number of the block of the other table with its engine hash; -1 for none. */
int move_block(KnownBlocks *known, uint32_t number, KnownBlocks *other, int64_t former);

/* Remove the blocks of these engine hashes that are in the table. */
void discard_blocks(KnownBlocks *known, const uint64_t *hashes, size_t count);

/* Make a block the first of its key. 0 with an exception; nothing has changed then. */
int lead_block(KnownBlocks *known, uint32_t number);

/* Return whether a number occurs twice: 1 or 0, -1 with an exception. */
int has_repeats(const uint64_t *numbers, size_t count);

/* Return whether none of these numbers is found, and none occurs twice: 1 or 0, -1 with an exception. */
int are_strange(KnownBlocks *known, const uint64_t *numbers, size_t count, Find *find);

/* Free the last blocks of a table that is not used any more. Return whether some are left. */
int release_blocks(KnownBlocks *known);

/* Remove all blocks; the table keeps room for as many. */
void empty_blocks(KnownBlocks *known);

/* Free the table; its blocks leave their places. */
void clear_blocks(KnownBlocks *known);

#endif
