/* The places of a stream, each of them once, with numbers.
 *
 * A place exists as long as one of its blocks; then its number may be given to another place. It takes 40 bytes and a
 * slot of the index.
 */

#ifndef WAYMARK_PLACES_H
#define WAYMARK_PLACES_H

#include "index.h"
#include "place.h"

typedef struct {
    uint64_t head;   /* in a free place, 1 more than the number of the next free one */
    uint64_t branch; /* key of the first block of a branch row, else 0 */
    uint64_t namespace;
    uint32_t blocks; /* the number of places in use */
    uint8_t kind;
} Place;

/* A pointer to one of `places` is valid until the next place is added. */
typedef struct {
    PyObject_HEAD
    Place *places;
    uint32_t count, capacity, used;
    uint32_t free; /* 1 more than the number of the first free place; 0 for none */
    Index index;
    PyObject *place_type, *spot_type;
    PyObject *last; /* the Place that was made last, of the number last_number; NULL for none */
    uint32_t last_number;
} Places;

/* Return the object as Places, borrowed. NULL with an exception. */
Places *as_places(PyObject *object);

/* Read a Place of Python into a place without blocks, in a namespace. 0 with an exception. */
int read_place_in(PyObject *object, PyObject *namespace, Place *place);

/* Return the number of a place, which is added if it is new. A new place has no block: it must be entered, or it is
 * never removed. -1 with an exception; nothing has changed then. */
int64_t number_of_place(Places *places, const Place *place);

/* Count one more block at the place. */
static inline void enter_place(Places *places, uint32_t number)
{
    places->places[number].blocks++;
}

/* Remove a place without blocks; its number is free then. */
void drop_place(Places *places, uint32_t number);

/* Count one block less at the place. It is removed with its last block. */
static inline void leave_place(Places *places, uint32_t number)
{
    if (--places->places[number].blocks == 0)
        drop_place(places, number);
}

/* Return the Place with this number, which is in use. */
PyObject *make_place(Places *places, uint32_t number);

#endif
