/* Which parts each shard gets, wave by wave; app/waymark/domain/parts.py says what a wave is. */

#include "parts.h"

/* Put the parts from `start` on, up to the next one that waits, into a dict by their shards. The end of these parts, or
 * -1 with an exception. */
static Py_ssize_t share_wave(const Parts *parts, size_t start, uint64_t shards, PyObject *of_shards)
{
    size_t end = start;
    while (end < parts->count && (end == start || !parts->parts[end].waits)) {
        const uint64_t shard = parts->parts[end].head % shards;
        const size_t first = end++;
        while (end < parts->count && !parts->parts[end].waits && parts->parts[end].head % shards == shard)
            end++;
        PyObject *number = PyLong_FromUnsignedLongLong(shard);
        PyObject *share = number == NULL ? NULL : PyDict_GetItemWithError(of_shards, number);
        if (share == NULL && number != NULL && !PyErr_Occurred()) {
            share = new_parts(Py_TYPE((PyObject *)parts), parts->part_type, parts->place_type, parts->seq);
            if (share != NULL && PyDict_SetItem(of_shards, number, share) < 0)
                Py_CLEAR(share);
            Py_XDECREF(share); /* the dict has it */
        }
        Py_XDECREF(number);
        if (share == NULL || !append_parts((Parts *)share, parts, first, end))
            return -1;
    }
    return (Py_ssize_t)end;
}

/* shares(shards: int) -> list[dict[int, Parts]]: each wave, as the parts of its shards; one wave at least */
PyObject *parts_shares(PyObject *self, PyObject *shards_given)
{
    const Parts *parts = (Parts *)self;
    const uint64_t shards = PyLong_AsUnsignedLongLong(shards_given);
    if (PyErr_Occurred())
        return NULL;
    if (shards == 0)
        return PyErr_Format(PyExc_ValueError, "there is at least one shard");
    PyObject *waves = PyList_New(0);
    Py_ssize_t start = 0;
    do {
        PyObject *wave = waves == NULL ? NULL : PyDict_New();
        start = wave == NULL ? -1 : share_wave(parts, (size_t)start, shards, wave);
        if (start < 0 || PyList_Append(waves, wave) < 0)
            Py_CLEAR(waves);
        Py_XDECREF(wave);
    } while (waves != NULL && (size_t)start < parts->count);
    return waves;
}
