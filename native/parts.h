/* The parts of a fold, as app/waymark/domain/parts.py describes them, in arrays. */

#ifndef WAYMARK_PARTS_H
#define WAYMARK_PARTS_H

#include "place.h"

#include <stddef.h>
#include <stdint.h>

/* By how much positions go up from one block to the next, and how many blocks a part has at most. */
enum { STEP = 2, PART_BLOCKS = 64 };

typedef struct {
    uint64_t key, hash;
    uint8_t depth;
} PartBlock;

typedef struct {
    uint64_t holder, seq;
    uint64_t head, branch, namespace; /* its place */
    uint64_t parent;                  /* key of the block before, if has_parent */
    int64_t last;                     /* position of the last block */
    PyObject *copies;                 /* a list of bytes, or NULL */
    size_t start;                     /* of its blocks among those of all parts */
    uint32_t count;
    char kind;
    uint8_t place_kind, is_known, is_identity, has_parent, waits;
} Part;

typedef struct Parts Parts;

/* The object as Parts. NULL with an exception. */
Parts *as_parts(PyObject *object);

/* Whether a number is a position as a call says it, in 32 bits; OverflowError where it is not. */
static inline int is_position(int64_t position)
{
    if (position >= 0 && position <= UINT32_MAX)
        return 1;
    PyErr_Format(PyExc_OverflowError, "position %lld has no 32 bits", (long long)position);
    return 0;
}

/* Add blocks at consecutive positions, the first at `position`, to the last part or as a new one. What is said of the
 * blocks is in `part`, besides its seq, last, start and count, and in `copies`, of each of them; NULL for nothing. 0
 * with an exception. */
int add_to_parts(Parts *parts, const Part *part, int64_t position, const PartBlock *blocks, size_t count,
                 PyObject *copies);

#endif
