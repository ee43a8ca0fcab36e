/* The table behind KnownBlocks: see blocks.h. */

#include "blocks.h"

/* Return the hash of a block for the index by engine hash. */
static uint64_t hash_spread_of(const void *known, uint32_t number)
{
    return spread(block_at(known, number)->hash);
}

/* Return the hash of a block for the index by key. */
static uint64_t key_spread_of(const void *known, uint32_t number)
{
    return spread(block_at(known, number)->key);
}

void fetch_blocks(const KnownBlocks *known, Index *index, const uint64_t *numbers, size_t count)
{
    for (size_t i = 0; i < count; i++)
        fetch_slot(index, spread(numbers[i]));
    for (size_t i = 0; i < count; i++) {
        Search search = begin_search(index, spread(numbers[i]));
        for (int64_t found; (found = next_found(&search)) >= 0;)
            __builtin_prefetch(block_at(known, (uint32_t)found));
    }
}

size_t fetch_candidates(KnownBlocks *known, const uint64_t *hashes, size_t count, Candidate *candidates)
{
    const size_t some = count < FETCHED ? count : FETCHED;
    for (size_t i = 0; i < some; i++)
        fetch_slot(&known->by_hash, spread(hashes[i]));
    for (size_t i = 0; i < some; i++) {
        Search search = begin_search(&known->by_hash, spread(hashes[i]));
        const int64_t found = next_found(&search);
        candidates[i] = found < 0 ? NO_CANDIDATE : (uint32_t)found | (may_find(&search) ? SEVERAL : 0);
        __builtin_prefetch(found < 0 ? NULL : block_at(known, (uint32_t)found));
    }
    return some;
}

/* Make room for one more block. 0 with an exception. */
static int reserve_block(KnownBlocks *known)
{
    if (known->free != 0 || known->count < known->chunks_count * CHUNK_BLOCKS)
        return 1;
    Block **chunks = known->chunks_count < THINGS_MAX / CHUNK_BLOCKS
                         ? PyMem_Realloc(known->chunks, (known->chunks_count + 1) * sizeof *chunks)
                         : NULL;
    if (chunks != NULL) {
        known->chunks = chunks;
        chunks[known->chunks_count] = PyMem_New(Block, CHUNK_BLOCKS);
    }
    if (chunks == NULL || chunks[known->chunks_count] == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    known->chunks_count++;
    return 1;
}

/* Return the number for a new block; there is room for the block. */
static uint32_t new_block(KnownBlocks *known)
{
    if (known->free == 0)
        return known->count++;
    const uint32_t number = known->free - 1;
    known->free = (uint32_t)block_at(known, number)->hash;
    return number;
}

/* Remove a block from the table; its place still counts it. */
static void unlink_block(KnownBlocks *known, uint32_t number)
{
    Block *block = block_at(known, number);
    delete_slot(&known->by_hash, spread(block->hash), number, hash_spread_of, known);
    if (block->is_first) {
        delete_slot(&known->by_key, spread(block->key), number, key_spread_of, known);
        known->firsts--;
    }
    known->left -= block->is_left;
    block->place = NO_PLACE;
    block->hash = known->free;
    known->free = number + 1;
    known->used--;
}

void remove_block(KnownBlocks *known, uint32_t number)
{
    const uint32_t place = block_at(known, number)->place;
    unlink_block(known, number);
    leave_place(known->places, place);
}

/* Make room for one more block with this engine hash and key in the indexes. 0 with an exception. */
static int reserve_slots(KnownBlocks *known, uint64_t hash, uint64_t key)
{
    return reserve_slot(&known->by_hash, spread(hash), hash_spread_of, known) &&
           (!known->has_keys || reserve_slot(&known->by_key, spread(key), key_spread_of, known));
}

/* Add a block whose engine hash is not in the table. There is room, and its place already counts the block. */
static void add_block(KnownBlocks *known, Block block)
{
    const uint32_t number = new_block(known);
    *block_at(known, number) = block;
    insert_slot(&known->by_hash, spread(block.hash), number, hash_spread_of, known);
    if (block.is_first)
        insert_slot(&known->by_key, spread(block.key), number, key_spread_of, known);
    known->firsts += block.is_first;
    known->used++;
}

int put_block(KnownBlocks *known, uint64_t hash, uint64_t key, uint32_t place, uint8_t depth)
{
    /* Everything that may fail comes first. Removing the former block leaves enough room in the indexes for the new
       one. */
    if (!reserve_slots(known, hash, key))
        return 0;
    const int64_t former = find_hash(known, hash);
    if (former < 0 && !reserve_block(known))
        return 0;
    enter_place(known->places, place); /* before the former block leaves it */
    if (former >= 0)
        remove_block(known, (uint32_t)former);
    const int is_first = known->has_keys && find_key(known, key) < 0;
    add_block(known, (Block){hash, key, place, .depth = depth, .is_first = is_first != 0, .copies = 1});
    return 1;
}

int put_new_block(KnownBlocks *known, uint64_t hash, uint64_t key, uint32_t place, uint8_t depth)
{
    if (!reserve_slots(known, hash, key) || !reserve_block(known))
        return 0;
    enter_place(known->places, place);
    add_block(known, (Block){hash, key, place, .depth = depth, .is_first = known->has_keys != 0, .copies = 1});
    return 1;
}

int move_block(KnownBlocks *known, uint32_t number, KnownBlocks *other, int64_t former)
{
    Block block = *block_at(known, number);
    if (!reserve_slots(other, block.hash, block.key))
        return 0;
    if (former >= 0)
        remove_block(other, (uint32_t)former); /* its number is free for the block */
    else if (!reserve_block(other))
        return 0;
    block.is_first = other->has_keys && find_key(other, block.key) < 0;
    block.is_left = 0;
    block.copies = 1;
    add_block(other, block);
    unlink_block(known, number);
    return 1;
}

void discard_blocks(KnownBlocks *known, const uint64_t *hashes, size_t count)
{
    if (known->used == 0)
        return;
    Candidate candidates[FETCHED];
    for (size_t start = 0, some; start < count; start += some) {
        some = fetch_candidates(known, hashes + start, count - start, candidates);
        for (size_t i = 0; i < some; i++) {
            const int64_t number = find_fetched(known, hashes[start + i], candidates[i]);
            if (number >= 0)
                remove_block(known, (uint32_t)number);
        }
    }
}

int lead_block(KnownBlocks *known, uint32_t number)
{
    Block *block = block_at(known, number);
    if (block->is_first)
        return 1;
    if (!reserve_slot(&known->by_key, spread(block->key), key_spread_of, known))
        return 0;
    const int64_t former = find_key(known, block->key);
    if (former >= 0) {
        delete_slot(&known->by_key, spread(block->key), (uint32_t)former, key_spread_of, known);
        block_at(known, (uint32_t)former)->is_first = 0;
    } else
        known->firsts++;
    insert_slot(&known->by_key, spread(block->key), number, key_spread_of, known);
    block->is_first = 1;
    return 1;
}

int has_repeats(const uint64_t *numbers, size_t count)
{
    enum { FEW = 128 };
    uint64_t few[FEW], *seen = few; /* a hash table, at most half full; 0 if there is none */
    size_t capacity = FEW, zeros = 0;
    while (capacity < 2 * count)
        capacity *= 2;
    if (capacity > FEW && (seen = PyMem_New(uint64_t, capacity)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memset(seen, 0, capacity * sizeof *seen);
    int is_repeated = 0;
    for (size_t i = 0; i < count && !is_repeated; i++) {
        size_t at = spread(numbers[i]) & (capacity - 1);
        while (seen[at] != 0 && seen[at] != numbers[i])
            at = (at + 1) & (capacity - 1);
        zeros += numbers[i] == 0;
        is_repeated = zeros > 1 || (seen[at] != 0 && seen[at] == numbers[i]);
        seen[at] = numbers[i];
    }
    if (seen != few)
        PyMem_Free(seen);
    return is_repeated;
}

int are_strange(KnownBlocks *known, const uint64_t *numbers, size_t count, Find *find)
{
    for (size_t i = 0; i < count; i++)
        if (find(known, numbers[i]) >= 0)
            return 0;
    const int is_repeated = has_repeats(numbers, count);
    return is_repeated < 0 ? -1 : !is_repeated;
}

int release_blocks(KnownBlocks *known)
{
    clear_index(&known->by_hash);
    clear_index(&known->by_key);
    known->used = known->firsts = known->free = known->left = 0;
    for (int i = 0; i < RELEASED_CHUNKS && known->chunks_count > 0; i++) {
        const uint32_t first = --known->chunks_count * CHUNK_BLOCKS;
        for (uint32_t number = first; number < known->count; number++)
            if (block_at(known, number)->place != NO_PLACE)
                leave_place(known->places, block_at(known, number)->place);
        known->count = known->count < first ? known->count : first;
        PyMem_Free(known->chunks[known->chunks_count]);
    }
    return known->chunks_count > 0;
}

/* Let all blocks leave their places. The order of numbers is the order in memory: a million blocks take a tenth of the
 * time that they would take in the order of the index. */
static void leave_places(KnownBlocks *known)
{
    for (uint32_t number = 0; number < known->count; number++)
        if (block_at(known, number)->place != NO_PLACE)
            leave_place(known->places, block_at(known, number)->place);
}

void empty_blocks(KnownBlocks *known)
{
    leave_places(known);
    empty_index(&known->by_hash);
    empty_index(&known->by_key);
    known->count = known->used = known->firsts = known->free = known->left = 0;
}

void clear_blocks(KnownBlocks *known)
{
    /* If no other object has the places, they are freed with the table. */
    if (known->places != NULL && Py_REFCNT((PyObject *)known->places) > 1)
        leave_places(known);
    for (uint32_t i = 0; i < known->chunks_count; i++)
        PyMem_Free(known->chunks[i]);
    PyMem_Free(known->chunks);
    clear_index(&known->by_hash);
    clear_index(&known->by_key);
}
