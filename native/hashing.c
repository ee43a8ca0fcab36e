/* Turns tokens into block keys, as app/waymark/domain/hashing.py describes. */

#include "input.h"
#include "chain.h"

/* Begin a chain of blocks of `width` bytes. 0 with an exception. */
static int begin_chain(Chain *chain, size_t width, PyObject *seed, PyObject *parent)
{
    xxh3_prepare(&chain->state, PyLong_AsUnsignedLongLong(seed), width);
    if (PyErr_Occurred())
        return 0;
    chain->has_parent = parent != Py_None;
    chain->parent = chain->has_parent ? PyLong_AsUnsignedLongLong(parent) : 0;
    return !PyErr_Occurred();
}

/* digest(payload: buffer, seed: int) -> int
 *
 * XXH3-64 of the whole payload.
 */
PyObject *digest(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Xxh3 state;
    Input payload;
    if (!has_arguments("digest", nargs, 2))
        return NULL;
    const uint64_t seed = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred() || !open_buffer(args[0], &payload))
        return NULL;
    xxh3_prepare(&state, seed, (size_t)payload.size);
    const uint64_t hash = xxh3(&state, payload.start, (size_t)payload.size);
    close_input(&payload);
    return PyLong_FromUnsignedLongLong(hash);
}

/* hash_blocks(tokens: buffer, block_size: int, seed: int, parent: int | None, namespace: int) -> bytes
 *
 * The keys of the complete blocks in `tokens` (little-endian u32), eight big-endian bytes each. `parent` is a
 * seq_hash, without the namespace.
 */
PyObject *hash_blocks(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Chain chain;
    Input tokens;
    if (!has_arguments("hash_blocks", nargs, 5))
        return NULL;
    const Py_ssize_t block_size = PyLong_AsSsize_t(args[1]);
    const uint64_t namespace = PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if (block_size < 1 || block_size > PY_SSIZE_T_MAX / 4)
        return PyErr_Format(PyExc_ValueError, "block_size is %zd; it is at least 1", block_size);
    const Py_ssize_t width = 4 * block_size;
    if (!begin_chain(&chain, (size_t)width, args[2], args[3]) || !open_buffer(args[0], &tokens))
        return NULL;
    const Py_ssize_t count = tokens.size / width;
    PyObject *keys = PyBytes_FromStringAndSize(NULL, KEY * count);
    if (keys != NULL) {
        char *out = PyBytes_AsString(keys);
        const char *block = tokens.start;
        for (Py_ssize_t i = 0; i < count; i++, block += width, out += KEY)
            store_big64(out, go_on(&chain, xxh3(&chain.state, block, (size_t)width)) ^ namespace);
    }
    close_input(&tokens);
    return keys;
}

/* hash_keys(seq_hashes: buffer, namespace: int) -> bytes
 *
 * As hash_blocks, from the seq_hashes themselves (little-endian u64).
 */
PyObject *hash_keys(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Input hashes;
    if (!has_arguments("hash_keys", nargs, 2))
        return NULL;
    const uint64_t namespace = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred() || !open_buffer(args[0], &hashes))
        return NULL;
    const Py_ssize_t count = hashes.size / KEY;
    PyObject *keys = PyBytes_FromStringAndSize(NULL, KEY * count);
    if (keys != NULL) {
        char *out = PyBytes_AsString(keys);
        for (Py_ssize_t i = 0; i < count; i++, out += KEY)
            store_big64(out, load_little64(hashes.start + KEY * i) ^ namespace);
    }
    close_input(&hashes);
    return keys;
}

/* chain(local_hashes: buffer, seed: int, parent: int | None) -> bytes
 *
 * As hash_blocks, from the hashes of the blocks' tokens (little-endian u64).
 */
PyObject *chain(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Chain chain;
    Input locals;
    if (!has_arguments("chain", nargs, 3) || !begin_chain(&chain, 2 * KEY, args[1], args[2]))
        return NULL;
    if (!open_buffer(args[0], &locals))
        return NULL;
    const Py_ssize_t count = locals.size / KEY;
    PyObject *keys = PyBytes_FromStringAndSize(NULL, KEY * count);
    if (keys != NULL) {
        char *out = PyBytes_AsString(keys);
        for (Py_ssize_t i = 0; i < count; i++, out += KEY)
            store_big64(out, go_on(&chain, load_little64(locals.start + KEY * i)));
    }
    close_input(&locals);
    return keys;
}
