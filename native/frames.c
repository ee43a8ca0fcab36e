/* Frames in one step: read_by_ways reads them, run resolves them, and calls writes the words of the calls, shard by shard.
 *
 * A way says how the frames of a rank are resolved. It is a tuple, which begins with: events like those of the frames,
 * the KnownBlocks of its holder, arguments of run (holder, seed, namespace, full, piece_blocks, waves, neighbours), the
 * tables of gone hashes, and what may be done.
 */

#include "events.h"
#include "parts.h"
#include "plain.h"
#include "waves.h"

enum { RUNNING_OBJECTS = 7, WAVES_AT = 5 };

int is_tuple_of(PyObject *object, Py_ssize_t count)
{
    if (PyTuple_Check(object) && PyTuple_Size(object) >= count)
        return 1;
    PyErr_Format(PyExc_TypeError, "run_frames() takes tuples of %d, %d and %d objects", READING_OBJECTS, WAY_OBJECTS,
                 RUNNING_OBJECTS);
    return 0;
}

PyObject *describe_batches(const RankBatches *batches)
{
    return Py_BuildValue("OOnnnn", batches->events, batches->ts, batches->stores, batches->stored, batches->removals,
                         batches->removed);
}

void drop_batches(RankBatches *batches)
{
    Py_XDECREF(batches->way);
    Py_XDECREF(batches->events);
    Py_XDECREF(batches->ts);
}

/* Return the events of all frames, each with its seq, as the argument `following` of run. NULL with an exception. */
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

/* Return the result of run for frames of one rank; no event of the way itself is run. NULL with an exception; some
 * frames may be done then. */
static PyObject *run_read(const RankBatches *batches, PyObject *hashes_max, PyObject *parts, uint64_t seq)
{
    PyObject *events = PyTuple_GetItem(batches->way, 0), *known = PyTuple_GetItem(batches->way, 1);
    PyObject *running = PyTuple_GetItem(batches->way, 2);
    if (as_known(known) == NULL || !is_tuple_of(running, RUNNING_OBJECTS))
        return NULL;
    PyObject *following = list_following(batches->events, seq), *position = PyLong_FromLong(1);
    PyObject *at = PyLong_FromSize_t(((Events *)events)->count), *ran = NULL;
    if (following != NULL && at != NULL && position != NULL) {
        PyObject *args[] = {events, at, position, hashes_max, parts,
                            PyTuple_GetItem(running, 0), PyTuple_GetItem(running, 1), PyTuple_GetItem(running, 2),
                            PyTuple_GetItem(running, 3), PyTuple_GetItem(running, 4), PyTuple_GetItem(batches->way, 3),
                            PyTuple_GetItem(batches->way, 4), following, PyTuple_GetItem(running, WAVES_AT),
                            PyTuple_GetItem(running, 6)};
        ran = known_run(known, args, sizeof args / sizeof *args);
    }
    Py_XDECREF(following);
    Py_XDECREF(at);
    Py_XDECREF(position);
    return ran;
}

/* Return whether a run reached the end of its last frame, and no copies must be judged. */
static int is_whole(PyObject *ran, PyObject *frames)
{
    const Py_ssize_t count = PyList_Size(frames);
    const size_t events = ((Events *)PyList_GetItem(frames, count - 1))->count;
    const Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GetItem(ran, 0)), begun = PyLong_AsSsize_t(PyTuple_GetItem(ran, 6));
    const Py_ssize_t restored = PyLong_AsSsize_t(PyTuple_GetItem(ran, 7));
    const Py_ssize_t miscounted = PyLong_AsSsize_t(PyTuple_GetItem(ran, 8));
    return begun == count && (size_t)at == events && restored + miscounted == 0;
}

/* Run what was read, rank by rank, up to the first rank that is not whole, and append (way, results of go_on, results of
 * run) for each to a list. 1 if all are whole, 0 if not, -1 with an exception; some frames may be done then. */
static int run_all(const RankBatches *read, Py_ssize_t count, PyObject *hashes_max, PyObject *parts, uint64_t seq,
                   PyObject *list)
{
    int outcome = 1;
    for (Py_ssize_t i = 0; outcome == 1 && i < count; i++) {
        PyObject *ran = run_read(&read[i], hashes_max, parts, seq), *described = NULL;
        if (ran != NULL) {
            outcome = is_whole(ran, read[i].events);
            described = Py_BuildValue("ONN", read[i].way, describe_batches(&read[i]), ran);
        }
        if (described == NULL || PyList_Append(list, described) < 0)
            outcome = -1;
        Py_XDECREF(described);
        seq += (uint64_t)PyList_Size(read[i].events);
    }
    return outcome;
}

/* Begin the waves of a way. 0 with an exception. */
static int begin_waves(PyObject *way)
{
    PyObject *running = PyTuple_GetItem(way, 2);
    Waves *waves = is_tuple_of(running, RUNNING_OBJECTS) ? as_waves(PyTuple_GetItem(running, WAVES_AT)) : NULL;
    if (waves != NULL)
        begin_wave(waves);
    return waves != NULL;
}

/* run_frames(ways: Mapping[int | None, tuple], payloads: tuple[bytes, ...], ts: float | None, reading: tuple, seq: int,
 *            prefixes: tuple[bytes, ...])
 *     -> tuple[list[tuple[tuple, tuple, tuple]], list[dict[int, tuple[int, tuple]]] | None] | None
 *
 * Read the batches in these payloads, up to the first whose rank has no way, or that differs from the events of its way
 * in more than its blocks; `ts` is that of the batch before. Store and remove their blocks as a wave of their own, add
 * their parts to these, which are empty, and write the words of the calls to Redis. `reading` has Events of the same types,
 * and the arguments of go_on after the rank; `seq` is that of the first batch, and `prefixes` has the prefix of the keys
 * of each shard.
 *
 * None if there is no such batch; then nothing has changed. Otherwise the first result has, for each sequence of
 * batches of one rank: the way, the results of go_on, and those of run, which counts the first batch among those that
 * have begun. The second result has the calls; it is None if a run ended before the last batch of its rank did, or if
 * copies must be judged; later sequences are left out then. An exception may come after some blocks have changed.
 */
PyObject *parts_run_frames(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments("run_frames", nargs, 6) || !is_tuple_of(args[1], 0) || !is_tuple_of(args[3], READING_OBJECTS))
        return NULL;
    if (!PyTuple_Check(args[5]) || PyTuple_Size(args[5]) == 0)
        return PyErr_Format(PyExc_TypeError, "run_frames() takes a tuple of the prefixes of all shards");
    const uint64_t seq = PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    RankBatches *read = PyMem_New(RankBatches, PyTuple_Size(args[1]));
    if (read == NULL)
        return PyErr_NoMemory();
    const Py_ssize_t count = read_by_ways(args[0], args[1], args[2], args[3], read);
    PyObject *list = NULL, *calls = NULL;
    if (!PyErr_Occurred() && count > 0 && begin_waves(read[0].way) && (list = PyList_New(0)) != NULL) {
        const int outcome = run_all(read, count, PyTuple_GetItem(args[3], 3), self, seq, list);
        calls = outcome < 0 ? NULL : outcome ? parts_calls(self, args[5]) : Py_NewRef(Py_None);
    }
    for (Py_ssize_t i = 0; i < count; i++)
        drop_batches(&read[i]);
    PyMem_Free(read);
    if (calls != NULL)
        return Py_BuildValue("NN", list, calls);
    Py_XDECREF(list);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}
