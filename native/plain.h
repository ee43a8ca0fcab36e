/* The functions of KnownBlocks for whole plain events, in stores.c, removals.c and runs.c. */

#ifndef WAYMARK_PLAIN_H
#define WAYMARK_PLAIN_H

#include "blocks.h"
#include "chain.h"

/* ---- known.c -------------------------------------------------------------------------------------- */

/* Read a sequence of numbers into memory that PyMem_Free frees, and its length into *count. NULL with an exception. */
uint64_t *read_numbers(PyObject *sequence, size_t *count);

/* Return the object as KnownBlocks, borrowed. NULL with an exception. */
KnownBlocks *as_known(PyObject *object);

/* Return the block that is the first of its key, in the table. NULL with an exception. */
Block *first_block(KnownBlocks *known, PyObject *key);

/* ---- methods -------------------------------------------------------------------------------------- */

PyObject *known_extend(PyObject *self, PyObject *const *args, Py_ssize_t nargs); /* stores.c */
PyObject *known_take(PyObject *self, PyObject *const *args, Py_ssize_t nargs);   /* removals.c */
PyObject *known_run(PyObject *self, PyObject *const *args, Py_ssize_t nargs);    /* runs.c */
PyObject *known_copies(PyObject *self, PyObject *key);                           /* copies.c */
PyObject *known_set_copies(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *known_left(PyObject *self, PyObject *ignored);

/* ---- stores.c ------------------------------------------------------------------------------------- */

/* The blocks of a plain store, and the place where they continue. */
typedef struct {
    uint64_t *hashes, *keys; /* `count` of each */
    size_t count;
    int64_t place; /* of the first block, if it continues the piece of its parent; else -1 */
    uint64_t parent, namespace;
    int depth; /* of the first block */
} Store;

/* Find where a store continues, and write it into `store` and `chain`. 1 if that is plain, 0 if it is not, -1 with an
 * exception. `full` is a dict of the places where no store continues. */
int find_parent(KnownBlocks *known, const uint64_t *parent, PyObject *full, int piece_blocks, Store *store,
                Chain *chain);

/* Hash a store's blocks, of `width` bytes each, into its keys. */
void hash_store(Store *store, Chain *chain, const char *tokens, size_t width);

/* Return whether the blocks from `start` on are new, and each of them comes once: 1 or 0, -1 with an exception. */
int are_new_from(KnownBlocks *known, const Store *store, size_t start);

/* Add the blocks `start` to `end` of a store, all of one piece, at the place with this number, or at a new row if it is
 * -1. Return the number of their place, and write the blocks into `blocks`, which has room for them. -1 with an
 * exception; some blocks may be added then. */
int64_t put_piece(KnownBlocks *known, const Store *store, int64_t place, size_t start, size_t end, int depth,
                  Block *blocks);

/* Return whether the place with a number is in a dict of places: 1 or 0, -1 with an exception. */
int is_in(PyObject *full, Places *places, uint32_t number);

/* Return the end of the piece of a store's block `start`, which has this depth: at most PIECE_BLOCKS blocks later. */
static inline size_t end_of_piece(const Store *store, size_t start, int depth, int piece_blocks)
{
    const size_t end = start + (size_t)(piece_blocks - depth);
    return end < store->count ? end : store->count;
}

/* Pack the slots of blocks as a row has them, SLOT_CHARS each, and their engine hashes, 8 bytes each, as two new bytes
 * objects. 0 with an exception; there are none then. */
int pack_blocks(const Block *blocks, size_t count, PyObject **slots, PyObject **hashes);

/* ---- removals.c ----------------------------------------------------------------------------------- */

/* Return whether `gone` is a tuple of other KnownBlocks, all with the same places as `known`. 0 with an exception. */
int are_beside(KnownBlocks *known, PyObject *gone);

/* Return whether an object is another KnownBlocks of the same places. */
static inline int is_beside(const KnownBlocks *known, PyObject *other)
{
    return Py_TYPE(other) == Py_TYPE((PyObject *)known) && other != (PyObject *)known &&
           ((KnownBlocks *)other)->places == known->places;
}

/* Remove engine hashes from all tables of a tuple. */
void discard_beside(PyObject *gone, const uint64_t *hashes, size_t count);

/* Write the blocks of these hashes into `blocks`, and their numbers into `numbers`, if all are in the table, each once,
 * and none has further hashes. *are_last gets whether each block has a single copy, which no earlier removal has left.
 * Return 1, or 0 if the blocks do not fit. */
int collect(KnownBlocks *known, const uint64_t *hashes, size_t count, Block *blocks, uint32_t *numbers, int *are_last);

/* Return the end of the blocks from `start` on that are at one place, as many as a part may have. */
size_t end_of_group(const Block *blocks, size_t start, size_t count);

/* Move the blocks of these hashes, by their numbers, to `gone`. 0 with an exception; some have moved then. */
int move_blocks(KnownBlocks *known, KnownBlocks *gone, const uint64_t *hashes, const uint32_t *numbers, size_t count);

#endif
