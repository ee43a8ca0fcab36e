/* Plain stores: blocks that are all new, hashed and put into their pieces at once. */

#include "input.h"
#include "plain.h"
#include "slots.h"

int is_in(PyObject *full, Places *places, uint32_t number)
{
    if (PyDict_Size(full) == 0)
        return 0;
    PyObject *place = make_place(places, number);
    const int found = place == NULL ? -1 : PyDict_Contains(full, place);
    Py_XDECREF(place);
    return found;
}

int find_parent(KnownBlocks *known, const uint64_t *parent, PyObject *full, int piece_blocks, Store *store,
                       Chain *chain)
{
    store->place = -1;
    store->depth = 0;
    chain->has_parent = 0;
    if (parent == NULL)
        return 1;
    const int64_t number = find_hash(known, *parent);
    if (number < 0)
        return 0;
    const Block *block = block_at(known, (uint32_t)number);
    const Place *place = &known->places->places[block->place];
    if (place->kind == SINGLE || place->namespace != store->namespace)
        return 0;
    chain->parent = block->key ^ place->namespace;
    chain->has_parent = 1;
    store->parent = block->key;
    store->depth = (block->depth + 1) % piece_blocks;
    if (store->depth == 0)
        return 1;
    store->place = block->place;
    const int is_full = is_in(full, known->places, block->place);
    return is_full < 0 ? -1 : !is_full;
}

void hash_store(Store *store, Chain *chain, const char *tokens, size_t width)
{
    for (size_t i = 0; i < store->count; i++)
        store->keys[i] = go_on(chain, xxh3(&chain->state, tokens + width * i, width)) ^ store->namespace;
}

int are_new_from(KnownBlocks *known, const Store *store, size_t start)
{
    const size_t count = store->count - start;
    fetch_blocks(known, &known->by_hash, store->hashes + start, count);
    fetch_blocks(known, &known->by_key, store->keys + start, count);
    const int are_new = are_strange(known, store->hashes + start, count, find_hash);
    return are_new == 1 ? are_strange(known, store->keys + start, count, find_key) : are_new;
}

int64_t put_piece(KnownBlocks *known, const Store *store, int64_t place, size_t start, size_t end, int depth,
                  Block *blocks)
{
    if (place < 0) {
        const Place row = {.head = store->keys[start], .namespace = store->namespace, .kind = ROW};
        place = number_of_place(known->places, &row);
    }
    if (place < 0)
        return -1;
    int is_done = 1;
    enter_place(known->places, (uint32_t)place); /* keeps the place while other blocks leave it */
    for (size_t i = 0; is_done && i < end - start; i++) {
        const size_t at = start + i;
        blocks[i] = (Block){store->hashes[at], store->keys[at], (uint32_t)place, .depth = (uint32_t)depth + (uint32_t)i};
        is_done = put_new_block(known, blocks[i].hash, blocks[i].key, (uint32_t)place, (uint8_t)blocks[i].depth);
    }
    leave_place(known->places, (uint32_t)place);
    return is_done ? place : -1;
}

int pack_blocks(const Block *blocks, size_t count, PyObject **slots, PyObject **hashes)
{
    *slots = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(SLOT_CHARS * count));
    *hashes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(sizeof(uint64_t) * count));
    if (*slots == NULL || *hashes == NULL) {
        Py_XDECREF(*slots);
        Py_XDECREF(*hashes);
        return 0;
    }
    char *slot = PyBytes_AsString(*slots), *hash = PyBytes_AsString(*hashes);
    for (size_t i = 0; i < count; i++, slot += SLOT_CHARS, hash += sizeof(uint64_t)) {
        write_slot(slot, blocks[i].key, blocks[i].depth);
        store_big64(hash, blocks[i].hash);
    }
    return 1;
}

/* Put blocks of a store at one place. Return (place, slots, engine hashes, start, the block before or None). */
static PyObject *store_piece(KnownBlocks *known, const Store *store, size_t start, size_t end, int depth)
{
    Block blocks[PIECE_BLOCKS];
    const int64_t place = put_piece(known, store, start == 0 ? store->place : -1, start, end, depth, blocks);
    PyObject *made = place < 0 ? NULL : make_place(known->places, (uint32_t)place), *slots = NULL, *hashes = NULL;
    PyObject *before = depth > 0 ? PyLong_FromUnsignedLongLong(store->parent) : Py_NewRef(Py_None);
    if (made == NULL || before == NULL || !pack_blocks(blocks, end - start, &slots, &hashes)) {
        Py_XDECREF(made);
        Py_XDECREF(before);
        return NULL;
    }
    return Py_BuildValue("NNNnN", made, slots, hashes, (Py_ssize_t)start, before);
}

/* Hash a store's blocks, and put them in if all of them are new: a list of pieces, or None. */
static PyObject *extend(KnownBlocks *known, Store *store, Chain *chain, const Input *tokens, size_t width, int piece_blocks,
                        PyObject *gone)
{
    hash_store(store, chain, tokens->start, width);
    const int are_new = are_new_from(known, store, 0);
    if (are_new != 1)
        return are_new < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *pieces = PyList_New(0);
    int depth = store->depth;
    for (size_t start = 0, end; pieces != NULL && start < store->count; start = end, depth = 0) {
        end = end_of_piece(store, start, depth, piece_blocks);
        PyObject *piece = store_piece(known, store, start, end, depth);
        if (piece == NULL || PyList_Append(pieces, piece) < 0)
            Py_CLEAR(pieces);
        Py_XDECREF(piece);
    }
    if (pieces != NULL)
        discard_beside(gone, store->hashes, store->count);
    return pieces;
}

/* extend(parent: int | None, engine_hashes: Sequence, tokens: bytes, block_size: int, seed: int, namespace: int,
 *        full: dict[Place, object], piece_blocks: int, gone: tuple[KnownBlocks, ...])
 *     -> list[tuple[Place, bytes, bytes, int, int | None]] | None
 *
 * Store complete blocks that are all new, and continue from a block of the table at a place that is not full, or begin
 * at the root; take their engine hashes out of `gone`. None for any other store; nothing has changed then.
 */
PyObject *known_extend(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    KnownBlocks *known = (KnownBlocks *)self;
    Input tokens;
    Chain chain;
    Store store = {NULL, NULL, 0, -1, 0, 0, 0};
    if (!has_arguments("extend", nargs, 9))
        return NULL;
    const Py_ssize_t block_size = PyLong_AsSsize_t(args[3]);
    const uint64_t seed = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[4]);
    store.namespace = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[5]);
    const long piece_blocks = PyErr_Occurred() ? 0 : PyLong_AsLong(args[7]);
    if (PyErr_Occurred())
        return NULL;
    if (block_size < 1 || block_size > PY_SSIZE_T_MAX / 4 || piece_blocks < 1 || piece_blocks > PIECE_BLOCKS ||
        !PyDict_Check(args[6]) || !known->has_keys)
        return PyErr_Format(PyExc_ValueError, "extend() takes blocks of tokens, pieces of up to 32 blocks, and a dict");
    if (!are_beside(known, args[8]))
        return NULL;
    const uint64_t parent = args[0] == Py_None ? 0 : PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred())
        return NULL;
    if (!open_bytes(args[2], &tokens))
        return NULL;
    const uint64_t *above = args[0] == Py_None ? NULL : &parent;
    const size_t width = 4 * (size_t)block_size, complete = (size_t)tokens.size / width;
    PyObject *pieces = NULL;
    /* Read before the parent is searched, since a sequence of the caller's own may change the table. */
    store.hashes = read_numbers(args[1], &store.count);
    const int is_plain =
        store.hashes == NULL ? -1 : find_parent(known, above, args[6], (int)piece_blocks, &store, &chain);
    if (is_plain == 0)
        pieces = Py_NewRef(Py_None);
    if (is_plain == 1) {
        store.count = complete < store.count ? complete : store.count;
        store.keys = PyMem_New(uint64_t, store.count);
        xxh3_prepare(&chain.state, seed, width > 2 * KEY ? width : 2 * KEY);
        pieces = store.keys == NULL ? PyErr_NoMemory()
                                    : extend(known, &store, &chain, &tokens, width, (int)piece_blocks, args[8]);
    }
    PyMem_Free(store.hashes);
    PyMem_Free(store.keys);
    close_input(&tokens);
    return pieces;
}
