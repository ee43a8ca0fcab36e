/* Events, the type: see events.h. */

#include "events.h"

#include "objects.h"
#include "reserve.h"

static PyTypeObject *events_type;

Events *as_events(PyObject *object)
{
    if (Py_TYPE(object) == events_type)
        return (Events *)object;
    PyErr_Format(PyExc_TypeError, "there must be Events, not %R", (PyObject *)Py_TYPE(object));
    return NULL;
}

Events *new_events(const EventTypes *types)
{
    Events *events = intern_attributes() ? (Events *)PyType_GenericAlloc(events_type, 0) : NULL;
    if (events != NULL) {
        events->types = *types;
        Py_INCREF(types->stored);
        Py_INCREF(types->reference);
        Py_INCREF(types->window);
        Py_INCREF(types->removed);
        Py_INCREF(types->cleared);
    }
    return events;
}

/* ---- events that are alike ----------------------------------------------------------------------- */

/* Return whether two names, numbers or None are equal; mostly they are one object. -1 with an exception. */
static int is_equal(PyObject *one, PyObject *other)
{
    if (one == NULL || other == NULL)
        return one == other;
    return PyObject_RichCompareBool(one, other, Py_EQ);
}

/* Return whether two events of one kind differ in nothing but their blocks. -1 with an exception. */
static int are_alike(const PlainEvent *one, const PlainEvent *other)
{
    if (one->window != other->window || one->is_dense != other->is_dense || one->has_group != other->has_group || one->group != other->group || one->tells_salts != other->tells_salts ||
        one->block_size != other->block_size || one->origin != other->origin || one->leaves_none != other->leaves_none)
        return 0;
    const int is_same_medium = is_equal(one->medium, other->medium);
    return is_same_medium == 1 ? is_equal(one->adapter, other->adapter) : is_same_medium;
}

/* Return the first event of a kind; NULL if there is none. */
static const PlainEvent *first_of(const Events *events, uint8_t kind)
{
    for (size_t i = 0; i < events->count; i++)
        if (events->events[i].kind == kind)
            return &events->events[i];
    return NULL;
}

/* Find the form of an event by a comparison with the first event of each form so far, or add a form. Return whether
 * there is room for it; -1 with an exception. */
static int find_form(Events *events, PlainEvent *event, const PlainEvent **first)
{
    for (size_t form = 0; form < events->forms; form++) {
        const int is_alike = first[form]->kind == event->kind ? are_alike(event, first[form]) : 0;
        event->form = (uint8_t)form;
        if (is_alike != 0)
            return is_alike;
    }
    if (events->forms == FORMS_MAX)
        return 0;
    event->form = (uint8_t)events->forms;
    first[events->forms++] = event;
    return 1;
}

int keep_together(Events *events)
{
    const PlainEvent *first[FORMS_MAX];
    size_t of_kind[2] = {0};
    events->forms = 0;
    for (size_t i = 0; i < events->count; i++) {
        PlainEvent *event = &events->events[i];
        if (event->kind > REFERENCE || (event->kind == STORE && !event->is_dense))
            return APART;
        const int is_found = find_form(events, event, first);
        if (is_found != 1)
            return is_found;
    }
    int keeping = events->forms == 0 ? APART : ALIKE;
    for (size_t form = 0; form < events->forms; form++)
        if (first[form]->kind > REMOVAL || ++of_kind[first[form]->kind] > 1)
            keeping = MIXED;
    const PlainEvent *store = first_of(events, STORE);
    events->block_size = store == NULL ? 0 : store->block_size;
    return keeping;
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

/* Count the events of a kind, and their hashes. The first event becomes *pattern, as an object without its blocks, or
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
    else
        *pattern = make_pattern(events, first);
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

/* forms() -> list[tuple[Event, int, int]]: of each form the first event without its blocks, how many events there are, and
 * their hashes */
static PyObject *events_forms(PyObject *self, PyObject *ignored)
{
    const Events *events = (Events *)self;
    const PlainEvent *first[FORMS_MAX] = {NULL};
    Py_ssize_t counts[FORMS_MAX] = {0}, hashes[FORMS_MAX] = {0};
    for (size_t i = 0; i < events->count; i++) {
        const PlainEvent *event = &events->events[i];
        if (first[event->form] == NULL)
            first[event->form] = event;
        counts[event->form]++;
        hashes[event->form] += (Py_ssize_t)event->hashes_count;
    }
    PyObject *forms = PyList_New((Py_ssize_t)events->forms);
    for (size_t form = 0; forms != NULL && form < events->forms; form++) {
        PyObject *pattern = make_pattern(events, first[form]);
        PyObject *told = pattern == NULL ? NULL : Py_BuildValue("Nnn", pattern, counts[form], hashes[form]);
        if (told == NULL || PyList_SetItem(forms, (Py_ssize_t)form, told) < 0)
            Py_CLEAR(forms);
    }
    return forms;
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

/* patterns(before: Events) -> Events: the first store and the first removal, each without its blocks; for a kind that
 * these events lack, the first event of `before` */
static PyObject *events_patterns(PyObject *self, PyObject *before)
{
    const Events *events = (Events *)self, *others = as_events(before);
    Events *patterns = others == NULL ? NULL : new_events(&events->types);
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
    Py_XDECREF(events->types.stored);
    Py_XDECREF(events->types.reference);
    Py_XDECREF(events->types.window);
    Py_XDECREF(events->types.removed);
    Py_XDECREF(events->types.cleared);
    free_object(self);
}

static PyMethodDef events_methods[] = {
    METHOD("facts", events_facts, METH_NOARGS,
           "facts($self, /)\n--\n\nCount the stores and their blocks, with the first store; then the removals."),
    METHOD("go_on", events_go_on, METH_FASTCALL,
           "go_on($self, payloads, ts, rank, publisher, events_max, hashes_max, medium, stored_fields, removed_fields, "
           "/)\n--\n\nRead the next batches, as far as they differ from this one in their blocks only."),
    METHOD("patterns", events_patterns, METH_O,
           "patterns($self, before, /)\n--\n\nReturn the first store and the first removal, without blocks."),
    METHOD("run", events_run, METH_FASTCALL,
           "run($self, start, position, hashes_max, parts, holders, forms, seed, full, piece_blocks, waves, /)\n--\n\n"
           "Run events of several forms, one after the other."),
    METHOD("forms", events_forms, METH_NOARGS,
           "forms($self, /)\n--\n\nReturn each form: an event without its blocks, and two counts."),
    METHOD("hashes", events_hashes, METH_FASTCALL, "hashes($self, start, end, /)\n--\n\nReturn those of some stores."),
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
