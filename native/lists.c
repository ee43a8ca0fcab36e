/* Cuts a list of token ids or hashes out of a JSON text, without a Python object for each number. */

#include "input.h"
#include "digits.h"

#if defined(__x86_64__) && defined(__SSE2__)
#include "tokens_avx2.h"
#else
#define has_avx2() 0
#define read_plain_tokens(at, close, out) 0
#endif

/* The number of quotes that the search for a name looks at before it gives up; a query has about ten members. */
#define QUOTES_MAX 256

/* Return the first character from `at` that is not a JSON blank; `end` if there is none. */
static inline const char *skip_blanks(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    return at;
}

/* Return the first `name` (in its quotes) from `at`; NULL if there is none. *has_given_up: there may be one. */
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

/* Read the tokens between `at` and the bracket at `close` into `out`; 0 if they are not `count` plain u32. */
static int read_tokens(const char *at, const char *close, const char *end, Py_ssize_t count, unsigned char *out)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        at = skip_blanks(at, close);
        const char *first = at;
        /* The bracket is not a digit, so neither function reads beyond it. */
        const int64_t token = end - at >= 8 ? read_short_number(&at) : read_number(&at);
        if (token < 0 || token > UINT32_MAX || (*first == '0' && at - first > 1))
            return 0;
        store_little32(out + 4 * i, (uint32_t)token);
        at = skip_blanks(at, close);
        if (i + 1 < count && *at++ != ',')
            return 0;
    }
    return at == close;
}

/* Read a number of 64 bits at `at`, in quotes or not; a negative one as its two's complement. 0 if it is not plain. */
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

/* Read `count` hashes, as read_tokens reads tokens. */
static int read_hashes(const char *at, const char *close, const char *end, Py_ssize_t count, unsigned char *out)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t hash;
        at = skip_blanks(at, close);
        if (!read_hash(&at, end, &hash))
            return 0;
        store_little64(out + 8 * i, hash);
        at = skip_blanks(at, close);
        if (i + 1 < count && *at++ != ',')
            return 0;
    }
    return at == close;
}

/* Return how many commas there are between `at` and `end`. */
static Py_ssize_t count_commas(const char *at, const char *end)
{
    Py_ssize_t count = 0;
    while (at < end) {
        /* Up to 255 characters are counted in a byte: compilers turn such a loop into the fastest code. */
        const char *pause = end - at > 255 ? at + 255 : end;
        unsigned char few = 0;
        for (; at < pause; at++)
            few += *at == ',';
        count += few;
    }
    return count;
}

/* Return where the list under `name` opens; NULL if the text is not plain. *close: its closing bracket. */
static const char *find_list(const char *body, const char *end, const Input *name, const char **close)
{
    const size_t length = (size_t)name->size;
    int has_given_up = 0;
    const char *found = find_name(body, end, name->start, length, &has_given_up);
    if (found == NULL)
        return NULL;
    const char *open = skip_blanks(found + length, end);
    if (open == end || *open != ':')
        return NULL;
    open = skip_blanks(open + 1, end);
    if (open == end || *open != '[')
        return NULL;
    *close = memchr(open, ']', (size_t)(end - open));
    if (*close == NULL || find_name(*close, end, name->start, length, &has_given_up) != NULL || has_given_up)
        return NULL;
    if (memchr(body, '\\', (size_t)(open - body)) != NULL || memchr(*close, '\\', (size_t)(end - *close)) != NULL)
        return NULL;
    return open;
}

/* Cut out a list as cut and cut_hashes do, with numbers of `width` bytes. */
static PyObject *cut_list(const Input *text, const Input *name, Py_ssize_t count_max, Py_ssize_t width)
{
    const char *body = text->start, *end = body + text->size, *close;
    const char *open = find_list(body, end, name, &close);
    if (open == NULL)
        Py_RETURN_NONE;
    const char *first = open + 1;
    const Py_ssize_t count = skip_blanks(first, close) == close ? 0 : 1 + count_commas(first, close);
    if (count > count_max)
        Py_RETURN_NONE;
    PyObject *numbers = PyBytes_FromStringAndSize(NULL, width * count);
    if (numbers == NULL)
        return NULL;
    unsigned char *out = (unsigned char *)PyBytes_AsString(numbers);
    int is_plain = count == 0;
    if (!is_plain && width == 8)
        is_plain = read_hashes(first, close, end, count, out);
    else if (!is_plain)
        is_plain = (first - body >= 8 && has_avx2() && read_plain_tokens(first, close, out)) ||
                   read_tokens(first, close, end, count, out);
    if (!is_plain) {
        Py_DECREF(numbers);
        Py_RETURN_NONE;
    }
    return Py_BuildValue("nnN", open - body, close + 1 - body, numbers);
}

/* Do the work of cut and cut_hashes, with their arguments. */
static PyObject *cut_arguments(const char *function, PyObject *const *args, Py_ssize_t nargs, Py_ssize_t width)
{
    Input body, name;
    PyObject *found = NULL;
    if (!has_arguments(function, nargs, 3))
        return NULL;
    const Py_ssize_t count_max = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() || !open_bytes(args[0], &body))
        return NULL;
    if (open_bytes(args[1], &name)) {
        found = cut_list(&body, &name, count_max, width);
        close_input(&name);
    }
    close_input(&body);
    return found;
}

/* cut, cut_hashes(body: bytes, name: bytes, count_max: int) -> tuple[int, int, bytes] | None
 *
 * The result is exact because `name` comes once; because there is no backslash outside the list, so in valid JSON every
 * quote begins or ends a string, and a text in quotes before `:` is a key; and because the list holds digits, commas
 * and blanks only. A list of hashes may also have signs, and quotes around digits. The caller reads body[:start] +
 * b"[]" + body[end:] with its JSON parser: if that is valid and has an empty list under the key, then the body is valid
 * and has this list under it.
 */
PyObject *cut(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return cut_arguments("cut", args, nargs, 4);
}

/* Do the same as cut, for hashes. */
PyObject *cut_hashes(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return cut_arguments("cut_hashes", args, nargs, 8);
}
