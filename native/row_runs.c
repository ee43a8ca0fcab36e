/* Turns rows into runs of equal holders, as app/waymark/domain/row_runs.py describes. */

#include "rows.h"

/* ---- runs ---------------------------------------------------------------------------------------- */

/* The runs so far: a list, and the last run, which is not in the list yet, because it may continue: its holders, or
 * NULL, and the number of its blocks. `text` has room for the holders of one block. */
typedef struct {
    PyObject *list, *value;
    Py_ssize_t count;
    char *text;
    size_t room;
} Runs;

/* Put the last run, if there is one, into the list. 0 with an exception. */
static int end_run(Runs *runs)
{
    if (runs->value == NULL)
        return 1;
    PyObject *run = Py_BuildValue("Nn", runs->value, runs->count);
    runs->value = NULL;
    const int outcome = run == NULL ? -1 : PyList_Append(runs->list, run);
    Py_XDECREF(run);
    return outcome == 0;
}

/* Add `count` blocks with the holders of this text. 0 with an exception. */
static int add_run(Runs *runs, const char *text, size_t size, Py_ssize_t count)
{
    char *value;
    Py_ssize_t length;
    if (runs->value != NULL) {
        if (PyBytes_AsStringAndSize(runs->value, &value, &length) < 0)
            return 0;
        if ((size_t)length == size && memcmp(value, text, size) == 0) {
            runs->count += count;
            return 1;
        }
        if (!end_run(runs))
            return 0;
    }
    runs->value = PyBytes_FromStringAndSize(text, (Py_ssize_t)size);
    runs->count = count;
    return runs->value != NULL;
}

/* Write the ids of the holders of block `at` into runs->text. *size is 0 if no holder has it. 0 with an exception. */
static int write_holders(Runs *runs, const Holders *holders, int at, size_t *size)
{
    size_t room = 0;
    for (size_t i = 0; i < holders->count; i++)
        room += holders->first[i].length + 1;
    if (room > runs->room) {
        char *text = PyMem_Realloc(runs->text, room);
        if (text == NULL) {
            PyErr_NoMemory();
            return 0;
        }
        runs->text = text;
        runs->room = room;
    }
    char *out = runs->text;
    for (size_t i = 0; i < holders->count; i++) {
        const Holder *holder = &holders->first[i];
        if (holder->blocks >> at & 1) {
            memcpy(out, holder->text, holder->length);
            out += holder->length;
            *out++ = ' ';
        }
    }
    *size = out == runs->text ? 0 : (size_t)(out - runs->text) - 1;
    return 1;
}

/* Add the runs of the first `count` blocks, up to the first without a holder. Return how many blocks they are. -1: an
 * exception. */
static int add_runs(Runs *runs, const Holders *holders, int count)
{
    uint32_t changes = 0;
    for (size_t i = 0; i < holders->count; i++)
        changes |= holders->first[i].blocks ^ (holders->first[i].blocks >> 1);
    int at = 0;
    while (at < count) {
        size_t size;
        const uint32_t until = changes >> at;
        int length = until == 0 ? count : __builtin_ctz(until) + 1;
        if (length > count - at)
            length = count - at;
        if (!write_holders(runs, holders, at, &size))
            return -1;
        if (size == 0)
            break;
        if (!add_run(runs, runs->text, size, length))
            return -1;
        at += length;
    }
    return at;
}

/* Begin without runs. 0 with an exception. */
static int begin_runs(Runs *runs)
{
    memset(runs, 0, sizeof *runs);
    runs->list = PyList_New(0);
    return runs->list != NULL;
}

/* Return the list of all runs if they are whole, else NULL with the exception. Release the references of the runs. */
static PyObject *finish_runs(Runs *runs, int is_whole)
{
    if (is_whole && !end_run(runs))
        is_whole = 0;
    Py_XDECREF(runs->value);
    PyMem_Free(runs->text);
    if (!is_whole)
        Py_CLEAR(runs->list);
    return runs->list;
}

/* ---- rows of a chain ----------------------------------------------------------------------------- */

/* The result of a row for its piece: the chain goes on, the next block has no holder, or another value may list some of
 * the blocks. */
typedef enum { FAILED = -1, GOES_ON, IS_OVER, UNDECIDED } Verdict;

/* Add the runs of one piece, by its row alone. */
static Verdict add_row(Runs *runs, Holders *holders, const Piece *piece, const Input *value)
{
    Slots slots;
    const char *rest;
    holders->count = 0;
    if (!read_slots(value, piece, &slots, &rest) || slots.first != 0)
        return UNDECIDED;
    const int outcome = read_holders(rest, value->start + value->size, &slots, holders);
    if (outcome < 0)
        return FAILED;
    if (outcome == 0 || (slots.is_marked && slots.found != piece->every))
        return UNDECIDED;
    const int blocks = add_runs(runs, holders, piece->count);
    return blocks < 0 ? FAILED : blocks == piece->count ? GOES_ON : IS_OVER;
}

/* Do the same as row_runs, for the values of a list. *pieces gets the number of pieces whose row decided alone. */
static Verdict add_rows(Runs *runs, const Input *keys, PyObject *rows, Py_ssize_t *pieces)
{
    Piece piece;
    Input value;
    Holders holders = {NULL, 0, 0};
    Verdict verdict = GOES_ON;
    const Py_ssize_t count = PyList_Size(rows), blocks = keys->size / KEY;
    for (*pieces = 0; verdict == GOES_ON && *pieces < count; *pieces += verdict == GOES_ON) {
        PyObject *row = PyList_GetItem(rows, *pieces);
        const Py_ssize_t at = PIECE * *pieces;
        if (row == NULL)
            verdict = FAILED; /* a callback has emptied the list */
        else if (row == Py_None || at >= blocks)
            verdict = IS_OVER;
        else if (!open_bytes(row, &value))
            verdict = FAILED;
        else {
            open_piece(&piece, (const unsigned char *)keys->start + KEY * at, blocks - at);
            verdict = add_row(runs, &holders, &piece, &value);
            close_input(&value);
        }
    }
    PyMem_Free(holders.first);
    return verdict;
}

/* row_runs(keys: bytes, rows: list[bytes | None]) -> tuple[list[tuple[bytes, int]], int, bool]
 *
 * The runs of a chain, as far as the row of each piece decides alone; the number of these pieces; and whether the block
 * after them has no holder.
 */
PyObject *row_runs(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Input keys;
    Runs runs;
    Py_ssize_t pieces;
    if (!has_arguments("row_runs", nargs, 2) || !open_bytes(args[0], &keys))
        return NULL;
    PyObject *answer = NULL;
    if (!PyList_Check(args[1]))
        PyErr_Format(PyExc_TypeError, "row_runs() takes a list, not %R", Py_TYPE(args[1]));
    else if (begin_runs(&runs)) {
        const Verdict verdict = add_rows(&runs, &keys, args[1], &pieces);
        PyObject *list = finish_runs(&runs, verdict != FAILED);
        if (list != NULL)
            answer = Py_BuildValue("NnN", list, pieces, PyBool_FromLong(verdict == IS_OVER));
    }
    close_input(&keys);
    return answer;
}

/* ---- all values of one piece --------------------------------------------------------------------- */

/* Add the holders of one of the values of a piece. 0 with an exception. */
static int add_value(const Piece *piece, const Input *value, int is_row, Holders *holders, uint32_t *missing, int *is_bad)
{
    Slots slots;
    const char *rest;
    int outcome = read_slots(value, piece, &slots, &rest) && (slots.first == 0 || !is_row);
    if (outcome)
        outcome = read_holders(rest, value->start + value->size, &slots, holders);
    *is_bad = outcome == 0;
    if (outcome > 0 && is_row && slots.is_marked)
        *missing = piece->every & ~slots.found;
    return outcome >= 0;
}

/* Do the same as piece_runs, for the values of a list, which stay open until the runs are written. */
static PyObject *unite_values(const Piece *piece, PyObject *values, Input *inputs, Py_ssize_t count)
{
    Runs runs;
    Holders holders = {NULL, 0, 0};
    uint32_t missing = 0;
    uint64_t bad[VALUES_MAX / 64] = {0};
    Py_ssize_t opened = 0;
    if (!begin_runs(&runs))
        return NULL;
    int is_whole = 1;
    for (Py_ssize_t i = 0; is_whole && i < count; i++) {
        PyObject *value = PyList_GetItem(values, i);
        int is_bad = 0;
        if (value == Py_None)
            continue;
        is_whole = value != NULL && open_bytes(value, &inputs[opened]);
        if (!is_whole)
            break;
        is_whole = add_value(piece, &inputs[opened++], i == 0, &holders, &missing, &is_bad);
        bad[i / 64] |= (uint64_t)is_bad << i % 64;
    }
    if (is_whole && opened > 1 && holders.count > 1)
        unite(&holders);
    is_whole = is_whole && add_runs(&runs, &holders, piece->count) >= 0;
    while (opened > 0)
        close_input(&inputs[--opened]);
    PyMem_Free(holders.first);
    PyObject *list = finish_runs(&runs, is_whole);
    char hex[2 * HEX_DIGITS + 1] = {0};
    write_hex(hex, bad[1]);
    write_hex(hex + HEX_DIGITS, bad[0]);
    return list == NULL ? NULL : Py_BuildValue("NkN", list, (unsigned long)missing, PyLong_FromString(hex, NULL, 16));
}

/* piece_runs(keys: bytes, values: list[bytes | None]) -> tuple[list[tuple[bytes, int]], int, int]
 *
 * The runs of one piece by all values that may list its blocks, its row first, at most VALUES_MAX; the blocks that may
 * be in branch rows; which values cannot be read.
 */
PyObject *piece_runs(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Input keys, inputs[VALUES_MAX];
    Piece piece;
    if (!has_arguments("piece_runs", nargs, 2) || !open_bytes(args[0], &keys))
        return NULL;
    const Py_ssize_t blocks = keys.size / KEY, count = PyList_Check(args[1]) ? PyList_Size(args[1]) : -1;
    PyObject *answer = NULL;
    if (count < 0)
        PyErr_Format(PyExc_TypeError, "piece_runs() takes a list, not %R", Py_TYPE(args[1]));
    else if (blocks < 1 || blocks > PIECE || count > VALUES_MAX)
        PyErr_Format(PyExc_ValueError, "%zd blocks or %zd values are not those of one piece", blocks, count);
    else {
        open_piece(&piece, (const unsigned char *)keys.start, blocks);
        answer = unite_values(&piece, args[1], inputs, count);
    }
    close_input(&keys);
    return answer;
}
