/* The blocks that the parts of the present wave use and remove: app/waymark/domain/parts.py says what a wave is. */

#ifndef WAYMARK_WAVES_H
#define WAYMARK_WAVES_H

#include "native.h"

#include <stddef.h>
#include <stdint.h>

enum { SHARDS_MAX = 256 };

/* A block of the wave: the shard where a part uses it, and the one that it has left. */
typedef struct {
    uint64_t block; /* its seq_hash */
    uint32_t wave;  /* the slot is free if this is not the present one */
    int16_t used, left;
} WaveBlock;

typedef struct {
    PyObject_HEAD
    WaveBlock *blocks; /* open addressing with linear probing, at most half full */
    size_t capacity, count, left; /* slots, and of this wave: blocks, and those of them that have left a shard */
    uint32_t wave, shards;
} Waves;

/* Return the object as Waves, borrowed. NULL with an exception. */
Waves *as_waves(PyObject *object);

/* Return the shard of the rows of a head. */
static inline int shard_of(const Waves *waves, uint64_t head)
{
    return (int)(head % waves->shards);
}

/* Begin a fold, or a wave: Redis has everything before it. */
void begin_wave(Waves *waves);

/* Note that a part on this shard is resolved with the block. 0 with an exception. */
int use_block(Waves *waves, uint64_t block, int shard);

/* Note that a part removes the block, or a hash of the block, from a row on this shard. 0 with an exception. */
int leave_block(Waves *waves, uint64_t block, int shard);

/* Return whether a part of this wave on another shard is resolved with the block. */
int is_used_elsewhere(const Waves *waves, uint64_t block, int shard);

/* Return whether a part of this wave removes the block from a row on another shard. */
int has_left_elsewhere(const Waves *waves, uint64_t block, int shard);

#endif
