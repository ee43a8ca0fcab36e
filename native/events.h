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

/* The kinds of events. A window is a store of a group other than main attention, and a reference a store without tokens:
 * both name blocks by their hashes alone. */
typedef enum { STORE, REMOVAL, WINDOW, REFERENCE, CLEARING, OTHER } EventKind;

/* Whether the blocks of a store were new to its engine, or announced again. */
typedef enum { UNTOLD, FROM_NEW, FROM_REUSE } Origin;

/* A plain event, or only the position in the payload of any other event. */
typedef struct {
    PyObject *medium, *adapter; /* references; NULL if its kind has none */
    uint64_t parent, group;
    size_t hashes, tokens; /* where its hashes and tokens begin among those of all events */
    uint32_t hashes_count, tokens_count, block_size;
    uint32_t window; /* of a window, in tokens; 0 if it is unknown */
    uint8_t kind, has_parent, has_group, tells_salts;
    uint8_t is_dense;    /* whether a store or a window has the tokens of all its blocks */
    uint8_t form;        /* the number of its form, if the events are kept together */
    uint8_t origin;      /* of a store: an Origin */
    uint8_t leaves_none; /* whether a removal says that no copy of any block is left */
    Py_ssize_t start, end; /* in the payload */
} PlainEvent;

/* The types of the events in Python, and the object for a clear: references. */
typedef struct {
    PyObject *stored, *reference, *window, *removed, *cleared;
} EventTypes;

typedef struct {
    PyObject_HEAD
    PlainEvent *events;
    size_t count, capacity;
    uint64_t *hashes;
    size_t hashes_count, hashes_capacity;
    uint32_t *tokens; /* little-endian */
    size_t tokens_count, tokens_capacity;
    uint32_t block_size; /* of all stores, if the events are alike; 0 without a store */
    size_t forms;        /* how many forms the events have, if they are kept together */
    EventTypes types;
} Events;

/* Return the object as Events, borrowed. NULL with an exception. */
Events *as_events(PyObject *object);

/* Return new Events, which are empty; their events become objects of these types. */
Events *new_events(const EventTypes *types);

/* Release the references of an event. */
static inline void drop_event(PlainEvent *event)
{
    Py_CLEAR(event->medium);
    Py_CLEAR(event->adapter);
}

/* Intern the names of the attributes of all events. 0 with an exception. */
int intern_attributes(void);

/* Return an event as an object; for an event that is left to Python, its position in the payload, (start, end). */
PyObject *make_event(const Events *events, const PlainEvent *event);

/* Return an event without its blocks, as an object. */
PyObject *make_pattern(const Events *events, const PlainEvent *event);

/* Return a list of all events, each as an object. */
PyObject *list_events(const Events *events);

/* Return whether the events of two batches, each of which can be kept together, are alike: those of `more` differ from
 * those of `events` in their blocks only. -1 with an exception. */
int are_of_one_kind(const Events *events, const Events *more);

enum { FORMS_MAX = 16 };

/* How the events of a batch are kept: as objects; together, if all stores have their tokens and are alike, and all
 * removals are alike; or together, in several forms. */
typedef enum { APART, ALIKE, MIXED } Keeping;

/* Return how these events can be kept. If they are kept together, each event gets the number of its form: events of one
 * form differ in their blocks only. The events get the block size of the first store. -1 with an exception. */
int keep_together(Events *events);

/* run(at, position, hashes_max, parts, holders, forms, seed, full, piece_blocks, waves); mixed.c */
PyObject *events_run(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

/* ---- batches that go on: batches.c and frames.c ---------------------------------------------------- */

/* The lengths of two tuples that run_frames takes: `reading`, and a way (see frames.c). */
enum { READING_OBJECTS = 7, WAY_OBJECTS = 5 };

/* Batches that follow each other and differ in their blocks only: references. */
typedef struct {
    PyObject *way;    /* that of their rank; NULL for go_on */
    PyObject *events; /* a list with the Events of each */
    PyObject *ts;     /* of the last one */
    Py_ssize_t stores, stored, removals, removed;
} RankBatches;

/* Return whether an object is a tuple of at least `count` objects. 0 with an exception. */
int is_tuple_of(PyObject *object, Py_ssize_t count);

/* Return the events, the ts and the numbers as a tuple. */
PyObject *describe_batches(const RankBatches *batches);

/* Release the references. */
void drop_batches(RankBatches *batches);

/* Read batches up to the first that has no way, or differs in more than its blocks, into *found, which has room for
 * all. Batches of one rank that follow each other share a RankBatches. Return their number, even with an exception. */
Py_ssize_t read_by_ways(PyObject *ways, PyObject *payloads, PyObject *ts, PyObject *reading, RankBatches *found);

/* go_on(payloads, ts, rank, publisher, events_max, hashes_max, medium, stored_fields, removed_fields); batches.c */
PyObject *events_go_on(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

#endif
