/* The reply to an MGET, and lists of values: runs of equal neighbours. */

#include "digits.h"
#include "input.h"

#include <stdio.h>

/* A bulk string from `at`, *value NULL where it is nil; what follows it. NULL where it is not whole, or nothing plain. */
static const char *read_bulk(const char *at, const char *end, const char **value, Py_ssize_t *length)
{
    if (end - at < 5 || *at++ != '$')
        return NULL;
    if (memcmp(at, "-1\r\n", 4) == 0) {
        *value = NULL;
        return at + 4;
    }
    const char *first = at;
    const int64_t number = read_number(&at);
    if (number < 0 || (*first == '0' && at - first > 1) || end - at < number + 4 || memcmp(at, "\r\n", 2) != 0)
        return NULL;
    *value = at + 2;
    *length = (Py_ssize_t)number;
    at += 2 + number;
    return memcmp(at, "\r\n", 2) == 0 ? at + 2 : NULL;
}

/* One more run onto `found`; -1 where there is no memory for it. */
static int append_run(PyObject *found, const char *value, Py_ssize_t length, Py_ssize_t count)
{
    PyObject *run = Py_BuildValue("y#n", value, length, count);
    const int outcome = run == NULL ? -1 : PyList_Append(found, run);
    Py_XDECREF(run);
    return outcome;
}

/* How many times the last `width` bytes before `at` come again from there, up to `limit`. */
static Py_ssize_t count_repeats(const char *at, Py_ssize_t width, const char *end, Py_ssize_t limit)
{
    Py_ssize_t repeats = 0;
    for (Py_ssize_t step = 1; step > 0;) /* what has come again is expected to: twice as many are compared at once */
        if (limit - repeats >= step && end - at >= step * width && memcmp(at, at - width, (size_t)(step * width)) == 0) {
            at += step * width;
            repeats += step;
            step *= 2;
        } else
            step /= 2;
    return repeats;
}

/* The first values of `count` bulk strings from `at` as runs onto `found`, up to the first nil, and in *blocks how many
 * they are; what follows all of them. NULL where they are not whole and plain, or with an exception. */
static const char *read_runs(const char *at, const char *end, Py_ssize_t count, PyObject *found, Py_ssize_t *blocks)
{
    const char *value;
    Py_ssize_t length, i = 0;
    while (i < count) {
        const char *start = at;
        at = read_bulk(at, end, &value, &length);
        if (at == NULL)
            return NULL;
        if (value == NULL)
            break;
        const Py_ssize_t repeats = count_repeats(at, at - start, end, count - i - 1);
        if (append_run(found, value, length, 1 + repeats) < 0)
            return NULL;
        at += repeats * (at - start);
        i += 1 + repeats;
    }
    *blocks = i;
    for (i++; i < count && at != NULL; i++)
        at = read_bulk(at, end, &value, &length);
    return at;
}

/* As scan, for a reply in memory. */
static PyObject *scan_reply(const Input *reply, Py_ssize_t count, int has_version)
{
    const char *at = reply->start, *end = at + reply->size, *version = NULL;
    Py_ssize_t version_length = 0, blocks = 0;
    PyObject *found = PyList_New(0);
    if (found == NULL)
        return NULL;
    if (count > 0) {
        char head[32];
        const int length = snprintf(head, sizeof head, "*%zd\r\n", count);
        at = end - at >= length && memcmp(at, head, (size_t)length) == 0 ? at + length : NULL;
        if (at != NULL)
            at = read_runs(at, end, count, found, &blocks);
    }
    if (at != NULL && has_version)
        at = read_bulk(at, end, &version, &version_length);
    PyObject *answer = NULL;
    if (at != NULL)
        answer = Py_BuildValue("y#Onn", version, version_length, found, blocks, (Py_ssize_t)(at - reply->start));
    else if (!PyErr_Occurred())
        answer = Py_NewRef(Py_None);
    Py_DECREF(found);
    return answer;
}

/* scan(reply: bytes, count: int, with_version: bool) -> tuple[bytes | None, list[tuple[bytes, int]], int, int] | None
 *
 * The reply to an MGET of `count` keys (0: there was none) and to an HGET of the version after it: the version, the runs
 * of equal values up to the first nil, how many values they are, and where the replies end. None where `reply` does not
 * begin with just that.
 */
PyObject *scan(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Input reply;
    if (!has_arguments("scan", nargs, 3))
        return NULL;
    const Py_ssize_t count = PyLong_AsSsize_t(args[1]);
    const int has_version = PyObject_IsTrue(args[2]);
    if (PyErr_Occurred() || !open_bytes(args[0], &reply))
        return NULL;
    PyObject *answer = scan_reply(&reply, count, has_version);
    close_input(&reply);
    return answer;
}

/* Whether `value` equals `other`, whose bytes are given. -1 with an exception. */
static int is_equal(PyObject *value, PyObject *other, const char *bytes, Py_ssize_t size)
{
    char *start;
    Py_ssize_t length;
    if (value == other)
        return 1;
    if (value == Py_None)
        return 0;
    if (PyBytes_AsStringAndSize(value, &start, &length) < 0)
        return -1;
    return length == size && memcmp(start, bytes, (size_t)size) == 0;
}

/* runs(values: list[bytes | None]) -> list[tuple[bytes, int]]
 *
 * Equal neighbours, and how many they are, up to the first None.
 */
PyObject *runs(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments("runs", nargs, 1))
        return NULL;
    PyObject *values = args[0];
    const Py_ssize_t count = PyList_Check(values) ? PyList_Size(values) : -1;
    if (count < 0)
        return PyErr_Format(PyExc_TypeError, "runs() takes a list, not %R", Py_TYPE(values));
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < count;) {
        PyObject *value = PyList_GetItem(values, i);
        char *bytes;
        Py_ssize_t size;
        if (value == Py_None)
            break;
        int equal = PyBytes_AsStringAndSize(value, &bytes, &size) < 0 ? -1 : 1;
        const Py_ssize_t first = i;
        while (equal == 1 && ++i < count)
            equal = is_equal(PyList_GetItem(values, i), value, bytes, size);
        PyObject *run = equal < 0 ? NULL : Py_BuildValue("On", value, i - first);
        if (run == NULL || PyList_Append(found, run) < 0)
            Py_CLEAR(found);
        Py_XDECREF(run);
    }
    return found;
}
