/* The bytes of an argument, for as long as a call lasts.
 *
 * With WAYMARK_EXACT_INPUT they are a copy in memory of just that size, for a sanitizer: it then reports a read before
 * the first byte too, where a bytes object has its own header.
 */

#ifndef WAYMARK_INPUT_H
#define WAYMARK_INPUT_H

#include "native.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *start;
    Py_ssize_t size;
    Py_buffer view;   /* its obj is NULL for a bytes object */
    PyObject *object; /* a reference to a bytes object, since a list with it may change meanwhile; else NULL */
#ifdef WAYMARK_EXACT_INPUT
    char *copy;
#endif
} Input;

/* Release the object that has the bytes. */
static inline void release_input(Input *input)
{
    Py_XDECREF(input->object);
    if (input->view.obj != NULL)
        PyBuffer_Release(&input->view);
}

/* Copy the bytes of `input` and `terminator` bytes after them, with the same alignment. 0 with an exception. */
static inline int copy_exactly(Input *input, size_t terminator)
{
#ifdef WAYMARK_EXACT_INPUT
    const size_t size = (size_t)input->size + terminator, before = (uintptr_t)input->start % 16;
    input->copy = malloc(before + size);
    if (input->copy == NULL) {
        release_input(input);
        PyErr_NoMemory();
        return 0;
    }
    if (size > 0)
        memcpy(input->copy + before, input->start, size);
    input->start = input->copy + before;
#else
    (void)input, (void)terminator;
#endif
    return 1;
}

/* Get the content of a bytes object; a zero follows its last byte. 0 with an exception. */
static inline int open_bytes(PyObject *object, Input *input)
{
    char *start;
    input->view.obj = NULL;
    if (PyBytes_AsStringAndSize(object, &start, &input->size) < 0)
        return 0;
    input->start = start;
    input->object = Py_NewRef(object);
    return copy_exactly(input, 1);
}

/* Get the content of an object with a buffer. 0 with an exception. */
static inline int open_buffer(PyObject *object, Input *input)
{
    if (PyObject_GetBuffer(object, &input->view, PyBUF_SIMPLE) < 0)
        return 0;
    input->start = input->view.buf;
    input->size = input->view.len;
    input->object = NULL;
    return copy_exactly(input, 0);
}

/* Release what open_bytes or open_buffer has taken. No pointer into it may be used afterwards. */
static inline void close_input(Input *input)
{
#ifdef WAYMARK_EXACT_INPUT
    free(input->copy);
#endif
    release_input(input);
}

#endif
