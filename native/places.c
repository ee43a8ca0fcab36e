/* The places of a stream: see places.h, and app/waymark/domain/pure_known.py for the same in Python. */

#include "places.h"

static PyTypeObject *places_type;

Places *as_places(PyObject *object)
{
    if (Py_TYPE(object) == places_type)
        return (Places *)object;
    PyErr_Format(PyExc_TypeError, "there must be Places, not %R", (PyObject *)Py_TYPE(object));
    return NULL;
}

/* Return the hash of everything that distinguishes places. */
static uint64_t hash_of_place(const Place *place)
{
    return spread(spread(place->head) ^ rotate_left(spread(place->branch), 16) ^ place->namespace ^ place->kind);
}

/* Return the hash of a place for the index of places. */
static uint64_t place_hash_of(const void *places, uint32_t number)
{
    return hash_of_place(&((const Places *)places)->places[number]);
}

int read_place_in(PyObject *object, PyObject *namespace, Place *place)
{
    memset(place, 0, sizeof *place);
    if (!read_place(object, &place->head, &place->branch, &place->kind))
        return 0;
    place->namespace = PyLong_AsUnsignedLongLong(namespace);
    return !PyErr_Occurred();
}

/* Return whether two places are the same, whatever their blocks. */
static int is_same_place(const Place *one, const Place *other)
{
    return one->head == other->head && one->branch == other->branch && one->namespace == other->namespace &&
           one->kind == other->kind;
}

/* Return a number that no place has. -1 with an exception. */
static int64_t new_number(Places *places)
{
    if (places->free != 0) {
        const uint32_t number = places->free - 1;
        places->free = (uint32_t)places->places[number].head;
        return number;
    }
    if (places->count == places->capacity) {
        uint32_t capacity = places->capacity + places->capacity / 4 + 16;
        capacity = capacity < THINGS_MAX ? capacity : THINGS_MAX;
        Place *grown = places->count < THINGS_MAX ? PyMem_Realloc(places->places, capacity * sizeof *grown) : NULL;
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        places->places = grown;
        places->capacity = capacity;
    }
    return places->count++;
}

int64_t number_of_place(Places *places, const Place *place)
{
    const uint64_t hash = hash_of_place(place);
    Search search = begin_search(&places->index, hash);
    for (int64_t found; (found = next_found(&search)) >= 0;)
        if (is_same_place(&places->places[found], place))
            return found;
    if (!reserve_slot(&places->index, hash, place_hash_of, places))
        return -1;
    const int64_t number = new_number(places);
    if (number >= 0) {
        places->places[number] = *place;
        insert_slot(&places->index, hash, (uint32_t)number, place_hash_of, places);
        places->used++;
    }
    return number;
}

void drop_place(Places *places, uint32_t number)
{
    Place *place = &places->places[number];
    delete_slot(&places->index, hash_of_place(place), number, place_hash_of, places);
    place->kind = FREE;
    place->head = places->free;
    places->free = number + 1;
    places->used--;
    if (places->last_number == number)
        Py_CLEAR(places->last);
}

PyObject *make_place(Places *places, uint32_t number)
{
    if (places->last == NULL || places->last_number != number) { /* mostly the place of the last call */
        const Place *place = &places->places[number];
        PyObject *made = build_place(places->place_type, place->head, place->branch, place->kind);
        if (made == NULL)
            return NULL;
        Py_XDECREF(places->last);
        places->last = made;
        places->last_number = number;
    }
    return Py_NewRef(places->last);
}

/* ---- the type ------------------------------------------------------------------------------------ */

/* Places(place_type: type[Place], spot_type: type[Spot]) */
static PyObject *places_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    if (!has_only_arguments("Places", args, names, 2))
        return NULL;
    PyObject *place_type = PyTuple_GetItem(args, 0), *spot_type = PyTuple_GetItem(args, 1);
    if (!is_tuple_type(place_type) || !is_tuple_type(spot_type))
        return PyErr_Format(PyExc_TypeError, "Places() takes two types of tuples");
    Places *places = (Places *)PyType_GenericAlloc(type, 0);
    if (places != NULL) {
        places->place_type = Py_NewRef(place_type);
        places->spot_type = Py_NewRef(spot_type);
    }
    return (PyObject *)places;
}

/* Each of its KnownBlocks holds a reference, so no block has one of its places any more. */
static void places_dealloc(PyObject *self)
{
    Places *places = (Places *)self;
    PyMem_Free(places->places);
    clear_index(&places->index);
    Py_XDECREF(places->last);
    Py_XDECREF(places->place_type);
    Py_XDECREF(places->spot_type);
    free_object(self);
}

/* len(places) */
static Py_ssize_t places_length(PyObject *self)
{
    return (Py_ssize_t)((Places *)self)->used;
}

/* __sizeof__() -> int: bytes, with those of the index. */
static PyObject *places_size(PyObject *self, PyObject *ignored)
{
    const Places *places = (Places *)self;
    return PyLong_FromSize_t(sizeof *places + places->capacity * sizeof(Place) + places->index.bytes);
}

static PyMethodDef places_methods[] = {
    METHOD("__sizeof__", places_size, METH_NOARGS, NULL),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot places_slots[] = {
    {Py_tp_new, places_new},       {Py_tp_dealloc, places_dealloc},         {Py_tp_methods, places_methods},
    {Py_sq_length, places_length}, {Py_tp_doc, "The places of a stream."}, {0, NULL},
};

static PyType_Spec places_spec = {"waymark._native.Places", sizeof(Places), 0, Py_TPFLAGS_DEFAULT, places_slots};

int add_places(PyObject *module)
{
    return add_type(module, "Places", &places_spec, &places_type);
}
