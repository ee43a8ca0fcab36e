/* The declarations that the files of a run of plain events share: runs.c has the run, copies.c the blocks with several
 * copies, mixed.c the run of events of several forms. */

#ifndef WAYMARK_RUNS_H
#define WAYMARK_RUNS_H

#include "events.h"
#include "parts.h"
#include "plain.h"
#include "waves.h"

/* What a run may do, and how copies count; app/waymark/domain/known.py has the same bits, and says what they mean. */
enum May {
    MAY_STORE = 1,
    MAY_REMOVE = 2,
    MAY_REPEAT = 4,
    COUNTS = 8,
    REPLACES = 16,
    NOTES_LEFT = 32,
    REMOVED_EACH = 64,
};

/* Another table of the holder's rank. A generation is a table of the same name, and no two tables of one name have the
 * same block. */
typedef struct {
    KnownBlocks *known;
    uint64_t holder;
    int is_generation;
} Neighbour;

/* The last position of a hash: the position of its block in a part is STEP times as high, plus 1. */
#define HASH_POSITION_MAX ((POSITION_MAX - 1) / STEP)

/* The common facts of all events of a run, and memory for one event. */
typedef struct {
    const Events *events;
    Parts *parts;
    Waves *waves; /* NULL with one shard */
    PyObject *full, *gone;
    uint64_t holder, namespace;
    uint64_t *keys;
    Block *blocks;
    uint32_t *numbers; /* of those blocks */
    uint32_t *owners;  /* of those blocks: 0 for the table itself, else 1 more than the number of a neighbour */
    PartBlock *some;
    size_t room; /* of these five, in hashes */
    Neighbour *neighbours;
    size_t neighbours_count;
    Xxh3 state;
    int piece_blocks, may; /* bits of May */
    size_t hashes;
    Py_ssize_t stores, stored, removed, restored, miscounted;
} Run;

/* ---- runs.c --------------------------------------------------------------------------------------- */

/* Return the fields of a part for the blocks at a place, except its kind. */
Part part_at(const KnownBlocks *known, uint32_t number, uint64_t holder);

/* Add blocks that follow each other in an event, the first at `position`; `copies` are those of each block, NULL for
 * none. 0 with an exception. */
int add_blocks(Run *run, const Part *part, int64_t position, const Block *blocks, size_t count, PyObject *copies);

/* Note that a part stores a piece which continues from `parent`, the seq_hash of a block, or NULL; the part may have to
 * wait. 0 with an exception. */
int note_stored(const Run *run, const Store *store, size_t start, size_t end, const uint64_t *parent, Part *part);

/* Add blocks that leave the place of a part. From the first that a part on another shard uses, they have to wait. The
 * arguments are those of add_blocks. */
int add_removed(Run *run, Part *part, int64_t position, const Block *blocks, size_t count, PyObject *copies);

/* Add the blocks of a store from `start` on, all of them new, and their parts. The first has this depth, and is put at
 * the place with this number, or at a new row if it is -1. 0 with an exception; some blocks may be added then. */
int store_new(KnownBlocks *known, Run *run, const Store *store, const uint64_t *above, size_t start, int64_t place,
              int depth, int64_t position);

/* ---- generations.c -------------------------------------------------------------------------------- */

/* Read the neighbours of a run: a tuple of (holder, KnownBlocks, whether it is a generation). 0 with an exception. */
int read_neighbours(KnownBlocks *known, Run *run, PyObject *given);

/* Return the table that has an engine hash: the run's own, or the first of its neighbours; NULL if there is none. */
KnownBlocks *table_with(KnownBlocks *known, const Run *run, uint64_t hash);

/* Return whether the blocks of a store from `start` on are new to all generations, and each of them comes once: 1 or 0,
 * -1 with an exception. */
int are_new_to_all(KnownBlocks *known, const Run *run, const Store *store, size_t start);

/* Collect as `collect` does, in all generations, into the run's blocks, numbers and owners. If a block is in another
 * generation, all have a single copy. 1 or 0, -1 with an exception. */
int collect_in_all(KnownBlocks *known, Run *run, const uint64_t *hashes, size_t count, int *are_last);

/* Return the table with the collected block `at`. */
KnownBlocks *owner_of(KnownBlocks *known, const Run *run, size_t at);

/* Return the end of the blocks from `start` on that one part can have: as `end_of_group`, within one table. */
size_t end_of_owned(const Run *run, size_t start, size_t count);

/* Make room for the blocks of an event. 0 with an exception. */
int make_event_room(Run *run, size_t hashes);

/* Free this room. */
void free_event_room(Run *run);

/* Run a store, at `position`. 1 if it was plain, 0 if not and nothing has changed, -1 with an exception; some of it may
 * be done then. */
int run_store(KnownBlocks *known, Run *run, const PlainEvent *event, int64_t position);

/* Run a removal in the same way. */
int run_removal(KnownBlocks *known, Run *run, const PlainEvent *event, int64_t position);

/* ---- copies.c ------------------------------------------------------------------------------------- */

/* Run a store whose first blocks are in the table, and whose others are new; *known_blocks gets the number of the
 * first. 1, or 0 if it is another store and nothing has changed, or -1 with an exception; some of it may be done then.
 * */
int store_again(KnownBlocks *known, Run *run, const PlainEvent *event, Store *store, const uint64_t *above,
                int64_t position, size_t *known_blocks);

/* Repeat the store of a block that is in the table with a single hash. `part` describes it, and says whether it has to
 * wait. 0 with an exception. */
int add_again(KnownBlocks *known, Run *run, const PlainEvent *event, Block *block, Part *part, int64_t position);

/* Run a removal of the collected blocks, some of which have several copies, or one that a removal has left. 1, or -1
 * with an exception; some of it may be done then. */
int remove_copies(KnownBlocks *known, Run *run, const PlainEvent *event, int64_t position);

#endif
