/* Which parts each shard gets, wave by wave; app/waymark/domain/parts.py says what a wave is. */

#include "parts.h"
#include "waves.h"

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

/* Return the next call of each shard for the parts of a wave; done[shard] of its parts are packed already. A dict,
 * empty if none is left. NULL with an exception. */
static PyObject *next_calls(PyObject *wave, PyObject *prefixes, size_t *done)
{
    PyObject *calls = PyDict_New(), *number, *share;
    Py_ssize_t next = 0;
    while (calls != NULL && PyDict_Next(wave, &next, &number, &share)) {
        const Parts *parts = (Parts *)share;
        const Py_ssize_t shard = PyLong_AsSsize_t(number);
        const size_t start = done[shard], end = end_of_parts(parts, start, CALL_PARTS, CALL_BLOCKS);
        if (start == end)
            continue;
        PyObject *words = pack_call(parts, start, end, PyTuple_GetItem(prefixes, shard));
        PyObject *call = words == NULL ? NULL : Py_BuildValue("nN", (Py_ssize_t)(end - start), words);
        if (call == NULL || PyDict_SetItem(calls, number, call) < 0)
            Py_CLEAR(calls);
        Py_XDECREF(call);
        done[shard] = end;
    }
    return calls;
}

/* calls(prefixes: tuple[bytes, ...]) -> list[dict[int, tuple[int, tuple]]]
 *
 * The calls for all parts: as shares, each share as the number of its parts and the result of pack. If a share needs
 * several calls, its wave has as many dicts. `prefixes` has the prefix of the keys of each shard.
 */
PyObject *parts_calls(PyObject *self, PyObject *prefixes)
{
    const Py_ssize_t shards = PyTuple_Check(prefixes) ? PyTuple_Size(prefixes) : 0;
    if (shards < 1 || shards > SHARDS_MAX)
        return PyErr_Format(PyExc_TypeError, "there must be a tuple of the prefixes of 1 to %d shards", SHARDS_MAX);
    PyObject *number = PyLong_FromSsize_t(shards);
    PyObject *waves = number == NULL ? NULL : parts_shares(self, number), *all = waves == NULL ? NULL : PyList_New(0);
    Py_XDECREF(number);
    for (Py_ssize_t i = 0; all != NULL && i < PyList_Size(waves); i++) {
        size_t done[SHARDS_MAX] = {0};
        Py_ssize_t left = 1;
        for (int is_first = 1; all != NULL && left > 0; is_first = 0) {
            PyObject *calls = next_calls(PyList_GetItem(waves, i), prefixes, done);
            left = calls == NULL ? 0 : PyDict_Size(calls);
            if (calls == NULL || ((is_first || left > 0) && PyList_Append(all, calls) < 0))
                Py_CLEAR(all);
            Py_XDECREF(calls);
        }
    }
    Py_XDECREF(waves);
    return all;
}
