/* Waves: which parts must wait for those of other shards; app/waymark/domain/parts.py has the same in Python. */

#include "waves.h"

#include "index.h"
#include "place.h"

enum {
    NOWHERE = -1,
    SEVERAL = -2,         /* shards use the block */
    CAPACITY_KEPT = 8192, /* a larger table is freed with its wave */
};

static PyTypeObject *waves_type;

Waves *as_waves(PyObject *object)
{
    if (Py_TYPE(object) == waves_type)
        return (Waves *)object;
    PyErr_Format(PyExc_TypeError, "there must be Waves, not %R", (PyObject *)Py_TYPE(object));
    return NULL;
}

/* ---- the table ----------------------------------------------------------------------------------- */

/* Return the slot of a block, or the free one where it belongs; there is one, since the table is never full. */
static WaveBlock *slot_of(const Waves *waves, uint64_t block)
{
    size_t at = (size_t)spread(block) & (waves->capacity - 1);
    while (waves->blocks[at].wave == waves->wave && waves->blocks[at].block != block)
        at = (at + 1) & (waves->capacity - 1);
    return &waves->blocks[at];
}

/* Return the block, if it is of this wave, else NULL. */
static const WaveBlock *find(const Waves *waves, uint64_t block)
{
    const WaveBlock *found = waves->count == 0 ? NULL : slot_of(waves, block);
    return found != NULL && found->wave == waves->wave ? found : NULL;
}

/* Make the table larger. 0 with an exception; it is unchanged then. */
static int grow(Waves *waves)
{
    const Waves before = *waves;
    const size_t capacity = before.capacity == 0 ? 64 : 2 * before.capacity;
    WaveBlock *blocks = PyMem_Calloc(capacity, sizeof *blocks);
    if (blocks == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    waves->blocks = blocks;
    waves->capacity = capacity;
    for (size_t i = 0; i < before.capacity; i++)
        if (before.blocks[i].wave == waves->wave)
            *slot_of(waves, before.blocks[i].block) = before.blocks[i];
    PyMem_Free(before.blocks);
    return 1;
}

/* Return the entry of the block, which is added if it is new in this wave. NULL with an exception. */
static WaveBlock *enter(Waves *waves, uint64_t block)
{
    if (2 * (waves->count + 1) > waves->capacity && !grow(waves))
        return NULL;
    WaveBlock *entered = slot_of(waves, block);
    if (entered->wave != waves->wave) {
        *entered = (WaveBlock){block, waves->wave, NOWHERE, NOWHERE};
        waves->count++;
    }
    return entered;
}

/* ---- what parts do ------------------------------------------------------------------------------- */

void begin_wave(Waves *waves)
{
    waves->count = waves->left = 0;
    if (waves->capacity > CAPACITY_KEPT || waves->wave == UINT32_MAX) {
        PyMem_Free(waves->blocks);
        waves->blocks = NULL;
        waves->capacity = waves->wave = 0;
    }
    waves->wave++; /* never 0, which a new table has */
}

int use_block(Waves *waves, uint64_t block, int shard)
{
    WaveBlock *used = enter(waves, block);
    if (used != NULL)
        used->used = used->used == NOWHERE || used->used == shard ? (int16_t)shard : SEVERAL;
    return used != NULL;
}

int leave_block(Waves *waves, uint64_t block, int shard)
{
    WaveBlock *left = enter(waves, block);
    if (left == NULL)
        return 0;
    waves->left += left->left == NOWHERE;
    left->left = (int16_t)shard;
    return 1;
}

int is_used_elsewhere(const Waves *waves, uint64_t block, int shard)
{
    const WaveBlock *found = find(waves, block);
    return found != NULL && found->used != NOWHERE && found->used != shard;
}

int has_left_elsewhere(const Waves *waves, uint64_t block, int shard)
{
    const WaveBlock *found = find(waves, block);
    return found != NULL && found->left != NOWHERE && found->left != shard;
}

/* ---- the type ------------------------------------------------------------------------------------ */

typedef int Ask(const Waves *waves, uint64_t block, int shard);

/* Return the number of the first of some blocks for which `ask` is true; their number if there is none, -1 with an
 * exception. A block may be None. */
static Py_ssize_t first_of(const Waves *waves, PyObject *blocks, int shard, Ask *ask)
{
    const Py_ssize_t count = PySequence_Size(blocks);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *block = PySequence_GetItem(blocks, i);
        const int is_none = block == Py_None;
        const uint64_t number = block == NULL || is_none ? 0 : PyLong_AsUnsignedLongLong(block);
        Py_XDECREF(block);
        if (PyErr_Occurred())
            return -1;
        if (!is_none && ask(waves, number, shard))
            return i;
    }
    return count;
}

/* Return the shard of a Place. -1 with an exception. */
static int shard_of_place(const Waves *waves, PyObject *place)
{
    uint64_t head, branch;
    uint8_t kind;
    return read_place(place, &head, &branch, &kind) ? shard_of(waves, head) : -1;
}

/* begin() -> None */
static PyObject *waves_begin(PyObject *self, PyObject *ignored)
{
    begin_wave((Waves *)self);
    return Py_NewRef(Py_None);
}

/* use(seq_hash: int, place: Place) -> None */
static PyObject *waves_use(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Waves *waves = (Waves *)self;
    if (!has_arguments("use", nargs, 2))
        return NULL;
    const uint64_t block = PyLong_AsUnsignedLongLong(args[0]);
    const int shard = PyErr_Occurred() ? -1 : shard_of_place(waves, args[1]);
    if (shard < 0 || (waves->shards > 1 && !use_block(waves, block, shard)))
        return NULL;
    return Py_NewRef(Py_None);
}

/* first_that_waits(blocks: Sequence[int], place: Place) -> int */
static PyObject *waves_first_that_waits(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const Waves *waves = (Waves *)self;
    if (!has_arguments("first_that_waits", nargs, 2))
        return NULL;
    const int shard = shard_of_place(waves, args[1]);
    const Py_ssize_t count = shard < 0 ? -1 : PySequence_Size(args[0]);
    const Py_ssize_t first = count < 0 ? -1 : first_of(waves, args[0], shard, is_used_elsewhere);
    return first < 0 ? NULL : PyLong_FromSsize_t(first < count ? first : 0);
}

/* leave(blocks: Sequence[int], place: Place) -> bool */
static PyObject *waves_leave(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Waves *waves = (Waves *)self;
    if (!has_arguments("leave", nargs, 2))
        return NULL;
    const int shard = shard_of_place(waves, args[1]);
    const Py_ssize_t count = shard < 0 ? -1 : PySequence_Size(args[0]);
    const Py_ssize_t first = count < 0 ? -1 : first_of(waves, args[0], shard, is_used_elsewhere);
    if (first < 0)
        return NULL;
    if (first < count)
        begin_wave(waves);
    for (Py_ssize_t i = 0; waves->shards > 1 && i < count; i++) {
        PyObject *block = PySequence_GetItem(args[0], i);
        const uint64_t number = block == NULL ? 0 : PyLong_AsUnsignedLongLong(block);
        Py_XDECREF(block);
        if (PyErr_Occurred() || !leave_block(waves, number, shard))
            return NULL;
    }
    return PyBool_FromLong(first < count);
}

/* store(blocks: Sequence[int | None], place: Place) -> bool */
static PyObject *waves_store(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Waves *waves = (Waves *)self;
    if (!has_arguments("store", nargs, 2))
        return NULL;
    const int shard = shard_of_place(waves, args[1]);
    const Py_ssize_t count = shard < 0 ? -1 : PySequence_Size(args[0]);
    const Py_ssize_t first = count < 0 ? -1 : first_of(waves, args[0], shard, has_left_elsewhere);
    if (first < 0)
        return NULL;
    if (first < count)
        begin_wave(waves);
    return PyBool_FromLong(first < count);
}

/* waves.is_needed */
static PyObject *get_is_needed(PyObject *self, void *closure)
{
    return PyBool_FromLong(((Waves *)self)->shards > 1);
}

/* waves.has_left */
static PyObject *get_has_left(PyObject *self, void *closure)
{
    return PyBool_FromLong(((Waves *)self)->left > 0);
}

/* Waves(shards: int) */
static PyObject *waves_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    if (!has_only_arguments("Waves", args, names, 1))
        return NULL;
    const size_t shards = PyLong_AsSize_t(PyTuple_GetItem(args, 0));
    if (PyErr_Occurred())
        return NULL;
    if (shards < 1 || shards > SHARDS_MAX)
        return PyErr_Format(PyExc_ValueError, "there are 1 to %d shards, not %zu", SHARDS_MAX, shards);
    Waves *waves = (Waves *)PyType_GenericAlloc(type, 0);
    if (waves != NULL) {
        waves->shards = (uint32_t)shards;
        waves->wave = 1;
    }
    return (PyObject *)waves;
}

/* Free the table. */
static void waves_dealloc(PyObject *self)
{
    PyMem_Free(((Waves *)self)->blocks);
    free_object(self);
}

static PyMethodDef waves_methods[] = {
    METHOD("begin", waves_begin, METH_NOARGS, "begin($self, /)\n--\n\nBegin a fold, or a wave."),
    METHOD("use", waves_use, METH_FASTCALL, "use($self, seq_hash, place, /)\n--\n\nNote a block that a part needs."),
    METHOD("first_that_waits", waves_first_that_waits, METH_FASTCALL,
           "first_that_waits($self, blocks, place, /)\n--\n\nFind the first block that must wait to leave."),
    METHOD("leave", waves_leave, METH_FASTCALL,
           "leave($self, blocks, place, /)\n--\n\nNote blocks that leave. Return whether they wait."),
    METHOD("store", waves_store, METH_FASTCALL,
           "store($self, blocks, place, /)\n--\n\nReturn whether blocks stored at a place must wait."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef waves_attributes[] = {
    {"is_needed", get_is_needed, NULL, "Whether there are several shards.", NULL},
    {"has_left", get_has_left, NULL, "Whether a part of this wave has removed a block or a hash.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot waves_slots[] = {
    {Py_tp_new, waves_new},
    {Py_tp_dealloc, waves_dealloc},
    {Py_tp_methods, waves_methods},
    {Py_tp_getset, waves_attributes},
    {Py_tp_doc, "The blocks that the parts of a wave use and remove."},
    {0, NULL},
};

static PyType_Spec waves_spec = {"waymark._native.Waves", sizeof(Waves), 0, Py_TPFLAGS_DEFAULT, waves_slots};

int add_waves(PyObject *module)
{
    return add_type(module, "Waves", &waves_spec, &waves_type);
}
