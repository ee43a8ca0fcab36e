/* Finds and reads the fields of an event in its payload, in vLLM's dialect.
 *
 * A plain event needs no rule of app/waymark/engines: it has no salt, no image, and no part that must be rejected. All
 * others are UNUSUAL: they are left to Python, which has the sentences for rejections.
 */

#ifndef WAYMARK_FIELDS_H
#define WAYMARK_FIELDS_H

#include "events.h"
#include "msgpack.h"

/* Fields of a store, in the order of a list; fields that only maps have come last. */
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
    ORIGIN,
    COPY_COUNTS,
    COMPONENT,
    WINDOW_TOKENS,
    TYPE,
    FIELDS,
} Field;

typedef struct {
    const char *text;
    size_t size;
} Name;

#define NAME(text) {text, sizeof text - 1}

/* One call of read_batch. */
typedef struct {
    Reader reader;
    const unsigned char *begin;
    Events *events;
    uint64_t stored_fields, removed_fields; /* the fields to read of a store and of a removal that is a list */
    PyObject *medium_of;     /* called with a name of the wire, or None; returns the name of the medium */
    PyObject *medium;        /* of the last event that has one: a reference, or NULL */
    const unsigned char *medium_at; /* its name in the payload */
    uint64_t medium_size;
    PyObject *adapter;       /* of the last event that named one by a text: a reference, or NULL */
    Value adapter_name;
} Batch;

enum { STORED_FIELDS = ATTENTION + 1, REMOVED_FIELDS = 3 }; /* of vLLM's lists */

/* Where the fields of an event are; NULL if it does not have them. */
typedef struct {
    const unsigned char *at[FIELDS];
    uint64_t elements; /* of a list; 0 of a map */
} Event;

/* The outcome of reading. FAILED: with an exception. */
typedef enum { FAILED = -1, UNUSUAL = 0, READ = 1 } Outcome;

/* Return whether a value is this text. */
static inline int is_name(const Value *value, const Name *name)
{
    return value->kind == TEXT && value->number == name->size && memcmp(value->start, name->text, name->size) == 0;
}

/* Return whether an unused value is one that the library can read, too. */
int is_simple(const Value *value);

/* Skip an unused value. 0 if it is UNUSUAL. */
int skip_simple(Reader *reader);

/* Find the fields of an event whose head has been read, and move the reader to its end. 0 if it is UNUSUAL. */
int find_fields(Reader *reader, const Value *head, Event *event);

/* Return the value at a place where a whole value is known to be; nil if there is no place. */
static inline Value value_at(const Batch *batch, const unsigned char *at, Reader *inside)
{
    Value value = {NIL, 0, NULL};
    *inside = (Reader){at, batch->reader.end};
    if (at != NULL)
        read_value(inside, &value);
    return value;
}

/* ---- one field, into an event; the references of the event are released with it in any case ---------------- */

/* Append the hashes of an event to those of all events. UNUSUAL if there are none, too many, or one of them twice. The
 * count of all hashes is raised only when the event is kept. */
Outcome read_hashes(const Batch *batch, const Event *fields, PlainEvent *event);

/* Read the parent of a store: a hash other than those of the store, or nil. What 0 means depends on the engine. */
Outcome read_parent(const Batch *batch, const Event *fields, PlainEvent *event);

/* Append the token ids of an event to those of all events, in the same way. */
Outcome read_tokens(const Batch *batch, const Event *fields, PlainEvent *event);

/* Read an integer of at most `most`. */
Outcome read_integer(const Batch *batch, const unsigned char *at, uint64_t most, uint64_t *found);

/* Read the group of an event, if it names one. */
Outcome read_group(const Batch *batch, const Event *fields, PlainEvent *event);

/* Read the medium of an event; medium_of is called if it is not that of the last event. */
Outcome read_medium(Batch *batch, const Event *fields, PlainEvent *event);

/* Read the adapter: its name, else its id, else None. *name: the name, nil if it has none. */
Outcome read_adapter(Batch *batch, const Event *fields, Value *name, PlainEvent *event);

/* Read whether the blocks were new, or only announced again, if a store says so. */
Outcome read_origin(const Batch *batch, const Event *fields, PlainEvent *event);

/* Read how many copies a removal leaves, if it says so. Only 0 copies of each block are plain. */
Outcome read_copy_counts(const Batch *batch, const Event *fields, PlainEvent *event);

/* Return whether the extra keys of `count` blocks name nothing but the adapter of the event. */
int has_plain_keys(const Batch *batch, const Event *event, size_t count, const Value *adapter);

/* Check that the blocks are of the attention that a prefix needs, or that the event says nothing about it. Otherwise
 * the event becomes a WINDOW. */
Outcome read_attention(const Batch *batch, const Event *fields, PlainEvent *event);

/* Read the next event. If it is UNUSUAL, the reader may stand anywhere in it. */
Outcome read_event(Batch *batch, PlainEvent *found);

#endif
