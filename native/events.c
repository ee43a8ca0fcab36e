/* The payload of a batch, in vLLM's dialect, to events: what most events of most engines are.
 *
 * A plain event has nothing in it that needs a rule of app/waymark/engines: no salt, no image, nothing that is to be
 * rejected. All others are left to Python, which has the words for them; so are batches of an unusual form.
 */

#include "bytes.h"
#include "input.h"
#include "msgpack.h"

enum {
    HASHES_MAX = 2048, /* of a plain event */
    BUCKETS = 2 * HASHES_MAX,
    LIST_FIELDS = 10,
    TELLS_SALTS_FROM = 9, /* elements of a list: with this many it has a place for salts */
};

/* Fields of a store, in the order of a list; what only maps have comes behind. */
typedef enum {
    BLOCK_HASHES,
    PARENT,
    TOKEN_IDS,
    BLOCK_SIZE,
    LORA_ID,
    MEDIUM,
    LORA_NAME,
    EXTRA_KEYS,
    GROUP,
    ATTENTION,
    LOCALITY,
    CACHE_SALT,
    IMAGES,
    TYPE,
    FIELDS,
} Field;

typedef struct {
    const char *text;
    size_t size;
} Name;

#define NAME(text) {text, sizeof text - 1}
static const Name field_names[FIELDS] = {
    NAME("block_hashes"), NAME("parent_block_hash"), NAME("token_ids"),      NAME("block_size"),
    NAME("lora_id"),      NAME("medium"),            NAME("lora_name"),      NAME("extra_keys"),
    NAME("group_idx"),    NAME("kv_cache_spec_kind"), NAME("locality"),      NAME("cache_salt"),
    NAME("block_mm_infos"), NAME("type"),
};
static const Name stored_tag = NAME("BlockStored"), removed_tag = NAME("BlockRemoved"),
                  cleared_tag = NAME("AllBlocksCleared");
static const Name main_attention[] = {NAME("full_attention"), NAME("mla_attention"), NAME("sink_full_attention")};

/* The attributes of Stored and of Removed, in the order in which they are built here. */
enum { STORED_ATTRIBUTES = 17, REMOVED_ATTRIBUTES = 8 };
static const char *const stored_names[STORED_ATTRIBUTES] = {
    "engine_hashes", "parent", "tokens", "block_size",        "medium",      "adapter",     "salts",
    "extras",        "group",  "part",   "is_main_attention", "tells_salts", "is_identity", "envelope",
    "is_deep",       "may_begin", "window",
};
static const char *const removed_names[REMOVED_ATTRIBUTES] = {
    "engine_hashes", "medium", "group", "adapter", "salts", "is_identity", "envelope", "part",
};
static PyObject *stored_attributes[STORED_ATTRIBUTES], *removed_attributes[REMOVED_ATTRIBUTES];

/* One call of read_batch. */
typedef struct {
    Reader reader;
    const unsigned char *begin;
    PyTypeObject *stored, *removed;
    PyObject *cleared;
    PyObject *medium_of;     /* a name of the wire, or None, to that of its medium */
    PyObject *medium;        /* of the last event */
    const unsigned char *medium_at; /* its name in the payload */
    uint64_t medium_size;
    PyObject *zero, *nothing; /* 0 and () */
} Batch;

/* Where the fields of an event are; NULL where it does not have them. */
typedef struct {
    const unsigned char *at[FIELDS];
    uint64_t elements; /* of a list; 0 of a map */
} Event;

/* What reading comes to. */
typedef enum { FAILED = -1, UNUSUAL = 0, READ = 1 } Outcome;

static int is_name(const Value *value, const Name *name)
{
    return value->kind == TEXT && value->number == name->size && memcmp(value->start, name->text, name->size) == 0;
}

static int is_ascii(const Value *value)
{
    unsigned char all = 0;
    for (uint64_t i = 0; i < value->number; i++)
        all |= value->start[i];
    return all < 0x80;
}

/* The value at a place that is known to have a whole one; nil where there is no place. */
static Value value_at(const Batch *batch, const unsigned char *at, Reader *inside)
{
    Value value = {NIL, 0, NULL};
    *inside = (Reader){at, batch->reader.end};
    if (at != NULL)
        read_value(inside, &value);
    return value;
}

/* Whether a value that nobody looks at is one that the library can read, too. */
static int is_simple(const Value *value)
{
    return value->kind < LIST && (value->kind != TEXT || is_ascii(value));
}

static int skip_simple(Reader *reader)
{
    Value value;
    return read_value(reader, &value) && is_simple(&value);
}

static Field find_field(const Value *name)
{
    Field field = 0;
    while (field < FIELDS && !is_name(name, &field_names[field]))
        field++;
    return field;
}

/* Where the fields of an event are; the reader is behind it then. */
static int find_fields(Reader *reader, const Value *head, Event *event)
{
    memset(event, 0, sizeof *event);
    if (head->kind == LIST) {
        event->elements = head->number;
        for (uint64_t i = 0; i < head->number; i++) {
            if (i <= LIST_FIELDS)
                event->at[i == 0 ? TYPE : (Field)(i - 1)] = reader->at;
            if (!(i <= LIST_FIELDS ? skip_value(reader, 0) : skip_simple(reader)))
                return 0;
        }
        return head->number > 0;
    }
    for (uint64_t i = 0; i < head->number; i++) {
        Value name;
        if (!read_value(reader, &name) || name.kind != TEXT)
            return 0;
        const Field field = find_field(&name);
        if (field < FIELDS) {
            if (event->at[field] != NULL)
                return 0;
            event->at[field] = reader->at;
        }
        if (!(field < FIELDS ? skip_value(reader, 0) : is_ascii(&name) && skip_simple(reader)))
            return 0;
    }
    return 1;
}

/* ---- values ------------------------------------------------------------------------------------- */

/* A hash as u64: an integer by its 64 bits, bytes by their last 8. */
static int as_hash(const Value *value, uint64_t *hash)
{
    if (value->kind == INTEGER || value->kind == NEGATIVE) {
        *hash = value->number;
        return 1;
    }
    if (value->kind != BINARY || value->number == 0)
        return 0;
    const int bytes = value->number < 8 ? (int)value->number : 8;
    *hash = big_endian(value->start + value->number - (uint64_t)bytes, bytes);
    return 1;
}

/* The hashes of an event; how many, 0 where they are none, too many, or one of them comes twice. */
static size_t read_hashes(const Batch *batch, const Event *event, uint64_t *hashes)
{
    static const uint64_t spread = 0x9E3779B97F4A7C15;
    uint16_t buckets[BUCKETS]; /* numbers of hashes, from 1; of a few hashes only a few buckets are used */
    Reader inside;
    const Value list = value_at(batch, event->at[BLOCK_HASHES], &inside);
    if (list.kind != LIST || list.number == 0 || list.number > HASHES_MAX)
        return 0;
    const size_t count = (size_t)list.number;
    int bits = 1;
    while ((size_t)1 << bits < 2 * count)
        bits++;
    memset(buckets, 0, sizeof *buckets << bits);
    for (size_t i = 0; i < count; i++) {
        Value item;
        if (!read_value(&inside, &item) || !as_hash(&item, &hashes[i]))
            return 0;
        size_t bucket = (size_t)(hashes[i] * spread >> (64 - bits));
        for (; buckets[bucket] != 0; bucket = (bucket + 1) & (((size_t)1 << bits) - 1))
            if (hashes[buckets[bucket] - 1] == hashes[i])
                return 0;
        buckets[bucket] = (uint16_t)(i + 1);
    }
    return count;
}

static PyObject *hashes_as_tuple(const uint64_t *hashes, size_t count)
{
    PyObject *found = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; found != NULL && i < count; i++) {
        PyObject *hash = PyLong_FromUnsignedLongLong(hashes[i]);
        if (hash == NULL)
            Py_CLEAR(found);
        else
            PyTuple_SetItem(found, (Py_ssize_t)i, hash);
    }
    return found;
}

/* The parent of a store: a hash that is none of its own, or None. What 0 means depends on the engine. */
static Outcome read_parent(const Batch *batch, const Event *event, const uint64_t *hashes, size_t count, PyObject **found)
{
    Reader inside;
    uint64_t parent;
    const Value value = value_at(batch, event->at[PARENT], &inside);
    if (value.kind == NIL) {
        *found = Py_NewRef(Py_None);
        return READ;
    }
    if (!as_hash(&value, &parent) || (value.kind == INTEGER && parent == 0))
        return UNUSUAL;
    for (size_t i = 0; i < count; i++)
        if (hashes[i] == parent)
            return UNUSUAL;
    *found = PyLong_FromUnsignedLongLong(parent);
    return *found == NULL ? FAILED : READ;
}

/* Token ids as little-endian u32. */
static Outcome read_tokens(const Batch *batch, const Event *event, PyObject **found)
{
    Reader inside;
    const Value list = value_at(batch, event->at[TOKEN_IDS], &inside);
    if (list.kind != NIL && list.kind != LIST)
        return UNUSUAL;
    const uint64_t count = list.kind == NIL ? 0 : list.number;
    *found = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * count));
    if (*found == NULL)
        return FAILED;
    char *out = PyBytes_AsString(*found);
    for (uint64_t i = 0; i < count; i++, out += 4) {
        Value token;
        if (!read_value(&inside, &token) || token.kind != INTEGER || token.number > UINT32_MAX)
            return UNUSUAL;
        store_little32(out, (uint32_t)token.number);
    }
    return READ;
}

/* An integer of at most `most`, or None where that is allowed. */
static Outcome read_integer(const Batch *batch, const unsigned char *at, uint64_t most, int may_be_nil, PyObject **found)
{
    Reader inside;
    const Value value = value_at(batch, at, &inside);
    if (value.kind == NIL && may_be_nil) {
        *found = Py_NewRef(Py_None);
        return READ;
    }
    if (value.kind != INTEGER || value.number > most)
        return UNUSUAL;
    *found = PyLong_FromUnsignedLongLong(value.number);
    return *found == NULL ? FAILED : READ;
}

/* The medium of an event. Neighbours have the same one nearly always. */
static Outcome read_medium(Batch *batch, const Event *event, PyObject **found)
{
    Reader inside;
    const Value value = value_at(batch, event->at[MEDIUM], &inside);
    const uint64_t size = value.kind == TEXT ? value.number : 0;
    if ((value.kind != NIL && value.kind != TEXT) || (value.kind == TEXT && !is_ascii(&value)))
        return UNUSUAL;
    const int is_known = batch->medium != NULL && (value.kind == NIL) == (batch->medium_at == NULL) &&
                         size == batch->medium_size && (size == 0 || memcmp(value.start, batch->medium_at, size) == 0);
    if (!is_known) {
        PyObject *name = value.kind == NIL
                             ? Py_NewRef(Py_None)
                             : PyUnicode_FromStringAndSize((const char *)value.start, (Py_ssize_t)size);
        if (name == NULL)
            return FAILED;
        PyObject *medium = PyObject_CallFunctionObjArgs(batch->medium_of, name, NULL);
        Py_DECREF(name);
        if (medium == NULL)
            return FAILED;
        if (medium == Py_None) {
            Py_DECREF(medium);
            return UNUSUAL;
        }
        Py_XDECREF(batch->medium);
        batch->medium = medium;
        batch->medium_at = value.kind == NIL ? NULL : value.start;
        batch->medium_size = size;
    }
    *found = Py_NewRef(batch->medium);
    return READ;
}

/* The adapter: its name, else its id, else None. */
static Outcome read_adapter(const Batch *batch, const Event *event, Value *name, PyObject **found)
{
    Reader inside;
    *name = value_at(batch, event->at[LORA_NAME], &inside);
    if (name->kind == TEXT && name->number > 0) {
        const Value id = value_at(batch, event->at[LORA_ID], &inside);
        if (!is_ascii(name) || !is_simple(&id))
            return UNUSUAL;
        *found = PyUnicode_FromStringAndSize((const char *)name->start, (Py_ssize_t)name->number);
        return *found == NULL ? FAILED : READ;
    }
    const int is_absent = name->kind == NIL || name->kind == TEXT;
    name->kind = NIL;
    return is_absent ? read_integer(batch, event->at[LORA_ID], INT64_MAX, 1, found) : UNUSUAL;
}

/* Whether nothing is told of any block but the adapter that its event names. */
static int has_plain_keys(const Batch *batch, const Event *event, size_t count, const Value *adapter)
{
    Reader inside;
    const Value list = value_at(batch, event->at[EXTRA_KEYS], &inside);
    if (list.kind == NIL)
        return 1;
    if (list.kind != LIST || list.number != count)
        return 0;
    for (size_t i = 0; i < count; i++) {
        Value keys, key;
        if (!read_value(&inside, &keys))
            return 0;
        if (keys.kind == NIL)
            continue;
        if (keys.kind != LIST || keys.number != 1 || adapter->kind != TEXT || !read_value(&inside, &key))
            return 0;
        if (key.kind != TEXT || key.number != adapter->number || memcmp(key.start, adapter->start, key.number) != 0)
            return 0;
    }
    return 1;
}

/* Whether the blocks are of the attention that a prefix needs; None where the event says nothing. */
static Outcome read_attention(const Batch *batch, const Event *event, PyObject **found)
{
    Reader inside;
    const Value value = value_at(batch, event->at[ATTENTION], &inside);
    if (value.kind != NIL && (value.kind != TEXT || !is_ascii(&value)))
        return UNUSUAL;
    int is_main = 0;
    for (size_t i = 0; i < sizeof main_attention / sizeof *main_attention; i++)
        is_main |= is_name(&value, &main_attention[i]);
    /* Another group may have a window, which has rules of its own. */
    if (value.kind != NIL && !is_main)
        return UNUSUAL;
    *found = Py_NewRef(value.kind == NIL ? Py_None : Py_True);
    return READ;
}

/* ---- events ------------------------------------------------------------------------------------- */

/* An object of `type` with these attributes, built without its __init__: that takes longer than all the rest. */
static PyObject *build(PyTypeObject *type, PyObject *const *names, PyObject *const *values, int count)
{
    PyObject *object = PyType_GenericAlloc(type, 0);
    for (int i = 0; object != NULL && i < count; i++)
        if (PyObject_GenericSetAttr(object, names[i], values[i]) < 0)
            Py_CLEAR(object);
    return object;
}

static Outcome read_stored(Batch *batch, const Event *event, PyObject **found)
{
    uint64_t hashes[HASHES_MAX];
    Value adapter;
    /* In the order of stored_names; what is borrowed stands behind the rest. */
    enum { OWNED = 9 };
    PyObject *values[STORED_ATTRIBUTES] = {NULL};
    const size_t count = read_hashes(batch, event, hashes);
    if (count == 0)
        return UNUSUAL;
    Outcome outcome = read_parent(batch, event, hashes, count, &values[1]);
    if (outcome == READ)
        outcome = read_tokens(batch, event, &values[2]);
    if (outcome == READ)
        outcome = read_integer(batch, event->at[BLOCK_SIZE], 65536, 0, &values[3]);
    if (outcome == READ)
        outcome = read_medium(batch, event, &values[4]);
    if (outcome == READ)
        outcome = read_adapter(batch, event, &adapter, &values[5]);
    if (outcome == READ)
        outcome = read_integer(batch, event->at[GROUP], UINT32_MAX, 1, &values[8]);
    PyObject *attention = NULL;
    if (outcome == READ)
        outcome = read_attention(batch, event, &attention);
    if (outcome == READ && !has_plain_keys(batch, event, count, &adapter))
        outcome = UNUSUAL;
    if (outcome == READ) {
        values[0] = hashes_as_tuple(hashes, count);
        values[6] = Py_NewRef(batch->nothing);
        values[7] = Py_NewRef(Py_None);
        values[9] = batch->zero;
        values[10] = attention;
        values[11] = event->elements == 0 || event->elements >= TELLS_SALTS_FROM ? Py_True : Py_False;
        values[12] = Py_False;
        values[13] = Py_None;
        values[14] = values[15] = Py_False;
        values[16] = Py_None;
        *found = values[0] == NULL ? NULL : build(batch->stored, stored_attributes, values, STORED_ATTRIBUTES);
        outcome = *found == NULL ? FAILED : READ;
    }
    for (int i = 0; i < OWNED; i++)
        Py_XDECREF(values[i]);
    Py_XDECREF(attention);
    return outcome;
}

static Outcome read_removed(Batch *batch, const Event *event, PyObject **found)
{
    uint64_t hashes[HASHES_MAX];
    PyObject *medium = NULL, *group = NULL;
    const size_t count = read_hashes(batch, event, hashes);
    if (count == 0)
        return UNUSUAL;
    Outcome outcome = read_medium(batch, event, &medium);
    if (outcome == READ)
        outcome = read_integer(batch, event->at[GROUP], UINT32_MAX, 1, &group);
    if (outcome == READ) {
        PyObject *removed = hashes_as_tuple(hashes, count);
        PyObject *values[REMOVED_ATTRIBUTES] = {removed,        medium,   group,   Py_None,
                                                batch->nothing, Py_False, Py_None, batch->zero};
        *found = removed == NULL ? NULL : build(batch->removed, removed_attributes, values, REMOVED_ATTRIBUTES);
        outcome = *found == NULL ? FAILED : READ;
        Py_XDECREF(removed);
    }
    Py_XDECREF(medium);
    Py_XDECREF(group);
    return outcome;
}

/* Whether an event of a list has its fields where those of a removal are: a list of a removal is shorter. */
static void move_fields_of_removal(Event *event)
{
    if (event->elements == 0)
        return;
    event->at[MEDIUM] = event->at[PARENT];
    event->at[GROUP] = event->at[TOKEN_IDS];
    event->at[PARENT] = event->at[TOKEN_IDS] = NULL;
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
static Outcome read_event(Batch *batch, PyObject **found)
{
    static const Field of_maps[] = {LOCALITY, CACHE_SALT, IMAGES};
    static const Field of_stores[] = {PARENT, TOKEN_IDS, BLOCK_SIZE, LORA_ID, LORA_NAME, EXTRA_KEYS, ATTENTION};
    Value head;
    Event event;
    Reader inside;
    if (!read_value(&batch->reader, &head) || head.kind < LIST || !find_fields(&batch->reader, &head, &event))
        return UNUSUAL;
    const Value tag = value_at(batch, event.at[TYPE], &inside);
    if (!has_none_of(batch, &event, of_maps, 3))
        return UNUSUAL;
    if (is_name(&tag, &stored_tag))
        return read_stored(batch, &event, found);
    if (is_name(&tag, &removed_tag)) {
        move_fields_of_removal(&event);
        return has_none_of(batch, &event, of_stores, 7) ? read_removed(batch, &event, found) : UNUSUAL;
    }
    if (!is_name(&tag, &cleared_tag) || event.elements > 1 || (head.kind == MAP && head.number > 1))
        return UNUSUAL;
    *found = Py_NewRef(batch->cleared);
    return READ;
}

/* ---- batches ------------------------------------------------------------------------------------ */

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

/* The events onto `found`; in *others how many of them are left to Python. */
static Outcome read_list(Batch *batch, uint64_t count, PyObject *found, Py_ssize_t *others)
{
    for (uint64_t i = 0; i < count; i++) {
        PyObject *event = NULL;
        const unsigned char *start = batch->reader.at;
        Outcome outcome = read_event(batch, &event);
        if (outcome == UNUSUAL) {
            batch->reader.at = start;
            if (!skip_value(&batch->reader, 0))
                return UNUSUAL;
            event = Py_BuildValue("nn", start - batch->begin, batch->reader.at - batch->begin);
            outcome = event == NULL ? FAILED : READ;
            ++*others;
        }
        if (outcome == READ && PyList_Append(found, event) < 0)
            outcome = FAILED;
        Py_XDECREF(event);
        if (outcome == FAILED)
            return FAILED;
    }
    return READ;
}

/* As read_batch, of bytes in memory. */
static PyObject *read_payload(Batch *batch, Py_ssize_t events_max)
{
    Value root, list;
    PyObject *ts = NULL, *rank = NULL, *answer = NULL, *events = PyList_New(0);
    Py_ssize_t others = 0;
    Outcome outcome = events == NULL ? FAILED : UNUSUAL;
    if (outcome == UNUSUAL && read_value(&batch->reader, &root) && root.kind == LIST &&
        (root.number == 2 || root.number == 3))
        outcome = read_number(&batch->reader, &ts);
    if (outcome == READ)
        outcome = read_value(&batch->reader, &list) && list.kind == LIST && list.number <= (uint64_t)events_max;
    if (outcome == READ)
        outcome = read_list(batch, list.number, events, &others);
    if (outcome == READ && root.number == 3)
        outcome = read_number(&batch->reader, &rank);
    if (outcome == READ && batch->reader.at == batch->reader.end)
        answer = Py_BuildValue("OOOn", ts, events, rank == NULL ? Py_None : rank, others);
    else if (outcome != FAILED)
        answer = Py_NewRef(Py_None);
    Py_XDECREF(ts);
    Py_XDECREF(rank);
    Py_XDECREF(events);
    return answer;
}

static int intern_names(const char *const *names, PyObject **attributes, int count)
{
    for (int i = 0; i < count; i++)
        if (attributes[i] == NULL && (attributes[i] = PyUnicode_InternFromString(names[i])) == NULL)
            return 0;
    return 1;
}

/* read_batch(payload: bytes, events_max: int, stored: type, removed: type, cleared, medium)
 *     -> tuple[float | int | None, list, float | int | None, int] | None
 *
 * The batch `[ts, events, rank?]`: ts, the events, the rank, and how many events are not plain. Instead of such a one
 * stands where it is in the payload, (start, end). None where the batch itself is not plain, or has more than
 * `events_max` events. `medium` turns the name of a medium, or None, into ours; None for one that is not a name.
 */
PyObject *read_batch(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Input payload;
    if (!has_arguments("read_batch", nargs, 6))
        return NULL;
    const Py_ssize_t events_max = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (!PyType_Check(args[2]) || !PyType_Check(args[3]) || events_max < 0)
        return PyErr_Format(PyExc_TypeError, "read_batch() takes a ceiling and the types of two events");
    if (!intern_names(stored_names, stored_attributes, STORED_ATTRIBUTES) ||
        !intern_names(removed_names, removed_attributes, REMOVED_ATTRIBUTES) || !open_bytes(args[0], &payload))
        return NULL;
    const unsigned char *start = (const unsigned char *)payload.start;
    Batch batch = {
        .reader = {start, start + payload.size},
        .begin = start,
        .stored = (PyTypeObject *)args[2],
        .removed = (PyTypeObject *)args[3],
        .cleared = args[4],
        .medium_of = args[5],
        .zero = PyLong_FromLong(0),
        .nothing = PyTuple_New(0),
    };
    PyObject *answer = batch.zero == NULL || batch.nothing == NULL ? NULL : read_payload(&batch, events_max);
    Py_XDECREF(batch.medium);
    Py_XDECREF(batch.zero);
    Py_XDECREF(batch.nothing);
    close_input(&payload);
    return answer;
}
