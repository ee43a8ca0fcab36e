/* Turns the payload of a batch in vLLM's dialect, which most engines speak, into events.
 *
 * Events that are not plain are left to Python; so are batches of an unusual form.
 */

#include "fields.h"
#include "input.h"
#include "reserve.h"

enum { PUBLISHER_ID = 16, /* bytes of the id of a process, the fourth element of a batch */ ELEMENTS_MAX = 8 };

/* The time or the rank of a batch. FAILED with an exception. */
static Outcome read_number(Reader *reader, PyObject **found)
{
    Value value;
    if (!read_value(reader, &value))
        return UNUSUAL;
    if (value.kind == NIL)
        *found = Py_NewRef(Py_None);
    else if (value.kind == INTEGER)
        *found = PyLong_FromUnsignedLongLong(value.number);
    else if (value.kind == FLOATING) {
        double number;
        memcpy(&number, &value.number, sizeof number);
        if (number != number)
            return UNUSUAL;
        *found = PyFloat_FromDouble(number);
    } else
        return UNUSUAL;
    return *found == NULL ? FAILED : READ;
}

/* The id of the process that sent a batch, if the fourth element of the batch is such an id: 16 bytes. FAILED with an
 * exception. */
static Outcome read_publisher(Reader *reader, PyObject **found)
{
    Value value;
    if (!read_value(reader, &value) || !is_simple(&value))
        return UNUSUAL;
    if (value.kind != BINARY || value.number != PUBLISHER_ID)
        return READ;
    *found = PyBytes_FromStringAndSize((const char *)value.start, PUBLISHER_ID);
    return *found == NULL ? FAILED : READ;
}

/* Append all events to those of the batch, and store in *others how many of them are left to Python. UNUSUAL if the
 * payload ends before the events do. */
static Outcome read_list(Batch *batch, uint64_t count, Py_ssize_t *others)
{
    Events *events = batch->events;
    for (uint64_t i = 0; i < count; i++) {
        PlainEvent event = {0};
        const unsigned char *start = batch->reader.at;
        Outcome outcome = read_event(batch, &event);
        if (outcome == UNUSUAL) {
            drop_event(&event);
            batch->reader.at = start;
            if (!skip_value(&batch->reader, 0))
                return UNUSUAL;
            event = (PlainEvent){.kind = OTHER, .start = start - batch->begin, .end = batch->reader.at - batch->begin};
            outcome = READ;
            ++*others;
        }
        if (outcome == READ &&
            !reserve((void **)&events->events, &events->capacity, events->count, 1, sizeof *events->events))
            outcome = FAILED;
        if (outcome == FAILED) {
            drop_event(&event);
            return FAILED;
        }
        events->hashes_count += event.hashes_count;
        events->tokens_count += event.tokens_count;
        events->events[events->count++] = event;
    }
    return READ;
}

/* The fields of a batch besides its events, as references or NULL. */
typedef struct {
    PyObject *ts, *rank, *publisher;
    Py_ssize_t others; /* events that are left to Python */
} Head;

/* Release its references. */
static void drop_head(Head *head)
{
    Py_XDECREF(head->ts);
    Py_XDECREF(head->rank);
    Py_XDECREF(head->publisher);
}

/* Read a whole payload into the events of the batch and *head. The caller releases *head in any case. */
static Outcome read_all(Batch *batch, Py_ssize_t events_max, Head *head)
{
    Value root, list;
    Outcome outcome = UNUSUAL;
    if (read_value(&batch->reader, &root) && root.kind == LIST && root.number >= 2 && root.number <= ELEMENTS_MAX)
        outcome = read_number(&batch->reader, &head->ts);
    if (outcome == READ)
        outcome = read_value(&batch->reader, &list) && list.kind == LIST && list.number <= (uint64_t)events_max;
    if (outcome == READ)
        outcome = read_list(batch, list.number, &head->others);
    if (outcome == READ && root.number > 2)
        outcome = read_number(&batch->reader, &head->rank);
    if (outcome == READ && root.number > 3)
        outcome = read_publisher(&batch->reader, &head->publisher);
    for (uint64_t i = 4; outcome == READ && i < root.number; i++)
        outcome = skip_simple(&batch->reader) ? READ : UNUSUAL;
    return outcome == READ && batch->reader.at != batch->reader.end ? UNUSUAL : outcome;
}

/* The same as read_batch, for bytes in memory. */
static PyObject *read_payload(Batch *batch, Py_ssize_t events_max)
{
    Head head = {0};
    PyObject *found = NULL, *answer = NULL;
    const Outcome outcome = read_all(batch, events_max, &head);
    if (outcome == READ) {
        const int keeping = keep_together(batch->events);
        if (keeping >= 0)
            found = keeping == APART ? list_events(batch->events) : Py_NewRef((PyObject *)batch->events);
        answer = found == NULL ? NULL : Py_BuildValue("OOOOnN", head.ts, found, head.rank == NULL ? Py_None : head.rank,
                                                      head.publisher == NULL ? Py_None : head.publisher, head.others,
                                                      PyBool_FromLong(keeping == MIXED));
    } else if (outcome != FAILED)
        answer = Py_NewRef(Py_None);
    Py_XDECREF(found);
    drop_head(&head);
    return answer;
}

/* A batch to be read from memory. */
static Batch begin_batch(const Input *payload, Events *events, PyObject *medium_of, long stored_fields,
                         long removed_fields)
{
    const unsigned char *start = (const unsigned char *)payload->start;
    return (Batch){.reader = {start, start + payload->size}, .begin = start, .events = events,
                   .stored_fields = (uint64_t)stored_fields, .removed_fields = (uint64_t)removed_fields,
                   .medium_of = medium_of};
}

/* Release the references that reading has kept. */
static void end_batch(Batch *batch)
{
    Py_XDECREF(batch->medium);
    Py_XDECREF(batch->adapter);
}

/* Whether these numbers of fields of a store and of a removal may be read. 0 with an exception. */
static int are_fields(long stored_fields, long removed_fields)
{
    if (stored_fields >= 1 && stored_fields <= STORED_FIELDS && removed_fields >= 1 && removed_fields <= REMOVED_FIELDS)
        return 1;
    PyErr_Format(PyExc_ValueError, "an event has 1 to 10 fields of a store, and 1 to 3 of a removal");
    return 0;
}

/* read_batch(payload: bytes, events_max: int, stored: type, reference: type, window: type, removed: type, cleared, medium,
 *            stored_fields: int, removed_fields: int)
 *     -> tuple[float | int | None, list | Events, float | int | None, bytes | None, int, bool] | None
 *
 * The batch `[ts, events, rank?, publisher?, ...]`: ts, the events, the rank, the id of the publisher's process, how
 * many events are not plain, and whether the events are mixed. In place of an event that is not plain there is its
 * position in the payload, (start, end). `stored_fields` and `removed_fields` are the most fields that are read of a
 * store and of a removal that is a list. The events are Events if keep_together can keep them. None if the batch itself
 * is not plain, or has more than `events_max` events. `medium` is called with the name of a medium, or None, and
 * returns our name for it, or None if it is not a name.
 */
PyObject *read_batch(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Input payload;
    if (!has_arguments("read_batch", nargs, 10))
        return NULL;
    const Py_ssize_t events_max = PyLong_AsSsize_t(args[1]);
    const long stored_fields = PyErr_Occurred() ? 0 : PyLong_AsLong(args[8]);
    const long removed_fields = PyErr_Occurred() ? 0 : PyLong_AsLong(args[9]);
    if (PyErr_Occurred() || !are_fields(stored_fields, removed_fields))
        return NULL;
    const EventTypes types = {args[2], args[3], args[4], args[5], args[6]};
    if (!PyType_Check(types.stored) || !PyType_Check(types.reference) || !PyType_Check(types.window) ||
        !PyType_Check(types.removed) || events_max < 0)
        return PyErr_Format(PyExc_TypeError, "read_batch() takes a ceiling and the types of four events");
    if (!open_bytes(args[0], &payload))
        return NULL;
    Events *events = new_events(&types);
    PyObject *answer = NULL;
    if (events != NULL) {
        Batch batch = begin_batch(&payload, events, args[7], stored_fields, removed_fields);
        answer = read_payload(&batch, events_max);
        end_batch(&batch);
        Py_DECREF((PyObject *)events);
    }
    close_input(&payload);
    return answer;
}

/* ---- batches that go on -------------------------------------------------------------------------- */

#define SECONDS_MAX 1e11 /* a larger time counts milliseconds */

/* The common facts of the batches that continue, and the counts of their events. */
typedef struct {
    const Events *first;
    PyObject *ts, *rank, *publisher; /* the ts of the batch before, borrowed, and the ts of all */
    PyObject *medium_of;
    long stored_fields, removed_fields;
    Py_ssize_t events_max;
    size_t hashes_max;
    size_t stores, stored, removals, removed;
} Going;

/* Whether two times are seconds of one clock that has not gone back. */
static int are_in_order(PyObject *before, PyObject *ts)
{
    if (!PyFloat_Check(before) || !PyFloat_Check(ts))
        return 0;
    const double from = PyFloat_AsDouble(before), to = PyFloat_AsDouble(ts);
    return 0 <= from && from <= to && to < SECONDS_MAX;
}

/* Whether the rank of a batch is this one. -1 with an exception. */
static int is_rank(PyObject *found, PyObject *rank)
{
    if (found == NULL || found == Py_None || rank == Py_None)
        return (found == NULL ? Py_None : found) == rank;
    return PyLong_Check(found) ? PyObject_RichCompareBool(found, rank, Py_EQ) : 0;
}

/* Whether a batch differs from the one before in its blocks only, and its hashes are within the bound. -1 with an
 * exception. */
static int goes_on(const Going *going, const Events *events, const Head *head)
{
    if (head->others > 0 || !are_in_order(going->ts, head->ts) ||
        events->hashes_count > going->hashes_max - going->stored - going->removed)
        return 0;
    int is_alike = is_rank(head->rank, going->rank);
    if (is_alike == 1)
        is_alike = PyObject_RichCompareBool(head->publisher == NULL ? Py_None : head->publisher, going->publisher, Py_EQ);
    return is_alike == 1 ? are_of_one_kind(going->first, events) : is_alike;
}

/* Count the events of a batch. */
static void add_up(Going *going, const Events *events)
{
    for (size_t i = 0; i < events->count; i++) {
        const PlainEvent *event = &events->events[i];
        *(event->kind == STORE ? &going->stores : &going->removals) += 1;
        *(event->kind == STORE ? &going->stored : &going->removed) += event->hashes_count;
    }
}

/* Read the next batch: append its events to the list `found`, and set *ts to its time, a reference. 1, or 0 if the
 * batch does not continue, or -1 with an exception. */
static int read_next(Going *going, PyObject *payload, PyObject *found, PyObject **ts)
{
    Input input;
    Head head = {0};
    if (!open_bytes(payload, &input))
        return -1;
    Events *events = new_events(&going->first->types);
    int outcome = -1;
    if (events != NULL) {
        Batch batch = begin_batch(&input, events, going->medium_of, going->stored_fields, going->removed_fields);
        outcome = (int)read_all(&batch, going->events_max, &head);
        end_batch(&batch);
        if (outcome == 1)
            outcome = keep_together(events);
        if (outcome > 0)
            outcome = outcome == ALIKE && goes_on(going, events, &head);
        if (outcome == 1 && PyList_Append(found, (PyObject *)events) < 0)
            outcome = -1;
        if (outcome == 1) {
            add_up(going, events);
            *ts = Py_NewRef(head.ts);
        }
        Py_DECREF((PyObject *)events);
    }
    drop_head(&head);
    close_input(&input);
    return outcome;
}

/* go_on(payloads: tuple[bytes, ...], ts: float | None, rank: int | None, publisher: bytes | None, events_max: int,
 *       hashes_max: int, medium, stored_fields: int, removed_fields: int)
 *     -> tuple[list[Events], float | None, int, int, int, int]
 *
 * The events of the batches in these payloads, up to the first that differs from this batch in more than its blocks;
 * ts, rank and publisher are those of this batch. Together they have at most `hashes_max` hashes. After the events: the
 * ts of the last batch, and how many stores, stored blocks, removals and removed blocks there are in all of them. The
 * other arguments are those of read_batch.
 */
PyObject *events_go_on(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments("go_on", nargs, 9))
        return NULL;
    if (!PyTuple_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "go_on() takes a tuple of payloads");
    Going going = {.first = (Events *)self, .ts = args[1], .rank = args[2], .publisher = args[3], .medium_of = args[6]};
    going.events_max = PyLong_AsSsize_t(args[4]);
    going.hashes_max = PyErr_Occurred() ? 0 : PyLong_AsSize_t(args[5]);
    going.stored_fields = PyErr_Occurred() ? 0 : PyLong_AsLong(args[7]);
    going.removed_fields = PyErr_Occurred() ? 0 : PyLong_AsLong(args[8]);
    if (PyErr_Occurred() || !are_fields(going.stored_fields, going.removed_fields))
        return NULL;
    PyObject *found = PyList_New(0), *ts = Py_NewRef(args[1]);
    int outcome = found == NULL ? -1 : 1;
    for (Py_ssize_t i = 0; outcome == 1 && i < PyTuple_Size(args[0]); i++) {
        PyObject *next = NULL;
        outcome = read_next(&going, PyTuple_GetItem(args[0], i), found, &next);
        if (outcome == 1) {
            Py_DECREF(ts);
            going.ts = ts = next;
        }
    }
    if (outcome >= 0)
        return Py_BuildValue("NNnnnn", found, ts, (Py_ssize_t)going.stores, (Py_ssize_t)going.stored,
                             (Py_ssize_t)going.removals, (Py_ssize_t)going.removed);
    Py_XDECREF(found);
    Py_DECREF(ts);
    return NULL;
}
