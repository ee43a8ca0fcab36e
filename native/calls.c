/* Parts as the script of Redis reads them, lua/apply_rows.lua; app/waymark/store/calls.py has the same in Python. */

#include "parts.h"

enum {
    HEADER = 15,      /* bytes of a packed part before its namespace */
    CALL_PARTS = 128, /* of a call, at most; a part needs two rows at most */
    BUCKETS = 1024,   /* more than twice the rows of a call */
};

/* The end of the parts from `start` on that go together: one, and more within the bounds. */
static size_t end_of(const Parts *parts, size_t start, size_t parts_max, size_t blocks_max)
{
    size_t end = start, blocks = 0;
    for (; end < parts->count; end++) {
        blocks += parts->parts[end].count;
        if (end > start && (end - start >= parts_max || blocks > blocks_max))
            break;
    }
    return end;
}

/* end(start: int, parts_max: int, blocks_max: int) -> int: the end of the parts from `start` on that go together */
PyObject *parts_end(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    size_t bounds[3] = {0};
    if (!has_arguments("end", nargs, 3) || !read_bounds(args, 3, bounds))
        return NULL;
    return PyLong_FromSize_t(end_of((Parts *)self, bounds[0], bounds[1], bounds[2]));
}

/* The numbers that a call gives to what its parts name, from 1, in the order in which they are named. */
typedef struct {
    uint64_t holders[CALL_PARTS], seqs[CALL_PARTS];
    Part rows[2 * CALL_PARTS]; /* only their places */
    uint16_t holders_count, seqs_count, rows_count;
    uint16_t buckets[BUCKETS]; /* numbers of rows */
} Call;

/* The number of a holder or a seq, from 1, which is new if need be; there is room for one for each part. */
static uint16_t number_of(uint64_t *numbers, uint16_t *count, uint64_t number)
{
    for (uint16_t i = *count; i > 0; i--) /* mostly it is the last one */
        if (numbers[i - 1] == number)
            return i;
    numbers[(*count)++] = number;
    return *count;
}

/* The number of a place's row, which is new if need be; there is room for two for each part. */
static uint16_t number_of_row(Call *call, const Part *place)
{
    size_t bucket = (size_t)((place->head ^ place->branch * 3 ^ place->place_kind) * 0x9E3779B97F4A7C15 >> 54);
    for (; call->buckets[bucket] != 0; bucket = (bucket + 1) % BUCKETS)
        if (is_at_place_of(&call->rows[call->buckets[bucket] - 1], place))
            return call->buckets[bucket];
    Part *row = &call->rows[call->rows_count++];
    row->head = place->head;
    row->branch = place->branch;
    row->place_kind = place->place_kind;
    return call->buckets[bucket] = call->rows_count;
}

/* The row of a branch row's piece. */
static uint16_t number_of_piece(Call *call, const Part *branch_row)
{
    const Part row = {.head = branch_row->head, .place_kind = ROW};
    return number_of_row(call, &row);
}

/* Number what the parts name, holders and seqs in their order; rows that only a branch row needs come last. */
static void number_all(Call *call, const Part *parts, size_t count)
{
    memset(call->buckets, 0, sizeof call->buckets);
    call->holders_count = call->seqs_count = call->rows_count = 0;
    for (size_t i = 0; i < count; i++) {
        number_of(call->holders, &call->holders_count, parts[i].holder);
        number_of(call->seqs, &call->seqs_count, parts[i].seq);
        if (parts[i].kind != '*')
            number_of_row(call, &parts[i]);
    }
    const uint16_t named = call->rows_count;
    for (uint16_t i = 0; i < named; i++)
        if (call->rows[i].place_kind == BRANCH_ROW)
            number_of_piece(call, &call->rows[i]);
}

/* The copies of a part, joined by semicolons. NULL with an exception. */
static PyObject *join_copies(const Part *part)
{
    PyObject *semicolon = PyBytes_FromStringAndSize(";", 1);
    PyObject *joined = semicolon == NULL ? NULL : PyObject_CallMethod(semicolon, "join", "O", part->copies);
    Py_XDECREF(semicolon);
    return joined;
}

/* Two bytes, the highest first. */
static void store_big16(char *at, uint16_t number)
{
    at[0] = (char)(number >> 8);
    at[1] = (char)number;
}

/* A part as lua/apply_rows.lua reads it; the call has numbered what it names. */
static PyObject *pack_part(Call *call, const Parts *parts, const Part *part)
{
    PyObject *copies = NULL;
    char *tail = NULL;
    Py_ssize_t tail_size = 0;
    if (part->copies != NULL && ((copies = join_copies(part)) == NULL || PyBytes_AsStringAndSize(copies, &tail, &tail_size) < 0)) {
        Py_XDECREF(copies);
        return NULL;
    }
    const size_t hashes = part->kind == '+' && !part->is_identity ? sizeof(uint64_t) * part->count : 0;
    const size_t namespace = part->namespace ? HEX_DIGITS : 0, slots = SLOT_CHARS * (size_t)part->count;
    const int is_behind = part->kind == '+' && part->has_parent && part->place_kind == BRANCH_ROW &&
                          is_shared(part->head, part->branch);
    const size_t names = namespace + (is_behind ? HEX_DIGITS : 0);
    PyObject *word = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(HEADER + names + slots + hashes) + tail_size);
    if (word != NULL) {
        uint16_t row = 0, branch = 0;
        if (part->kind != '*') {
            branch = part->place_kind == BRANCH_ROW ? number_of_row(call, part) : 0;
            row = branch ? number_of_piece(call, part) : number_of_row(call, part);
        }
        const uint32_t last = (uint32_t)part->last;
        char *at = PyBytes_AsString(word);
        at[0] = part->kind;
        store_big16(at + 1, number_of(call->holders, &call->holders_count, part->holder));
        store_big16(at + 3, number_of(call->seqs, &call->seqs_count, part->seq));
        store_big16(at + 5, (uint16_t)(last >> 16));
        store_big16(at + 7, (uint16_t)last);
        store_big16(at + 9, row);
        store_big16(at + 11, branch);
        at[13] = (char)part->count;
        at[14] = (char)((hashes > 0) + (namespace > 0 ? 2 : 0) + (is_behind ? 4 : 0));
        at += HEADER;
        if (namespace > 0)
            write_hex(at, part->namespace);
        if (is_behind)
            write_hex(at + namespace, part->parent);
        at += names;
        write_slots(parts->blocks + part->start, part->count, at);
        if (hashes > 0)
            write_hashes(parts->blocks + part->start, part->count, at + slots);
        if (tail_size > 0)
            memcpy(at + slots + hashes, tail, (size_t)tail_size);
    }
    Py_XDECREF(copies);
    return word;
}

/* The key of a place's value. */
static PyObject *row_key(const Part *place, const char *prefix, Py_ssize_t length)
{
    const Py_ssize_t suffix = place->place_kind == ROW ? 0 : 2;
    PyObject *key = PyBytes_FromStringAndSize(NULL, length + HEX_DIGITS + suffix);
    if (key != NULL) {
        char *at = PyBytes_AsString(key);
        memcpy(at, prefix, (size_t)length);
        write_hex(at + length, place->place_kind == BRANCH_ROW ? place->branch : place->head);
        if (suffix > 0)
            memcpy(at + length + HEX_DIGITS, place->place_kind == BRANCH_ROW ? ":b" : ":s", 2);
    }
    return key;
}

/* Put an object into a list that has room for it, and takes it over. 0 with an exception, also for NULL. */
static int set_item(PyObject *list, size_t at, PyObject *item)
{
    return item != NULL && PyList_SetItem(list, (Py_ssize_t)at, item) == 0;
}

/* Fill lists that are as long as what the call has numbered. 0 with an exception. */
static int fill_call(Call *call, const Parts *parts, size_t start, size_t end, const char *prefix, Py_ssize_t length,
                     PyObject *holders, PyObject *rows, PyObject *seqs, PyObject *words)
{
    int is_done = 1;
    for (size_t i = 0; is_done && i < end - start; i++)
        is_done = set_item(words, i, pack_part(call, parts, &parts->parts[start + i]));
    for (size_t i = 0; is_done && i < call->holders_count; i++)
        is_done = set_item(holders, i, PyLong_FromUnsignedLongLong(call->holders[i]));
    for (size_t i = 0; is_done && i < call->seqs_count; i++)
        is_done = set_item(seqs, i, PyLong_FromUnsignedLongLong(call->seqs[i]));
    for (size_t i = 0; is_done && i < call->rows_count; i++)
        is_done = set_item(rows, i, row_key(&call->rows[i], prefix, length));
    return is_done;
}

/* pack(start: int, end: int, prefix: bytes) -> tuple[int, list[int], list[bytes], list[int], list[bytes]]
 *
 * How many blocks, the holders, the keys of the rows, the seqs, and the parts, at most CALL_PARTS.
 */
PyObject *parts_pack(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const Parts *parts = (Parts *)self;
    size_t bounds[2] = {0}, blocks = 0;
    char *prefix;
    Py_ssize_t length;
    if (!has_arguments("pack", nargs, 3) || !read_bounds(args, 2, bounds) || !is_range(parts, bounds[0], bounds[1]) ||
        PyBytes_AsStringAndSize(args[2], &prefix, &length) < 0)
        return NULL;
    const size_t start = bounds[0], count = bounds[1] - start;
    if (count > CALL_PARTS)
        return PyErr_Format(PyExc_ValueError, "a call has at most %d parts", CALL_PARTS);
    Call call;
    number_all(&call, parts->parts + start, count);
    for (size_t i = 0; i < count; i++)
        blocks += parts->parts[start + i].count;
    PyObject *holders = PyList_New(call.holders_count), *rows = PyList_New(call.rows_count);
    PyObject *seqs = PyList_New(call.seqs_count), *words = PyList_New((Py_ssize_t)count);
    if (holders == NULL || rows == NULL || seqs == NULL || words == NULL ||
        !fill_call(&call, parts, start, bounds[1], prefix, length, holders, rows, seqs, words)) {
        Py_XDECREF(holders);
        Py_XDECREF(rows);
        Py_XDECREF(seqs);
        Py_XDECREF(words);
        return NULL;
    }
    return Py_BuildValue("nNNNN", (Py_ssize_t)blocks, holders, rows, seqs, words);
}
