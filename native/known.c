/* What a worker remembers of a stream: the blocks that engine hashes stand for, and the places that these are in.
 *
 * app/waymark/domain/known.py describes both types, and has them in Python. A block takes 24 bytes and its slots in one
 * index or two, a place 40 and its slot.
 */

#include "bytes.h"
#include "chain.h"
#include "events.h"
#include "index.h"
#include "input.h"
#include "objects.h"
#include "parts.h"
#include "slots.h"

enum { PIECE_BLOCKS = 32, CHUNK_BLOCKS = 256 };

/* Without it nobody can choose hashes that fall together. */
static uint64_t secret;

static inline uint64_t spread(uint64_t number)
{
    return fold_product(number ^ secret, PRIME64_1 ^ secret);
}

/* ---- places -------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t head;   /* of a free one: the number of the next free one, and 1 */
    uint64_t branch; /* key of the first block of a branch row, else 0 */
    uint64_t namespace;
    uint32_t blocks; /* that are here */
    uint8_t kind;
} Place;

typedef struct {
    PyObject_HEAD
    Place *places;
    uint32_t count, capacity, used;
    uint32_t free; /* the number of the first free one, and 1; 0 for none */
    Index index;
    PyObject *place_type, *spot_type;
    PyObject *last; /* the Place that was made last, of the number last_number */
    uint32_t last_number;
} Places;

static uint64_t hash_of_place(const Place *place)
{
    return spread(spread(place->head) ^ rotate_left(spread(place->branch), 16) ^ place->namespace ^ place->kind);
}

static uint64_t place_hash_of(const void *places, uint32_t number)
{
    return hash_of_place(&((const Places *)places)->places[number]);
}

/* What a Place of Python names. 0 with an exception. */
static int read_place(PyObject *object, PyObject *namespace, Place *place)
{
    if (!PyTuple_Check(object) || PyTuple_Size(object) != 3) {
        PyErr_Format(PyExc_TypeError, "a place is head, branch and is_single, not %R", object);
        return 0;
    }
    PyObject *branch = PyTuple_GetItem(object, 1);
    memset(place, 0, sizeof *place);
    place->kind = PyTuple_GetItem(object, 2) == Py_True ? SINGLE : ROW;
    place->head = PyLong_AsUnsignedLongLong(PyTuple_GetItem(object, 0));
    if (!PyErr_Occurred() && branch != Py_None) {
        place->branch = PyLong_AsUnsignedLongLong(branch);
        place->kind = BRANCH_ROW;
    }
    if (!PyErr_Occurred())
        place->namespace = PyLong_AsUnsignedLongLong(namespace);
    return !PyErr_Occurred();
}

static int is_same_place(const Place *one, const Place *other)
{
    return one->head == other->head && one->branch == other->branch && one->namespace == other->namespace &&
           one->kind == other->kind;
}

/* A number that no place has. -1 with an exception. */
static int64_t new_number(Places *places)
{
    if (places->free != 0) {
        const uint32_t number = places->free - 1;
        places->free = (uint32_t)places->places[number].head;
        return number;
    }
    if (places->count == places->capacity) {
        const uint32_t capacity = places->capacity + places->capacity / 4 + 16;
        Place *grown = places->count < THINGS_MAX ? PyMem_Realloc(places->places, capacity * sizeof *grown) : NULL;
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        places->places = grown;
        places->capacity = capacity;
    }
    return places->count++;
}

/* The number of a place, which is new if need be. -1 with an exception. */
static int64_t number_of_place(Places *places, const Place *place)
{
    const uint64_t hash = hash_of_place(place);
    Search search = begin_search(&places->index, hash);
    for (int64_t found; (found = next_found(&search)) >= 0;)
        if (is_same_place(&places->places[found], place))
            return found;
    if (!reserve_slot(&places->index, hash, place_hash_of, places))
        return -1;
    const int64_t number = new_number(places);
    if (number >= 0) {
        places->places[number] = *place;
        insert_slot(&places->index, hash, (uint32_t)number);
        places->used++;
    }
    return number;
}

static void enter_place(Places *places, uint32_t number)
{
    places->places[number].blocks++;
}

static void leave_place(Places *places, uint32_t number)
{
    Place *place = &places->places[number];
    if (--place->blocks > 0)
        return;
    delete_slot(&places->index, hash_of_place(place), number, place_hash_of, places);
    place->kind = FREE;
    place->head = places->free;
    places->free = number + 1;
    places->used--;
    if (places->last_number == number)
        Py_CLEAR(places->last);
}

/* The Place with a number. Neighbours are asked for together. */
static PyObject *make_place(Places *places, uint32_t number)
{
    const Place *place = &places->places[number];
    if (places->last == NULL || places->last_number != number) {
        PyObject *branch = place->kind == BRANCH_ROW ? PyLong_FromUnsignedLongLong(place->branch) : Py_NewRef(Py_None);
        PyObject *is_single = place->kind == SINGLE ? Py_True : Py_False;
        PyObject *fields = branch == NULL ? NULL : Py_BuildValue("KNO", place->head, branch, is_single);
        PyObject *made = build_named(places->place_type, fields);
        if (made == NULL)
            return NULL;
        Py_XDECREF(places->last);
        places->last = made;
        places->last_number = number;
    }
    return Py_NewRef(places->last);
}

static PyObject *places_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    if (!has_arguments("Places", PyTuple_Size(args), 2))
        return NULL;
    PyObject *place_type = PyTuple_GetItem(args, 0), *spot_type = PyTuple_GetItem(args, 1);
    if (!PyType_Check(place_type) || !PyType_IsSubtype((PyTypeObject *)place_type, &PyTuple_Type) ||
        !PyType_Check(spot_type) || !PyType_IsSubtype((PyTypeObject *)spot_type, &PyTuple_Type))
        return PyErr_Format(PyExc_TypeError, "Places() takes two types of tuples");
    Places *places = (Places *)PyType_GenericAlloc(type, 0);
    if (places != NULL) {
        places->place_type = Py_NewRef(place_type);
        places->spot_type = Py_NewRef(spot_type);
    }
    return (PyObject *)places;
}

static void places_dealloc(PyObject *self)
{
    Places *places = (Places *)self;
    PyMem_Free(places->places);
    clear_index(&places->index);
    Py_XDECREF(places->last);
    Py_XDECREF(places->place_type);
    Py_XDECREF(places->spot_type);
    free_object(self);
}

static Py_ssize_t places_length(PyObject *self)
{
    return (Py_ssize_t)((Places *)self)->used;
}

static PyObject *places_size(PyObject *self, PyObject *ignored)
{
    const Places *places = (Places *)self;
    return PyLong_FromSize_t(sizeof *places + places->capacity * sizeof(Place) + places->index.bytes);
}

static PyMethodDef places_methods[] = {
    METHOD("__sizeof__", places_size, METH_NOARGS, NULL),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot places_slots[] = {
    {Py_tp_new, places_new},       {Py_tp_dealloc, places_dealloc},         {Py_tp_methods, places_methods},
    {Py_sq_length, places_length}, {Py_tp_doc, "The places of a stream."}, {0, NULL},
};

static PyType_Spec places_spec = {"waymark._native.Places", sizeof(Places), 0, Py_TPFLAGS_DEFAULT, places_slots};

/* ---- known blocks -------------------------------------------------------------------------------- */

typedef struct {
    uint64_t hash; /* the engine hash; of a free one: the number of the next free one, and 1 */
    uint64_t key;
    uint32_t place;
    uint8_t depth;
    uint8_t is_first; /* of the hashes of its block */
} Block;

typedef struct {
    PyObject_HEAD
    Places *places;
    Block **chunks;
    uint32_t count, chunks_count, used;
    uint32_t free; /* as of Places */
    uint32_t firsts; /* blocks that are found by their key */
    int has_keys;
    Index by_hash, by_key;
} KnownBlocks;

static inline Block *block_at(const KnownBlocks *known, uint32_t number)
{
    return &known->chunks[number / CHUNK_BLOCKS][number % CHUNK_BLOCKS];
}

static uint64_t hash_spread_of(const void *known, uint32_t number)
{
    return spread(block_at(known, number)->hash);
}

static uint64_t key_spread_of(const void *known, uint32_t number)
{
    return spread(block_at(known, number)->key);
}

/* The block with an engine hash, or with a key; -1 where there is none. */
static int64_t find_hash(KnownBlocks *known, uint64_t hash)
{
    Search search = begin_search(&known->by_hash, spread(hash));
    int64_t found;
    while ((found = next_found(&search)) >= 0 && block_at(known, (uint32_t)found)->hash != hash)
        continue;
    return found;
}

static int64_t find_key(KnownBlocks *known, uint64_t key)
{
    Search search = begin_search(&known->by_key, spread(key));
    int64_t found;
    while ((found = next_found(&search)) >= 0 && block_at(known, (uint32_t)found)->key != key)
        continue;
    return found;
}

/* Of many numbers the caches fetch all slots at once; one search after the other would wait for each. */
static void fetch_slots(const Index *index, const uint64_t *numbers, size_t count)
{
    for (size_t i = 0; i < count; i++)
        fetch_slot(index, spread(numbers[i]));
}

/* The same with the blocks of engine hashes. */
static void fetch_blocks(KnownBlocks *known, const uint64_t *hashes, size_t count)
{
    fetch_slots(&known->by_hash, hashes, count);
    for (size_t i = 0; i < count; i++) {
        Search search = begin_search(&known->by_hash, spread(hashes[i]));
        const int64_t found = next_found(&search);
        if (found >= 0)
            __builtin_prefetch(block_at(known, (uint32_t)found));
    }
}

/* A number that no block has. -1 with an exception. */
static int64_t new_block(KnownBlocks *known)
{
    if (known->free != 0) {
        const uint32_t number = known->free - 1;
        known->free = (uint32_t)block_at(known, number)->hash;
        return number;
    }
    if (known->count == known->chunks_count * CHUNK_BLOCKS) {
        Block **chunks = known->chunks_count < THINGS_MAX / CHUNK_BLOCKS
                             ? PyMem_Realloc(known->chunks, (known->chunks_count + 1) * sizeof *chunks)
                             : NULL;
        if (chunks != NULL) {
            known->chunks = chunks;
            chunks[known->chunks_count] = PyMem_Malloc(CHUNK_BLOCKS * sizeof(Block));
        }
        if (chunks == NULL || chunks[known->chunks_count] == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        known->chunks_count++;
    }
    return known->count++;
}

static void remove_block(KnownBlocks *known, uint32_t number)
{
    Block *block = block_at(known, number);
    delete_slot(&known->by_hash, spread(block->hash), number, hash_spread_of, known);
    if (block->is_first) {
        delete_slot(&known->by_key, spread(block->key), number, key_spread_of, known);
        known->firsts--;
    }
    leave_place(known->places, block->place);
    block->hash = known->free;
    known->free = number + 1;
    known->used--;
}

/* Put a block in. A former one with its engine hash goes; one with its key stays the first. 0 with an exception. */
static int put_block(KnownBlocks *known, uint64_t hash, uint64_t key, uint32_t place, uint8_t depth)
{
    enter_place(known->places, place);
    const int64_t former = find_hash(known, hash);
    if (former >= 0)
        remove_block(known, (uint32_t)former);
    const int is_first = known->has_keys && find_key(known, key) < 0;
    int64_t number = -1;
    if (reserve_slot(&known->by_hash, spread(hash), hash_spread_of, known) &&
        (!is_first || reserve_slot(&known->by_key, spread(key), key_spread_of, known)))
        number = new_block(known);
    if (number < 0) {
        leave_place(known->places, place);
        return 0;
    }
    *block_at(known, (uint32_t)number) = (Block){hash, key, place, depth, (uint8_t)is_first};
    insert_slot(&known->by_hash, spread(hash), (uint32_t)number);
    if (is_first)
        insert_slot(&known->by_key, spread(key), (uint32_t)number);
    known->firsts += (uint32_t)is_first;
    known->used++;
    return 1;
}

/* A block as a Spot: place, namespace, depth, key. */
static PyObject *make_spot(KnownBlocks *known, const Block *block)
{
    PyObject *place = make_place(known->places, block->place);
    if (place == NULL)
        return NULL;
    const uint64_t namespace = known->places->places[block->place].namespace;
    return build_named(known->places->spot_type, Py_BuildValue("NKiK", place, namespace, (int)block->depth, block->key));
}

static PyObject *spot_or_none(KnownBlocks *known, int64_t number)
{
    return number < 0 ? Py_NewRef(Py_None) : make_spot(known, block_at(known, (uint32_t)number));
}

/* The number at `i` of a sequence. 0 with an exception. */
static int number_at(PyObject *numbers, Py_ssize_t i, uint64_t *number)
{
    PyObject *item = PySequence_GetItem(numbers, i);
    if (item == NULL)
        return 0;
    *number = PyLong_AsUnsignedLongLong(item);
    Py_DECREF(item);
    return !PyErr_Occurred();
}

/* ---- their methods ------------------------------------------------------------------------------- */

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

static int compare_numbers(const void *one, const void *other)
{
    const uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return (a > b) - (a < b);
}

/* Whether a number is there twice. -1 without memory. */
static int has_repeats(const uint64_t *numbers, size_t count)
{
    if (count < 2)
        return 0;
    uint64_t few[64], *sorted = count > 64 ? PyMem_Malloc(count * sizeof *sorted) : few;
    if (sorted == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(sorted, numbers, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, compare_numbers);
    int is_repeated = 0;
    for (size_t i = 1; i < count; i++)
        is_repeated |= sorted[i - 1] == sorted[i];
    if (sorted != few)
        PyMem_Free(sorted);
    return is_repeated;
}

typedef int64_t Find(KnownBlocks *known, uint64_t number);

/* Whether none of these is found, and none is there twice. -1 with an exception. */
static int are_strange(KnownBlocks *known, const uint64_t *numbers, size_t count, Find *find)
{
    for (size_t i = 0; i < count; i++)
        if (find(known, numbers[i]) >= 0)
            return 0;
    const int is_repeated = has_repeats(numbers, count);
    return is_repeated < 0 ? -1 : !is_repeated;
}

/* A sequence of numbers in memory that is to be freed. NULL with an exception. */
static uint64_t *read_numbers(PyObject *sequence, size_t *count)
{
    const Py_ssize_t size = PySequence_Size(sequence);
    uint64_t *numbers = size < 0 ? NULL : PyMem_Malloc((size_t)size * sizeof *numbers + 1);
    if (numbers == NULL) {
        if (size >= 0)
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

/* As are_strange, of a sequence. */
static int are_all_strange(KnownBlocks *known, PyObject *sequence, Find *find)
{
    size_t count = 0;
    uint64_t *numbers = read_numbers(sequence, &count);
    const int outcome = numbers == NULL ? -1 : are_strange(known, numbers, count, find);
    PyMem_Free(numbers);
    return outcome;
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

/* The number of a place that is given as an argument, with one block more in it. -1 with an exception. */
static int64_t enter_given_place(KnownBlocks *known, PyObject *object, PyObject *namespace)
{
    Place place;
    const int64_t number = read_place(object, namespace, &place) ? number_of_place(known->places, &place) : -1;
    if (number >= 0)
        enter_place(known->places, (uint32_t)number); /* so that it stays whatever goes meanwhile */
    return number;
}

/* store(place: Place, namespace: int, keys: Sequence, depths: Sequence, engine_hashes: Sequence) -> None */
static PyObject *known_store(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    KnownBlocks *known = (KnownBlocks *)self;
    if (!has_arguments("store", nargs, 5))
        return NULL;
    const Py_ssize_t count = PySequence_Size(args[2]), depths = PySequence_Size(args[3]), hashes = PySequence_Size(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if (count != depths || count != hashes)
        return PyErr_Format(PyExc_ValueError, "%zd keys have %zd depths and %zd engine hashes", count, depths, hashes);
    const int64_t place = enter_given_place(known, args[0], args[1]);
    if (place < 0)
        return NULL;
    int is_done = 1;
    for (Py_ssize_t i = 0; is_done && i < count; i++) {
        uint64_t key, depth, hash;
        is_done = number_at(args[2], i, &key) && number_at(args[3], i, &depth) && number_at(args[4], i, &hash);
        if (is_done && depth >= PIECE_BLOCKS) {
            PyErr_Format(PyExc_ValueError, "a depth in a piece is less than %d", PIECE_BLOCKS);
            is_done = 0;
        }
        is_done = is_done && put_block(known, hash, key, (uint32_t)place, (uint8_t)depth);
    }
    leave_place(known->places, (uint32_t)place);
    return is_done ? Py_NewRef(Py_None) : NULL;
}

/* The block that is the first of its key. NULL with an exception. */
static Block *first_block(KnownBlocks *known, PyObject *key)
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
    return put_block(known, hash, copy.key, copy.place, copy.depth) ? Py_NewRef(Py_None) : NULL;
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
    Block *block = block_at(known, (uint32_t)number);
    if (block->is_first)
        return Py_NewRef(Py_None);
    const int64_t former = find_key(known, block->key);
    if (!reserve_slot(&known->by_key, spread(block->key), key_spread_of, known))
        return NULL;
    if (former >= 0) {
        delete_slot(&known->by_key, spread(block->key), (uint32_t)former, key_spread_of, known);
        block_at(known, (uint32_t)former)->is_first = 0;
    } else
        known->firsts++;
    insert_slot(&known->by_key, spread(block->key), (uint32_t)number);
    block->is_first = 1;
    return Py_NewRef(Py_None);
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

static void discard_blocks(KnownBlocks *known, const uint64_t *hashes, size_t count)
{
    if (known->used == 0)
        return;
    fetch_blocks(known, hashes, count);
    for (size_t i = 0; i < count; i++) {
        const int64_t number = find_hash(known, hashes[i]);
        if (number >= 0)
            remove_block(known, (uint32_t)number);
    }
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

/* ---- whole events -------------------------------------------------------------------------------- */

/* What a plain store goes by. */
typedef struct {
    uint64_t *hashes, *keys;
    size_t count;
    int64_t place; /* of the first block, where it goes on in the piece of its parent; else -1 */
    uint64_t parent, namespace;
    int depth; /* of the first block */
} Store;

/* The slots of blocks as a row has them, 16 hex digits and the depth, and their engine hashes, 8 bytes each. 0 with an
 * exception. */
static int pack_blocks(const Block *blocks, size_t count, PyObject **slots, PyObject **hashes)
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

/* The KnownBlocks of a tuple, all of the places of `known` and none of them itself. 0 with an exception. */
static int are_beside(KnownBlocks *known, PyObject *gone)
{
    int is_right = PyTuple_Check(gone);
    for (Py_ssize_t i = 0; is_right && i < PyTuple_Size(gone); i++) {
        PyObject *each = PyTuple_GetItem(gone, i);
        is_right = Py_TYPE(each) == Py_TYPE((PyObject *)known) && each != (PyObject *)known &&
                   ((KnownBlocks *)each)->places == known->places;
    }
    if (!is_right)
        PyErr_Format(PyExc_TypeError, "what is gone is a tuple of other KnownBlocks of the same Places");
    return is_right;
}

/* Take engine hashes out of those of a tuple, from the one with number `first` on. */
static void discard_beside(PyObject *gone, Py_ssize_t first, const uint64_t *hashes, size_t count)
{
    for (Py_ssize_t i = first; i < PyTuple_Size(gone); i++)
        discard_blocks((KnownBlocks *)PyTuple_GetItem(gone, i), hashes, count);
}

/* Whether a place is in a dict of places. -1 with an exception. */
static int is_in(PyObject *full, Places *places, uint32_t number)
{
    if (PyDict_Size(full) == 0)
        return 0;
    PyObject *place = make_place(places, number);
    const int found = place == NULL ? -1 : PyDict_Contains(full, place);
    Py_XDECREF(place);
    return found;
}

/* Where a store goes on: 1 where that is plain, 0 where it is not, -1 with an exception. */
static int find_parent(KnownBlocks *known, const uint64_t *parent, PyObject *full, int piece_blocks, Store *store,
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

/* Put in the blocks `start` to `end` of a store, which are of one piece: the number of their place, and the blocks in
 * `blocks`. -1 with an exception. */
static int64_t put_piece(KnownBlocks *known, const Store *store, size_t start, size_t end, int depth, Block *blocks)
{
    int64_t place = start == 0 ? store->place : -1;
    if (place < 0) {
        const Place row = {.head = store->keys[start], .namespace = store->namespace, .kind = ROW};
        place = number_of_place(known->places, &row);
    }
    if (place < 0)
        return -1;
    int is_done = 1;
    enter_place(known->places, (uint32_t)place); /* so that it stays whatever goes meanwhile */
    for (size_t i = 0; is_done && i < end - start; i++) {
        const size_t at = start + i;
        blocks[i] = (Block){store->hashes[at], store->keys[at], (uint32_t)place, (uint8_t)(depth + (int)i), 0};
        is_done = put_block(known, blocks[i].hash, blocks[i].key, (uint32_t)place, blocks[i].depth);
    }
    leave_place(known->places, (uint32_t)place);
    return is_done ? place : -1;
}

/* The end of the piece of a store's block `start`, which has this depth. */
static size_t end_of_piece(const Store *store, size_t start, int depth, int piece_blocks)
{
    const size_t end = start + (size_t)(piece_blocks - depth);
    return end < store->count ? end : store->count;
}

/* The blocks `start` to `end` of a store at one place: (place, slots, engine hashes, start, the block before or None). */
static PyObject *store_piece(KnownBlocks *known, const Store *store, size_t start, size_t end, int depth)
{
    Block blocks[PIECE_BLOCKS];
    const int64_t place = put_piece(known, store, start, end, depth, blocks);
    PyObject *made = place < 0 ? NULL : make_place(known->places, (uint32_t)place), *slots = NULL, *hashes = NULL;
    PyObject *before = depth > 0 ? PyLong_FromUnsignedLongLong(store->parent) : Py_NewRef(Py_None);
    if (made == NULL || before == NULL || !pack_blocks(blocks, end - start, &slots, &hashes)) {
        Py_XDECREF(made);
        Py_XDECREF(before);
        return NULL;
    }
    return Py_BuildValue("NNNnN", made, slots, hashes, (Py_ssize_t)start, before);
}

/* Hash a store's blocks. 1 where all of them are new, 0 where not, -1 with an exception. */
static int hash_new_blocks(KnownBlocks *known, Store *store, Chain *chain, const char *tokens, size_t width)
{
    for (size_t i = 0; i < store->count; i++)
        store->keys[i] = go_on(chain, xxh3(&chain->state, tokens + width * i, width)) ^ store->namespace;
    fetch_slots(&known->by_hash, store->hashes, store->count);
    fetch_slots(&known->by_key, store->keys, store->count);
    const int are_new = are_strange(known, store->hashes, store->count, find_hash);
    return are_new == 1 ? are_strange(known, store->keys, store->count, find_key) : are_new;
}

/* Hash a store's blocks, and put them in if all of them are new: a list of pieces, or None. */
static PyObject *extend(KnownBlocks *known, Store *store, Chain *chain, const Input *tokens, size_t width, int piece_blocks,
                        PyObject *gone)
{
    const int are_new = hash_new_blocks(known, store, chain, tokens->start, width);
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
        discard_beside(gone, 0, store->hashes, store->count);
    return pieces;
}

/* extend(parent: int | None, engine_hashes: Sequence, tokens: bytes, block_size: int, seed: int, namespace: int,
 *        full: dict[Place, object], piece_blocks: int, gone: tuple[KnownBlocks, ...])
 *     -> list[tuple[Place, bytes, bytes, int, int | None]] | None
 *
 * A store of complete blocks that are all new, and go on from a block here at a place that is not full, or begin at the
 * root; their engine hashes are gone no more. None where it is not so; nothing has changed then.
 */
static PyObject *known_extend(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
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
    const uint64_t *above = args[0] == Py_None ? NULL : &parent;
    const int is_plain = find_parent(known, above, args[6], (int)piece_blocks, &store, &chain);
    if (is_plain != 1)
        return is_plain < 0 ? NULL : Py_NewRef(Py_None);
    if (!open_bytes(args[2], &tokens))
        return NULL;
    const size_t width = 4 * (size_t)block_size, complete = (size_t)tokens.size / width;
    PyObject *pieces = NULL;
    store.hashes = read_numbers(args[1], &store.count);
    if (store.hashes != NULL) {
        store.count = complete < store.count ? complete : store.count;
        store.keys = PyMem_Malloc(store.count * sizeof *store.keys + 1);
        xxh3_prepare(&chain.state, seed, width > 2 * KEY ? width : 2 * KEY);
        pieces = store.keys == NULL ? PyErr_NoMemory()
                                    : extend(known, &store, &chain, &tokens, width, (int)piece_blocks, args[8]);
    }
    PyMem_Free(store.hashes);
    PyMem_Free(store.keys);
    close_input(&tokens);
    return pieces;
}

/* Blocks of one place that are taken together: place, namespace, slots, engine hashes. */
static PyObject *describe_group(KnownBlocks *known, const Block *blocks, size_t count)
{
    PyObject *place = make_place(known->places, blocks[0].place), *slots, *hashes;
    if (place == NULL || !pack_blocks(blocks, count, &slots, &hashes)) {
        Py_XDECREF(place);
        return NULL;
    }
    return Py_BuildValue("NKNN", place, known->places->places[blocks[0].place].namespace, slots, hashes);
}

/* Whether a block is in a dict by its key. -1 with an exception. */
static int is_among(PyObject *several, const Block *block)
{
    if (PyDict_Size(several) == 0)
        return 0;
    PyObject *key = PyLong_FromUnsignedLongLong(block->key);
    const int found = key == NULL ? -1 : PyDict_Contains(several, key);
    Py_XDECREF(key);
    return found;
}

/* The blocks of these hashes, if all are here, each once, and not among `several`. 1, 0, or -1 with an exception. */
static int collect(KnownBlocks *known, const uint64_t *hashes, size_t count, PyObject *several, Block *blocks)
{
    fetch_blocks(known, hashes, count);
    for (size_t i = 0; i < count; i++) {
        const int64_t number = find_hash(known, hashes[i]);
        if (number < 0)
            return 0;
        blocks[i] = *block_at(known, (uint32_t)number);
        fetch_slot(&known->by_key, spread(blocks[i].key));
        const int found = is_among(several, &blocks[i]);
        if (found != 0)
            return found < 0 ? -1 : 0;
    }
    const int is_repeated = has_repeats(hashes, count);
    return is_repeated < 0 ? -1 : !is_repeated;
}

/* Move collected blocks to `gone`. 0 with an exception. */
static int move_blocks(KnownBlocks *known, KnownBlocks *gone, const Block *blocks, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (!put_block(gone, blocks[i].hash, blocks[i].key, blocks[i].place, blocks[i].depth))
            return 0;
        remove_block(known, (uint32_t)find_hash(known, blocks[i].hash));
    }
    return 1;
}

/* The end of the blocks from `start` on that are at one place, as many as a part may have. Until Redis says that a row is
 * full, any number of blocks may be at the place of its piece. */
static size_t end_of_group(const Block *blocks, size_t start, size_t count)
{
    size_t end = start + 1;
    while (end < count && end - start < PART_BLOCKS && blocks[end].place == blocks[start].place)
        end++;
    return end;
}

/* Move collected blocks to `gone`, and describe them by places: a list, or NULL with an exception. */
static PyObject *take_blocks(KnownBlocks *known, KnownBlocks *gone, const Block *blocks, size_t count)
{
    PyObject *groups = PyList_New(0);
    for (size_t start = 0, end; groups != NULL && start < count; start = end) {
        end = end_of_group(blocks, start, count);
        PyObject *group = describe_group(known, blocks + start, end - start);
        if (group == NULL || PyList_Append(groups, group) < 0)
            Py_CLEAR(groups);
        Py_XDECREF(group);
    }
    if (groups != NULL && !move_blocks(known, gone, blocks, count))
        Py_CLEAR(groups);
    return groups;
}

/* take(engine_hashes: Sequence, gone: tuple[KnownBlocks, ...], several: dict[int, object])
 *     -> list[tuple[Place, int, bytes, bytes]] | None
 *
 * Move the blocks of all these engine hashes to the first of `gone`, and take the hashes out of the others. Up to 64
 * blocks of one place that follow each other are told together.
 * None where one of them is not here, comes twice, or is among `several`; nothing has changed then.
 */
static PyObject *known_take(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    KnownBlocks *known = (KnownBlocks *)self;
    size_t count = 0;
    if (!has_arguments("take", nargs, 3))
        return NULL;
    if (!are_beside(known, args[1]))
        return NULL;
    if (PyTuple_Size(args[1]) == 0 || !PyDict_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "take() takes a place for what is gone, and a dict");
    uint64_t *hashes = read_numbers(args[0], &count);
    Block *blocks = hashes == NULL ? NULL : PyMem_Malloc(count * sizeof *blocks + 1);
    PyObject *groups = NULL;
    if (blocks != NULL) {
        const int is_plain = collect(known, hashes, count, args[2], blocks);
        if (is_plain == 1) {
            KnownBlocks *gone = (KnownBlocks *)PyTuple_GetItem(args[1], 0);
            fetch_slots(&gone->by_hash, hashes, count);
            groups = take_blocks(known, gone, blocks, count);
            if (groups != NULL)
                discard_beside(args[1], 1, hashes, count);
        } else if (is_plain == 0)
            groups = Py_NewRef(Py_None);
    } else if (hashes != NULL)
        PyErr_NoMemory();
    PyMem_Free(hashes);
    PyMem_Free(blocks);
    return groups;
}

/* ---- runs of events ------------------------------------------------------------------------------ */

/* What all events of a run share, and memory for one of them. */
typedef struct {
    const Events *events;
    Parts *parts;
    PyObject *full, *gone, *several;
    uint64_t holder, namespace;
    uint64_t *keys;
    Block *blocks;
    PartBlock *some;
    size_t room; /* of these three, in hashes */
    Xxh3 state;
    int piece_blocks, may_store, may_remove;
    Py_ssize_t stores, stored, removed;
} Run;

/* What is said of the blocks at a place, besides the kind. */
static Part part_at(const KnownBlocks *known, uint32_t number, uint64_t holder)
{
    const Place *place = &known->places->places[number];
    return (Part){.holder = holder,
                  .head = place->head,
                  .branch = place->branch,
                  .namespace = place->namespace,
                  .place_kind = place->kind};
}

/* Add blocks that follow each other in an event, the first at `position`. 0 with an exception. */
static int add_blocks(Run *run, const Part *part, int64_t position, const Block *blocks, size_t count)
{
    for (size_t i = 0; i < count; i++)
        run->some[i] = (PartBlock){blocks[i].key, blocks[i].hash, blocks[i].depth};
    return add_to_parts(run->parts, part, STEP * position + 1, run->some, count, NULL);
}

static void free_room(Run *run)
{
    PyMem_Free(run->keys);
    PyMem_Free(run->blocks);
    PyMem_Free(run->some);
}

/* Memory for the blocks of an event. 0 with an exception. */
static int make_room(Run *run, size_t hashes)
{
    if (hashes <= run->room)
        return 1;
    free_room(run);
    run->room = hashes + PIECE_BLOCKS;
    run->keys = PyMem_Malloc(run->room * sizeof *run->keys);
    run->blocks = PyMem_Malloc(run->room * sizeof *run->blocks);
    run->some = PyMem_Malloc(run->room * sizeof *run->some);
    if (run->keys != NULL && run->blocks != NULL && run->some != NULL)
        return 1;
    PyErr_NoMemory();
    return 0;
}

/* A store of a run, at `position`. 1 where it was plain, 0 where not and nothing has changed, -1 with an exception. */
static int run_store(KnownBlocks *known, Run *run, const PlainEvent *event, int64_t position)
{
    Chain chain = {.state = run->state};
    Store store = {.hashes = run->events->hashes + event->hashes, .keys = run->keys, .count = event->hashes_count,
                   .place = -1, .namespace = run->namespace};
    const size_t width = sizeof(uint32_t) * event->block_size;
    for (size_t i = 0; i < store.count; i++)
        if (store.hashes[i] == UINT64_MAX) /* SAME_HASH: an entry cannot tell it */
            return 0;
    int is_plain = find_parent(known, event->has_parent ? &event->parent : NULL, run->full, run->piece_blocks, &store, &chain);
    if (is_plain == 1)
        is_plain = hash_new_blocks(known, &store, &chain, (const char *)(run->events->tokens + event->tokens), width);
    if (is_plain != 1)
        return is_plain;
    int depth = store.depth;
    for (size_t start = 0, end; start < store.count; start = end, depth = 0) {
        end = end_of_piece(&store, start, depth, run->piece_blocks);
        const int64_t place = put_piece(known, &store, start, end, depth, run->blocks);
        if (place < 0)
            return -1;
        Part part = part_at(known, (uint32_t)place, run->holder);
        part.kind = '+';
        part.has_parent = depth > 0;
        part.parent = store.parent;
        if (!add_blocks(run, &part, position + (int64_t)start, run->blocks, end - start))
            return -1;
    }
    discard_beside(run->gone, 0, store.hashes, store.count);
    run->stores++;
    run->stored += (Py_ssize_t)store.count;
    return 1;
}

/* The same with a removal. */
static int run_removal(KnownBlocks *known, Run *run, const PlainEvent *event, int64_t position)
{
    const uint64_t *hashes = run->events->hashes + event->hashes;
    const size_t count = event->hashes_count;
    KnownBlocks *gone = (KnownBlocks *)PyTuple_GetItem(run->gone, 0);
    const int is_plain = collect(known, hashes, count, run->several, run->blocks);
    if (is_plain != 1)
        return is_plain;
    for (size_t start = 0, end; start < count; start = end) {
        end = end_of_group(run->blocks, start, count);
        Part part = part_at(known, run->blocks[start].place, run->holder);
        part.kind = '-';
        part.is_known = 1;
        if (!add_blocks(run, &part, position + (int64_t)start, run->blocks + start, end - start))
            return -1;
    }
    fetch_slots(&gone->by_hash, hashes, count);
    if (!move_blocks(known, gone, run->blocks, count))
        return -1;
    discard_beside(run->gone, 1, hashes, count);
    run->removed += (Py_ssize_t)count;
    return 1;
}

/* The events from *at on, up to the first that is not plain, or after so many hashes. 0 with an exception. */
static int run_events(KnownBlocks *known, Run *run, size_t *at, int64_t *position, size_t hashes_max)
{
    size_t hashes = 0;
    for (; *at < run->events->count && hashes < hashes_max; ++*at) {
        const PlainEvent *event = &run->events->events[*at];
        if (!(event->kind == STORE ? run->may_store : run->may_remove))
            break;
        if (!make_room(run, event->hashes_count))
            return 0;
        const int is_plain = event->kind == STORE ? run_store(known, run, event, *position)
                                                  : run_removal(known, run, event, *position);
        if (is_plain < 0)
            return 0;
        if (!is_plain)
            break;
        *position += event->hashes_count;
        hashes += event->hashes_count;
    }
    return 1;
}

/* run(events: Events, at: int, position: int, hashes_max: int, parts: Parts, holder: int, seed: int, namespace: int,
 *     full: dict[Place, object], piece_blocks: int, gone: tuple[KnownBlocks, ...], several: dict[int, object],
 *     may_store: bool, may_remove: bool)
 *     -> tuple[int, int, int, int, int]
 *
 * What extend and take do with the events from the one with number `at` on: their parts are added to `parts`. Ends
 * before the first event that is not plain, and after `hashes_max` hashes or somewhat more. Returns the number of the
 * next event, its position, how many stores there were, and how many blocks were stored and removed.
 */
static PyObject *known_run(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    KnownBlocks *known = (KnownBlocks *)self;
    Run run = {0};
    if (!has_arguments("run", nargs, 14))
        return NULL;
    run.events = as_events(args[0]);
    run.parts = run.events == NULL ? NULL : as_parts(args[4]);
    if (run.parts == NULL || !are_beside(known, args[10]))
        return NULL;
    size_t at = PyLong_AsSize_t(args[1]);
    int64_t position = PyErr_Occurred() ? 0 : PyLong_AsLongLong(args[2]);
    const size_t hashes_max = PyErr_Occurred() ? 0 : PyLong_AsSize_t(args[3]);
    run.holder = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[5]);
    const uint64_t seed = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[6]);
    run.namespace = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[7]);
    run.piece_blocks = PyErr_Occurred() ? 0 : (int)PyLong_AsLong(args[9]);
    if (PyErr_Occurred())
        return NULL;
    run.full = args[8], run.gone = args[10], run.several = args[11];
    run.may_store = args[12] == Py_True, run.may_remove = args[13] == Py_True;
    if (run.piece_blocks < 1 || run.piece_blocks > PIECE_BLOCKS || !PyDict_Check(run.full) ||
        !PyDict_Check(run.several) || PyTuple_Size(run.gone) == 0 || !known->has_keys)
        return PyErr_Format(PyExc_ValueError, "run() takes pieces of up to 32 blocks, two dicts, and a place for what is gone");
    const size_t width = sizeof(uint32_t) * run.events->block_size;
    xxh3_prepare(&run.state, seed, width > 2 * KEY ? width : 2 * KEY);
    const int is_done = run_events(known, &run, &at, &position, hashes_max);
    free_room(&run);
    return is_done ? Py_BuildValue("nLnnn", (Py_ssize_t)at, (long long)position, run.stores, run.stored, run.removed)
                   : NULL;
}

static Py_ssize_t known_length(PyObject *self)
{
    return (Py_ssize_t)((KnownBlocks *)self)->used;
}

static PyObject *known_size(PyObject *self, PyObject *ignored)
{
    const KnownBlocks *known = (KnownBlocks *)self;
    const size_t blocks = known->chunks_count * (sizeof(Block *) + CHUNK_BLOCKS * sizeof(Block));
    return PyLong_FromSize_t(sizeof *known + blocks + known->by_hash.bytes + known->by_key.bytes);
}

static PyObject *known_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    if (!has_arguments("KnownBlocks", PyTuple_Size(args), 2))
        return NULL;
    PyObject *places = PyTuple_GetItem(args, 0);
    if (PyType_GetSlot(Py_TYPE(places), Py_tp_dealloc) != (void *)places_dealloc)
        return PyErr_Format(PyExc_TypeError, "KnownBlocks() takes Places");
    KnownBlocks *known = (KnownBlocks *)PyType_GenericAlloc(type, 0);
    if (known != NULL) {
        known->places = (Places *)Py_NewRef(places);
        known->has_keys = PyTuple_GetItem(args, 1) == Py_True;
    }
    return (PyObject *)known;
}

/* Its blocks leave their places; where nobody else has these, they go with it. */
static void known_dealloc(PyObject *self)
{
    KnownBlocks *known = (KnownBlocks *)self;
    if (known->places != NULL && Py_REFCNT((PyObject *)known->places) > 1)
        for (int i = 0; i < SEGMENTS; i++)
            for (uint32_t at = 0; at < known->by_hash.segments[i].capacity; at++)
                if (known->by_hash.segments[i].slots[at] != 0)
                    leave_place(known->places, block_at(known, number_in(known->by_hash.segments[i].slots[at]))->place);
    for (uint32_t i = 0; i < known->chunks_count; i++)
        PyMem_Free(known->chunks[i]);
    PyMem_Free(known->chunks);
    clear_index(&known->by_hash);
    clear_index(&known->by_key);
    Py_XDECREF((PyObject *)known->places);
    free_object(self);
}

static PyMethodDef known_methods[] = {
    METHOD("blocks", known_blocks, METH_NOARGS, "blocks($self, /)\n--\n\nHow many are found by their key."),
    METHOD("get", known_get, METH_O, "get($self, engine_hash, /)\n--\n\nThe block of an engine hash."),
    METHOD("get_block", known_get_block, METH_O, "get_block($self, key, /)\n--\n\nThe block with a key."),
    METHOD("first", known_first, METH_O, "first($self, key, /)\n--\n\nThe first engine hash of a block."),
    METHOD("are_new", known_are_new, METH_FASTCALL,
           "are_new($self, engine_hashes, keys, /)\n--\n\nWhether none is here, and none of them is there twice."),
    METHOD("store", known_store, METH_FASTCALL,
           "store($self, place, namespace, keys, depths, engine_hashes, /)\n--\n\nBlocks of one place."),
    METHOD("name", known_name, METH_FASTCALL, "name($self, engine_hash, key, /)\n--\n\nA further hash of a block."),
    METHOD("lead", known_lead, METH_O, "lead($self, engine_hash, /)\n--\n\nIt is the first of its block."),
    METHOD("pop", known_pop, METH_O, "pop($self, engine_hash, /)\n--\n\nTake an engine hash out."),
    METHOD("discard", known_discard, METH_O, "discard($self, engine_hashes, /)\n--\n\nTake engine hashes out."),
    METHOD("move", known_move, METH_FASTCALL, "move($self, engine_hash, place, /)\n--\n\nA block is elsewhere."),
    METHOD("extend", known_extend, METH_FASTCALL,
           "extend($self, parent, engine_hashes, tokens, block_size, seed, namespace, full, piece_blocks, gone, /)\n--\n\n"
           "A plain store, from its tokens."),
    METHOD("take", known_take, METH_FASTCALL,
           "take($self, engine_hashes, gone, several, /)\n--\n\nA plain removal."),
    METHOD("run", known_run, METH_FASTCALL,
           "run($self, events, at, position, hashes_max, parts, holder, seed, namespace, full, piece_blocks, gone, several, "
           "may_store, may_remove, /)\n--\n\nPlain events, one after the other."),
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
    PyObject *word = PyUnicode_FromString("waymark"); /* its hash is another one in each process */
    if (word == NULL)
        return -1;
    secret = (uint64_t)PyObject_Hash(word);
    Py_DECREF(word);
    PyObject *places = PyType_FromSpec(&places_spec), *known = PyType_FromSpec(&known_spec);
    int outcome = places == NULL || known == NULL ? -1 : PyModule_AddObjectRef(module, "Places", places);
    if (outcome == 0)
        outcome = PyModule_AddObjectRef(module, "KnownBlocks", known);
    Py_XDECREF(places);
    Py_XDECREF(known);
    return outcome;
}
