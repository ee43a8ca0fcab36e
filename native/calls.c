/* Parts as the script of Redis reads them, lua/apply_rows.lua; app/waymark/store/calls.py has the same in Python. */

#include "parts.h"

enum {
    HEADER = 15,    /* bytes of a packed part before its namespace */
    BUCKETS = 1024, /* more than twice the rows of a call */
};

size_t end_of_parts(const Parts *parts, size_t start, size_t parts_max, size_t blocks_max)
{
    size_t end = start, blocks = 0;
    for (; end < parts->count; end++) {
        blocks += parts->parts[end].count;
        if (end > start && (end - start >= parts_max || blocks > blocks_max))
            break;
    }
    return end;
}

/* end(start: int, parts_max: int, blocks_max: int) -> int: the end of the parts from `start` on that fit one call */
PyObject *parts_end(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    size_t bounds[3] = {0};
    if (!has_arguments("end", nargs, 3) || !read_bounds(args, 3, bounds))
        return NULL;
    return PyLong_FromSize_t(end_of_parts((Parts *)self, bounds[0], bounds[1], bounds[2]));
}

/* The numbers, from 1, that a call gives to the holders, seqs and rows of its parts, in the order in which the parts
 * name them. */
typedef struct {
    uint64_t holders[CALL_PARTS], seqs[CALL_PARTS];
    Part rows[2 * CALL_PARTS]; /* only the place is used */
    uint16_t holders_count, seqs_count, rows_count;
    uint16_t buckets[BUCKETS]; /* numbers of rows */
} Call;

/* Return the number of a holder or a seq, from 1; a new one if it has none yet. There is room for one for each part. */
static uint16_t number_of(uint64_t *numbers, uint16_t *count, uint64_t number)
{
    for (uint16_t i = *count; i > 0; i--) /* mostly it is the last one */
        if (numbers[i - 1] == number)
            return i;
    numbers[(*count)++] = number;
    return *count;
}

/* Return the number of a place's row; a new one if it has none yet. There is room for two for each part. */
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

/* Return the number of the row of a branch row's piece. */
static uint16_t number_of_piece(Call *call, const Part *branch_row)
{
    const Part row = {.head = branch_row->head, .place_kind = ROW};
    return number_of_row(call, &row);
}

/* Number the holders, the seqs and the rows of the parts, in the order of the parts; rows that only a branch row needs
 * come last. */
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

/* Return the copies of a part, joined by semicolons. NULL with an exception. */
static PyObject *join_copies(const Part *part)
{
    PyObject *semicolon = PyBytes_FromStringAndSize(";", 1);
    PyObject *joined = semicolon == NULL ? NULL : PyObject_CallMethod(semicolon, "join", "O", part->copies);
    Py_XDECREF(semicolon);
    return joined;
}

/* Write a number to `at` as two bytes, the highest first. */
static void store_big16(char *at, uint16_t number)
{
    at[0] = (char)(number >> 8);
    at[1] = (char)number;
}

/* ---- bulk strings: words as Redis reads them ----------------------------------------------------- */

/* Return the number of decimal digits of a length. */
static size_t digits_of(size_t length)
{
    size_t digits = 1;
    while (length >= 10) {
        length /= 10;
        digits++;
    }
    return digits;
}

/* Return the number of bytes of a word with its length and the ends of lines. */
static size_t bulk_size(size_t length)
{
    return 1 + digits_of(length) + 2 + length + 2;
}

/* Write the length that precedes the bytes of a word. Return where the bytes go. */
static char *begin_bulk(char *at, size_t length)
{
    const size_t digits = digits_of(length);
    *at = '$';
    for (size_t i = digits; i > 0; i--, length /= 10)
        at[i] = (char)('0' + length % 10);
    memcpy(at + 1 + digits, "\r\n", 2);
    return at + 1 + digits + 2;
}

/* Write the end of line after the bytes of a word, which end here. Return where the next word goes. */
static char *end_bulk(char *at)
{
    memcpy(at, "\r\n", 2);
    return at + 2;
}

/* ---- words --------------------------------------------------------------------------------------- */

/* The fields of a packed part after its header. */
typedef struct {
    size_t namespace, parent, slots, hashes; /* bytes of each */
    PyObject *copies;                        /* a reference to bytes, or NULL */
    char *copied;
    Py_ssize_t copied_size;
} Body;

/* Plan the fields of a packed part after its header. 0 with an exception; then there is nothing to release. */
static int plan_body(const Part *part, Body *body)
{
    const int is_behind = part->kind == '+' && part->has_parent && part->place_kind == BRANCH_ROW &&
                          is_shared(part->head, part->branch);
    *body = (Body){.namespace = part->namespace ? HEX_DIGITS : 0,
                   .parent = is_behind ? HEX_DIGITS : 0,
                   .slots = SLOT_CHARS * (size_t)part->count,
                   .hashes = part->kind == '+' && !part->is_identity ? sizeof(uint64_t) * part->count : 0};
    if (part->copies == NULL)
        return 1;
    body->copies = join_copies(part);
    if (body->copies != NULL && PyBytes_AsStringAndSize(body->copies, &body->copied, &body->copied_size) == 0)
        return 1;
    Py_XDECREF(body->copies);
    return 0;
}

/* Return the number of bytes of a packed part. */
static size_t part_size(const Body *body)
{
    return HEADER + body->namespace + body->parent + body->slots + body->hashes + (size_t)body->copied_size;
}

/* Write a part to `at` as lua/apply_rows.lua reads it; the call has numbered its holder, its seq and its rows. Return
 * where the part ends. */
static char *write_part(Call *call, const Parts *parts, const Part *part, const Body *body, char *at)
{
    uint16_t row = 0, branch = 0;
    if (part->kind != '*') {
        branch = part->place_kind == BRANCH_ROW ? number_of_row(call, part) : 0;
        row = branch ? number_of_piece(call, part) : number_of_row(call, part);
    }
    const uint32_t last = (uint32_t)part->last;
    at[0] = part->kind;
    store_big16(at + 1, number_of(call->holders, &call->holders_count, part->holder));
    store_big16(at + 3, number_of(call->seqs, &call->seqs_count, part->seq));
    store_big16(at + 5, (uint16_t)(last >> 16));
    store_big16(at + 7, (uint16_t)last);
    store_big16(at + 9, row);
    store_big16(at + 11, branch);
    at[13] = (char)part->count;
    at[14] = (char)((body->hashes > 0) + (body->namespace > 0 ? 2 : 0) + (body->parent > 0 ? 4 : 0));
    at += HEADER;
    if (body->namespace > 0)
        write_hex(at, part->namespace);
    at += body->namespace;
    if (body->parent > 0)
        write_hex(at, part->parent);
    at += body->parent;
    write_slots(parts->blocks + part->start, part->count, at);
    at += body->slots;
    if (body->hashes > 0)
        write_hashes(parts->blocks + part->start, part->count, at);
    at += body->hashes;
    if (body->copied_size > 0)
        memcpy(at, body->copied, (size_t)body->copied_size);
    return at + body->copied_size;
}

/* Return the parts `start` to `end` as words. NULL with an exception. */
static PyObject *pack_parts(Call *call, const Parts *parts, size_t start, size_t end)
{
    Body bodies[CALL_PARTS];
    size_t planned = 0, size = 0;
    while (planned < end - start && plan_body(&parts->parts[start + planned], &bodies[planned]))
        size += bulk_size(part_size(&bodies[planned++]));
    PyObject *words = planned < end - start ? NULL : PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    char *at = words == NULL ? NULL : PyBytes_AsString(words);
    for (size_t i = 0; i < planned; i++) {
        if (words != NULL) {
            at = begin_bulk(at, part_size(&bodies[i]));
            at = end_bulk(write_part(call, parts, &parts->parts[start + i], &bodies[i], at));
        }
        Py_XDECREF(bodies[i].copies);
    }
    return words;
}

/* Return the keys of a call's rows as words. NULL with an exception. */
static PyObject *pack_rows(const Call *call, const char *prefix, size_t length)
{
    const size_t row = length + HEX_DIGITS, other = row + 2;
    size_t size = 0;
    for (size_t i = 0; i < call->rows_count; i++)
        size += bulk_size(call->rows[i].place_kind == ROW ? row : other);
    PyObject *words = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    char *at = words == NULL ? NULL : PyBytes_AsString(words);
    for (size_t i = 0; words != NULL && i < call->rows_count; i++) {
        const Part *place = &call->rows[i];
        at = begin_bulk(at, place->place_kind == ROW ? row : other);
        memcpy(at, prefix, length);
        write_hex(at + length, place->place_kind == BRANCH_ROW ? place->branch : place->head);
        if (place->place_kind != ROW)
            memcpy(at + row, place->place_kind == BRANCH_ROW ? ":b" : ":s", 2);
        at = end_bulk(at + (place->place_kind == ROW ? row : other));
    }
    return words;
}

/* Return numbers as a list. NULL with an exception. */
static PyObject *list_numbers(const uint64_t *numbers, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(numbers[i]);
        if (number == NULL || PyList_SetItem(list, (Py_ssize_t)i, number) < 0)
            Py_CLEAR(list);
    }
    return list;
}

PyObject *pack_call(const Parts *parts, size_t start, size_t end, PyObject *prefix)
{
    char *text;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(prefix, &text, &length) < 0)
        return NULL;
    Call call;
    number_all(&call, parts->parts + start, end - start);
    size_t blocks = 0;
    for (size_t i = start; i < end; i++)
        blocks += parts->parts[i].count;
    PyObject *words = pack_parts(&call, parts, start, end), *rows = pack_rows(&call, text, (size_t)length);
    PyObject *holders = list_numbers(call.holders, call.holders_count), *seqs = list_numbers(call.seqs, call.seqs_count);
    if (words != NULL && rows != NULL && holders != NULL && seqs != NULL)
        return Py_BuildValue("nNnNNN", (Py_ssize_t)blocks, holders, (Py_ssize_t)call.rows_count, rows, seqs, words);
    Py_XDECREF(words);
    Py_XDECREF(rows);
    Py_XDECREF(holders);
    Py_XDECREF(seqs);
    return NULL;
}

/* pack(start: int, end: int, prefix: bytes) -> tuple[int, list[int], int, bytes, list[int], bytes]
 *
 * Pack at most CALL_PARTS parts. Returns the number of blocks, the holders, the number of rows and their keys, the
 * seqs, and the parts. Keys and parts are bulk strings, one after the other.
 */
PyObject *parts_pack(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    size_t bounds[2] = {0};
    if (!has_arguments("pack", nargs, 3) || !read_bounds(args, 2, bounds) ||
        !is_range((Parts *)self, bounds[0], bounds[1]))
        return NULL;
    if (bounds[1] - bounds[0] > CALL_PARTS)
        return PyErr_Format(PyExc_ValueError, "a call has at most %d parts", CALL_PARTS);
    return pack_call((Parts *)self, bounds[0], bounds[1], args[2]);
}

/* ---- engine hashes ------------------------------------------------------------------------------- */

/* Return the number of characters of a block as lua/keep_hashes.lua has it: its key, its depth, its head, and its
 * namespace if it has one. */
static size_t reported_size(const Part *part)
{
    return SLOT_CHARS + HEX_DIGITS + (part->namespace ? HEX_DIGITS : 0);
}

/* Return whether the blocks of a part are new under their engine hashes, and their depth is known. */
static int is_reported(const Part *part)
{
    return part->kind == '+' && !part->is_known && !part->is_identity && part->place_kind != SINGLE;
}

/* Write a part's engine hashes, each with its block, to `at`. Return where they end. */
static char *write_reported(const Parts *parts, const Part *part, char *at)
{
    for (const PartBlock *block = parts->blocks + part->start, *end = block + part->count; block < end; block++) {
        at = begin_bulk(at, sizeof(uint64_t));
        store_big64(at, block->hash);
        at = begin_bulk(end_bulk(at + sizeof(uint64_t)), reported_size(part));
        write_slot(at, block->key, block->depth);
        write_hex(at + SLOT_CHARS, part->head);
        if (part->namespace)
            write_hex(at + SLOT_CHARS + HEX_DIGITS, part->namespace);
        at = end_bulk(at + reported_size(part));
    }
    return at;
}

/* reported(start: int, blocks_max: int) -> tuple[int, int, bytes]
 *
 * The new blocks of the parts from `start` on, up to the returned end, by their engine hashes: how many, and the words
 * of lua/keep_hashes.lua for them as bulk strings. One part always fits the bound.
 */
PyObject *parts_reported(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const Parts *parts = (Parts *)self;
    size_t bounds[2] = {0}, blocks = 0, size = 0;
    if (!has_arguments("reported", nargs, 2) || !read_bounds(args, 2, bounds) ||
        !is_range(parts, bounds[0], parts->count))
        return NULL;
    size_t end = bounds[0];
    for (; end < parts->count; end++) {
        const Part *part = &parts->parts[end];
        const size_t more = is_reported(part) ? part->count : 0;
        if (more > 0 && blocks > 0 && blocks + more > bounds[1])
            break;
        blocks += more;
        size += more * (bulk_size(sizeof(uint64_t)) + bulk_size(reported_size(part)));
    }
    PyObject *words = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (words == NULL)
        return NULL;
    char *at = PyBytes_AsString(words);
    for (size_t i = bounds[0]; i < end; i++)
        if (is_reported(&parts->parts[i]))
            at = write_reported(parts, &parts->parts[i], at);
    return Py_BuildValue("nnN", (Py_ssize_t)end, (Py_ssize_t)blocks, words);
}
