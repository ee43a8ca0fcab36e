/* The loops of a query that Python has to run once per token or block, in C.
 *
 *     cut         JSON text  ->  where the token ids stand, and the ids as little-endian u32
 *     cut_hashes  JSON text  ->  where the hashes stand, and the hashes as little-endian u64
 *     hash_blocks token ids  ->  block keys, as big-endian u64
 *     chain       hashes of blocks by themselves  ->  block keys
 *     pack_keys   block keys ->  one MGET command, as it goes over the wire
 *     scan        its reply  ->  runs of equal values, without an object for each of them
 *     runs        a list of values  ->  the same
 *
 * Optional: app/waymark/domain/native.py and hashing.py have the same in Python, and the same tests run over both. Nothing here raises
 * for what a client sent: `cut` answers None to anything but a plain list of plain numbers, and the Python path
 * decides what is wrong with it.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define XXH_INLINE_ALL
#include "xxhash.h"

/* Members of an object that are looked at before giving up; a query has some ten. */
#define QUOTES_MAX 256

/* Bytes of what stands before the digits of a key; a group's number and a shard's are some twenty. */
#define PREFIX_MAX 256

static inline const char *skip_blanks(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    return at;
}

/* The first `name` (in its quotes) from `at`; NULL where there is none. *has_given_up: there may be one. */
static const char *find_name(const char *at, const char *end, const char *name, size_t length, int *has_given_up)
{
    for (int quotes = 0; quotes < QUOTES_MAX; quotes++) {
        at = memchr(at, '"', (size_t)(end - at));
        if (at == NULL || (size_t)(end - at) < length)
            return NULL;
        if (memcmp(at, name, length) == 0)
            return at;
        at++;
    }
    *has_given_up = 1;
    return NULL;
}

/* The digits from `at` as a number; *at goes behind them. -1 where there are none, or more than 10. */
static int64_t read_number(const char **at)
{
    const char *first = *at;
    int64_t number = 0;
    for (unsigned digit; (digit = (unsigned)((unsigned char)**at - '0')) < 10; ++*at) {
        if (*at - first == 10)
            return -1;
        number = number * 10 + digit;
    }
    return *at == first ? -1 : number;
}

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
/* 0 where all of eight bytes are digits; else the lowest bit that is set is in the first that is none.
 *
 * A digit is 0x30..0x39: its upper half is 3, and stays so with 6 added. A carry only reaches beyond a byte that is no
 * digit itself. */
static inline uint64_t not_digits(uint64_t text)
{
    const uint64_t upper = 0xF0F0F0F0F0F0F0F0, more = 0x0606060606060606;
    return ((text & upper) | ((text + more) & upper) >> 4) ^ 0x3333333333333333;
}

/* The number that eight bytes of 0..9 stand for, the first of them the highest. */
static inline uint64_t eight_digits(uint64_t number)
{
    number = number * 10 + (number >> 8); /* pairs of digits, then fours, then all eight */
    number = (number & 0x00FF00FF00FF00FF) * 100 + (number >> 16 & 0x00FF00FF00FF00FF);
    return ((number & 0xFFFF) * 10000 + (number >> 32 & 0xFFFF)) & 0xFFFFFFFF;
}

/* As read_number, for up to 7 digits with 8 readable bytes: at once, since a branch for each digit is one that is
 * guessed wrong at the end of each number. */
static inline int64_t read_short_number(const char **at)
{
    uint64_t text;
    memcpy(&text, *at, 8);
    const uint64_t wrong = not_digits(text);
    if (wrong == 0)
        return read_number(at);
    const int digits = __builtin_ctzll(wrong) / 8;
    if (digits == 0)
        return -1;
    *at += digits;
    return (int64_t)eight_digits((text & 0x0F0F0F0F0F0F0F0F) << (64 - 8 * digits));
}

/* The digits from `at` as a number, eight at once, as long as there are eight; *at goes behind them. */
static inline uint64_t read_eights(const char **at, const char *end)
{
    uint64_t number = 0, text;
    for (int eights = 0; eights < 2 && end - *at >= 8; eights++, *at += 8) {
        memcpy(&text, *at, 8);
        if (not_digits(text))
            break;
        number = number * 100000000 + eight_digits(text & 0x0F0F0F0F0F0F0F0F);
    }
    return number;
}
#else
#define read_short_number read_number
#define read_eights(at, end) 0
#endif

#if defined(__SSE2__)
#include "tokens_sse2.h"
#else
#define read_plain_tokens(at, close, out) 0
#endif

/* The tokens between `at` and the bracket at `close` into `out`; 0 where they are not `count` plain u32. */
static int read_tokens(const char *at, const char *close, const char *end, Py_ssize_t count, unsigned char *out)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        at = skip_blanks(at, close);
        const char *first = at;
        /* The bracket is no digit, so neither reads beyond it. */
        const int64_t token = end - at >= 8 ? read_short_number(&at) : read_number(&at);
        if (token < 0 || token > UINT32_MAX || (*first == '0' && at - first > 1))
            return 0;
        out[4 * i] = (unsigned char)token;
        out[4 * i + 1] = (unsigned char)(token >> 8);
        out[4 * i + 2] = (unsigned char)(token >> 16);
        out[4 * i + 3] = (unsigned char)(token >> 24);
        at = skip_blanks(at, close);
        if (i + 1 < count && *at++ != ',')
            return 0;
    }
    return at == close;
}

/* A number of 64 bits from `at`, in quotes or not; a negative one as its two's complement. 0 where it is not plain. */
static int read_hash(const char **at, const char *end, uint64_t *hash)
{
    const int is_text = **at == '"';
    *at += is_text;
    const int is_negative = **at == '-';
    *at += is_negative;
    const char *first = *at;
    uint64_t number = read_eights(at, end);
    for (unsigned digit; (digit = (unsigned)((unsigned char)**at - '0')) < 10; ++*at) {
        if (number > UINT64_MAX / 10 || (number == UINT64_MAX / 10 && digit > UINT64_MAX % 10))
            return 0;
        number = number * 10 + digit;
    }
    if (*at == first || (*first == '0' && *at - first > 1))
        return 0;
    if (is_negative && (number == 0 || number > (uint64_t)1 << 63))
        return 0;
    *hash = is_negative ? 0 - number : number;
    return !is_text || *(*at)++ == '"';
}

/* As read_tokens, for `count` hashes. */
static int read_hashes(const char *at, const char *close, const char *end, Py_ssize_t count, unsigned char *out)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t hash;
        at = skip_blanks(at, close);
        if (!read_hash(&at, end, &hash))
            return 0;
        for (int byte = 0; byte < 8; byte++)
            out[8 * i + byte] = (unsigned char)(hash >> 8 * byte);
        at = skip_blanks(at, close);
        if (i + 1 < count && *at++ != ',')
            return 0;
    }
    return at == close;
}

static Py_ssize_t count_commas(const char *at, const char *end)
{
    Py_ssize_t count = 0;
    while (at < end) {
        /* A short stretch at a time, in a byte: compilers make the most of that. */
        const char *pause = end - at > 255 ? at + 255 : end;
        unsigned char few = 0;
        for (; at < pause; at++)
            few += *at == ',';
        count += few;
    }
    return count;
}

/* cut, cut_hashes(body: bytes, name: bytes, count_max: int) -> tuple[int, int, bytes] | None
 *
 * Exact by these facts: `name` comes once; there is no backslash outside the list, so in valid JSON every quote
 * begins or ends a string, and what stands before `:` in quotes is a key; the list holds digits, commas and blanks
 * only; one of hashes may also have signs, and quotes around digits. The caller reads body[:start] + b"[]" + body[end:]
 * with its JSON parser: if that is valid and has an empty list under the key, then the body is valid and has this list
 * under it.
 */
static PyObject *cut_list(PyObject *const *args, Py_ssize_t nargs, Py_ssize_t width)
{
    if (nargs != 3 || !PyBytes_CheckExact(args[0]) || !PyBytes_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "cut(body: bytes, name: bytes, count_max: int)");
        return NULL;
    }
    const Py_ssize_t count_max = PyLong_AsSsize_t(args[2]);
    if (count_max == -1 && PyErr_Occurred())
        return NULL;
    const char *body = PyBytes_AS_STRING(args[0]), *end = body + PyBytes_GET_SIZE(args[0]);
    const char *name = PyBytes_AS_STRING(args[1]);
    const size_t length = (size_t)PyBytes_GET_SIZE(args[1]);

    int has_given_up = 0;
    const char *found = find_name(body, end, name, length, &has_given_up);
    if (found == NULL)
        Py_RETURN_NONE;
    const char *open = skip_blanks(found + length, end);
    if (open == end || *open != ':')
        Py_RETURN_NONE;
    open = skip_blanks(open + 1, end);
    if (open == end || *open != '[')
        Py_RETURN_NONE;
    const char *close = memchr(open, ']', (size_t)(end - open));
    if (close == NULL || find_name(close, end, name, length, &has_given_up) != NULL || has_given_up)
        Py_RETURN_NONE;
    if (memchr(body, '\\', (size_t)(open - body)) != NULL || memchr(close, '\\', (size_t)(end - close)) != NULL)
        Py_RETURN_NONE;

    Py_ssize_t count = 0;
    if (skip_blanks(open + 1, close) != close)
        count = 1 + count_commas(open, close);
    if (count > count_max)
        Py_RETURN_NONE;
    PyObject *numbers = PyBytes_FromStringAndSize(NULL, width * count);
    if (numbers == NULL)
        return NULL;
    unsigned char *out = (unsigned char *)PyBytes_AS_STRING(numbers);
    int is_plain = count == 0 || (width == 4 && open - body >= 8 && read_plain_tokens(open + 1, close, out));
    if (!is_plain)
        is_plain = width == 8 ? read_hashes(open + 1, close, end, count, out)
                              : read_tokens(open + 1, close, end, count, out);
    if (!is_plain) {
        Py_DECREF(numbers);
        Py_RETURN_NONE;
    }
    return Py_BuildValue("nnN", open - body, close + 1 - body, numbers);
}

static PyObject *cut(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    return cut_list(args, nargs, 4);
}

static PyObject *cut_hashes(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    return cut_list(args, nargs, 8);
}

static void put_be64(unsigned char *out, uint64_t number)
{
    for (int i = 7; i >= 0; i--, number >>= 8)
        out[i] = (unsigned char)number;
}

/* What is hashed to go on from a parent: both numbers, little-endian. */
static uint64_t chained(uint64_t parent, uint64_t local, uint64_t seed)
{
    unsigned char pair[16];
    for (int i = 0; i < 8; i++) {
        pair[i] = (unsigned char)(parent >> 8 * i);
        pair[8 + i] = (unsigned char)(local >> 8 * i);
    }
    return XXH3_64bits_withSeed(pair, sizeof pair, seed);
}

/* hash_blocks(tokens: buffer, block_size: int, seed: int, parent: int | None, namespace: int) -> bytes
 *
 * The keys of the complete blocks in `tokens` (little-endian u32), eight big-endian bytes each. `parent` is a
 * seq_hash, without the namespace.
 */
static PyObject *hash_blocks(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 5) {
        PyErr_SetString(PyExc_TypeError, "hash_blocks(tokens, block_size, seed, parent, namespace)");
        return NULL;
    }
    const Py_ssize_t block_size = PyLong_AsSsize_t(args[1]);
    const uint64_t seed = PyLong_AsUnsignedLongLong(args[2]);
    int is_root = args[3] == Py_None;
    uint64_t parent = is_root ? 0 : PyLong_AsUnsignedLongLong(args[3]);
    const uint64_t ns = PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if (block_size < 1 || block_size > PY_SSIZE_T_MAX / 4) {
        PyErr_SetString(PyExc_ValueError, "block_size must be positive");
        return NULL;
    }
    Py_buffer tokens;
    if (PyObject_GetBuffer(args[0], &tokens, PyBUF_SIMPLE) < 0)
        return NULL;
    const size_t width = 4 * (size_t)block_size;
    const Py_ssize_t count = tokens.len / (Py_ssize_t)width;
    PyObject *keys = PyBytes_FromStringAndSize(NULL, 8 * count);
    if (keys != NULL) {
        unsigned char *out = (unsigned char *)PyBytes_AS_STRING(keys);
        for (Py_ssize_t i = 0; i < count; i++) {
            const uint64_t local = XXH3_64bits_withSeed((const char *)tokens.buf + (size_t)i * width, width, seed);
            parent = is_root ? local : chained(parent, local, seed);
            is_root = 0;
            put_be64(out + 8 * i, parent ^ ns);
        }
    }
    PyBuffer_Release(&tokens);
    return keys;
}

/* chain(local_hashes: buffer, seed: int, parent: int | None) -> bytes
 *
 * As hash_blocks, from what each block's tokens hash to (little-endian u64).
 */
static PyObject *chain(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "chain(local_hashes, seed, parent)");
        return NULL;
    }
    const uint64_t seed = PyLong_AsUnsignedLongLong(args[1]);
    int is_root = args[2] == Py_None;
    uint64_t parent = is_root ? 0 : PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    Py_buffer locals;
    if (PyObject_GetBuffer(args[0], &locals, PyBUF_SIMPLE) < 0)
        return NULL;
    const Py_ssize_t count = locals.len / 8;
    PyObject *keys = PyBytes_FromStringAndSize(NULL, 8 * count);
    if (keys != NULL) {
        unsigned char *out = (unsigned char *)PyBytes_AS_STRING(keys);
        for (Py_ssize_t i = 0; i < count; i++) {
            uint64_t local = 0;
            for (int byte = 7; byte >= 0; byte--)
                local = local << 8 | ((const unsigned char *)locals.buf)[8 * i + byte];
            parent = is_root ? local : chained(parent, local, seed);
            is_root = 0;
            put_be64(out + 8 * i, parent);
        }
    }
    PyBuffer_Release(&locals);
    return keys;
}

/* The two hex digits of each byte. */
static char digits_of[256][2];

/* pack_keys(before: bytes, prefix: bytes, keys: bytes) -> bytes
 *
 * `before`, then each key as a bulk string of the protocol: its length, `prefix`, 16 hex digits.
 */
static PyObject *pack_keys(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !PyBytes_CheckExact(args[0]) || !PyBytes_CheckExact(args[1]) || !PyBytes_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "pack_keys(before: bytes, prefix: bytes, keys: bytes)");
        return NULL;
    }
    const Py_ssize_t count = PyBytes_GET_SIZE(args[2]) / 8;
    const size_t length = (size_t)PyBytes_GET_SIZE(args[1]);
    char head[32];
    const size_t head_length = (size_t)snprintf(head, sizeof head, "$%zu\r\n", length + 16);
    const size_t width = head_length + length + 16 + 2;
    if (length > PREFIX_MAX || (size_t)count > (PY_SSIZE_T_MAX - (size_t)PyBytes_GET_SIZE(args[0])) / width) {
        PyErr_SetString(PyExc_OverflowError, "more than one command can hold");
        return NULL;
    }
    const Py_ssize_t start = PyBytes_GET_SIZE(args[0]);
    PyObject *packed = PyBytes_FromStringAndSize(NULL, start + count * (Py_ssize_t)width);
    if (packed == NULL)
        return NULL;
    char *out = PyBytes_AS_STRING(packed);
    const unsigned char *key = (const unsigned char *)PyBytes_AS_STRING(args[2]);
    memcpy(out, PyBytes_AS_STRING(args[0]), (size_t)start);
    out += start;
    /* All but the digits is always the same. */
    char item[sizeof head + PREFIX_MAX + 18];
    memcpy(item, head, head_length);
    memcpy(item + head_length, PyBytes_AS_STRING(args[1]), length);
    memcpy(item + width - 2, "\r\n", 2);
    for (Py_ssize_t i = 0; i < count; i++, out += width) {
        memcpy(out, item, width);
        for (int byte = 0; byte < 8; byte++, key++)
            memcpy(out + head_length + length + 2 * byte, digits_of[*key], 2);
    }
    return packed;
}

/* A bulk string from `at`, *value NULL where it is nil; what follows it. NULL where it is not whole, or nothing plain. */
static const char *read_bulk(const char *at, const char *end, const char **value, Py_ssize_t *length)
{
    if (end - at < 5 || *at++ != '$')
        return NULL;
    if (memcmp(at, "-1\r\n", 4) == 0) {
        *value = NULL;
        return at + 4;
    }
    const char *first = at;
    const int64_t number = read_number(&at);
    if (number < 0 || (*first == '0' && at - first > 1) || end - at < number + 4 || memcmp(at, "\r\n", 2) != 0)
        return NULL;
    *value = at + 2;
    *length = (Py_ssize_t)number;
    at += 2 + number;
    return memcmp(at, "\r\n", 2) == 0 ? at + 2 : NULL;
}

/* One more run onto `found`; -1 where there is no memory for it. */
static int append_run(PyObject *found, const char *value, Py_ssize_t length, Py_ssize_t count)
{
    PyObject *run = Py_BuildValue("y#n", value, length, count);
    const int outcome = run == NULL ? -1 : PyList_Append(found, run);
    Py_XDECREF(run);
    return outcome;
}

/* The first values of `count` bulk strings from `at` as runs onto `found`, up to the first nil, and in *blocks how many
 * they are; what follows all of them. NULL where they are not whole and plain, or with an exception. */
static const char *read_runs(const char *at, const char *end, Py_ssize_t count, PyObject *found, Py_ssize_t *blocks)
{
    const char *before = at, *value = NULL, *run = NULL;
    Py_ssize_t length, run_length = 0, run_count = 0, i = 0;
    for (; i < count; i++) {
        const Py_ssize_t width = at - before; /* of the bulk string before this one, the run's last */
        if (width > 0 && end - at >= width && memcmp(at, before, (size_t)width) == 0) {
            before = at;
            at += width;
            run_count++;
            continue;
        }
        before = at;
        at = read_bulk(at, end, &value, &length);
        if (at == NULL || (run != NULL && append_run(found, run, run_length, run_count) < 0))
            return NULL;
        run = value;
        if (run == NULL)
            break;
        run_length = length;
        run_count = 1;
    }
    *blocks = i;
    if (run != NULL && append_run(found, run, run_length, run_count) < 0)
        return NULL;
    for (i++; i < count && at != NULL; i++)
        at = read_bulk(at, end, &value, &length);
    return at;
}

/* scan(reply: bytes, count: int, with_version: bool) -> tuple[bytes | None, list[tuple[bytes, int]], int] | None
 *
 * What Redis says to an MGET of `count` keys (none: not asked) and to an HGET of the version behind it: the version,
 * the runs of equal values up to the first nil, and how many values they are. None where it is anything but just that.
 */
static PyObject *scan(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !PyBytes_CheckExact(args[0]) || !PyLong_CheckExact(args[1]) || !PyBool_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "scan(reply: bytes, count: int, with_version: bool)");
        return NULL;
    }
    const Py_ssize_t count = PyLong_AsSsize_t(args[1]);
    if (count == -1 && PyErr_Occurred())
        return NULL;
    /* A bytes object ends in a zero, so reading digits stops at `end`. */
    const char *at = PyBytes_AS_STRING(args[0]), *end = at + PyBytes_GET_SIZE(args[0]);
    const char *version = NULL;
    Py_ssize_t version_length = 0, blocks = 0;
    PyObject *found = PyList_New(0);
    if (found == NULL)
        return NULL;
    if (count > 0) {
        char head[32];
        const int length = snprintf(head, sizeof head, "*%zd\r\n", count);
        at = end - at >= length && memcmp(at, head, (size_t)length) == 0 ? at + length : NULL;
        if (at != NULL)
            at = read_runs(at, end, count, found, &blocks);
    }
    if (at != NULL && args[2] == Py_True)
        at = read_bulk(at, end, &version, &version_length);
    PyObject *answer = NULL;
    if (at == end)
        answer = Py_BuildValue("y#On", version, version_length, found, blocks);
    else if (!PyErr_Occurred())
        answer = Py_NewRef(Py_None);
    Py_DECREF(found);
    return answer;
}

/* runs(values: list[bytes | None]) -> list[tuple[bytes, int]]
 *
 * Equal neighbours, and how many, up to the first None.
 */
static PyObject *runs(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 1 || !PyList_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "runs(values: list[bytes | None])");
        return NULL;
    }
    PyObject *values = args[0], *found = PyList_New(0);
    const Py_ssize_t count = PyList_GET_SIZE(values);
    Py_ssize_t i = 0;
    while (found != NULL && i < count) {
        PyObject *value = PyList_GET_ITEM(values, i);
        if (value == Py_None)
            break;
        const Py_ssize_t first = i;
        for (; i < count; i++) {
            PyObject *other = PyList_GET_ITEM(values, i);
            if (!PyBytes_CheckExact(other))
                break;
            if (other != value && (PyBytes_GET_SIZE(other) != PyBytes_GET_SIZE(value) ||
                                   memcmp(PyBytes_AS_STRING(other), PyBytes_AS_STRING(value),
                                          (size_t)PyBytes_GET_SIZE(value)) != 0))
                break;
        }
        PyObject *run = NULL;
        if (i == first)
            PyErr_SetString(PyExc_TypeError, "a value is neither bytes nor None");
        else
            run = Py_BuildValue("On", value, i - first);
        if (run == NULL || PyList_Append(found, run) < 0)
            Py_CLEAR(found);
        Py_XDECREF(run);
    }
    return found;
}

static PyMethodDef methods[] = {
    {"cut", (PyCFunction)(void (*)(void))cut, METH_FASTCALL, "The token ids in a JSON text; None where unusual."},
    {"cut_hashes", (PyCFunction)(void (*)(void))cut_hashes, METH_FASTCALL, "The same of a list of hashes."},
    {"chain", (PyCFunction)(void (*)(void))chain, METH_FASTCALL, "The keys of blocks that are hashed by themselves."},
    {"hash_blocks", (PyCFunction)(void (*)(void))hash_blocks, METH_FASTCALL, "The keys of a prompt's blocks."},
    {"pack_keys", (PyCFunction)(void (*)(void))pack_keys, METH_FASTCALL, "Keys as they go over the wire."},
    {"scan", (PyCFunction)(void (*)(void))scan, METH_FASTCALL, "Equal neighbours in the reply to an MGET."},
    {"runs", (PyCFunction)(void (*)(void))runs, METH_FASTCALL, "Equal neighbours of a reply, up to the first None."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    for (int byte = 0; byte < 256; byte++) {
        digits_of[byte][0] = "0123456789abcdef"[byte >> 4];
        digits_of[byte][1] = "0123456789abcdef"[byte & 15];
    }
    return PyModule_Create(&module);
}
