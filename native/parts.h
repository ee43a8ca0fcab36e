/* The parts of a fold, as app/waymark/domain/parts.py describes them, in arrays. */

#ifndef WAYMARK_PARTS_H
#define WAYMARK_PARTS_H

#include "place.h"
#include "slots.h"

#include <stddef.h>
#include <stdint.h>

/* The difference between the positions of consecutive blocks, the most blocks of a part, and the most parts and blocks
 * of a call. A part needs two rows at most. */
enum { STEP = 2, PART_BLOCKS = 64, CALL_PARTS = 128, CALL_BLOCKS = 3584 };

/* The last position that a part may have: it takes 32 bits in a call. */
#define POSITION_MAX UINT32_MAX

typedef struct {
    uint64_t key, hash;
    uint8_t depth;
} PartBlock;

typedef struct {
    uint64_t holder, seq;
    uint64_t head, branch, namespace; /* its place */
    uint64_t parent;                  /* key of the block before, if has_parent */
    int64_t last;                     /* position of the last block */
    PyObject *copies;                 /* a reference to a list of bytes, which parts of a cut may share; or NULL */
    size_t start;                     /* where its blocks begin among those of all parts */
    uint32_t count;
    char kind;
    uint8_t place_kind, is_known, is_identity, has_parent, waits;
} Part;

typedef struct {
    PyObject_HEAD
    Part *parts;
    size_t count, capacity;
    PartBlock *blocks;
    size_t blocks_count, blocks_capacity;
    size_t stored, singles; /* blocks that are stored, and parts whose place is a single */
    uint64_t seq;
    PyObject *part_type, *place_type; /* references */
} Parts;

/* Return the object as Parts, borrowed. NULL with an exception. */
Parts *as_parts(PyObject *object);

/* Return whether `count` positions are at most `most`; the first is `position`, and each other one is `step` more than
 * the one before. */
static inline int are_positions(int64_t position, size_t count, size_t step, uint32_t most)
{
    return position >= 0 && position <= most && (count == 0 || (count - 1) * step <= (uint64_t)(most - position));
}

/* Set ValueError for positions that are too large, and return 0. */
static inline int refuse_positions(int64_t position, size_t count, uint32_t most)
{
    PyErr_Format(PyExc_ValueError, "position is %lld, and %zu blocks from there on go beyond position %lu",
                 (long long)position, count, (unsigned long)most);
    return 0;
}

/* Add blocks at consecutive positions, the first at `position`, to the last part or as a new one. `part` describes the
 * blocks, except its seq, last, start and count. `copies` has the copies of each block; NULL for none. 0 with an
 * exception; then nothing has changed, unless there was no memory for the copies: then the blocks are added. */
int add_to_parts(Parts *parts, const Part *part, int64_t position, const PartBlock *blocks, size_t count,
                 PyObject *copies);

/* Append the parts `start` to `end` of another. 0 with an exception; nothing has changed then. */
int append_parts(Parts *parts, const Parts *other, size_t start, size_t end);

/* Return new Parts, which are empty. NULL with an exception. */
PyObject *new_parts(PyTypeObject *type, PyObject *part_type, PyObject *place_type, uint64_t seq);

/* add(kind, holder, position, place, namespace, slots, hashes, is_known, is_identity, parent, copies, waits); adding.c */
PyObject *parts_add(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

/* add_block(kind, holder, position, spot, engine_hash, is_known, is_identity, parent, copies, waits); adding.c */
PyObject *parts_add_block(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

/* shares(shards: int) -> list[dict[int, Parts]]; shares.c */
PyObject *parts_shares(PyObject *self, PyObject *shards_given);

/* calls(prefixes: tuple[bytes, ...]) -> list[dict[int, tuple[int, tuple]]]; shares.c */
PyObject *parts_calls(PyObject *self, PyObject *prefixes);

/* Return the end of the parts from `start` on that fit one call: one part, and more within the bounds; calls.c */
size_t end_of_parts(const Parts *parts, size_t start, size_t parts_max, size_t blocks_max);

/* Return the parts `start` to `end`, at most CALL_PARTS, as pack returns them; calls.c. NULL with an exception. */
PyObject *pack_call(const Parts *parts, size_t start, size_t end, PyObject *prefix);

/* end(start: int, parts_max: int, blocks_max: int) -> int; calls.c */
PyObject *parts_end(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

/* pack(start: int, end: int, prefix: bytes) -> tuple[int, list[int], int, bytes, list[int], bytes]; calls.c */
PyObject *parts_pack(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

/* run_frames(ways, payloads, ts, reading, seq, prefixes); frames.c */
PyObject *parts_run_frames(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

/* reported(start: int, blocks_max: int) -> tuple[int, int, bytes]; calls.c */
PyObject *parts_reported(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

/* ---- what both files need --------------------------------------------------------------------------- */

/* Return whether two parts have the same place in Redis. */
static inline int is_at_place_of(const Part *one, const Part *other)
{
    return one->head == other->head && one->branch == other->branch && one->place_kind == other->place_kind;
}

/* Read `count` arguments as numbers. 0 with an exception. */
static inline int read_bounds(PyObject *const *args, size_t count, size_t *bounds)
{
    for (size_t i = 0; i < count && !PyErr_Occurred(); i++)
        bounds[i] = PyLong_AsSize_t(args[i]);
    return !PyErr_Occurred();
}

/* Return whether two numbers are a range of parts. 0 with an exception. */
static inline int is_range(const Parts *parts, size_t start, size_t end)
{
    if (start <= end && end <= parts->count)
        return 1;
    PyErr_Format(PyExc_IndexError, "there are no parts %zu to %zu among %zu", start, end, parts->count);
    return 0;
}

/* Write the slots of blocks to `at`, SLOT_CHARS each. */
static inline void write_slots(const PartBlock *blocks, size_t count, char *at)
{
    for (size_t i = 0; i < count; i++)
        write_slot(at + SLOT_CHARS * i, blocks[i].key, blocks[i].depth);
}

/* Write the engine hashes of blocks to `at`, 8 bytes each. */
static inline void write_hashes(const PartBlock *blocks, size_t count, char *at)
{
    for (size_t i = 0; i < count; i++)
        store_big64(at + sizeof(uint64_t) * i, blocks[i].hash);
}

#endif
