/* The events of a batch as C has them.
 *
 * The events of most batches differ in their hashes and tokens only. These stay in C, as Events, and an object is made
 * only when one is read.
 */

#ifndef WAYMARK_EVENTS_H
#define WAYMARK_EVENTS_H

#include "native.h"

#include <stddef.h>
#include <stdint.h>

typedef enum { STORE, REMOVAL, CLEARING, OTHER } EventKind;

/* Whether the blocks of a store were new to its engine, or announced again. */
typedef enum { UNTOLD, FROM_NEW, FROM_REUSE } Origin;

/* A plain event, or only the position in the payload of any other event. */
typedef struct {
    PyObject *medium, *adapter; /* references; NULL if its kind has none */
    uint64_t parent, group;
    size_t hashes, tokens; /* the positions of its first ones among those of all events */
    uint32_t hashes_count, tokens_count, block_size;
    uint8_t kind, has_parent, has_group, tells_salts;
    uint8_t origin;      /* of a store: an Origin */
    uint8_t leaves_none; /* of a removal: it says that no copy of any block is left */
    Py_ssize_t start, end; /* in the payload */
} PlainEvent;

typedef struct {
    PyObject_HEAD
    PlainEvent *events;
    size_t count, capacity;
    uint64_t *hashes;
    size_t hashes_count, hashes_capacity;
    uint32_t *tokens; /* little-endian */
    size_t tokens_count, tokens_capacity;
    uint32_t block_size; /* of all stores, where the events are alike; 0 without a store */
    PyTypeObject *stored, *reference, *removed; /* references, as the next one */
    PyObject *cleared;
} Events;

/* The object as Events, borrowed. NULL with an exception. */
Events *as_events(PyObject *object);

/* Events without any yet; `stored`, `reference` and `removed` are types, `cleared` an object. */
Events *new_events(PyObject *stored, PyObject *reference, PyObject *removed, PyObject *cleared);

/* Release the references of an event. */
static inline void drop_event(PlainEvent *event)
{
    Py_CLEAR(event->medium);
    Py_CLEAR(event->adapter);
}

/* A list of all events, each as an object. */
PyObject *list_events(const Events *events);

/* Whether the events of two batches, each of which can be kept together, are alike: those of `more` differ from those
 * of `events` in their blocks only. -1 with an exception. */
int are_of_one_kind(const Events *events, const Events *more);

/* Whether all events are stores that are alike, each with the tokens of its blocks, and removals that are alike: the
 * block size of the stores is then that of the events. -1 with an exception. */
int stay_together(Events *events);

/* go_on(payloads, ts, rank, publisher, events_max, hashes_max, medium, stored_fields, removed_fields); batches.c */
PyObject *events_go_on(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

#endif
