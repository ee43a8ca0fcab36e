/* The payload of a batch, in vLLM's dialect, to events: what most events of most engines are.
 *
 * Events that are not plain are left to Python; so are batches of an unusual form.
 */

#include "fields.h"
#include "input.h"
#include "reserve.h"

enum { STORED_FIELDS = ATTENTION + 1, REMOVED_FIELDS = 3 }; /* of vLLM's lists */
enum { TELLS_SALTS_FROM = 9 }; /* elements of a list: with this many it has a place for salts */

enum { PUBLISHER_ID = 16, /* bytes of the id of a process, the fourth element of a batch */ ELEMENTS_MAX = 8 };

static const Name stored_tag = NAME("BlockStored"), removed_tag = NAME("BlockRemoved"),
                  cleared_tag = NAME("AllBlocksCleared"), local = NAME("LOCAL");

/* ---- events -------------------------------------------------------------------------------------- */

/* A store, from its fields. */
static Outcome read_stored(Batch *batch, const Event *fields, PlainEvent *event)
{
    Value adapter;
    uint64_t block_size = 0;
    event->kind = STORE;
    Outcome outcome = read_hashes(batch, fields, event);
    if (outcome == READ)
        outcome = read_parent(batch, fields, event);
    if (outcome == READ)
        outcome = read_tokens(batch, fields, event);
    if (outcome == READ)
        outcome = read_integer(batch, fields->at[BLOCK_SIZE], 65536, &block_size);
    if (outcome == READ)
        outcome = read_medium(batch, fields, event);
    if (outcome == READ)
        outcome = read_adapter(batch, fields, &adapter, event);
    if (outcome == READ)
        outcome = read_group(batch, fields, event);
    if (outcome == READ)
        outcome = read_attention(batch, fields);
    if (outcome == READ)
        outcome = read_origin(batch, fields, event);
    if (outcome == READ && !has_plain_keys(batch, fields, event->hashes_count, &adapter))
        outcome = UNUSUAL;
    event->block_size = (uint32_t)block_size;
    event->tells_salts = fields->elements == 0 || fields->elements >= TELLS_SALTS_FROM;
    return outcome;
}

/* A removal, from its fields. */
static Outcome read_removed(Batch *batch, const Event *fields, PlainEvent *event)
{
    event->kind = REMOVAL;
    Outcome outcome = read_hashes(batch, fields, event);
    if (outcome == READ)
        outcome = read_medium(batch, fields, event);
    if (outcome == READ)
        outcome = read_group(batch, fields, event);
    return outcome == READ ? read_copy_counts(batch, fields, event) : outcome;
}

/* The fields of a list as those of a removal, which are fewer. */
static void move_fields_of_removal(Event *event)
{
    if (event->elements == 0)
        return;
    event->at[MEDIUM] = event->at[PARENT];
    event->at[GROUP] = event->at[TOKEN_IDS];
    event->at[PARENT] = event->at[TOKEN_IDS] = NULL;
}

/* Leave out the fields of a list from this one on, which its dialect does not have. 0 where one is UNUSUAL: nobody has
 * seen then whether the library can read it. */
static int cut_fields(const Batch *batch, Event *event, uint64_t fields)
{
    if (event->elements == 0)
        return 1;
    for (Field field = (Field)fields; field <= ATTENTION; field++) {
        Reader inside;
        const Value value = value_at(batch, event->at[field], &inside);
        if (!is_simple(&value))
            return 0;
        event->at[field] = NULL;
    }
    if (event->elements > fields + 1)
        event->elements = fields + 1;
    return 1;
}

/* Whether an event has none of these fields, or nil. */
static int has_none_of(const Batch *batch, const Event *event, const Field *fields, int count)
{
    Reader inside;
    for (int i = 0; i < count; i++)
        if (value_at(batch, event->at[fields[i]], &inside).kind != NIL)
            return 0;
    return 1;
}

/* The next event; UNUSUAL leaves the reader anywhere in it. */
static Outcome read_event(Batch *batch, PlainEvent *found)
{
    static const Field of_maps[] = {CACHE_SALT, IMAGES, COMPONENT}, of_removals[] = {COPY_COUNTS};
    static const Field of_stores[] = {PARENT,    TOKEN_IDS,  BLOCK_SIZE, LORA_ID,
                                      LORA_NAME, EXTRA_KEYS, ATTENTION,  ORIGIN};
    Value head;
    Event event;
    Reader inside;
    if (!read_value(&batch->reader, &head) || head.kind < LIST || !find_fields(&batch->reader, &head, &event))
        return UNUSUAL;
    const Value tag = value_at(batch, event.at[TYPE], &inside), locality = value_at(batch, event.at[LOCALITY], &inside);
    if (!has_none_of(batch, &event, of_maps, 3) || (locality.kind != NIL && !is_name(&locality, &local)))
        return UNUSUAL;
    if (is_name(&tag, &stored_tag)) {
        const int is_usual = cut_fields(batch, &event, batch->stored_fields) && has_none_of(batch, &event, of_removals, 1);
        return is_usual ? read_stored(batch, &event, found) : UNUSUAL;
    }
    if (is_name(&tag, &removed_tag)) {
        /* What is behind the fields of a vLLM removal is left to Python, which does not read it. */
        if (batch->removed_fields < REMOVED_FIELDS && !cut_fields(batch, &event, batch->removed_fields))
            return UNUSUAL;
        move_fields_of_removal(&event);
        return has_none_of(batch, &event, of_stores, 8) ? read_removed(batch, &event, found) : UNUSUAL;
    }
    if (!is_name(&tag, &cleared_tag) || event.elements > 1 || (head.kind == MAP && head.number > 1))
        return UNUSUAL;
    found->kind = CLEARING;
    return READ;
}

/* ---- batches ------------------------------------------------------------------------------------- */

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

/* The id of the process that sent a batch, where its fourth element is one: 16 bytes. FAILED with an exception. */
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

/* All events, behind those of the batch; in *others how many of them are left to Python. UNUSUAL where the payload ends
 * before they do. */
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

/* As read_batch, of bytes in memory. */
static PyObject *read_payload(Batch *batch, Py_ssize_t events_max)
{
    Value root, list;
    PyObject *ts = NULL, *rank = NULL, *publisher = NULL, *found = NULL, *answer = NULL;
    Py_ssize_t others = 0;
    Outcome outcome = UNUSUAL;
    if (read_value(&batch->reader, &root) && root.kind == LIST && root.number >= 2 && root.number <= ELEMENTS_MAX)
        outcome = read_number(&batch->reader, &ts);
    if (outcome == READ)
        outcome = read_value(&batch->reader, &list) && list.kind == LIST && list.number <= (uint64_t)events_max;
    if (outcome == READ)
        outcome = read_list(batch, list.number, &others);
    if (outcome == READ && root.number > 2)
        outcome = read_number(&batch->reader, &rank);
    if (outcome == READ && root.number > 3)
        outcome = read_publisher(&batch->reader, &publisher);
    for (uint64_t i = 4; outcome == READ && i < root.number; i++)
        outcome = skip_simple(&batch->reader) ? READ : UNUSUAL;
    if (outcome == READ && batch->reader.at == batch->reader.end) {
        const int are_together = stay_together(batch->events);
        if (are_together >= 0)
            found = are_together ? Py_NewRef((PyObject *)batch->events) : list_events(batch->events);
        answer = found == NULL ? NULL : Py_BuildValue("OOOOn", ts, found, rank == NULL ? Py_None : rank,
                                                        publisher == NULL ? Py_None : publisher, others);
    } else if (outcome != FAILED)
        answer = Py_NewRef(Py_None);
    Py_XDECREF(ts);
    Py_XDECREF(found);
    Py_XDECREF(rank);
    Py_XDECREF(publisher);
    return answer;
}

/* read_batch(payload: bytes, events_max: int, stored: type, reference: type, removed: type, cleared, medium,
 *            stored_fields: int, removed_fields: int)
 *     -> tuple[float | int | None, list | Events, float | int | None, bytes | None, int] | None
 *
 * The batch `[ts, events, rank?, publisher?, ...]`: ts, the events, the rank, the id of the publisher's process, and how
 * many events are not plain. Instead of such a one stands where it is in the payload, (start, end). An event that is a
 * list has at most so many fields of a store, or of a removal; what is behind is not read. The events are Events where all are stores with the tokens of their
 * blocks, and removals, and neither differ in more than their blocks. None where the batch itself is not plain, or has
 * more than `events_max` events. `medium` turns the name of a medium, or None, into ours; None for one that is not a
 * name.
 */
PyObject *read_batch(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Input payload;
    if (!has_arguments("read_batch", nargs, 9))
        return NULL;
    const Py_ssize_t events_max = PyLong_AsSsize_t(args[1]);
    const long stored_fields = PyErr_Occurred() ? 0 : PyLong_AsLong(args[7]);
    const long removed_fields = PyErr_Occurred() ? 0 : PyLong_AsLong(args[8]);
    if (PyErr_Occurred())
        return NULL;
    if (stored_fields < 1 || stored_fields > STORED_FIELDS || removed_fields < 1 || removed_fields > REMOVED_FIELDS)
        return PyErr_Format(PyExc_ValueError, "read_batch() takes 1 to 10 fields of a store, and 1 to 3 of a removal");
    if (!PyType_Check(args[2]) || !PyType_Check(args[3]) || !PyType_Check(args[4]) || events_max < 0)
        return PyErr_Format(PyExc_TypeError, "read_batch() takes a ceiling and the types of three events");
    if (!open_bytes(args[0], &payload))
        return NULL;
    Events *events = new_events(args[2], args[3], args[4], args[5]);
    PyObject *answer = NULL;
    if (events != NULL) {
        const unsigned char *start = (const unsigned char *)payload.start;
        Batch batch = {
            .reader = {start, start + payload.size}, .begin = start, .events = events,
            .stored_fields = (uint64_t)stored_fields, .removed_fields = (uint64_t)removed_fields, .medium_of = args[6]};
        answer = read_payload(&batch, events_max);
        Py_XDECREF(batch.medium);
        Py_XDECREF(batch.adapter);
        Py_DECREF((PyObject *)events);
    }
    close_input(&payload);
    return answer;
}
