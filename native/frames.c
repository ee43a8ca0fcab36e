/* Frames in one step: go_on reads them, run resolves them, and pack writes the words of the calls, shard by shard. */

#include "plain.h"

#include "events.h"
#include "parts.h"
#include "waves.h"

/* The lengths of the tuples that run_frames takes. */
enum { READING = 7, RUNNING = 7 };

/* Whether an argument is a tuple of `count` objects. 0 with an exception. */
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

/* The events of all frames, each with its seq, as the argument `following` of run. NULL with an exception. */
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
                            PyTuple_GetItem(running, 5), PyTuple_GetItem(running, 6)};
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

/* run_frames(events: Events, payloads: tuple[bytes, ...], ts: float | None, reading: tuple, parts: Parts, seq: int,
 *            running: tuple, gone: tuple[KnownBlocks, ...], may: int, prefixes: tuple[bytes, ...])
 *     -> tuple[tuple, tuple, list[dict[int, tuple[int, tuple]]] | None] | None
 *
 * Read the batches in these payloads, up to the first that differs from `events` in more than its blocks; `ts` is that
 * of `events`. Store and remove their blocks as a wave of their own, and write the words of the calls to Redis.
 * `reading` has the arguments of go_on after the ts; `running` is holder, seed, namespace, full, piece_blocks, waves
 * and neighbours of run; `parts` is empty, `seq` is that of the first batch, and `prefixes` has the prefix of the keys
 * of each shard.
 *
 * None if the first batch differs in more; then nothing has changed. Otherwise the results of go_on, run and calls; run
 * counts the first batch among those that have begun. None in place of the calls if the run ended before the last batch
 * did, or if copies must be judged. An exception may come after some blocks have changed.
 */
PyObject *known_run_frames(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments("run_frames", nargs, 10) || as_events(args[0]) == NULL || !is_tuple_of(args[3], READING) ||
        !is_tuple_of(args[6], RUNNING))
        return NULL;
    Waves *waves = as_waves(PyTuple_GetItem(args[6], RUNNING - 2));
    if (waves == NULL)
        return NULL;
    if (!PyTuple_Check(args[9]) || PyTuple_Size(args[9]) == 0)
        return PyErr_Format(PyExc_TypeError, "run_frames() takes a tuple of the prefixes of all shards");
    const uint64_t seq = PyLong_AsUnsignedLongLong(args[5]);
    PyObject *read = PyErr_Occurred() ? NULL : read_frames(args[0], args[1], args[2], args[3]);
    if (read == NULL)
        return NULL;
    PyObject *frames = PyTuple_GetItem(read, 0), *ran = NULL, *calls = NULL;
    if (PyList_Size(frames) == 0) {
        Py_DECREF(read);
        return Py_NewRef(Py_None);
    }
    begin_wave(waves);
    ran = run_read(self, args[0], frames, PyTuple_GetItem(args[3], 3), args[4], seq, args[6], args[7], args[8]);
    if (ran != NULL)
        calls = is_whole(ran, frames) ? parts_calls(args[4], args[9]) : Py_NewRef(Py_None);
    if (calls != NULL)
        return Py_BuildValue("NNN", read, ran, calls);
    Py_DECREF(read);
    Py_XDECREF(ran);
    return NULL;
}
