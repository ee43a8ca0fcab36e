/* Turns one event of a batch in vLLM's dialect into a plain event.
 *
 * An event of an unusual form is left to Python.
 */

#include "fields.h"

enum { TELLS_SALTS_FROM = 9 }; /* a list of this many elements, or more, has a place for salts */

static const Name stored_tag = NAME("BlockStored"), removed_tag = NAME("BlockRemoved"),
                  cleared_tag = NAME("AllBlocksCleared"), local = NAME("LOCAL");

/* Clear the fields of a store that have no meaning if its blocks are named by hashes alone. */
static void keep_hashes(PlainEvent *event)
{
    event->is_dense = event->is_dense && event->kind == WINDOW;
    event->tokens_count = 0;
    event->has_parent = event->tells_salts = 0;
    Py_CLEAR(event->adapter);
}

/* Read a store from its fields. */
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
    if (outcome == READ)
        outcome = read_origin(batch, fields, event);
    if (outcome == READ && !has_plain_keys(batch, fields, event->hashes_count, &adapter))
        outcome = UNUSUAL;
    event->block_size = (uint32_t)block_size;
    event->tells_salts = fields->elements == 0 || fields->elements >= TELLS_SALTS_FROM;
    event->is_dense = event->tokens_count == block_size * event->hashes_count;
    if (event->kind == STORE && event->tokens_count == 0)
        event->kind = REFERENCE;
    if (event->kind != STORE)
        keep_hashes(event);
    return outcome;
}

/* Read a removal from its fields. */
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

/* Move the fields of a list to where a removal has them: a removal has fewer. */
static void move_fields_of_removal(Event *event)
{
    if (event->elements == 0)
        return;
    event->at[MEDIUM] = event->at[PARENT];
    event->at[GROUP] = event->at[TOKEN_IDS];
    event->at[PARENT] = event->at[TOKEN_IDS] = NULL;
}

/* Drop the fields of a list from this one on, since its dialect does not have them. 0 if one is UNUSUAL: then it is
 * unknown whether the library can read it. */
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

/* Return whether an event has none of these fields, or nil in them. */
static int has_none_of(const Batch *batch, const Event *event, const Field *fields, int count)
{
    Reader inside;
    for (int i = 0; i < count; i++)
        if (value_at(batch, event->at[fields[i]], &inside).kind != NIL)
            return 0;
    return 1;
}

Outcome read_event(Batch *batch, PlainEvent *found)
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
    const Value window = value_at(batch, event.at[WINDOW_TOKENS], &inside);
    if (!is_simple(&window) || !has_none_of(batch, &event, of_maps, 3) || (locality.kind != NIL && !is_name(&locality, &local)))
        return UNUSUAL;
    if (is_name(&tag, &stored_tag)) {
        const int is_usual = cut_fields(batch, &event, batch->stored_fields) && has_none_of(batch, &event, of_removals, 1);
        return is_usual ? read_stored(batch, &event, found) : UNUSUAL;
    }
    if (is_name(&tag, &removed_tag)) {
        if (!cut_fields(batch, &event, batch->removed_fields))
            return UNUSUAL;
        move_fields_of_removal(&event);
        return has_none_of(batch, &event, of_stores, 8) ? read_removed(batch, &event, found) : UNUSUAL;
    }
    if (!is_name(&tag, &cleared_tag) || event.elements > 1 || (head.kind == MAP && head.number > 1))
        return UNUSUAL;
    found->kind = CLEARING;
    return READ;
}
