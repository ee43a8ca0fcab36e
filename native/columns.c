/* Sums over all candidates of a decision, one column after the other, and the least sums. */

#include "native.h"

#include <stdlib.h>

/* Up to this number of places, one pass over the numbers finds them; for more places all numbers are sorted. */
#define FEW 64

/* Read the numbers of a sequence of `count`; `absent` stands for None, unless that is NULL. 0 with an exception. */
static int read_numbers(PyObject *sequence, double *numbers, Py_ssize_t count, const double *absent)
{
    PyObject *items = PySequence_Tuple(sequence); /* a list could change while methods of its objects run */
    int is_read = items != NULL;
    if (is_read && PyTuple_Size(items) != count) {
        PyErr_Format(PyExc_ValueError, "a column has %zd numbers, and another one %zd", PyTuple_Size(items), count);
        is_read = 0;
    }
    for (Py_ssize_t i = 0; is_read && i < count; i++) {
        PyObject *item = PyTuple_GetItem(items, i);
        if (absent != NULL && item == Py_None) {
            numbers[i] = *absent;
            continue;
        }
        numbers[i] = PyFloat_AsDouble(item);
        is_read = numbers[i] != -1.0 || !PyErr_Occurred();
    }
    Py_XDECREF(items);
    return is_read;
}

/* ---- sums -------------------------------------------------------------------------------------------------------- */

/* Add a pair of a weight and a column to the sums; `numbers` is room for the column. 0 with an exception. */
static int add_column(PyObject *pair, int is_clamped, double *sums, double *numbers, Py_ssize_t count)
{
    static const double nothing = 0.0; /* for None: the sum stays the same */
    if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "a part is a weight and a column");
        return 0;
    }
    const double weight = PyFloat_AsDouble(PyTuple_GetItem(pair, 0));
    if ((weight == -1.0 && PyErr_Occurred()) || !read_numbers(PyTuple_GetItem(pair, 1), numbers, count, &nothing))
        return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        double number = numbers[i];
        if (is_clamped) {
            number = number > 0.0 ? number : 0.0;
            number = number < 1.0 ? number : 1.0;
        }
        sums[i] += weight * number;
    }
    return 1;
}

/* Return the numbers in a list; NULL with an exception. */
static PyObject *listed(const double *numbers, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *number = PyFloat_FromDouble(numbers[i]);
        if (number == NULL)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, i, number);
    }
    return list;
}

/* add_columns(columns, is_clamped) -> list[float]
 *
 * `columns` are pairs of a weight and a sequence of numbers, in which None adds nothing; all sequences have the same
 * length. The sums are made from the first column to the last.
 */
PyObject *add_columns(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (!has_arguments("add_columns", nargs, 2))
        return NULL;
    const int is_clamped = PyObject_IsTrue(args[1]);
    PyObject *pairs = is_clamped < 0 ? NULL : PySequence_Tuple(args[0]), *list = NULL;
    const Py_ssize_t parts = pairs == NULL ? 0 : PyTuple_Size(pairs);
    Py_ssize_t count = -1;
    if (parts > 0 && PyTuple_Check(PyTuple_GetItem(pairs, 0)) && PyTuple_Size(PyTuple_GetItem(pairs, 0)) == 2)
        count = PySequence_Size(PyTuple_GetItem(PyTuple_GetItem(pairs, 0), 1));
    else if (pairs != NULL)
        PyErr_SetString(PyExc_TypeError, "sums need a first part of a weight and a column");
    double *sums = count < 0 ? NULL : PyMem_New(double, 2 * (size_t)count + 1), *numbers = sums == NULL ? NULL : sums + count;
    if (count >= 0 && sums == NULL)
        PyErr_NoMemory();
    else if (count >= 0) {
        for (Py_ssize_t i = 0; i < count; i++)
            sums[i] = 0.0;
        Py_ssize_t added = 0;
        while (added < parts && add_column(PyTuple_GetItem(pairs, added), is_clamped, sums, numbers, count))
            added++;
        list = added == parts ? listed(sums, count) : NULL;
    }
    PyMem_Free(sums);
    Py_XDECREF(pairs);
    return list;
}

/* ---- the least --------------------------------------------------------------------------------------------------- */

typedef struct {
    double value, draw;
    Py_ssize_t place;
} Entry;

/* Return the order of two entries, as qsort asks for it. */
static int compare_entries(const void *one, const void *other)
{
    const Entry *a = one, *b = other;
    if (a->value != b->value)
        return a->value < b->value ? -1 : 1;
    if (a->draw != b->draw)
        return a->draw < b->draw ? -1 : 1;
    return a->place < b->place ? -1 : a->place > b->place;
}

/* Move the least `most` entries to the beginning, least first. */
static void sort_least(Entry *entries, Py_ssize_t count, Py_ssize_t most)
{
    if (most > FEW) {
        qsort(entries, (size_t)count, sizeof *entries, compare_entries);
        return;
    }
    Py_ssize_t found = 0; /* how many of the entries before i are kept, in order, in the first places */
    for (Py_ssize_t i = 0; i < count; i++) {
        const Entry entry = entries[i];
        if (found == most && compare_entries(&entry, &entries[most - 1]) > 0)
            continue;
        Py_ssize_t at = found < most ? found++ : most - 1;
        for (; at > 0 && compare_entries(&entry, &entries[at - 1]) < 0; at--)
            entries[at] = entries[at - 1];
        entries[at] = entry;
    }
}

/* least_of(values, draws, most, sign) -> list[int]
 *
 * The places of the least sign * value, at most `most`, least first; among equal ones the least draw comes first.
 */
PyObject *least_of(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (!has_arguments("least_of", nargs, 4))
        return NULL;
    const Py_ssize_t count = PySequence_Size(args[0]), most = PyLong_AsSsize_t(args[2]);
    const double sign = PyFloat_AsDouble(args[3]);
    if (count < 0 || PyErr_Occurred())
        return NULL;
    double *numbers = PyMem_New(double, 2 * (size_t)count + 1);
    Entry *entries = PyMem_New(Entry, (size_t)count + 1);
    PyObject *list = NULL;
    if (numbers == NULL || entries == NULL)
        PyErr_NoMemory();
    else if (read_numbers(args[0], numbers, count, NULL) && read_numbers(args[1], numbers + count, count, NULL)) {
        for (Py_ssize_t i = 0; i < count; i++)
            entries[i] = (Entry){sign * numbers[i], numbers[count + i], i};
        const Py_ssize_t length = most < 0 ? 0 : most < count ? most : count;
        if (length > 0)
            sort_least(entries, count, length);
        list = PyList_New(length);
        for (Py_ssize_t i = 0; list != NULL && i < length; i++) {
            PyObject *place = PyLong_FromSsize_t(entries[i].place);
            if (place == NULL)
                Py_CLEAR(list);
            else
                PyList_SetItem(list, i, place);
        }
    }
    PyMem_Free(numbers);
    PyMem_Free(entries);
    return list;
}
