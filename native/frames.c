/* Frames in one step: go_on reads them, run resolves them, and pack writes the words of a call. */

#include "plain.h"

#include "events.h"
#include "parts.h"

/* The lengths of the tuples that run_frames takes. */
enum { READING = 7, RUNNING = 6 };

/* Whether an argument is a tuple of so many objects. 0 with an exception. */
static int is_tuple_of(PyObject *object, Py_ssize_t count)
{
    if (PyTuple_Check(object) && PyTuple_Size(object) == count)
        return 1;
    PyErr_Format(PyExc_TypeError, "run_frames() takes tuples of %d and %d objects", READING, RUNNING);
    return 0;
}

/* The result of go_on for the payloads. NULL with an exception. */
static PyObject *read_frames(PyObject *events, PyObject *payloads, PyObject *ts, PyObject *reading)
{
    PyObject *args[2 + READING] = {payloads, ts};
    for (Py_ssize_t i = 0; i < READING; i++)
        args[2 + i] = PyTuple_GetItem(reading, i);
    return events_go_on(events, args, 2 + READING);
}

/* The events of all frames, each with its seq, as run takes what follows. NULL with an exception. */
static PyObject *list_following(PyObject *frames, uint64_t seq)
{
    const Py_ssize_t count = PyList_Size(frames);
    PyObject *following = PyList_New(count);
    for (Py_ssize_t i = 0; following != NULL && i < count; i++) {
        PyObject *pair = Py_BuildValue("KO", (unsigned long long)(seq + (uint64_t)i), PyList_GetItem(frames, i));
        if (pair == NULL || PyList_SetItem(following, i, pair) < 0)
            Py_CLEAR(following);
    }
    return following;
}

/* The result of run for the frames that were read, which follow `events`; no event of `events` itself is run. NULL with
 * an exception; some frames may be done then. */
static PyObject *run_read(PyObject *known, PyObject *events, PyObject *frames, PyObject *hashes_max, PyObject *parts,
                          uint64_t seq, PyObject *running, PyObject *gone, PyObject *may)
{
    PyObject *following = list_following(frames, seq), *position = PyLong_FromLong(1);
    PyObject *at = PyLong_FromSize_t(((Events *)events)->count), *ran = NULL;
    if (following != NULL && at != NULL && position != NULL) {
        PyObject *args[] = {events, at, position, hashes_max, parts,
                            PyTuple_GetItem(running, 0), PyTuple_GetItem(running, 1), PyTuple_GetItem(running, 2),
                            PyTuple_GetItem(running, 3), PyTuple_GetItem(running, 4), gone, may, following,
                            PyTuple_GetItem(running, 5)};
        ran = known_run(known, args, sizeof args / sizeof *args);
    }
    Py_XDECREF(following);
    Py_XDECREF(at);
    Py_XDECREF(position);
    return ran;
}

/* Whether a run reached the end of its last frame, and no copies must be judged. */
static int is_whole(PyObject *ran, PyObject *frames)
{
    const Py_ssize_t count = PyList_Size(frames);
    const size_t events = ((Events *)PyList_GetItem(frames, count - 1))->count;
    const Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GetItem(ran, 0)), begun = PyLong_AsSsize_t(PyTuple_GetItem(ran, 6));
    const Py_ssize_t restored = PyLong_AsSsize_t(PyTuple_GetItem(ran, 7));
    const Py_ssize_t miscounted = PyLong_AsSsize_t(PyTuple_GetItem(ran, 8));
    return begun == count && (size_t)at == events && restored + miscounted == 0;
}

/* All parts as pack writes them; None if a call has no room for them. NULL with an exception. */
static PyObject *pack_all(PyObject *parts, PyObject *prefix)
{
    const size_t count = ((Parts *)parts)->count;
    if (count > CALL_PARTS)
        return Py_NewRef(Py_None);
    PyObject *start = PyLong_FromLong(0), *end = PyLong_FromSize_t(count), *words = NULL;
    if (start != NULL && end != NULL) {
        PyObject *args[] = {start, end, prefix};
        words = parts_pack(parts, args, sizeof args / sizeof *args);
    }
    Py_XDECREF(start);
    Py_XDECREF(end);
    return words;
}

/* run_frames(events: Events, payloads: tuple[bytes, ...], ts: float | None, reading: tuple, parts: Parts, seq: int,
 *            running: tuple, gone: tuple[KnownBlocks, ...], may: int, prefix: bytes)
 *     -> tuple[tuple, tuple, tuple | None] | None
 *
 * Read the batches in these payloads, up to the first that differs from `events` in more than its blocks; `ts` is that
 * of `events`. Store and remove their blocks, and write the words of the call to Redis. `reading` has the arguments of
 * go_on after the ts; `running` is holder, seed, namespace, full, piece_blocks and waves of run; `parts` has none yet,
 * and `seq` is that of the first batch.
 *
 * None if the first batch differs in more; then nothing has changed. Otherwise the results of go_on, run and pack: run
 * counts the first batch among those that have begun. None in place of words if the run ended before the last batch did,
 * if copies must be judged, or if a call has no room for all parts. An exception may come after some blocks have
 * changed.
 */
PyObject *known_run_frames(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments("run_frames", nargs, 10) || as_events(args[0]) == NULL || !is_tuple_of(args[3], READING) ||
        !is_tuple_of(args[6], RUNNING))
        return NULL;
    const uint64_t seq = PyLong_AsUnsignedLongLong(args[5]);
    PyObject *read = PyErr_Occurred() ? NULL : read_frames(args[0], args[1], args[2], args[3]);
    if (read == NULL)
        return NULL;
    PyObject *frames = PyTuple_GetItem(read, 0), *ran = NULL, *words = NULL;
    if (PyList_Size(frames) == 0) {
        Py_DECREF(read);
        return Py_NewRef(Py_None);
    }
    ran = run_read(self, args[0], frames, PyTuple_GetItem(args[3], 3), args[4], seq, args[6], args[7], args[8]);
    if (ran != NULL)
        words = is_whole(ran, frames) ? pack_all(args[4], args[9]) : Py_NewRef(Py_None);
    if (words != NULL)
        return Py_BuildValue("NNN", read, ran, words);
    Py_DECREF(read);
    Py_XDECREF(ran);
    return NULL;
}
