/* Reads the fields of an event: see fields.h. */

#include "fields.h"

#include "index.h"
#include "reserve.h"

enum {
    HASHES_MAX = 2048, /* of a plain event */
    BUCKETS = 2 * HASHES_MAX,
    LIST_FIELDS = 10,
};

static const Name field_names[FIELDS] = {
    NAME("block_hashes"), NAME("parent_block_hash"), NAME("token_ids"),      NAME("block_size"),
    NAME("lora_id"),      NAME("medium"),            NAME("lora_name"),      NAME("extra_keys"),
    NAME("group_idx"),    NAME("kv_cache_spec_kind"), NAME("locality"),      NAME("cache_salt"),
    NAME("block_mm_infos"), NAME("origin"), NAME("remaining_copy_counts"), NAME("component_type"),
    NAME("kv_cache_spec_sliding_window"), NAME("type"),
};
static const Name main_attention[] = {NAME("full_attention"), NAME("mla_attention"), NAME("sink_full_attention")};
static const Name states = NAME("mamba");
static const Name windows[] = {NAME("sliding_window"), NAME("sliding_window_mla")};

/* ---- finding fields ------------------------------------------------------------------------------ */

/* Return whether a text is ASCII, so that Python and C read it alike. */
static int is_ascii(const Value *value)
{
    unsigned char all = 0;
    for (uint64_t i = 0; i < value->number; i++)
        all |= value->start[i];
    return all < 0x80;
}

int is_simple(const Value *value)
{
    return value->kind < LIST && (value->kind != TEXT || is_ascii(value));
}

int skip_simple(Reader *reader)
{
    Value value;
    return read_value(reader, &value) && is_simple(&value);
}

/* Return the field with a name; FIELDS if there is none. */
static Field find_field(const Value *name)
{
    Field field = 0;
    while (field < FIELDS && !is_name(name, &field_names[field]))
        field++;
    return field;
}

int find_fields(Reader *reader, const Value *head, Event *event)
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

/* ---- reading fields ------------------------------------------------------------------------------ */

/* Read a hash as u64: an integer by its 64 bits, bytes by their last 8. */
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

Outcome read_hashes(const Batch *batch, const Event *fields, PlainEvent *event)
{
    uint16_t buckets[BUCKETS]; /* numbers of hashes, from 1; a few hashes use only a few buckets */
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
        size_t bucket = (size_t)(spread(hashes[i]) >> (64 - bits));
        for (; buckets[bucket] != 0; bucket = (bucket + 1) & (((size_t)1 << bits) - 1))
            if (hashes[buckets[bucket] - 1] == hashes[i])
                return UNUSUAL;
        buckets[bucket] = (uint16_t)(i + 1);
    }
    event->hashes = events->hashes_count;
    event->hashes_count = (uint32_t)count;
    return READ;
}

Outcome read_parent(const Batch *batch, const Event *fields, PlainEvent *event)
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

Outcome read_tokens(const Batch *batch, const Event *fields, PlainEvent *event)
{
    Events *events = batch->events;
    Reader inside;
    const Value list = value_at(batch, fields->at[TOKEN_IDS], &inside);
    if ((list.kind != NIL && list.kind != LIST) || (list.kind == LIST && list.number > UINT32_MAX))
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

Outcome read_integer(const Batch *batch, const unsigned char *at, uint64_t most, uint64_t *found)
{
    Reader inside;
    const Value value = value_at(batch, at, &inside);
    *found = value.number;
    return value.kind == INTEGER && value.number <= most ? READ : UNUSUAL;
}

Outcome read_group(const Batch *batch, const Event *fields, PlainEvent *event)
{
    Reader inside;
    event->has_group = value_at(batch, fields->at[GROUP], &inside).kind != NIL;
    return event->has_group ? read_integer(batch, fields->at[GROUP], UINT32_MAX, &event->group) : READ;
}

Outcome read_medium(Batch *batch, const Event *fields, PlainEvent *event)
{
    /* Consecutive events nearly always have the same medium. */
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

/* Return whether both are texts, with the same bytes. */
static int is_same_text(const Value *one, const Value *other)
{
    return one->kind == TEXT && other->kind == TEXT && one->number == other->number &&
           memcmp(one->start, other->start, one->number) == 0;
}

Outcome read_adapter(Batch *batch, const Event *fields, Value *name, PlainEvent *event)
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

int has_plain_keys(const Batch *batch, const Event *event, size_t count, const Value *adapter)
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

/* Return whether a value is one of these names. */
static int is_among(const Value *value, const Name *names, size_t count)
{
    int is_found = 0;
    for (size_t i = 0; i < count; i++)
        is_found |= is_name(value, &names[i]);
    return is_found;
}

/* Return how many tokens a group must have before a boundary: a window includes the token that is computed next. 0 if
 * the group needs something else. */
static uint32_t window_of(const Batch *batch, const Event *fields, const Value *attention)
{
    Reader inside;
    const Value tokens = value_at(batch, fields->at[WINDOW_TOKENS], &inside);
    if (is_name(attention, &states))
        return 1;
    if (!is_among(attention, windows, 2) || tokens.kind != INTEGER || tokens.number == 0 || tokens.number > UINT32_MAX)
        return 0;
    return tokens.number == 1 ? 1 : (uint32_t)tokens.number - 1;
}

Outcome read_attention(const Batch *batch, const Event *fields, PlainEvent *event)
{
    Reader inside;
    const Value value = value_at(batch, fields->at[ATTENTION], &inside);
    if (value.kind != NIL && (value.kind != TEXT || !is_ascii(&value)))
        return UNUSUAL;
    if (value.kind == NIL || is_among(&value, main_attention, sizeof main_attention / sizeof *main_attention))
        return READ;
    if (fields->elements > 0) /* a list may have the length of the window after the fields that are read */
        return UNUSUAL;
    event->kind = WINDOW;
    event->window = window_of(batch, fields, &value);
    return READ;
}

Outcome read_origin(const Batch *batch, const Event *fields, PlainEvent *event)
{
    static const Name is_new = NAME("NEW"), is_reused = NAME("REUSED");
    Reader inside;
    const Value value = value_at(batch, fields->at[ORIGIN], &inside);
    if (value.kind == NIL)
        return READ;
    event->origin = is_name(&value, &is_new) ? FROM_NEW : is_name(&value, &is_reused) ? FROM_REUSE : UNTOLD;
    return event->origin == UNTOLD ? UNUSUAL : READ;
}

Outcome read_copy_counts(const Batch *batch, const Event *fields, PlainEvent *event)
{
    Reader inside;
    const Value list = value_at(batch, fields->at[COPY_COUNTS], &inside);
    if (list.kind == NIL)
        return READ;
    if (list.kind != LIST || list.number != event->hashes_count)
        return UNUSUAL;
    for (size_t i = 0; i < event->hashes_count; i++) {
        Value count;
        if (!read_value(&inside, &count) || count.kind != INTEGER || count.number != 0)
            return UNUSUAL;
    }
    event->leaves_none = 1;
    return READ;
}
