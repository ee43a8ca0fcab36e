/* The parts of a fold, one behind the other, and how the script of Redis reads them.
 *
 * app/waymark/domain/parts.py says what a part is and has the same in Python; app/waymark/store/calls.py packs those.
 * A part takes some hundred bytes here, and a block 24; as objects they would be ten times as much, each a part of the
 * time that an event of one block takes.
 */

#include "parts.h"

#include "bytes.h"
#include "objects.h"
#include "reserve.h"
#include "slots.h"

enum {
    HEADER = 15,      /* bytes of a packed part before its namespace */
    CALL_PARTS = 128, /* of a call, at most; a part needs two rows at most */
    BUCKETS = 1024,   /* more than twice the rows of a call */
};

struct Parts {
    PyObject_HEAD
    Part *parts;
    size_t count, capacity;
    PartBlock *blocks;
    size_t blocks_count, blocks_capacity;
    size_t stored, singles; /* blocks that are stored, and parts whose place is a single */
    uint64_t seq;
    PyObject *part_type, *place_type;
};

static const char *const part_names[] = {
    "kind",          "holder",   "seq",         "last",   "place",  "namespace", "slots",
    "packed_hashes", "is_known", "is_identity", "parent", "copies", "waits",
};
enum { PART_NAMES = sizeof part_names / sizeof *part_names };
static PyObject *part_attributes[PART_NAMES];

static PyTypeObject *parts_type;

Parts *as_parts(PyObject *object)
{
    if (Py_TYPE(object) == parts_type)
        return (Parts *)object;
    PyErr_Format(PyExc_TypeError, "there must be Parts, not %R", (PyObject *)Py_TYPE(object));
    return NULL;
}

/* ---- adding -------------------------------------------------------------------------------------- */

static int reserve_blocks(Parts *parts, size_t more)
{
    return reserve((void **)&parts->blocks, &parts->blocks_capacity, parts->blocks_count, more, sizeof *parts->blocks);
}

static int reserve_parts(Parts *parts, size_t more)
{
    return reserve((void **)&parts->parts, &parts->capacity, parts->count, more, sizeof *parts->parts);
}

static int is_at_place_of(const Part *one, const Part *other)
{
    return one->head == other->head && one->branch == other->branch && one->place_kind == other->place_kind;
}

/* Whether blocks go on from the last part: as PartList.add_packed has it. */
static int does_join(const Parts *parts, const Part *part, int64_t position, const PartBlock *blocks, size_t count)
{
    const Part *last = parts->count == 0 ? NULL : &parts->parts[parts->count - 1];
    if (last == NULL || part->waits || last->seq != parts->seq || last->last + STEP != position ||
        !is_at_place_of(last, part) || last->kind != part->kind || last->holder != part->holder ||
        last->is_known != part->is_known || last->is_identity != part->is_identity || last->count + count > PART_BLOCKS)
        return 0;
    const PartBlock *own = parts->blocks + last->start;
    if (!part->is_known)
        return part->has_parent && part->parent == own[last->count - 1].key;
    for (size_t i = 0; i < last->count; i++)
        if (own[i].key == blocks->key)
            return 0;
    return 1;
}

/* The last part says `text` of its last `count` blocks, and nothing of those before, unless it does already. 0 with an
 * exception. */
static int add_copies(Parts *parts, PyObject *text, size_t count)
{
    Part *last = &parts->parts[parts->count - 1];
    PyObject *nothing = PyBytes_FromStringAndSize(NULL, 0);
    if (nothing == NULL || (last->copies == NULL && (last->copies = PyList_New(0)) == NULL)) {
        Py_XDECREF(nothing);
        return 0;
    }
    int is_done = 1;
    while (is_done && (size_t)PyList_Size(last->copies) < last->count) {
        const int is_before = (size_t)PyList_Size(last->copies) < last->count - count;
        is_done = PyList_Append(last->copies, is_before || text == NULL ? nothing : text) == 0;
    }
    Py_DECREF(nothing);
    return is_done;
}

int add_to_parts(Parts *parts, const Part *part, int64_t position, const PartBlock *blocks, size_t count,
                 PyObject *copies)
{
    if (count > PART_BLOCKS) { /* a call says the number in a byte */
        PyErr_Format(PyExc_ValueError, "a part has at most %d blocks", PART_BLOCKS);
        return 0;
    }
    const int joins = does_join(parts, part, position, blocks, count);
    if (!reserve_blocks(parts, count) || !(joins || reserve_parts(parts, 1)))
        return 0;
    Part *last = &parts->parts[parts->count - joins];
    if (!joins) {
        *last = *part;
        last->copies = NULL;
        last->seq = parts->seq;
        last->start = parts->blocks_count;
        last->count = 0;
        last->last = position - STEP;
        parts->count++;
        parts->singles += part->place_kind == SINGLE;
    }
    memcpy(parts->blocks + parts->blocks_count, blocks, count * sizeof *blocks);
    parts->blocks_count += count;
    parts->stored += part->kind == '+' ? count : 0;
    last->count += (uint32_t)count;
    last->last += STEP * (int64_t)count;
    return copies == NULL && last->copies == NULL ? 1 : add_copies(parts, copies, count);
}

/* The blocks of packed slots and engine hashes, in memory that is to be freed. NULL with an exception. */
static PartBlock *read_blocks(PyObject *slots, PyObject *hashes, size_t *count)
{
    char *slot, *hash;
    Py_ssize_t slots_size, hashes_size;
    if (PyBytes_AsStringAndSize(slots, &slot, &slots_size) < 0 ||
        PyBytes_AsStringAndSize(hashes, &hash, &hashes_size) < 0)
        return NULL;
    *count = (size_t)hashes_size / sizeof(uint64_t);
    PartBlock *blocks = PyMem_New(PartBlock, *count);
    if (blocks == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    int are_slots = (size_t)slots_size == SLOT_CHARS * *count && (size_t)hashes_size == sizeof(uint64_t) * *count && *count > 0;
    for (size_t i = 0; are_slots && i < *count; i++) {
        unsigned depth = 0;
        are_slots = read_slot(slot + SLOT_CHARS * i, &blocks[i].key, &depth);
        blocks[i].depth = (uint8_t)depth;
        blocks[i].hash = load_big64(hash + sizeof(uint64_t) * i);
    }
    if (!are_slots) {
        PyMem_Free(blocks);
        PyErr_Format(PyExc_ValueError, "a part has slots of %d characters, and an engine hash for each", SLOT_CHARS);
        return NULL;
    }
    return blocks;
}

/* add(kind: str, holder: int, position: int, place: Place, namespace: int, slots: bytes, hashes: bytes,
 *     is_known: bool, is_identity: bool, parent: int | None, copies: bytes, waits: bool) -> None
 */
static PyObject *parts_add(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Parts *parts = (Parts *)self;
    Part part = {0};
    Py_ssize_t length;
    if (!has_arguments("add", nargs, 12))
        return NULL;
    const char *kind = PyUnicode_AsUTF8AndSize(args[0], &length);
    if (kind == NULL)
        return NULL;
    if (length != 1 || !PyBytes_Check(args[10]))
        return PyErr_Format(PyExc_ValueError, "the kind of a part is one character, and copies are bytes");
    part.kind = *kind;
    part.holder = PyLong_AsUnsignedLongLong(args[1]);
    const int64_t position = PyErr_Occurred() ? 0 : PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred() || !is_position(position) || !read_place(args[3], &part.head, &part.branch, &part.place_kind))
        return NULL;
    part.namespace = PyLong_AsUnsignedLongLong(args[4]);
    part.is_known = args[7] == Py_True;
    part.is_identity = args[8] == Py_True;
    part.has_parent = args[9] != Py_None;
    part.parent = PyErr_Occurred() || !part.has_parent ? 0 : PyLong_AsUnsignedLongLong(args[9]);
    part.waits = args[11] == Py_True;
    if (PyErr_Occurred())
        return NULL;
    size_t count;
    PartBlock *blocks = read_blocks(args[5], args[6], &count);
    if (blocks == NULL)
        return NULL;
    PyObject *copies = PyBytes_Size(args[10]) > 0 ? args[10] : NULL;
    const int is_done = add_to_parts(parts, &part, position, blocks, count, copies);
    PyMem_Free(blocks);
    return is_done ? Py_NewRef(Py_None) : NULL;
}

/* ---- as a sequence ------------------------------------------------------------------------------- */

static PyObject *place_of(const Parts *parts, const Part *part)
{
    return build_place(parts->place_type, part->head, part->branch, part->place_kind);
}

static void write_slots(const PartBlock *blocks, size_t count, char *at)
{
    for (size_t i = 0; i < count; i++)
        write_slot(at + SLOT_CHARS * i, blocks[i].key, blocks[i].depth);
}

static void write_hashes(const PartBlock *blocks, size_t count, char *at)
{
    for (size_t i = 0; i < count; i++)
        store_big64(at + sizeof(uint64_t) * i, blocks[i].hash);
}

/* A part as an object of its type in Python. */
static PyObject *make_part(const Parts *parts, size_t at)
{
    const Part *part = &parts->parts[at];
    const PartBlock *blocks = parts->blocks + part->start;
    PyObject *values[PART_NAMES] = {
        PyUnicode_FromStringAndSize(&part->kind, 1),
        PyLong_FromUnsignedLongLong(part->holder),
        PyLong_FromUnsignedLongLong(part->seq),
        PyLong_FromLongLong(part->last),
        place_of(parts, part),
        PyLong_FromUnsignedLongLong(part->namespace),
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(SLOT_CHARS * part->count)),
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(sizeof(uint64_t) * part->count)),
        PyBool_FromLong(part->is_known),
        PyBool_FromLong(part->is_identity),
        part->has_parent ? PyLong_FromUnsignedLongLong(part->parent) : Py_NewRef(Py_None),
        part->copies == NULL ? PyList_New(0) : PySequence_List(part->copies),
        PyBool_FromLong(part->waits),
    };
    PyObject *made = NULL;
    int are_all = 1;
    for (int i = 0; i < PART_NAMES; i++)
        are_all &= values[i] != NULL;
    if (are_all) {
        write_slots(blocks, part->count, PyBytes_AsString(values[6]));
        write_hashes(blocks, part->count, PyBytes_AsString(values[7]));
        made = build_object((PyTypeObject *)parts->part_type, part_attributes, values, PART_NAMES);
    }
    for (int i = 0; i < PART_NAMES; i++)
        Py_XDECREF(values[i]);
    return made;
}

static Py_ssize_t parts_length(PyObject *self)
{
    return (Py_ssize_t)((Parts *)self)->count;
}

static PyObject *parts_item(PyObject *self, Py_ssize_t at)
{
    const Parts *parts = (Parts *)self;
    if (at < 0 || (size_t)at >= parts->count)
        return PyErr_Format(PyExc_IndexError, "there are %zu parts", parts->count);
    return make_part(parts, (size_t)at);
}

/* parts[number] and parts[start:end:step], which is a list */
static PyObject *parts_subscript(PyObject *self, PyObject *key)
{
    Py_ssize_t start, stop, step, count = parts_length(self);
    if (!PySlice_Check(key)) {
        const Py_ssize_t at = PyNumber_AsSsize_t(key, PyExc_IndexError);
        return at == -1 && PyErr_Occurred() ? NULL : parts_item(self, at < 0 ? at + count : at);
    }
    if (PySlice_Unpack(key, &start, &stop, &step) < 0)
        return NULL;
    count = PySlice_AdjustIndices(count, &start, &stop, step);
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *part = parts_item(self, start + step * i);
        if (part == NULL || PyList_SetItem(list, i, part) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/* Append the parts `start` to `end` of another. 0 with an exception. */
static int append_parts(Parts *parts, const Parts *other, size_t start, size_t end)
{
    if (start == end)
        return 1;
    const size_t first = other->parts[start].start;
    const size_t blocks = other->parts[end - 1].start + other->parts[end - 1].count - first;
    if (!reserve_parts(parts, end - start) || !reserve_blocks(parts, blocks))
        return 0;
    memcpy(parts->blocks + parts->blocks_count, other->blocks + first, blocks * sizeof *parts->blocks);
    for (size_t i = start; i < end; i++) {
        Part *part = &parts->parts[parts->count++];
        *part = other->parts[i];
        part->start = part->start - first + parts->blocks_count;
        Py_XINCREF(part->copies);
        parts->stored += part->kind == '+' ? part->count : 0;
        parts->singles += part->place_kind == SINGLE;
    }
    parts->blocks_count += blocks;
    return 1;
}

/* parts += other */
static PyObject *parts_inplace_concat(PyObject *self, PyObject *other)
{
    Parts *more = as_parts(other);
    if (more == NULL)
        return NULL;
    if (self == other)
        return PyErr_Format(PyExc_ValueError, "no part is there twice");
    return append_parts((Parts *)self, more, 0, more->count) ? Py_NewRef(self) : NULL;
}

static PyObject *new_parts(PyTypeObject *type, PyObject *part_type, PyObject *place_type, uint64_t seq)
{
    Parts *parts = (Parts *)PyType_GenericAlloc(type, 0);
    if (parts != NULL) {
        parts->part_type = Py_NewRef(part_type);
        parts->place_type = Py_NewRef(place_type);
        parts->seq = seq;
    }
    return (PyObject *)parts;
}

/* ---- calls --------------------------------------------------------------------------------------- */

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

/* The numbers of the arguments from the second on. 0 with an exception. */
static int read_bounds(PyObject *const *args, size_t count, size_t *bounds)
{
    for (size_t i = 0; i < count && !PyErr_Occurred(); i++)
        bounds[i] = PyLong_AsSize_t(args[i]);
    return !PyErr_Occurred();
}

/* end(start: int, parts_max: int, blocks_max: int) -> int */
static PyObject *parts_end(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    size_t bounds[3] = {0};
    if (!has_arguments("end", nargs, 3) || !read_bounds(args, 3, bounds))
        return NULL;
    return PyLong_FromSize_t(end_of((Parts *)self, bounds[0], bounds[1], bounds[2]));
}

/* Whether two numbers are a range of parts; with an exception where they are not. */
static int is_range(const Parts *parts, size_t start, size_t end)
{
    if (start <= end && end <= parts->count)
        return 1;
    PyErr_Format(PyExc_IndexError, "there are no parts %zu to %zu among %zu", start, end, parts->count);
    return 0;
}

/* cut(start: int, end: int) -> Parts */
static PyObject *parts_cut(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const Parts *parts = (Parts *)self;
    size_t bounds[2] = {0};
    if (!has_arguments("cut", nargs, 2) || !read_bounds(args, 2, bounds) || !is_range(parts, bounds[0], bounds[1]))
        return NULL;
    PyObject *cut = new_parts(Py_TYPE(self), parts->part_type, parts->place_type, parts->seq);
    if (cut != NULL && !append_parts((Parts *)cut, parts, bounds[0], bounds[1]))
        Py_CLEAR(cut);
    return cut;
}

/* The numbers that a call gives to what its parts name, from 1, in the order in which they are named. */
typedef struct {
    uint64_t holders[CALL_PARTS], seqs[CALL_PARTS];
    Part rows[2 * CALL_PARTS]; /* only their places */
    uint16_t holders_count, seqs_count, rows_count;
    uint16_t buckets[BUCKETS]; /* numbers of rows */
} Call;

static uint16_t number_of(uint64_t *numbers, uint16_t *count, uint64_t number)
{
    for (uint16_t i = *count; i > 0; i--) /* mostly it is the last one */
        if (numbers[i - 1] == number)
            return i;
    numbers[(*count)++] = number;
    return *count;
}

/* The number of a row, which is new if need be. */
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

static void store_big16(char *at, uint16_t number)
{
    at[0] = (char)(number >> 8);
    at[1] = (char)number;
}

/* A part as lua/apply_rows.lua reads it. */
static PyObject *pack_part(Call *call, const Parts *parts, const Part *part)
{
    if (!is_position(part->last))
        return NULL;
    PyObject *copies = NULL;
    char *tail = NULL;
    Py_ssize_t tail_size = 0;
    if (part->copies != NULL && ((copies = join_copies(part)) == NULL || PyBytes_AsStringAndSize(copies, &tail, &tail_size) < 0)) {
        Py_XDECREF(copies);
        return NULL;
    }
    const size_t hashes = part->kind == '+' && !part->is_identity ? sizeof(uint64_t) * part->count : 0;
    const size_t namespace = part->namespace ? HEX_DIGITS : 0, slots = SLOT_CHARS * (size_t)part->count;
    PyObject *word = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(HEADER + namespace + slots + hashes) + tail_size);
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
        at[14] = (char)((hashes > 0) + (namespace > 0 ? 2 : 0));
        at += HEADER;
        if (namespace > 0)
            write_hex(at, part->namespace);
        write_slots(parts->blocks + part->start, part->count, at + namespace);
        if (hashes > 0)
            write_hashes(parts->blocks + part->start, part->count, at + namespace + slots);
        if (tail_size > 0)
            memcpy(at + namespace + slots + hashes, tail, (size_t)tail_size);
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

/* Put an object into a list that has room for it. 0 with an exception. */
static int set_item(PyObject *list, size_t at, PyObject *item)
{
    return item != NULL && PyList_SetItem(list, (Py_ssize_t)at, item) == 0;
}

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

/* pack(start: int, end: int, prefix: bytes) -> tuple[int, list[int], list[bytes], list[int], list[bytes]] */
static PyObject *parts_pack(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
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

/* ---- the type ------------------------------------------------------------------------------------ */

static PyObject *get_blocks(PyObject *self, void *closure)
{
    return PyLong_FromSize_t(((Parts *)self)->blocks_count);
}

static PyObject *get_stored(PyObject *self, void *closure)
{
    return PyLong_FromSize_t(((Parts *)self)->stored);
}

static PyObject *get_singles(PyObject *self, void *closure)
{
    return PyLong_FromSize_t(((Parts *)self)->singles);
}

static PyObject *parts_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    if (!has_only_arguments("Parts", args, names, 3) || !intern_names(part_names, part_attributes, PART_NAMES))
        return NULL;
    PyObject *part_type = PyTuple_GetItem(args, 0), *place_type = PyTuple_GetItem(args, 1);
    const uint64_t seq = PyLong_AsUnsignedLongLong(PyTuple_GetItem(args, 2));
    if (PyErr_Occurred())
        return NULL;
    if (!PyType_Check(part_type) || !is_tuple_type(place_type))
        return PyErr_Format(PyExc_TypeError, "Parts() takes the types of a part and of a place");
    return new_parts(type, part_type, place_type, seq);
}

static void parts_dealloc(PyObject *self)
{
    Parts *parts = (Parts *)self;
    for (size_t i = 0; i < parts->count; i++)
        Py_XDECREF(parts->parts[i].copies);
    PyMem_Free(parts->parts);
    PyMem_Free(parts->blocks);
    Py_XDECREF(parts->part_type);
    Py_XDECREF(parts->place_type);
    free_object(self);
}

static PyMethodDef parts_methods[] = {
    METHOD("add", parts_add, METH_FASTCALL,
           "add($self, kind, holder, position, place, namespace, slots, hashes, is_known, is_identity, parent, copies, "
           "waits, /)\n--\n\nBlocks at consecutive positions."),
    METHOD("end", parts_end, METH_FASTCALL,
           "end($self, start, parts_max, blocks_max, /)\n--\n\nThe end of the parts that go together."),
    METHOD("cut", parts_cut, METH_FASTCALL, "cut($self, start, end, /)\n--\n\nSome of the parts."),
    METHOD("pack", parts_pack, METH_FASTCALL, "pack($self, start, end, prefix, /)\n--\n\nParts as Redis reads them."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef parts_attributes[] = {
    {"blocks", get_blocks, NULL, "How many blocks the parts name.", NULL},
    {"stored", get_stored, NULL, "How many of them are stored.", NULL},
    {"singles", get_singles, NULL, "How many parts are of blocks of unknown depth.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot parts_slots[] = {
    {Py_tp_new, parts_new},         {Py_tp_dealloc, parts_dealloc},
    {Py_tp_methods, parts_methods}, {Py_tp_getset, parts_attributes},
    {Py_sq_length, parts_length},   {Py_sq_item, parts_item},
    {Py_mp_length, parts_length},   {Py_mp_subscript, parts_subscript},
    {Py_sq_inplace_concat, parts_inplace_concat},
    {Py_tp_doc, "The parts of a fold."},
    {0, NULL},
};

static PyType_Spec parts_spec = {"waymark._native.Parts", sizeof(Parts), 0, Py_TPFLAGS_DEFAULT, parts_slots};

int add_parts(PyObject *module)
{
    return add_type(module, "Parts", &parts_spec, &parts_type);
}
