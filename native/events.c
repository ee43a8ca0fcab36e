/* The payload of a batch, in vLLM's dialect, to events: what most events of most engines are.
 *
 * A plain event has nothing in it that needs a rule of app/waymark/engines: no salt, no image, nothing that is to be
 * rejected. All others are left to Python, which has the words for them; so are batches of an unusual form.
 *
 * Of most batches the events differ in their hashes and tokens alone. Those stay here, as Events, and become objects
 * only where somebody asks for one.
 */

#include "events.h"

#include "bytes.h"
#include "input.h"
#include "msgpack.h"
#include "objects.h"
#include "reserve.h"

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
    "engine_hashes", "parent", "tokens", "block_size", "salts", "group", "part", "medium", "adapter",
    "is_main_attention", "tells_salts", "extras", "is_identity", "envelope", "is_deep", "may_begin", "window",
};
static const char *const removed_names[REMOVED_ATTRIBUTES] = {
    "engine_hashes", "group", "salts", "part", "medium", "adapter", "is_identity", "envelope",
};
static PyObject *stored_attributes[STORED_ATTRIBUTES], *removed_attributes[REMOVED_ATTRIBUTES];

/* One call of read_batch. */
typedef struct {
    Reader reader;
    const unsigned char *begin;
    Events *events;
    PyObject *medium_of;     /* a name of the wire, or None, to that of its medium */
    PyObject *medium;        /* of the last event */
    const unsigned char *medium_at; /* its name in the payload */
    uint64_t medium_size;
    PyObject *adapter;       /* of the last event that named one by a text */
    Value adapter_name;
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

/* The hashes of an event behind those of all. UNUSUAL where they are none, too many, or one of them comes twice. */
static Outcome read_hashes(const Batch *batch, const Event *fields, PlainEvent *event)
{
    static const uint64_t spread = 0x9E3779B97F4A7C15;
    uint16_t buckets[BUCKETS]; /* numbers of hashes, from 1; of a few hashes only a few buckets are used */
    Events *events = batch->events;
    Reader inside;
    const Value list = value_at(batch, fields->at[BLOCK_HASHES], &inside);
    if (list.kind != LIST || list.number == 0 || list.number > HASHES_MAX)
        return UNUSUAL;
    const size_t count = (size_t)list.number;
    if (!reserve((void **)&events->hashes, &events->hashes_capacity, events->hashes_count, count, sizeof *events->hashes))
        return FAILED;
    uint64_t *hashes = events->hashes + events->hashes_count;
    int bits = 1;
    while ((size_t)1 << bits < 2 * count)
        bits++;
    memset(buckets, 0, sizeof *buckets << bits);
    for (size_t i = 0; i < count; i++) {
        Value item;
        if (!read_value(&inside, &item) || !as_hash(&item, &hashes[i]))
            return UNUSUAL;
        size_t bucket = (size_t)(hashes[i] * spread >> (64 - bits));
        for (; buckets[bucket] != 0; bucket = (bucket + 1) & (((size_t)1 << bits) - 1))
            if (hashes[buckets[bucket] - 1] == hashes[i])
                return UNUSUAL;
        buckets[bucket] = (uint16_t)(i + 1);
    }
    event->hashes = events->hashes_count;
    event->hashes_count = (uint32_t)count;
    return READ;
}

/* The parent of a store: a hash that is none of its own, or nil. What 0 means depends on the engine. */
static Outcome read_parent(const Batch *batch, const Event *fields, PlainEvent *event)
{
    Reader inside;
    const Value value = value_at(batch, fields->at[PARENT], &inside);
    if (value.kind == NIL)
        return READ;
    if (!as_hash(&value, &event->parent) || (value.kind == INTEGER && event->parent == 0))
        return UNUSUAL;
    for (size_t i = 0; i < event->hashes_count; i++)
        if (batch->events->hashes[event->hashes + i] == event->parent)
            return UNUSUAL;
    event->has_parent = 1;
    return READ;
}

/* Token ids behind those of all events. */
static Outcome read_tokens(const Batch *batch, const Event *fields, PlainEvent *event)
{
    Events *events = batch->events;
    Reader inside;
    const Value list = value_at(batch, fields->at[TOKEN_IDS], &inside);
    if (list.kind != NIL && list.kind != LIST)
        return UNUSUAL;
    const size_t count = list.kind == NIL ? 0 : (size_t)list.number;
    if (!reserve((void **)&events->tokens, &events->tokens_capacity, events->tokens_count, count, sizeof *events->tokens))
        return FAILED;
    uint32_t *out = events->tokens + events->tokens_count;
    for (size_t i = 0; i < count; i++) {
        Value token;
        if (!read_value(&inside, &token) || token.kind != INTEGER || token.number > UINT32_MAX)
            return UNUSUAL;
        out[i] = as_little32((uint32_t)token.number);
    }
    event->tokens = events->tokens_count;
    event->tokens_count = (uint32_t)count;
    return READ;
}

/* An integer of at most `most`. */
static Outcome read_integer(const Batch *batch, const unsigned char *at, uint64_t most, uint64_t *found)
{
    Reader inside;
    const Value value = value_at(batch, at, &inside);
    *found = value.number;
    return value.kind == INTEGER && value.number <= most ? READ : UNUSUAL;
}

/* The group of an event, if it names one. */
static Outcome read_group(const Batch *batch, const Event *fields, PlainEvent *event)
{
    Reader inside;
    event->has_group = value_at(batch, fields->at[GROUP], &inside).kind != NIL;
    return event->has_group ? read_integer(batch, fields->at[GROUP], UINT32_MAX, &event->group) : READ;
}

/* The medium of an event. Neighbours have the same one nearly always. */
static Outcome read_medium(Batch *batch, const Event *fields, PlainEvent *event)
{
    Reader inside;
    const Value value = value_at(batch, fields->at[MEDIUM], &inside);
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
    event->medium = Py_NewRef(batch->medium);
    return READ;
}

static int is_same_text(const Value *one, const Value *other)
{
    return one->kind == TEXT && other->kind == TEXT && one->number == other->number &&
           memcmp(one->start, other->start, one->number) == 0;
}

/* The adapter: its name, else its id, else None. */
static Outcome read_adapter(Batch *batch, const Event *fields, Value *name, PlainEvent *event)
{
    Reader inside;
    *name = value_at(batch, fields->at[LORA_NAME], &inside);
    const Value id = value_at(batch, fields->at[LORA_ID], &inside);
    if (name->kind == TEXT && name->number > 0) {
        if (!is_ascii(name) || !is_simple(&id))
            return UNUSUAL;
        if (!is_same_text(name, &batch->adapter_name)) {
            PyObject *adapter = PyUnicode_FromStringAndSize((const char *)name->start, (Py_ssize_t)name->number);
            if (adapter == NULL)
                return FAILED;
            Py_XDECREF(batch->adapter);
            batch->adapter = adapter;
            batch->adapter_name = *name;
        }
        event->adapter = Py_NewRef(batch->adapter);
        return READ;
    }
    const int is_absent = name->kind == NIL || name->kind == TEXT;
    name->kind = NIL;
    if (!is_absent || (id.kind != NIL && (id.kind != INTEGER || id.number > INT64_MAX)))
        return UNUSUAL;
    event->adapter = id.kind == NIL ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(id.number);
    return event->adapter == NULL ? FAILED : READ;
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

/* Whether the blocks are of the attention that a prefix needs; the event may say nothing. */
static Outcome read_attention(const Batch *batch, const Event *fields, PlainEvent *event)
{
    Reader inside;
    const Value value = value_at(batch, fields->at[ATTENTION], &inside);
    if (value.kind != NIL && (value.kind != TEXT || !is_ascii(&value)))
        return UNUSUAL;
    for (size_t i = 0; i < sizeof main_attention / sizeof *main_attention; i++)
        event->is_main |= is_name(&value, &main_attention[i]);
    /* Another group may have a window, which has rules of its own. */
    return value.kind == NIL || event->is_main ? READ : UNUSUAL;
}

/* ---- events ------------------------------------------------------------------------------------- */

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
        outcome = read_attention(batch, fields, event);
    if (outcome == READ && !has_plain_keys(batch, fields, event->hashes_count, &adapter))
        outcome = UNUSUAL;
    event->block_size = (uint32_t)block_size;
    event->tells_salts = fields->elements == 0 || fields->elements >= TELLS_SALTS_FROM;
    return outcome;
}

static Outcome read_removed(Batch *batch, const Event *fields, PlainEvent *event)
{
    event->kind = REMOVAL;
    Outcome outcome = read_hashes(batch, fields, event);
    if (outcome == READ)
        outcome = read_medium(batch, fields, event);
    return outcome == READ ? read_group(batch, fields, event) : outcome;
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
static Outcome read_event(Batch *batch, PlainEvent *found)
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
    found->kind = CLEARING;
    return READ;
}

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

static void drop_event(PlainEvent *event)
{
    Py_CLEAR(event->medium);
    Py_CLEAR(event->adapter);
}

/* All events; in *others how many of them are left to Python. */
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

/* ---- objects ------------------------------------------------------------------------------------ */

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

/* An object of `type` with these attributes, of which the first `owned` are let go. NULL with an exception. */
static PyObject *build_owned(PyTypeObject *type, PyObject *const *names, PyObject *const *values, int count, int owned)
{
    int are_all = 1;
    for (int i = 0; i < owned; i++)
        are_all &= values[i] != NULL;
    PyObject *found = are_all ? build_object(type, names, values, count) : NULL;
    for (int i = 0; i < owned; i++)
        Py_XDECREF(values[i]);
    return found;
}

static PyObject *make_stored(const Events *events, const PlainEvent *event)
{
    /* In the order of stored_names; what is borrowed stands behind the rest. */
    enum { OWNED = 8 };
    PyObject *values[STORED_ATTRIBUTES] = {
        hashes_as_tuple(events->hashes + event->hashes, event->hashes_count),
        event->has_parent ? PyLong_FromUnsignedLongLong(event->parent) : Py_NewRef(Py_None),
        PyBytes_FromStringAndSize((const char *)(events->tokens + event->tokens), 4 * (Py_ssize_t)event->tokens_count),
        PyLong_FromUnsignedLong(event->block_size),
        PyTuple_New(0),
        event->has_group ? PyLong_FromUnsignedLongLong(event->group) : Py_NewRef(Py_None),
        PyLong_FromLong(0),
        Py_NewRef(event->medium),
        event->adapter,
        event->is_main ? Py_True : Py_None,
        event->tells_salts ? Py_True : Py_False,
        Py_None,
        Py_False,
        Py_None,
        Py_False,
        Py_False,
        Py_None,
    };
    return build_owned(events->stored, stored_attributes, values, STORED_ATTRIBUTES, OWNED);
}

static PyObject *make_removed(const Events *events, const PlainEvent *event)
{
    enum { OWNED = 4 };
    PyObject *values[REMOVED_ATTRIBUTES] = {
        hashes_as_tuple(events->hashes + event->hashes, event->hashes_count),
        event->has_group ? PyLong_FromUnsignedLongLong(event->group) : Py_NewRef(Py_None),
        PyTuple_New(0),
        PyLong_FromLong(0),
        event->medium,
        Py_None,
        Py_False,
        Py_None,
    };
    return build_owned(events->removed, removed_attributes, values, REMOVED_ATTRIBUTES, OWNED);
}

static PyObject *make_event(const Events *events, const PlainEvent *event)
{
    if (event->kind == OTHER)
        return Py_BuildValue("nn", event->start, event->end);
    if (event->kind == CLEARING)
        return Py_NewRef(events->cleared);
    return event->kind == STORE ? make_stored(events, event) : make_removed(events, event);
}

static PyObject *make_list(const Events *events)
{
    PyObject *list = PyList_New((Py_ssize_t)events->count);
    for (size_t i = 0; list != NULL && i < events->count; i++) {
        PyObject *event = make_event(events, &events->events[i]);
        if (event == NULL || PyList_SetItem(list, (Py_ssize_t)i, event) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/* Whether two names, numbers or None are equal; mostly they are one object. -1 with an exception. */
static int is_equal(PyObject *one, PyObject *other)
{
    if (one == NULL || other == NULL)
        return one == other;
    return PyObject_RichCompareBool(one, other, Py_EQ);
}

/* Whether two stores, or two removals, differ in nothing but their blocks. -1 with an exception. */
static int are_alike(const PlainEvent *one, const PlainEvent *other)
{
    if (one->has_group != other->has_group || one->group != other->group || one->is_main != other->is_main ||
        one->tells_salts != other->tells_salts || one->block_size != other->block_size)
        return 0;
    const int is_same_medium = is_equal(one->medium, other->medium);
    return is_same_medium == 1 ? is_equal(one->adapter, other->adapter) : is_same_medium;
}

/* Whether all events are stores that are alike, each with the tokens of its blocks, and removals that are alike. -1
 * with an exception. */
static int is_run(Events *events)
{
    const PlainEvent *first[2] = {NULL, NULL};
    for (size_t i = 0; i < events->count; i++) {
        const PlainEvent *event = &events->events[i];
        if (event->kind > REMOVAL)
            return 0;
        if (event->kind == STORE && (event->tokens_count == 0 ||
                                     event->tokens_count != (uint64_t)event->block_size * event->hashes_count))
            return 0;
        if (first[event->kind] == NULL)
            first[event->kind] = event;
        const int is_alike = are_alike(event, first[event->kind]);
        if (is_alike != 1)
            return is_alike;
    }
    if (first[STORE] != NULL)
        events->block_size = first[STORE]->block_size;
    return events->count > 0;
}

static PyTypeObject *events_type;

Events *as_events(PyObject *object)
{
    if (Py_TYPE(object) == events_type)
        return (Events *)object;
    PyErr_Format(PyExc_TypeError, "there must be Events, not %R", (PyObject *)Py_TYPE(object));
    return NULL;
}

static Py_ssize_t events_length(PyObject *self)
{
    return (Py_ssize_t)((Events *)self)->count;
}

static PyObject *events_item(PyObject *self, Py_ssize_t at)
{
    const Events *events = (Events *)self;
    if (at < 0 || (size_t)at >= events->count)
        return PyErr_Format(PyExc_IndexError, "there are %zu events", events->count);
    return make_event(events, &events->events[at]);
}

/* first(kind: int) -> int */
static PyObject *events_first(PyObject *self, PyObject *kind)
{
    const Events *events = (Events *)self;
    const long wanted = PyLong_AsLong(kind);
    size_t at = 0;
    if (PyErr_Occurred())
        return NULL;
    while (at < events->count && events->events[at].kind != wanted)
        at++;
    return PyLong_FromSize_t(at);
}

/* count(kind: int) -> tuple[int, int] */
static PyObject *events_count(PyObject *self, PyObject *kind)
{
    const Events *events = (Events *)self;
    const long wanted = PyLong_AsLong(kind);
    Py_ssize_t count = 0, hashes = 0;
    if (PyErr_Occurred())
        return NULL;
    for (size_t i = 0; i < events->count; i++)
        if (events->events[i].kind == wanted) {
            count++;
            hashes += (Py_ssize_t)events->events[i].hashes_count;
        }
    return Py_BuildValue("nn", count, hashes);
}

/* hashes(start: int, end: int) -> tuple[int, ...] */
static PyObject *events_hashes(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const Events *events = (Events *)self;
    if (!has_arguments("hashes", nargs, 2))
        return NULL;
    const size_t start = PyLong_AsSize_t(args[0]), end = PyErr_Occurred() ? 0 : PyLong_AsSize_t(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (start > end || end > events->count)
        return PyErr_Format(PyExc_IndexError, "there are no events %zu to %zu", start, end);
    PyObject *found = PyList_New(0);
    for (size_t i = start; found != NULL && i < end; i++) {
        const PlainEvent *event = &events->events[i];
        for (size_t j = 0; found != NULL && event->kind == STORE && j < event->hashes_count; j++) {
            PyObject *hash = PyLong_FromUnsignedLongLong(events->hashes[event->hashes + j]);
            if (hash == NULL || PyList_Append(found, hash) < 0)
                Py_CLEAR(found);
            Py_XDECREF(hash);
        }
    }
    return found;
}

static void events_dealloc(PyObject *self)
{
    Events *events = (Events *)self;
    for (size_t i = 0; i < events->count; i++)
        drop_event(&events->events[i]);
    PyMem_Free(events->events);
    PyMem_Free(events->hashes);
    PyMem_Free(events->tokens);
    Py_XDECREF((PyObject *)events->stored);
    Py_XDECREF((PyObject *)events->removed);
    Py_XDECREF(events->cleared);
    free_object(self);
}

static PyMethodDef events_methods[] = {
    METHOD("first", events_first, METH_O, "first($self, kind, /)\n--\n\nThe first store (0) or removal (1)."),
    METHOD("count", events_count, METH_O, "count($self, kind, /)\n--\n\nStores (0) or removals (1), and their hashes."),
    METHOD("hashes", events_hashes, METH_FASTCALL, "hashes($self, start, end, /)\n--\n\nThose of some stores."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot events_slots[] = {
    {Py_tp_dealloc, events_dealloc}, {Py_tp_methods, events_methods}, {Py_sq_length, events_length},
    {Py_sq_item, events_item},       {Py_tp_doc, "Events of a batch."}, {0, NULL},
};

static PyType_Spec events_spec = {"waymark._native.Events", sizeof(Events), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, events_slots};

/* Nobody makes one but read_batch, so the module does not name the type. */
int add_events(PyObject *module)
{
    return add_type(NULL, "Events", &events_spec, &events_type);
}

/* ---- batches ------------------------------------------------------------------------------------ */

/* As read_batch, of bytes in memory. */
static PyObject *read_payload(Batch *batch, Py_ssize_t events_max)
{
    Value root, list;
    PyObject *ts = NULL, *rank = NULL, *found = NULL, *answer = NULL;
    Py_ssize_t others = 0;
    Outcome outcome = UNUSUAL;
    if (read_value(&batch->reader, &root) && root.kind == LIST && (root.number == 2 || root.number == 3))
        outcome = read_number(&batch->reader, &ts);
    if (outcome == READ)
        outcome = read_value(&batch->reader, &list) && list.kind == LIST && list.number <= (uint64_t)events_max;
    if (outcome == READ)
        outcome = read_list(batch, list.number, &others);
    if (outcome == READ && root.number == 3)
        outcome = read_number(&batch->reader, &rank);
    if (outcome == READ && batch->reader.at == batch->reader.end) {
        const int stay_together = is_run(batch->events);
        if (stay_together >= 0)
            found = stay_together ? Py_NewRef((PyObject *)batch->events) : make_list(batch->events);
        answer = found == NULL ? NULL : Py_BuildValue("OOOn", ts, found, rank == NULL ? Py_None : rank, others);
    } else if (outcome != FAILED)
        answer = Py_NewRef(Py_None);
    Py_XDECREF(ts);
    Py_XDECREF(found);
    Py_XDECREF(rank);
    return answer;
}

/* read_batch(payload: bytes, events_max: int, stored: type, removed: type, cleared, medium)
 *     -> tuple[float | int | None, list | Events, float | int | None, int] | None
 *
 * The batch `[ts, events, rank?]`: ts, the events, the rank, and how many events are not plain. Instead of such a one
 * stands where it is in the payload, (start, end). The events are Events where all are stores with the tokens of their
 * blocks, and removals, and neither differ in more than their blocks. None where the batch itself is not plain, or has
 * more than `events_max` events. `medium` turns the name of a medium, or None, into ours; None for one that is not a
 * name.
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
    Events *events = (Events *)PyType_GenericAlloc(events_type, 0);
    PyObject *answer = NULL;
    if (events != NULL) {
        const unsigned char *start = (const unsigned char *)payload.start;
        Batch batch = {
            .reader = {start, start + payload.size}, .begin = start, .events = events, .medium_of = args[5]};
        events->stored = (PyTypeObject *)Py_NewRef(args[2]);
        events->removed = (PyTypeObject *)Py_NewRef(args[3]);
        events->cleared = Py_NewRef(args[4]);
        answer = read_payload(&batch, events_max);
        Py_XDECREF(batch.medium);
        Py_XDECREF(batch.adapter);
        Py_DECREF((PyObject *)events);
    }
    close_input(&payload);
    return answer;
}
