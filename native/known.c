/* KnownBlocks and its methods for single blocks; app/waymark/domain/pure_known.py has the same in Python.
 *
 * The methods for whole events are in stores.c, removals.c, runs.c, the table itself in blocks.c.
 */

#include "plain.h"

static PyTypeObject *known_type;

KnownBlocks *as_known(PyObject *object)
{
    if (Py_TYPE(object) == known_type)
        return (KnownBlocks *)object;
    PyErr_Format(PyExc_TypeError, "there must be KnownBlocks, not %R", (PyObject *)Py_TYPE(object));
    return NULL;
}

/* ---- blocks as objects, objects as numbers ------------------------------------------------------- */

/* Return a block as a Spot: place, namespace, depth, key. */
static PyObject *make_spot(KnownBlocks *known, const Block *block)
{
    PyObject *place = make_place(known->places, block->place);
    if (place == NULL)
        return NULL;
    const uint64_t namespace = known->places->places[block->place].namespace;
    return build_named(known->places->spot_type, Py_BuildValue("NKiK", place, namespace, (int)block->depth, block->key));
}

/* Return the block with this number as a Spot; None if the number is -1. */
static PyObject *spot_or_none(KnownBlocks *known, int64_t number)
{
    return number < 0 ? Py_NewRef(Py_None) : make_spot(known, block_at(known, (uint32_t)number));
}

/* Read the number at `i` of a sequence. 0 with an exception. */
static int number_at(PyObject *numbers, Py_ssize_t i, uint64_t *number)
{
    PyObject *item = PySequence_GetItem(numbers, i);
    if (item == NULL)
        return 0;
    *number = PyLong_AsUnsignedLongLong(item);
    Py_DECREF(item);
    return !PyErr_Occurred();
}

/* Read a sequence of numbers into memory that PyMem_Free frees, and its length into *count. NULL with an exception. */
uint64_t *read_numbers(PyObject *sequence, size_t *count)
{
    const Py_ssize_t size = PySequence_Size(sequence);
    if (size < 0)
        return NULL;
    uint64_t *numbers = PyMem_New(uint64_t, size);
    if (numbers == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < size; i++)
        if (!number_at(sequence, i, &numbers[i])) {
            PyMem_Free(numbers);
            return NULL;
        }
    *count = (size_t)size;
    return numbers;
}

/* Return whether none of the numbers of a sequence is found, and none occurs twice: 1 or 0, -1 with an exception. */
static int are_all_strange(KnownBlocks *known, PyObject *sequence, Find *find)
{
    size_t count = 0;
    uint64_t *numbers = read_numbers(sequence, &count);
    const int outcome = numbers == NULL ? -1 : are_strange(known, numbers, count, find);
    PyMem_Free(numbers);
    return outcome;
}

/* Return the number of a place that is an argument; the place counts one more block. -1 with an exception. */
static int64_t enter_given_place(KnownBlocks *known, PyObject *object, PyObject *namespace)
{
    Place place;
    const int64_t number = read_place_in(object, namespace, &place) ? number_of_place(known->places, &place) : -1;
    if (number >= 0)
        enter_place(known->places, (uint32_t)number); /* keeps the place while other blocks leave it */
    return number;
}

/* ---- reading ------------------------------------------------------------------------------------- */

/* blocks() -> int */
static PyObject *known_blocks(PyObject *self, PyObject *ignored)
{
    return PyLong_FromUnsignedLong(((KnownBlocks *)self)->firsts);
}

/* get(engine_hash: int) -> Spot | None */
static PyObject *known_get(PyObject *self, PyObject *engine_hash)
{
    const uint64_t hash = PyLong_AsUnsignedLongLong(engine_hash);
    return PyErr_Occurred() ? NULL : spot_or_none((KnownBlocks *)self, find_hash((KnownBlocks *)self, hash));
}

/* get_block(key: int) -> Spot | None */
static PyObject *known_get_block(PyObject *self, PyObject *key)
{
    const uint64_t number = PyLong_AsUnsignedLongLong(key);
    return PyErr_Occurred() ? NULL : spot_or_none((KnownBlocks *)self, find_key((KnownBlocks *)self, number));
}

/* first(key: int) -> int | None */
static PyObject *known_first(PyObject *self, PyObject *key)
{
    KnownBlocks *known = (KnownBlocks *)self;
    const uint64_t number = PyLong_AsUnsignedLongLong(key);
    if (PyErr_Occurred())
        return NULL;
    const int64_t found = find_key(known, number);
    return found < 0 ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(block_at(known, (uint32_t)found)->hash);
}

/* are_new(engine_hashes: Sequence, keys: Sequence) -> bool */
static PyObject *known_are_new(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    KnownBlocks *known = (KnownBlocks *)self;
    if (!has_arguments("are_new", nargs, 2))
        return NULL;
    int outcome = are_all_strange(known, args[0], find_hash);
    if (outcome == 1)
        outcome = are_all_strange(known, args[1], find_key);
    return outcome < 0 ? NULL : PyBool_FromLong(outcome);
}

/* ---- changes ------------------------------------------------------------------------------------- */

/* Return whether there are equally many keys, depths and engine hashes, and each depth is one of a piece. 0 with an
 * exception. */
static int are_blocks(const size_t counts[3], const uint64_t *depths)
{
    if (counts[0] != counts[1] || counts[0] != counts[2]) {
        PyErr_Format(PyExc_ValueError, "%zu keys have %zu depths and %zu engine hashes", counts[0], counts[1], counts[2]);
        return 0;
    }
    for (size_t i = 0; i < counts[0]; i++)
        if (depths[i] >= PIECE_BLOCKS) {
            PyErr_Format(PyExc_ValueError, "depths[%zu] is %llu; a depth in a piece is less than %d", i,
                         (unsigned long long)depths[i], PIECE_BLOCKS);
            return 0;
        }
    return 1;
}

/* store(place: Place, namespace: int, keys: Sequence, depths: Sequence, engine_hashes: Sequence) -> None
 *
 * Nothing changes if an argument does not fit.
 */
static PyObject *known_store(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    KnownBlocks *known = (KnownBlocks *)self;
    if (!has_arguments("store", nargs, 5))
        return NULL;
    size_t counts[3] = {0};
    uint64_t *keys = read_numbers(args[2], &counts[0]);
    uint64_t *depths = keys == NULL ? NULL : read_numbers(args[3], &counts[1]);
    uint64_t *hashes = depths == NULL ? NULL : read_numbers(args[4], &counts[2]);
    int is_done = hashes != NULL && are_blocks(counts, depths);
    const int64_t place = is_done ? enter_given_place(known, args[0], args[1]) : -1;
    if (place >= 0) {
        for (size_t i = 0; is_done && i < counts[0]; i++)
            is_done = put_block(known, hashes[i], keys[i], (uint32_t)place, (uint8_t)depths[i]);
        leave_place(known->places, (uint32_t)place);
    }
    PyMem_Free(keys);
    PyMem_Free(depths);
    PyMem_Free(hashes);
    return place >= 0 && is_done ? Py_NewRef(Py_None) : NULL;
}

/* Return the block that is the first of its key, in the table. NULL with an exception. */
Block *first_block(KnownBlocks *known, PyObject *key)
{
    const uint64_t number = PyLong_AsUnsignedLongLong(key);
    if (PyErr_Occurred())
        return NULL;
    const int64_t found = find_key(known, number);
    if (found < 0)
        PyErr_SetObject(PyExc_KeyError, key);
    return found < 0 ? NULL : block_at(known, (uint32_t)found);
}

/* name(engine_hash: int, key: int) -> None */
static PyObject *known_name(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    KnownBlocks *known = (KnownBlocks *)self;
    if (!has_arguments("name", nargs, 2))
        return NULL;
    const uint64_t hash = PyLong_AsUnsignedLongLong(args[0]);
    const Block *first = PyErr_Occurred() ? NULL : first_block(known, args[1]);
    if (first == NULL)
        return NULL;
    const Block copy = *first;
    if (!put_block(known, hash, copy.key, copy.place, copy.depth))
        return NULL;
    set_copies(known, block_at(known, (uint32_t)find_hash(known, hash)), 0, 0);
    return Py_NewRef(Py_None);
}

/* lead(engine_hash: int) -> None */
static PyObject *known_lead(PyObject *self, PyObject *engine_hash)
{
    KnownBlocks *known = (KnownBlocks *)self;
    const uint64_t hash = PyLong_AsUnsignedLongLong(engine_hash);
    if (PyErr_Occurred())
        return NULL;
    const int64_t number = find_hash(known, hash);
    if (number < 0 || !known->has_keys) {
        PyErr_SetObject(PyExc_KeyError, engine_hash);
        return NULL;
    }
    return lead_block(known, (uint32_t)number) ? Py_NewRef(Py_None) : NULL;
}

/* pop(engine_hash: int) -> Spot | None */
static PyObject *known_pop(PyObject *self, PyObject *engine_hash)
{
    KnownBlocks *known = (KnownBlocks *)self;
    const uint64_t hash = PyLong_AsUnsignedLongLong(engine_hash);
    if (PyErr_Occurred())
        return NULL;
    const int64_t number = find_hash(known, hash);
    PyObject *spot = spot_or_none(known, number);
    if (spot != NULL && number >= 0)
        remove_block(known, (uint32_t)number);
    return spot;
}

/* discard(engine_hashes: Sequence) -> None */
static PyObject *known_discard(PyObject *self, PyObject *engine_hashes)
{
    size_t count = 0;
    uint64_t *hashes = read_numbers(engine_hashes, &count);
    if (hashes == NULL)
        return NULL;
    discard_blocks((KnownBlocks *)self, hashes, count);
    PyMem_Free(hashes);
    return Py_NewRef(Py_None);
}

/* move(engine_hash: int, place: Place) -> None */
static PyObject *known_move(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    KnownBlocks *known = (KnownBlocks *)self;
    if (!has_arguments("move", nargs, 2))
        return NULL;
    const uint64_t hash = PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred())
        return NULL;
    const int64_t number = find_hash(known, hash);
    if (number < 0) {
        PyErr_SetObject(PyExc_KeyError, args[0]);
        return NULL;
    }
    Block *block = block_at(known, (uint32_t)number);
    PyObject *namespace = PyLong_FromUnsignedLongLong(known->places->places[block->place].namespace);
    const int64_t place = namespace == NULL ? -1 : enter_given_place(known, args[1], namespace);
    Py_XDECREF(namespace);
    if (place < 0)
        return NULL;
    leave_place(known->places, block->place);
    block->place = (uint32_t)place;
    return Py_NewRef(Py_None);
}

/* clear() -> None */
static PyObject *known_clear(PyObject *self, PyObject *ignored)
{
    empty_blocks((KnownBlocks *)self);
    return Py_NewRef(Py_None);
}

/* release() -> bool */
static PyObject *known_release(PyObject *self, PyObject *ignored)
{
    return PyBool_FromLong(release_blocks((KnownBlocks *)self));
}

/* ---- the type ------------------------------------------------------------------------------------ */

/* KnownBlocks(places: Places, has_keys: bool) */
static PyObject *known_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    if (!has_only_arguments("KnownBlocks", args, names, 2))
        return NULL;
    Places *places = as_places(PyTuple_GetItem(args, 0));
    KnownBlocks *known = places == NULL ? NULL : (KnownBlocks *)PyType_GenericAlloc(type, 0);
    if (known != NULL) {
        known->places = (Places *)Py_NewRef((PyObject *)places);
        known->has_keys = PyTuple_GetItem(args, 1) == Py_True;
    }
    return (PyObject *)known;
}

/* Free the object. Its blocks leave their places, which other tables may share. */
static void known_dealloc(PyObject *self)
{
    KnownBlocks *known = (KnownBlocks *)self;
    clear_blocks(known);
    Py_XDECREF((PyObject *)known->places);
    free_object(self);
}

/* len(known): engine hashes */
static Py_ssize_t known_length(PyObject *self)
{
    return (Py_ssize_t)((KnownBlocks *)self)->used;
}

/* __sizeof__() -> int: bytes, without those of the places. */
static PyObject *known_size(PyObject *self, PyObject *ignored)
{
    const KnownBlocks *known = (KnownBlocks *)self;
    const size_t blocks = known->chunks_count * (sizeof(Block *) + CHUNK_BLOCKS * sizeof(Block));
    return PyLong_FromSize_t(sizeof *known + blocks + known->by_hash.bytes + known->by_key.bytes);
}

static PyMethodDef known_methods[] = {
    METHOD("blocks", known_blocks, METH_NOARGS, "blocks($self, /)\n--\n\nCount those with a key."),
    METHOD("get", known_get, METH_O, "get($self, engine_hash, /)\n--\n\nReturn the block of a hash."),
    METHOD("get_block", known_get_block, METH_O, "get_block($self, key, /)\n--\n\nReturn the block with a key."),
    METHOD("first", known_first, METH_O, "first($self, key, /)\n--\n\nReturn a block's first hash."),
    METHOD("are_new", known_are_new, METH_FASTCALL,
           "are_new($self, engine_hashes, keys, /)\n--\n\nReturn whether all are unknown and different."),
    METHOD("store", known_store, METH_FASTCALL,
           "store($self, place, namespace, keys, depths, engine_hashes, /)\n--\n\nAdd blocks of one place."),
    METHOD("name", known_name, METH_FASTCALL, "name($self, engine_hash, key, /)\n--\n\nAdd a hash to a block."),
    METHOD("lead", known_lead, METH_O, "lead($self, engine_hash, /)\n--\n\nMake it the first of its block."),
    METHOD("pop", known_pop, METH_O, "pop($self, engine_hash, /)\n--\n\nTake an engine hash out."),
    METHOD("clear", known_clear, METH_NOARGS, "clear($self, /)\n--\n\nTake all out, and keep the memory."),
    METHOD("release", known_release, METH_NOARGS,
           "release($self, /)\n--\n\nForget some blocks of an unused table. Return whether it has more."),
    METHOD("discard", known_discard, METH_O, "discard($self, engine_hashes, /)\n--\n\nTake engine hashes out."),
    METHOD("move", known_move, METH_FASTCALL, "move($self, engine_hash, place, /)\n--\n\nMove a block."),
    METHOD("extend", known_extend, METH_FASTCALL,
           "extend($self, parent, engine_hashes, tokens, block_size, seed, namespace, full, piece_blocks, former, /)\n--\n\n"
           "Run a plain store, from its tokens."),
    METHOD("take", known_take, METH_FASTCALL, "take($self, engine_hashes, former, /)\n--\n\nRun a plain removal."),
    METHOD("run", known_run, METH_FASTCALL,
           "run($self, events, start, position, hashes_max, parts, holder, seed, namespace, full, piece_blocks, former, "
           "may, following, waves, neighbours, /)\n--\n\nRun plain events, one after the other."),
    METHOD("copies", known_copies, METH_O, "copies($self, key, /)\n--\n\nCount the copies of a block."),
    METHOD("set_copies", known_set_copies, METH_FASTCALL,
           "set_copies($self, key, copies, is_left, /)\n--\n\nSet how many copies a block has."),
    METHOD("left", known_left, METH_NOARGS, "left($self, /)\n--\n\nReturn the hashes that a removal left."),
    METHOD("__sizeof__", known_size, METH_NOARGS, NULL),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot known_slots[] = {
    {Py_tp_new, known_new},       {Py_tp_dealloc, known_dealloc},                      {Py_tp_methods, known_methods},
    {Py_sq_length, known_length}, {Py_tp_doc, "Engine hashes, and the block of each."}, {0, NULL},
};

static PyType_Spec known_spec = {"waymark._native.KnownBlocks", sizeof(KnownBlocks), 0, Py_TPFLAGS_DEFAULT, known_slots};

int add_known(PyObject *module)
{
    return choose_secret() ? add_type(module, "KnownBlocks", &known_spec, &known_type) : -1;
}
