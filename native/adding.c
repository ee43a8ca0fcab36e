/* Parts from Python: blocks with packed slots and engine hashes, and single blocks.
 *
 * app/waymark/domain/parts.py has the same in Python.
 */

#include "parts.h"

/* Read blocks from packed slots and engine hashes, into memory that the caller frees. NULL with an exception. */
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

/* Read the arguments of `add` and `add_block` that describe the blocks, except their place. 0 with an exception. */
static int read_part(PyObject *kind, PyObject *holder, PyObject *is_known, PyObject *is_identity, PyObject *parent,
                     PyObject *copies, PyObject *waits, Part *part)
{
    Py_ssize_t length;
    const char *letter = PyUnicode_AsUTF8AndSize(kind, &length);
    if (letter == NULL)
        return 0;
    if (length != 1 || !PyBytes_Check(copies)) {
        PyErr_Format(PyExc_ValueError, "the kind of a part is one character, and copies are bytes");
        return 0;
    }
    part->kind = *letter;
    part->holder = PyLong_AsUnsignedLongLong(holder);
    part->is_known = is_known == Py_True;
    part->is_identity = is_identity == Py_True;
    part->has_parent = parent != Py_None;
    part->parent = PyErr_Occurred() || !part->has_parent ? 0 : PyLong_AsUnsignedLongLong(parent);
    part->waits = waits == Py_True;
    return !PyErr_Occurred();
}

/* add_block(kind: str, holder: int, position: int, spot: Spot, engine_hash: int, is_known: bool, is_identity: bool,
 *           parent: int | None, copies: bytes, waits: bool) -> None
 */
PyObject *parts_add_block(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Part part = {0};
    PartBlock block = {0};
    if (!has_arguments("add_block", nargs, 10))
        return NULL;
    if (!PyTuple_Check(args[3]) || PyTuple_Size(args[3]) != 4)
        return PyErr_Format(PyExc_TypeError, "a spot is place, namespace, depth and key, not %R", args[3]);
    if (!read_part(args[0], args[1], args[5], args[6], args[7], args[8], args[9], &part) ||
        !read_place(PyTuple_GetItem(args[3], 0), &part.head, &part.branch, &part.place_kind))
        return NULL;
    const int64_t position = PyLong_AsLongLong(args[2]);
    part.namespace = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(PyTuple_GetItem(args[3], 1));
    const size_t depth = PyErr_Occurred() ? 0 : PyLong_AsSize_t(PyTuple_GetItem(args[3], 2));
    block.key = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(PyTuple_GetItem(args[3], 3));
    block.hash = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if (depth >= DEPTHS)
        return PyErr_Format(PyExc_ValueError, "the depth is %zu; one in a piece is less than %d", depth, DEPTHS);
    block.depth = (uint8_t)depth;
    PyObject *copies = PyBytes_Size(args[8]) > 0 ? args[8] : NULL;
    return add_to_parts((Parts *)self, &part, position, &block, 1, copies) ? Py_NewRef(Py_None) : NULL;
}

/* add(kind: str, holder: int, position: int, place: Place, namespace: int, slots: bytes, hashes: bytes,
 *     is_known: bool, is_identity: bool, parent: int | None, copies: bytes, waits: bool) -> None
 */
PyObject *parts_add(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Parts *parts = (Parts *)self;
    Part part = {0};
    if (!has_arguments("add", nargs, 12) ||
        !read_part(args[0], args[1], args[7], args[8], args[9], args[10], args[11], &part) ||
        !read_place(args[3], &part.head, &part.branch, &part.place_kind))
        return NULL;
    const int64_t position = PyLong_AsLongLong(args[2]);
    part.namespace = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[4]);
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
