/* The objects of Python that are made of the events of a batch: see events.h. */

#include "events.h"

#include "objects.h"

/* The attributes of Stored, StoredReference, StoredWindow and Removed, in the order in which they are built here. */
enum { STORED_ATTRIBUTES = 14, REFERENCE_ATTRIBUTES = 7, WINDOW_ATTRIBUTES = 8, REMOVED_ATTRIBUTES = 6 };
static const char *const stored_names[STORED_ATTRIBUTES] = {
    "engine_hashes", "parent", "tokens", "block_size", "salts", "group", "part", "medium", "adapter",
    "tells_salts", "extras", "may_begin", "is_reused", "envelope",
};
static const char *const reference_names[REFERENCE_ATTRIBUTES] = {
    "engine_hashes", "block_size", "group", "part", "medium", "is_salted", "is_reused",
};
static const char *const window_names[WINDOW_ATTRIBUTES] = {
    "engine_hashes", "group", "window", "block_size", "part", "medium", "is_dense", "is_reused",
};
static const char *const removed_names[REMOVED_ATTRIBUTES] = {
    "engine_hashes", "group", "part", "copies_left", "medium", "envelope",
};
static PyObject *stored_attributes[STORED_ATTRIBUTES], *reference_attributes[REFERENCE_ATTRIBUTES],
    *window_attributes[WINDOW_ATTRIBUTES], *removed_attributes[REMOVED_ATTRIBUTES];

int intern_attributes(void)
{
    return intern_names(stored_names, stored_attributes, STORED_ATTRIBUTES) &&
           intern_names(reference_names, reference_attributes, REFERENCE_ATTRIBUTES) &&
           intern_names(window_names, window_attributes, WINDOW_ATTRIBUTES) &&
           intern_names(removed_names, removed_attributes, REMOVED_ATTRIBUTES);
}

/* Return hashes as a tuple of numbers. */
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

/* Return an object of `type` with these attributes, of which the first `owned` are released. NULL with an exception. */
static PyObject *build_owned(PyObject *type, PyObject *const *names, PyObject *const *values, int count, int owned)
{
    int are_all = 1;
    for (int i = 0; i < owned; i++)
        are_all &= values[i] != NULL;
    PyObject *found = are_all ? build_object((PyTypeObject *)type, names, values, count) : NULL;
    for (int i = 0; i < owned; i++)
        Py_XDECREF(values[i]);
    return found;
}

/* Return whether an engine had the blocks of a store before, according to its event; a borrowed reference. */
static PyObject *reused(const PlainEvent *event)
{
    return event->origin == UNTOLD ? Py_None : event->origin == FROM_REUSE ? Py_True : Py_False;
}

/* Return a store without tokens as a StoredReference. */
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
    return build_owned(events->types.reference, reference_attributes, values, REFERENCE_ATTRIBUTES, OWNED);
}

/* Return a store of another group as a StoredWindow. */
static PyObject *make_window(const Events *events, const PlainEvent *event)
{
    enum { OWNED = 5 };
    PyObject *values[WINDOW_ATTRIBUTES] = {
        hashes_as_tuple(events->hashes + event->hashes, event->hashes_count),
        event->has_group ? PyLong_FromUnsignedLongLong(event->group) : Py_NewRef(Py_None),
        event->window > 0 ? PyLong_FromUnsignedLong(event->window) : Py_NewRef(Py_None),
        PyLong_FromUnsignedLong(event->block_size),
        PyLong_FromLong(0),
        event->medium,
        event->is_dense ? Py_True : Py_False,
        reused(event),
    };
    return build_owned(events->types.window, window_attributes, values, WINDOW_ATTRIBUTES, OWNED);
}

/* Return a store with tokens as a Stored. */
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
    return build_owned(events->types.stored, stored_attributes, values, STORED_ATTRIBUTES, OWNED);
}

/* Return a tuple of `count` zeros. */
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

/* Return a removal as a Removed. */
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
    return build_owned(events->types.removed, removed_attributes, values, REMOVED_ATTRIBUTES, OWNED);
}

PyObject *make_event(const Events *events, const PlainEvent *event)
{
    switch ((EventKind)event->kind) {
    case STORE: return make_stored(events, event);
    case REMOVAL: return make_removed(events, event);
    case WINDOW: return make_window(events, event);
    case REFERENCE: return make_reference(events, event);
    case CLEARING: return Py_NewRef(events->types.cleared);
    default: return Py_BuildValue("nn", event->start, event->end);
    }
}

PyObject *make_pattern(const Events *events, const PlainEvent *event)
{
    PlainEvent without = *event;
    without.hashes_count = without.tokens_count = 0;
    without.has_parent = 0;
    return make_event(events, &without);
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

