/* The value of a row: the blocks that it lists, and the holders of each; app/waymark/domain/rows.py has its form. */

#ifndef WAYMARK_ROWS_H
#define WAYMARK_ROWS_H

#include "input.h"
#include "place.h"
#include "slots.h"

enum { KEY = 8, PIECE = 32, SLOTS_MAX = 64, VALUES_MAX = 128 };

/* A holder in a value: its id as a number and as text, which is in the value, and the own blocks of the piece that it
 * has. */
typedef struct {
    uint64_t id;
    const char *text;
    uint32_t length, blocks;
} Holder;

/* An array that grows, with PyMem_Realloc; its creator frees `first`. */
typedef struct {
    Holder *first;
    size_t count, room;
} Holders;

/* The blocks of a chain in one piece, and their slots as a row has them. */
typedef struct {
    char slots[SLOT_CHARS * PIECE];
    int count;
    uint32_t every; /* a bit for each */
} Piece;

/* The slots of a value. */
typedef struct {
    int count, is_marked, first; /* first: the own block in the first slot; PIECE in a shared branch row */
    uint32_t found;              /* own blocks that are in a slot */
    int shift;                   /* own block i is in slot i - shift for each of them; -1: no such number */
    signed char slot_of[PIECE];  /* -1: in no slot */
} Slots;

/* Make a piece of the first blocks of a chain, at most PIECE; there are `count` keys. */
void open_piece(Piece *piece, const unsigned char *keys, Py_ssize_t count);

/* Read the slots of a value; *rest gets the place where they end. 0 if they cannot be read. */
int read_slots(const Input *value, const Piece *piece, Slots *slots, const char **rest);

/* Append the holders of a value, from `at` to its end, to `holders`, ascending; their texts stay in the value. 0 if
 * they cannot be read, and `holders` is unchanged then; -1 with an exception. */
int read_holders(const char *at, const char *end, const Slots *slots, Holders *holders);

/* Bring the holders of several values into one order, each once. */
void unite(Holders *holders);

#endif
