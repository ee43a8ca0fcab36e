/* The order of targets whose costs are sums. */

#include "sums.h"

#include <stdlib.h>

static PyObject *weight_name[1];

int has_fields(PyObject *object, Py_ssize_t count, const char *what)
{
    if (PyTuple_Check(object) && PyTuple_Size(object) >= count)
        return 1;
    PyErr_Format(PyExc_TypeError, "%s is a tuple of at least %zd fields", what, count);
    return 0;
}

/* Read the numbers of the first fields of a tuple; zeros for None. 0 with an exception. */
static int read_fields(PyObject *tuple, double *numbers, int count, const char *what)
{
    for (int i = 0; i < count; i++)
        numbers[i] = 0.0;
    if (tuple == Py_None)
        return 1;
    if (!has_fields(tuple, count, what))
        return 0;
    for (int i = 0; i < count; i++) {
        numbers[i] = PyFloat_AsDouble(PyTuple_GetItem(tuple, i));
        if (numbers[i] == -1.0 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

PyObject *weight_of(PyObject *member)
{
    static const char *const names[] = {"weight"};
    if (!has_fields(member, MEMBER_FIELDS, "a member") || !intern_names(names, weight_name, 1))
        return NULL;
    return PyObject_GetAttr(PyTuple_GetItem(member, TARGET), weight_name[0]);
}

/* The common values in the costs of all members. */
typedef struct {
    PyObject *rows, *loads, *expected, *draw; /* called with a name, a publisher, a publisher, and nothing */
    double tokens, least, size, credits[ROW_FIELDS], weight_new, weight_active;
} Terms;

typedef struct {
    double cost, draw;
    long long publisher;
    PyObject *tuple; /* a reference */
} Sum;

/* Return the order of two sums, as qsort asks for it. */
static int compare_sums(const void *one, const void *other)
{
    const Sum *a = one, *b = other;
    if (a->cost != b->cost)
        return a->cost < b->cost ? -1 : 1;
    if (a->draw != b->draw)
        return a->draw < b->draw ? -1 : 1;
    return a->publisher < b->publisher ? -1 : a->publisher > b->publisher;
}

/* Compute the new tokens of a target and its cost, in the order of Python's additions. 0 with an exception. */
static int add_up(const Terms *terms, PyObject *member, PyObject *row, PyObject *load, double soon, double *new, double *cost)
{
    double blocks[ROW_FIELDS], loads[LOAD_FIELDS];
    if (!read_fields(row, blocks, ROW_FIELDS, "a row") || !read_fields(load, loads, LOAD_FIELDS, "a load"))
        return 0;
    const double *credits = terms->credits;
    const double has = credits[0] * blocks[DEVICE] + credits[1] * blocks[HOST] + credits[2] * blocks[DISK] + credits[3] * blocks[SHARED];
    *new = terms->tokens - terms->size * (soon > has ? soon : has);
    if (*new < terms->least)
        *new = terms->least;
    *cost = terms->weight_new * *new;
    if (load == Py_None)
        return 1;
    PyObject *object = weight_of(member);
    const double weight = object == NULL ? -1.0 : PyFloat_AsDouble(object);
    Py_XDECREF(object);
    if (PyErr_Occurred())
        return 0;
    if (weight == 0.0) {
        PyErr_SetString(PyExc_ZeroDivisionError, "the weight of a target is 0");
        return 0;
    }
    *cost += (loads[LOAD_TOKENS] + terms->weight_active * loads[LOAD_REQUESTS]) / weight;
    return 1;
}

/* Return the number of blocks that a publisher has soon, as an object; NULL with an exception. */
static PyObject *soon_of(const Terms *terms, PyObject *publisher)
{
    PyObject *soon = terms->expected == Py_None ? NULL : PyObject_CallFunctionObjArgs(terms->expected, publisher, NULL);
    if (soon != NULL && soon != Py_None)
        return soon;
    Py_XDECREF(soon);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(0);
}

/* Return the sum of a member; its tuple is NULL with an exception. */
static Sum sum_of(const Terms *terms, PyObject *member)
{
    Sum sum = {0.0, 0.0, 0, NULL};
    if (!has_fields(member, MEMBER_FIELDS, "a member"))
        return sum;
    PyObject *publisher = PyTuple_GetItem(member, PUBLISHER), *load = NULL, *soon = NULL, *draw = NULL, *made[2] = {NULL, NULL};
    PyObject *row = PyObject_CallFunctionObjArgs(terms->rows, PyTuple_GetItem(member, NAME), NULL);
    if (row != NULL && (load = PyObject_CallFunctionObjArgs(terms->loads, publisher, NULL)) != NULL &&
        (soon = soon_of(terms, publisher)) != NULL) {
        double new = 0.0;
        const double blocks = PyFloat_AsDouble(soon);
        if (!PyErr_Occurred() && add_up(terms, member, row, load, blocks, &new, &sum.cost) &&
            (draw = PyObject_CallNoArgs(terms->draw)) != NULL) {
            sum.draw = PyFloat_AsDouble(draw);
            sum.publisher = PyLong_AsLongLong(publisher);
            if (!PyErr_Occurred() && (made[0] = PyFloat_FromDouble(sum.cost)) != NULL && (made[1] = PyFloat_FromDouble(new)) != NULL)
                sum.tuple = PyTuple_Pack(SUM_FIELDS, made[0], draw, publisher, member, made[1], row, load, soon);
        }
    }
    PyObject *const parts[] = {row, load, soon, draw, made[0], made[1]};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        Py_XDECREF(parts[i]);
    return sum;
}

/* Return the tuples of sums, least first, in a list, which takes them over; NULL with an exception. */
static PyObject *listed(Sum *sums, Py_ssize_t count)
{
    if (count > 1)
        qsort(sums, (size_t)count, sizeof *sums, compare_sums);
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyList_SetItem(list, i, sums[i].tuple);
        sums[i].tuple = NULL;
    }
    return list;
}

/* rank_sums(members, rows, loads, expected, draw, tokens, least, size, device_credit, host_credit, disk_credit,
 *           shared_credit, weight_new, weight_active) -> list[tuple]
 *
 * `rows` returns the row of a name, `loads` the load of a publisher, and `expected` its expected blocks, or None;
 * `expected` may itself be None. `draw` returns the number by which equal targets are ordered, and is called once for
 * each member, in their order.
 */
PyObject *rank_sums(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    Terms terms;
    double *const numbers[] = {&terms.tokens,     &terms.least,      &terms.size,       &terms.credits[0], &terms.credits[1],
                               &terms.credits[2], &terms.credits[3], &terms.weight_new, &terms.weight_active};
    if (!has_arguments("rank_sums", nargs, 14))
        return NULL;
    terms.rows = args[1], terms.loads = args[2], terms.expected = args[3], terms.draw = args[4];
    for (int i = 0; i < 9; i++) {
        *numbers[i] = PyFloat_AsDouble(args[5 + i]);
        if (*numbers[i] == -1.0 && PyErr_Occurred())
            return NULL;
    }
    PyObject *members = PySequence_Tuple(args[0]); /* a list could change while methods of its objects run */
    if (members == NULL)
        return NULL;
    const Py_ssize_t count = PyTuple_Size(members);
    Sum *sums = PyMem_New(Sum, (size_t)count + 1);
    Py_ssize_t made = 0;
    if (sums == NULL)
        PyErr_NoMemory();
    for (; sums != NULL && made < count; made++)
        if ((sums[made] = sum_of(&terms, PyTuple_GetItem(members, made))).tuple == NULL)
            break;
    PyObject *list = sums != NULL && made == count ? listed(sums, count) : NULL;
    for (Py_ssize_t i = 0; i < made; i++)
        Py_XDECREF(sums[i].tuple);
    PyMem_Free(sums);
    Py_DECREF(members);
    return list;
}
