/* The rolling hashes of a chain of blocks, as app/waymark/domain/hashing.py describes them. */

#ifndef WAYMARK_CHAIN_H
#define WAYMARK_CHAIN_H

#include "xxh3.h"

enum { KEY = 8 }; /* bytes of a hash, and of a block key */

/* The state of a chain, from which the next block continues. */
typedef struct {
    Xxh3 state;
    uint64_t parent; /* a seq_hash, without the namespace */
    int has_parent;
} Chain;

/* Return the seq_hash of the next block, whose tokens are hashed already. */
static inline uint64_t go_on(Chain *chain, uint64_t local)
{
    unsigned char pair[2 * KEY];
    store_little64(pair, chain->parent);
    store_little64(pair + KEY, local);
    chain->parent = chain->has_parent ? xxh3(&chain->state, pair, sizeof pair) : local;
    chain->has_parent = 1;
    return chain->parent;
}

#endif
