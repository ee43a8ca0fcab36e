/* Block keys to the arguments of one MGET, as RESP has them. */

#include "input.h"

#include <stdio.h>

enum { KEY = 8, DIGITS = 2 * KEY, LINE_END = 2 };

/* The two digits of each byte. */
#define SIXTEEN(upper)                                                                                                 \
    {upper, '0'}, {upper, '1'}, {upper, '2'}, {upper, '3'}, {upper, '4'}, {upper, '5'}, {upper, '6'}, {upper, '7'},    \
    {upper, '8'}, {upper, '9'}, {upper, 'a'}, {upper, 'b'}, {upper, 'c'}, {upper, 'd'}, {upper, 'e'}, {upper, 'f'}
static const char digits_of[256][2] = {
    SIXTEEN('0'), SIXTEEN('1'), SIXTEEN('2'), SIXTEEN('3'), SIXTEEN('4'), SIXTEEN('5'), SIXTEEN('6'), SIXTEEN('7'),
    SIXTEEN('8'), SIXTEEN('9'), SIXTEEN('a'), SIXTEEN('b'), SIXTEEN('c'), SIXTEEN('d'), SIXTEEN('e'), SIXTEEN('f'),
};

static PyObject *pack(const Input *before, const Input *prefix, const Input *keys)
{
    char head[32];
    const size_t head_size = (size_t)snprintf(head, sizeof head, "$%zd\r\n", prefix->size + DIGITS);
    const size_t digits_at = head_size + (size_t)prefix->size, width = digits_at + DIGITS + LINE_END;
    const size_t count = (size_t)keys->size / KEY;
    if (count > ((size_t)PY_SSIZE_T_MAX - (size_t)before->size) / width)
        return PyErr_Format(PyExc_OverflowError, "%zu keys are more than one command can hold", count);
    PyObject *packed = PyBytes_FromStringAndSize(NULL, before->size + (Py_ssize_t)(count * width));
    if (packed == NULL)
        return NULL;
    char *out = PyBytes_AsString(packed);
    memcpy(out, before->start, (size_t)before->size);
    out += before->size;
    const char *first = out;
    const unsigned char *key = (const unsigned char *)keys->start;
    for (size_t i = 0; i < count; i++, out += width) {
        if (i == 0) {
            memcpy(out, head, head_size);
            memcpy(out + head_size, prefix->start, (size_t)prefix->size);
            memcpy(out + digits_at + DIGITS, "\r\n", LINE_END);
        } else
            memcpy(out, first, width); /* all but the digits is always the same */
        for (size_t at = digits_at; at < digits_at + DIGITS; at += 2)
            memcpy(out + at, digits_of[*key++], 2);
    }
    return packed;
}

/* pack_keys(before: bytes, prefix: bytes, keys: bytes) -> bytes
 *
 * `before`, then each key as a bulk string of the protocol: its length, `prefix`, 16 hex digits.
 */
PyObject *pack_keys(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Input before, prefix, keys;
    PyObject *packed = NULL;
    if (!has_arguments("pack_keys", nargs, 3) || !open_bytes(args[0], &before))
        return NULL;
    if (open_bytes(args[1], &prefix)) {
        if (open_bytes(args[2], &keys)) {
            packed = pack(&before, &prefix, &keys);
            close_input(&keys);
        }
        close_input(&prefix);
    }
    close_input(&before);
    return packed;
}
