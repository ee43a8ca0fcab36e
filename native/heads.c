/* Reads an HTTP request whose head arrived at once, with nothing unusual in it. */

#include "input.h"

#define FIELDS_MAX 100
#define HEAD_BYTES_MAX 32768
/* A number of this many digits does not overflow, and is far above the bound that a server has for bodies. */
#define LENGTH_DIGITS_MAX 9

typedef struct {
    const char *start, *end;
} Span;

/* The facts of a request that are collected while its fields are read. */
typedef struct {
    int hosts, lengths;
    size_t length;
} Facts;

/* Return whether a character is an ASCII letter or digit. */
static inline int is_letter_or_digit(unsigned char c)
{
    return (unsigned)(c - '0') < 10 || (unsigned)((c | 32) - 'a') < 26;
}

/* Return whether a character may stand before or after a value. */
static inline int is_blank(char c)
{
    return c == ' ' || c == '\t';
}

/* Return whether a span equals `word` except for upper and lower case; `word` is in lower case. */
static int is_word(Span span, const char *word)
{
    const size_t length = strlen(word);
    if ((size_t)(span.end - span.start) != length)
        return 0;
    for (size_t i = 0; i < length; i++) {
        const char c = span.start[i];
        if ((c >= 'A' && c <= 'Z' ? c | 32 : c) != word[i])
            return 0;
    }
    return 1;
}

/* Read a path of names and slashes from `at`; NULL if it is not one. *path: where it is. */
static const char *read_path(const char *at, const char *end, Span *path)
{
    path->start = at;
    while (at < end && *at == '/') {
        const char *name = ++at;
        while (at < end && (is_letter_or_digit((unsigned char)*at) || *at == '_' || *at == '.' || *at == '-'))
            at++;
        if (at == name)
            return NULL;
    }
    path->end = at;
    return at == path->start ? NULL : at;
}

/* Return whether a value is a name or an IPv4 address, and perhaps a port. */
static int is_plain_host(Span value)
{
    const char *at = value.start;
    while (at < value.end && (is_letter_or_digit((unsigned char)*at) || *at == '.' || *at == '-'))
        at++;
    if (at == value.start)
        return 0;
    if (at < value.end && *at == ':')
        do
            at++;
        while (at < value.end && (unsigned)(*at - '0') < 10);
    return at == value.end;
}

/* Read the number of a Content-Length into `length`; 0 if it is not plain. */
static int read_length(Span value, size_t *length)
{
    *length = 0;
    if (value.start == value.end || value.end - value.start > LENGTH_DIGITS_MAX)
        return 0;
    for (const char *at = value.start; at < value.end; at++) {
        if ((unsigned)(*at - '0') >= 10)
            return 0;
        *length = 10 * *length + (size_t)(*at - '0');
    }
    return 1;
}

/* Return whether a field has no meaning for the connection, or the plainest one. */
static int is_plain_field(Span name, Span value, Facts *facts)
{
    if (is_word(name, "host"))
        return ++facts->hosts == 1 && is_plain_host(value);
    if (is_word(name, "content-length"))
        return ++facts->lengths == 1 && read_length(value, &facts->length);
    if (is_word(name, "connection"))
        return is_word(value, "keep-alive");
    return !(is_word(name, "transfer-encoding") || is_word(name, "expect") || is_word(name, "upgrade") ||
             is_word(name, "proxy-connection"));
}

/* Read the field at `at` into `name` and `value`, and return the beginning of the next line; NULL if the field is not
 * plain. */
static const char *read_field(const char *at, const char *end, Span *name, Span *value)
{
    name->start = at;
    while (at < end && (is_letter_or_digit((unsigned char)*at) || *at == '-' || *at == '_'))
        at++;
    name->end = at;
    if (at == name->start || at == end || *at != ':')
        return NULL;
    do
        at++;
    while (at < end && is_blank(*at));
    value->start = value->end = at;
    for (; at < end && ((*at >= 0x20 && *at < 0x7f) || *at == '\t'); at++)
        if (!is_blank(*at))
            value->end = at + 1;
    return end - at >= 2 && at[0] == '\r' && at[1] == '\n' ? at + 2 : NULL;
}

/* Return a new pair of a field's name in lower case and its value; NULL with an exception. */
static PyObject *make_pair(Span name, Span value)
{
    /* Made without its bytes, because Python shares one object for each single byte, and a name may have one letter. */
    PyObject *made = PyBytes_FromStringAndSize(NULL, name.end - name.start);
    if (made == NULL)
        return NULL;
    char *letters = PyBytes_AsString(made);
    for (Py_ssize_t i = 0; i < name.end - name.start; i++) {
        const char c = name.start[i];
        letters[i] = c >= 'A' && c <= 'Z' ? (char)(c | 32) : c;
    }
    return Py_BuildValue("Ny#", made, value.start, value.end - value.start);
}

/* Append the fields from `at` to `fields`, and return the beginning of the body. NULL if they are not plain, or with an
 * exception. */
static const char *read_fields(const char *at, const char *end, PyObject *fields, Facts *facts)
{
    for (int count = 0; count <= FIELDS_MAX; count++) {
        Span name, value;
        if (end - at >= 2 && at[0] == '\r' && at[1] == '\n')
            return at + 2;
        at = read_field(at, end, &name, &value);
        if (at == NULL || !is_plain_field(name, value, facts))
            return NULL;
        PyObject *pair = make_pair(name, value);
        const int failed = pair == NULL || PyList_Append(fields, pair) < 0;
        Py_XDECREF(pair);
        if (failed)
            return NULL;
    }
    return NULL;
}

/* Read a request as plain_post does, into the empty list `fields`; NULL if it is not plain, or with an exception. */
static PyObject *read_post(const Input *data, PyObject *fields)
{
    static const char method[] = "POST ", version[] = " HTTP/1.1\r\n";
    const size_t method_length = sizeof method - 1, version_length = sizeof version - 1;
    const char *end = data->start + data->size, *at = data->start;
    const char *head_end = data->size > HEAD_BYTES_MAX ? at + HEAD_BYTES_MAX : end;
    Facts facts = {0, 0, 0};
    Span path;
    if ((size_t)data->size < method_length || memcmp(at, method, method_length) != 0)
        return NULL;
    at = read_path(at + method_length, head_end, &path);
    if (at == NULL || (size_t)(head_end - at) < version_length || memcmp(at, version, version_length) != 0)
        return NULL;
    at = read_fields(at + version_length, head_end, fields, &facts);
    if (at == NULL || !facts.hosts || !facts.lengths || !facts.length || (size_t)(end - at) > facts.length)
        return NULL;
    return Py_BuildValue("y#Oy#n", path.start, path.end - path.start, fields, at, end - at,
                         (Py_ssize_t)facts.length - (end - at));
}

/* plain_post(data: bytes) -> tuple[bytes, list[tuple[bytes, bytes]], bytes, int] | None
 *
 * The path, the fields and the body of a POST, and how many bytes the body lacks. None unless `data` is a single POST
 * with its whole head, and every HTTP parser reads this head in the same way: no coding, no expectation, no other
 * protocol, one Host, one length.
 */
PyObject *plain_post(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    Input data;
    if (!has_arguments("plain_post", nargs, 1) || !open_bytes(args[0], &data))
        return NULL;
    PyObject *fields = PyList_New(0), *found = NULL;
    if (fields != NULL) {
        found = read_post(&data, fields);
        Py_DECREF(fields);
    }
    close_input(&data);
    if (found == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return found;
}
