/* The parts of a fold, one after the other.
 *
 * app/waymark/domain/parts.py says what a part is and has the same in Python. A part takes about a hundred bytes here,
 * and a block 24. As objects they would take ten times as much, and making each object would take a part of the time of
 * an event with one block.
 */

#include "parts.h"

#include "reserve.h"

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

/* Make room for more parts and blocks. 0 with an exception. */
static int make_room(Parts *parts, size_t more, size_t blocks)
{
    return reserve((void **)&parts->parts, &parts->capacity, parts->count, more, sizeof *parts->parts) &&
           reserve((void **)&parts->blocks, &parts->blocks_capacity, parts->blocks_count, blocks, sizeof *parts->blocks);
}

/* Return whether blocks continue the last part, by the rule of PartList.add_packed. */
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

/* Return the copies of a part, as a list that it shares with no other part. NULL with an exception. */
static PyObject *own_copies(Part *part)
{
    PyObject *own = part->copies;
    if (own == NULL || Py_REFCNT(own) > 1) {
        own = own == NULL ? PyList_New(0) : PySequence_List(own);
        if (own == NULL)
            return NULL;
        Py_XDECREF(part->copies);
        part->copies = own;
    }
    return own;
}

/* Set the copies of the last `count` blocks of the last part to `text`; earlier blocks without copies get none. 0 with
 * an exception. */
static int add_copies(Parts *parts, PyObject *text, size_t count)
{
    Part *last = &parts->parts[parts->count - 1];
    PyObject *nothing = PyBytes_FromStringAndSize(NULL, 0);
    if (nothing == NULL || own_copies(last) == NULL) {
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
    if (count > PART_BLOCKS) { /* the number takes one byte in a call */
        PyErr_Format(PyExc_ValueError, "a part has at most %d blocks", PART_BLOCKS);
        return 0;
    }
    if (!are_positions(position, count, STEP, POSITION_MAX))
        return refuse_positions(position, count, POSITION_MAX);
    const int joins = does_join(parts, part, position, blocks, count);
    if (!make_room(parts, !joins, count))
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

/* ---- as a sequence ------------------------------------------------------------------------------- */

/* Return the Place of a part. */
static PyObject *place_of(const Parts *parts, const Part *part)
{
    return build_place(parts->place_type, part->head, part->branch, part->place_kind);
}

/* Return a part as an object of its type in Python. */
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

/* len(parts) */
static Py_ssize_t parts_length(PyObject *self)
{
    return (Py_ssize_t)((Parts *)self)->count;
}

/* parts[number], from 0 */
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

int append_parts(Parts *parts, const Parts *other, size_t start, size_t end)
{
    if (start == end)
        return 1;
    const size_t first = other->parts[start].start;
    const size_t blocks = other->parts[end - 1].start + other->parts[end - 1].count - first;
    if (!make_room(parts, end - start, blocks))
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

/* parts += other, which stays as it is */
static PyObject *parts_inplace_concat(PyObject *self, PyObject *other)
{
    Parts *more = as_parts(other);
    if (more == NULL)
        return NULL;
    if (self == other)
        return PyErr_Format(PyExc_ValueError, "no part is there twice");
    return append_parts((Parts *)self, more, 0, more->count) ? Py_NewRef(self) : NULL;
}

PyObject *new_parts(PyTypeObject *type, PyObject *part_type, PyObject *place_type, uint64_t seq)
{
    Parts *parts = (Parts *)PyType_GenericAlloc(type, 0);
    if (parts != NULL) {
        parts->part_type = Py_NewRef(part_type);
        parts->place_type = Py_NewRef(place_type);
        parts->seq = seq;
    }
    return (PyObject *)parts;
}

/* cut(start: int, end: int) -> Parts: a copy of these parts */
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

/* ---- the type ------------------------------------------------------------------------------------ */

/* parts.blocks */
static PyObject *get_blocks(PyObject *self, void *closure)
{
    return PyLong_FromSize_t(((Parts *)self)->blocks_count);
}

/* parts.stored */
static PyObject *get_stored(PyObject *self, void *closure)
{
    return PyLong_FromSize_t(((Parts *)self)->stored);
}

/* parts.singles */
static PyObject *get_singles(PyObject *self, void *closure)
{
    return PyLong_FromSize_t(((Parts *)self)->singles);
}

/* Parts(part_type: type[Part], place_type: type[Place], seq: int) */
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

/* Release the copies of the parts, and the types. */
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
           "waits, /)\n--\n\nAdd blocks at consecutive positions."),
    METHOD("add_block", parts_add_block, METH_FASTCALL,
           "add_block($self, kind, holder, position, spot, engine_hash, is_known, is_identity, parent, copies, waits, /)\n--\n\n"
           "Add one block."),
    METHOD("end", parts_end, METH_FASTCALL,
           "end($self, start, parts_max, blocks_max, /)\n--\n\nReturn the end of the parts that fit one call."),
    METHOD("shares", parts_shares, METH_O, "shares($self, shards, /)\n--\n\nSplit the parts by wave and shard."),
    METHOD("calls", parts_calls, METH_O, "calls($self, prefixes, /)\n--\n\nPack the calls, wave by wave."),
    METHOD("cut", parts_cut, METH_FASTCALL, "cut($self, start, end, /)\n--\n\nCopy some parts."),
    METHOD("run_frames", parts_run_frames, METH_FASTCALL,
           "run_frames($self, ways, payloads, ts, reading, seq, prefixes, /)\n--\n\n"
           "Turn frames like some before into the words of calls."),
    METHOD("pack", parts_pack, METH_FASTCALL, "pack($self, start, end, prefix, /)\n--\n\nPack parts for Redis."),
    METHOD("reported", parts_reported, METH_FASTCALL,
           "reported($self, start, blocks_max, /)\n--\n\nPack new blocks by their engine hashes, for Redis."),
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
