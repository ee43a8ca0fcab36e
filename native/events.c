/* Events, the type, and the objects of Python that are made of its events: see events.h. */

#include "events.h"

#include "objects.h"
#include "reserve.h"

/* The attributes of Stored, StoredReference and Removed, in the order in which they are built here. */
enum { STORED_ATTRIBUTES = 14, REFERENCE_ATTRIBUTES = 7, REMOVED_ATTRIBUTES = 6 };
static const char *const stored_names[STORED_ATTRIBUTES] = {
    "engine_hashes", "parent", "tokens", "block_size", "salts", "group", "part", "medium", "adapter",
    "tells_salts", "extras", "may_begin", "is_reused", "envelope",
};
static const char *const reference_names[REFERENCE_ATTRIBUTES] = {
    "engine_hashes", "block_size", "group", "part", "medium", "is_salted", "is_reused",
};
static const char *const removed_names[REMOVED_ATTRIBUTES] = {
    "engine_hashes", "group", "part", "copies_left", "medium", "envelope",
};
static PyObject *stored_attributes[STORED_ATTRIBUTES], *reference_attributes[REFERENCE_ATTRIBUTES],
    *removed_attributes[REMOVED_ATTRIBUTES];

static PyTypeObject *events_type;

Events *as_events(PyObject *object)
{
    if (Py_TYPE(object) == events_type)
        return (Events *)object;
    PyErr_Format(PyExc_TypeError, "there must be Events, not %R", (PyObject *)Py_TYPE(object));
    return NULL;
}

Events *new_events(PyObject *stored, PyObject *reference, PyObject *removed, PyObject *cleared)
{
    if (!intern_names(stored_names, stored_attributes, STORED_ATTRIBUTES) ||
        !intern_names(reference_names, reference_attributes, REFERENCE_ATTRIBUTES) ||
        !intern_names(removed_names, removed_attributes, REMOVED_ATTRIBUTES))
        return NULL;
    Events *events = (Events *)PyType_GenericAlloc(events_type, 0);
    if (events != NULL) {
        events->stored = (PyTypeObject *)Py_NewRef(stored);
        events->reference = (PyTypeObject *)Py_NewRef(reference);
        events->removed = (PyTypeObject *)Py_NewRef(removed);
        events->cleared = Py_NewRef(cleared);
    }
    return events;
}

/* ---- objects ------------------------------------------------------------------------------------- */

/* Hashes as a tuple of numbers. */
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

/* An object of `type` with these attributes, of which the first `owned` are released. NULL with an exception. */
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

/* Whether an engine had the blocks of a store before, according to its event; a borrowed reference. */
static PyObject *reused(const PlainEvent *event)
{
    return event->origin == UNTOLD ? Py_None : event->origin == FROM_REUSE ? Py_True : Py_False;
}

/* A store without tokens as a StoredReference. */
static PyObject *make_reference(const Events *events, const PlainEvent *event)
{
    enum { OWNED = 4 };
    PyObject *values[REFERENCE_ATTRIBUTES] = {
        hashes_as_tuple(events->hashes + event->hashes, event->hashes_count),
        PyLong_FromUnsignedLong(event->block_size),
        event->has_group ? PyLong_FromUnsignedLongLong(event->group) : Py_NewRef(Py_None),
        PyLong_FromLong(0),
        event->medium,
        Py_False,
        reused(event),
    };
    return build_owned(events->reference, reference_attributes, values, REFERENCE_ATTRIBUTES, OWNED);
}

/* A store with tokens as a Stored. */
static PyObject *make_stored(const Events *events, const PlainEvent *event)
{
    /* In the order of stored_names; borrowed references come last. */
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
        event->tells_salts ? Py_True : Py_False,
        Py_None,
        Py_False,
        reused(event),
        Py_None,
    };
    return build_owned(events->stored, stored_attributes, values, STORED_ATTRIBUTES, OWNED);
}

/* So many zeros, as a tuple. */
static PyObject *zeros(size_t count)
{
    PyObject *found = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; found != NULL && i < count; i++) {
        PyObject *zero = PyLong_FromLong(0);
        if (zero == NULL)
            Py_CLEAR(found);
        else
            PyTuple_SetItem(found, (Py_ssize_t)i, zero);
    }
    return found;
}

/* A removal as a Removed. */
static PyObject *make_removed(const Events *events, const PlainEvent *event)
{
    enum { OWNED = 4 };
    PyObject *values[REMOVED_ATTRIBUTES] = {
        hashes_as_tuple(events->hashes + event->hashes, event->hashes_count),
        event->has_group ? PyLong_FromUnsignedLongLong(event->group) : Py_NewRef(Py_None),
        PyLong_FromLong(0),
        event->leaves_none ? zeros(event->hashes_count) : Py_NewRef(Py_None),
        event->medium,
        Py_None,
    };
    return build_owned(events->removed, removed_attributes, values, REMOVED_ATTRIBUTES, OWNED);
}

/* An event as an object; for an event that is left to Python, its position in the payload, (start, end). */
static PyObject *make_event(const Events *events, const PlainEvent *event)
{
    if (event->kind == OTHER)
        return Py_BuildValue("nn", event->start, event->end);
    if (event->kind == CLEARING)
        return Py_NewRef(events->cleared);
    if (event->kind == REMOVAL)
        return make_removed(events, event);
    return event->tokens_count == 0 ? make_reference(events, event) : make_stored(events, event);
}

PyObject *list_events(const Events *events)
{
    PyObject *list = PyList_New((Py_ssize_t)events->count);
    for (size_t i = 0; list != NULL && i < events->count; i++) {
        PyObject *event = make_event(events, &events->events[i]);
        if (event == NULL || PyList_SetItem(list, (Py_ssize_t)i, event) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/* ---- events that are alike ----------------------------------------------------------------------- */

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
    if (one->has_group != other->has_group || one->group != other->group || one->tells_salts != other->tells_salts || one->block_size != other->block_size ||
        one->origin != other->origin || one->leaves_none != other->leaves_none)
        return 0;
    const int is_same_medium = is_equal(one->medium, other->medium);
    return is_same_medium == 1 ? is_equal(one->adapter, other->adapter) : is_same_medium;
}

int stay_together(Events *events)
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

/* The first event of a kind; NULL if there is none. */
static const PlainEvent *first_of(const Events *events, uint8_t kind)
{
    for (size_t i = 0; i < events->count; i++)
        if (events->events[i].kind == kind)
            return &events->events[i];
    return NULL;
}

int are_of_one_kind(const Events *events, const Events *more)
{
    int is_alike = 1;
    for (uint8_t kind = STORE; is_alike == 1 && kind <= REMOVAL; kind++) {
        const PlainEvent *first = first_of(events, kind), *other = first_of(more, kind);
        if (other != NULL)
            is_alike = first == NULL ? 0 : are_alike(first, other);
    }
    return is_alike;
}

/* ---- the type ------------------------------------------------------------------------------------ */

/* len(events) */
static Py_ssize_t events_length(PyObject *self)
{
    return (Py_ssize_t)((Events *)self)->count;
}

/* events[number], from 0 */
static PyObject *events_item(PyObject *self, Py_ssize_t at)
{
    const Events *events = (Events *)self;
    if (at < 0 || (size_t)at >= events->count)
        return PyErr_Format(PyExc_IndexError, "there are %zu events", events->count);
    return make_event(events, &events->events[at]);
}

/* How many events of a kind there are, and their hashes. The first becomes *pattern, as an object without its blocks, or
 * None if there is none. 0 with an exception. */
static int sum_up(const Events *events, uint8_t kind, Py_ssize_t *count, Py_ssize_t *hashes, PyObject **pattern)
{
    const PlainEvent *first = NULL;
    *count = *hashes = 0;
    for (size_t i = 0; i < events->count; i++)
        if (events->events[i].kind == kind) {
            first = first == NULL ? &events->events[i] : first;
            ++*count;
            *hashes += (Py_ssize_t)events->events[i].hashes_count;
        }
    if (first == NULL)
        *pattern = Py_NewRef(Py_None);
    else {
        PlainEvent without = *first;
        without.hashes_count = without.tokens_count = 0;
        without.has_parent = 0;
        *pattern = kind == STORE ? make_stored(events, &without) : make_removed(events, &without);
    }
    return *pattern != NULL;
}

/* facts() -> tuple[int, int, Stored | None, int, int, Removed | None]
 *
 * The stores, their blocks, the first store without its blocks; then the same of the removals.
 */
static PyObject *events_facts(PyObject *self, PyObject *ignored)
{
    const Events *events = (Events *)self;
    Py_ssize_t stores, blocks, removals, removed;
    PyObject *store = NULL, *removal = NULL;
    if (sum_up(events, STORE, &stores, &blocks, &store) && sum_up(events, REMOVAL, &removals, &removed, &removal))
        return Py_BuildValue("nnNnnN", stores, blocks, store, removals, removed, removal);
    Py_XDECREF(store);
    return NULL;
}

/* hashes(start: int, end: int) -> list[int]: those of the stores among these events */
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

/* Append an event without its blocks. 0 with an exception. */
static int add_pattern(Events *events, const PlainEvent *event)
{
    if (!reserve((void **)&events->events, &events->capacity, events->count, 1, sizeof *events->events))
        return 0;
    PlainEvent *pattern = &events->events[events->count++];
    *pattern = *event;
    pattern->hashes_count = pattern->tokens_count = 0;
    pattern->has_parent = 0;
    Py_XINCREF(pattern->medium);
    Py_XINCREF(pattern->adapter);
    return 1;
}

/* patterns(before: Events) -> Events: the first store and the first removal, each without its blocks; of a kind that is
 * not here, the first of those before */
static PyObject *events_patterns(PyObject *self, PyObject *before)
{
    const Events *events = (Events *)self, *others = as_events(before);
    Events *patterns = others == NULL ? NULL : new_events((PyObject *)events->stored, (PyObject *)events->reference,
                                                          (PyObject *)events->removed, events->cleared);
    for (uint8_t kind = STORE; patterns != NULL && kind <= REMOVAL; kind++) {
        const PlainEvent *first = first_of(events, kind), *pattern = first == NULL ? first_of(others, kind) : first;
        if (pattern == NULL)
            continue;
        if (!add_pattern(patterns, pattern))
            Py_CLEAR(patterns);
        else if (kind == STORE)
            patterns->block_size = pattern->block_size;
    }
    return (PyObject *)patterns;
}

/* Release the references of the events and of the type itself. */
static void events_dealloc(PyObject *self)
{
    Events *events = (Events *)self;
    for (size_t i = 0; i < events->count; i++)
        drop_event(&events->events[i]);
    PyMem_Free(events->events);
    PyMem_Free(events->hashes);
    PyMem_Free(events->tokens);
    Py_XDECREF((PyObject *)events->stored);
    Py_XDECREF((PyObject *)events->reference);
    Py_XDECREF((PyObject *)events->removed);
    Py_XDECREF(events->cleared);
    free_object(self);
}

static PyMethodDef events_methods[] = {
    METHOD("facts", events_facts, METH_NOARGS,
           "facts($self, /)\n--\n\nStores, their blocks, the first store; then the same of the removals."),
    METHOD("go_on", events_go_on, METH_FASTCALL,
           "go_on($self, payloads, ts, rank, publisher, events_max, hashes_max, medium, stored_fields, removed_fields, "
           "/)\n--\n\nThose of the next batches, as far as these say nothing else besides their blocks."),
    METHOD("patterns", events_patterns, METH_O,
           "patterns($self, before, /)\n--\n\nThe first of each kind, also of those before, without their blocks."),
    METHOD("hashes", events_hashes, METH_FASTCALL, "hashes($self, start, end, /)\n--\n\nThose of some stores."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot events_slots[] = {
    {Py_tp_dealloc, events_dealloc}, {Py_tp_methods, events_methods}, {Py_sq_length, events_length},
    {Py_sq_item, events_item},       {Py_tp_doc, "Events of a batch."}, {0, NULL},
};

static PyType_Spec events_spec = {"waymark._native.Events", sizeof(Events), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, events_slots};

/* Only read_batch makes such objects, so the module does not name the type. */
int add_events(PyObject *module)
{
    return add_type(NULL, "Events", &events_spec, &events_type);
}
