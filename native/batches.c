/* Turns the payload of a batch in vLLM's dialect, which most engines speak, into events.
 *
 * Events that are not plain are left to Python; so are batches of an unusual form.
 */

#include "fields.h"
#include "input.h"
#include "reserve.h"

enum { PUBLISHER_ID = 16, /* bytes of the id of a process, the fourth element of a batch */ ELEMENTS_MAX = 8 };

/* Read the time or the rank of a batch. FAILED with an exception. */
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

/* Read the id of the process that sent a batch, if the fourth element of the batch is such an id: 16 bytes. FAILED with
 * an exception. */
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

/* Release the references of a head. */
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

/* Do the same as read_batch, for bytes in memory. */
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

/* Return a batch to be read from memory. */
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

/* Return whether these numbers of fields of a store and of a removal may be read. 0 with an exception. */
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
 * position in the payload, (start, end). `stored_fields` and `removed_fields` are the most fields that are read if a
 * store, or a removal, is a list. The events are Events if keep_together can keep them. None if the batch itself is not
 * plain, or has more than `events_max` events. `medium` is called with the name of a medium, or None, and returns our
 * name for it, or None if it is not a name.
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

enum { MEDIUM_CHARS = 16 /* of a name that is remembered */ };

/* The common facts of the batches that continue. */
typedef struct {
    const Events *first;
    PyObject *ts, *rank, *publisher; /* the ts of the last batch, and the rank and the id of all batches; borrowed */
    PyObject *ways, *way;            /* for a call by ways: the ways by rank, and that of the last batch (a reference) */
    PyObject *medium;                /* of the last event, a reference or NULL, */
    char medium_name[MEDIUM_CHARS];  /* its name in the payload, */
    int64_t medium_size;             /* and the size of the name; -1 if it has none */
    PyObject *medium_of;
    long stored_fields, removed_fields;
    Py_ssize_t events_max;
    size_t hashes_max; /* in the batches that follow */
} Going;

/* Return whether two times are seconds of one clock that has not gone backwards. */
static int are_in_order(PyObject *before, PyObject *ts)
{
    if (!PyFloat_Check(before) || !PyFloat_Check(ts))
        return 0;
    const double from = PyFloat_AsDouble(before), to = PyFloat_AsDouble(ts);
    return 0 <= from && from <= to && to < SECONDS_MAX;
}

/* Return whether a batch has the common rank, or one with a way, which is remembered. -1 with an exception. */
static int has_way(Going *going, PyObject *rank)
{
    if (rank != Py_None && !PyLong_Check(rank))
        return 0;
    if (going->ways == NULL)
        return rank == Py_None || going->rank == Py_None ? rank == going->rank
                                                         : PyObject_RichCompareBool(rank, going->rank, Py_EQ);
    PyObject *way = PyObject_GetItem(going->ways, rank);
    if (way == NULL && PyErr_ExceptionMatches(PyExc_KeyError)) {
        PyErr_Clear();
        return 0;
    }
    Py_XDECREF(going->way);
    going->way = way;
    if (way == NULL || !is_tuple_of(way, WAY_OBJECTS))
        return -1;
    going->first = as_events(PyTuple_GetItem(way, 0));
    return going->first == NULL ? -1 : 1;
}

/* Return whether a batch differs from an earlier one in its blocks only, and its hashes are within the bound. -1
 * with an exception. */
static int goes_on(Going *going, const Events *events, const Head *head)
{
    if (head->others > 0 || !are_in_order(going->ts, head->ts) || events->hashes_count > going->hashes_max)
        return 0;
    int is_alike = has_way(going, head->rank == NULL ? Py_None : head->rank);
    if (is_alike == 1)
        is_alike = PyObject_RichCompareBool(head->publisher == NULL ? Py_None : head->publisher, going->publisher, Py_EQ);
    return is_alike == 1 ? are_of_one_kind(going->first, events) : is_alike;
}

/* Remember the medium of a batch for the next one. */
static void keep_medium(Going *going, const Batch *batch)
{
    going->medium = batch->medium;
    going->medium_size = batch->medium_at == NULL || batch->medium_size > MEDIUM_CHARS ? -1 : (int64_t)batch->medium_size;
    if (going->medium_size >= 0 && batch->medium_at != (const unsigned char *)going->medium_name)
        memcpy(going->medium_name, batch->medium_at, (size_t)going->medium_size);
}

/* Read the next batch: its events, or NULL if the batch does not continue, or with an exception. *ts becomes its time,
 * a reference. */
static PyObject *read_next(Going *going, PyObject *payload, PyObject **ts)
{
    Input input;
    Head head = {0};
    if (!open_bytes(payload, &input))
        return NULL;
    Events *events = new_events(&going->first->types);
    int outcome = -1;
    if (events != NULL) {
        Batch batch = begin_batch(&input, events, going->medium_of, going->stored_fields, going->removed_fields);
        if (going->medium_size >= 0) {
            batch.medium = Py_XNewRef(going->medium);
            batch.medium_at = (const unsigned char *)going->medium_name;
            batch.medium_size = (uint64_t)going->medium_size;
        }
        outcome = (int)read_all(&batch, going->events_max, &head);
        Py_XDECREF(going->medium);
        keep_medium(going, &batch);
        Py_XDECREF(batch.adapter);
        if (outcome == 1)
            outcome = keep_together(events);
        if (outcome > 0)
            outcome = outcome == ALIKE ? goes_on(going, events, &head) : 0;
        if (outcome == 1)
            *ts = Py_NewRef(head.ts);
        else
            Py_CLEAR(events);
    }
    drop_head(&head);
    close_input(&input);
    return (PyObject *)events;
}

/* Append a batch to those of one rank, which differ in their blocks only. Take over the references to its events and
 * its time. 0 with an exception. */
static int append_batch(Going *going, RankBatches *batches, PyObject *events, PyObject *ts)
{
    const Events *added = (Events *)events;
    for (size_t i = 0; i < added->count; i++) {
        const int is_store = added->events[i].kind == STORE;
        *(is_store ? &batches->stores : &batches->removals) += 1;
        *(is_store ? &batches->stored : &batches->removed) += (Py_ssize_t)added->events[i].hashes_count;
    }
    going->hashes_max -= added->hashes_count;
    Py_XDECREF(batches->ts);
    going->ts = batches->ts = ts;
    const int is_done = batches->events != NULL && PyList_Append(batches->events, events) == 0;
    Py_DECREF(events);
    return is_done;
}

/* Read the arguments of go_on from events_max on. 0 with an exception. */
static int read_reading(Going *going, PyObject *const *args)
{
    going->medium_size = -1;
    going->events_max = PyLong_AsSsize_t(args[0]);
    going->hashes_max = PyErr_Occurred() ? 0 : PyLong_AsSize_t(args[1]);
    going->medium_of = args[2];
    going->stored_fields = PyErr_Occurred() ? 0 : PyLong_AsLong(args[3]);
    going->removed_fields = PyErr_Occurred() ? 0 : PyLong_AsLong(args[4]);
    return !PyErr_Occurred() && are_fields(going->stored_fields, going->removed_fields);
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
    Going going = {.first = (Events *)self, .ts = args[1], .rank = args[2], .publisher = args[3]};
    RankBatches found = {.ts = Py_NewRef(args[1])};
    PyObject *result = NULL, *ts;
    if (read_reading(&going, args + 4) && (found.events = PyList_New(0)) != NULL) {
        for (Py_ssize_t i = 0; i < PyTuple_Size(args[0]); i++) {
            PyObject *next = read_next(&going, PyTuple_GetItem(args[0], i), &ts);
            if (next == NULL || !append_batch(&going, &found, next, ts))
                break;
        }
        result = PyErr_Occurred() ? NULL : describe_batches(&found);
    }
    Py_XDECREF(going.medium);
    drop_batches(&found);
    return result;
}

Py_ssize_t read_by_ways(PyObject *ways, PyObject *payloads, PyObject *ts, PyObject *reading, RankBatches *found)
{
    PyObject *args[READING_OBJECTS];
    for (Py_ssize_t i = 0; i < READING_OBJECTS; i++)
        args[i] = PyTuple_GetItem(reading, i);
    Going going = {.first = as_events(args[0]), .ts = ts, .ways = ways, .publisher = args[1]};
    Py_ssize_t count = 0;
    int is_done = going.first != NULL && read_reading(&going, args + 2);
    for (Py_ssize_t i = 0; is_done && i < PyTuple_Size(payloads); i++) {
        PyObject *next_ts, *next = read_next(&going, PyTuple_GetItem(payloads, i), &next_ts);
        if (next == NULL)
            break;
        if (count == 0 || found[count - 1].way != going.way)
            found[count++] = (RankBatches){.way = Py_NewRef(going.way), .events = PyList_New(0)};
        is_done = append_batch(&going, &found[count - 1], next, next_ts);
    }
    Py_XDECREF(going.medium);
    Py_XDECREF(going.way);
    return count;
}
