/* A Place of Python, app/waymark/domain/rows.py: (head, branch or None, is_single). */

#ifndef WAYMARK_PLACE_H
#define WAYMARK_PLACE_H

#include "objects.h"

/* A branch row is shared if its number equals its head's except for this number of leading digits. */
enum { SHARED_DIGITS = 2 };

/* The kind of a place. FREE: no place of the stream has this number. */
typedef enum { FREE, ROW, BRANCH_ROW, SINGLE } PlaceKind;

/* Return whether a branch row is a shared one. */
static inline int is_shared(uint64_t head, uint64_t branch)
{
    return (head ^ branch) << 4 * SHARED_DIGITS == 0;
}

/* Read a Place; *branch is 0 if it is not a branch row. 0 with an exception. */
static inline int read_place(PyObject *place, uint64_t *head, uint64_t *branch, uint8_t *kind)
{
    if (!PyTuple_Check(place) || PyTuple_Size(place) != 3) {
        PyErr_Format(PyExc_TypeError, "a place is head, branch and is_single, not %R", place);
        return 0;
    }
    PyObject *branch_or_none = PyTuple_GetItem(place, 1);
    *branch = 0;
    *kind = PyTuple_GetItem(place, 2) == Py_True ? SINGLE : ROW;
    *head = PyLong_AsUnsignedLongLong(PyTuple_GetItem(place, 0));
    if (!PyErr_Occurred() && branch_or_none != Py_None) {
        *branch = PyLong_AsUnsignedLongLong(branch_or_none);
        *kind = BRANCH_ROW;
    }
    return !PyErr_Occurred();
}

/* Return a Place of the type `type`. */
static inline PyObject *build_place(PyObject *type, uint64_t head, uint64_t branch, uint8_t kind)
{
    PyObject *branch_or_none = kind == BRANCH_ROW ? PyLong_FromUnsignedLongLong(branch) : Py_NewRef(Py_None);
    if (branch_or_none == NULL)
        return NULL;
    return build_named(type, Py_BuildValue("KNO", head, branch_or_none, kind == SINGLE ? Py_True : Py_False));
}

/* Return whether an object is a type of tuples, as that of a Place has to be. */
static inline int is_tuple_type(PyObject *type)
{
    return PyType_Check(type) && PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type);
}

#endif
