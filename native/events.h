/* The events of a batch as C has them. */

#ifndef WAYMARK_EVENTS_H
#define WAYMARK_EVENTS_H

#include "native.h"

#include <stddef.h>
#include <stdint.h>

typedef enum { STORE, REMOVAL, CLEARING, OTHER } EventKind;

/* A plain event; of another one only where it stands in the payload. */
typedef struct {
    PyObject *medium, *adapter; /* NULL where its kind has none */
    uint64_t parent, group;
    size_t hashes, tokens; /* where its own begin among those of all events */
    uint32_t hashes_count, tokens_count, block_size;
    uint8_t kind, has_parent, has_group, is_main, tells_salts;
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
    PyTypeObject *stored, *removed;
    PyObject *cleared;
} Events;

/* The object as Events. NULL with an exception. */
Events *as_events(PyObject *object);

#endif
