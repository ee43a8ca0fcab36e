/* Arrays that grow. */

#ifndef WAYMARK_RESERVE_H
#define WAYMARK_RESERVE_H

#include "native.h"

#include <stddef.h>

/* Make room for `more` things of `size` bytes after the first `count`. 0 with an exception. */
static inline int reserve(void **things, size_t *capacity, size_t count, size_t more, size_t size)
{
    if (*capacity - count >= more)
        return 1;
    const size_t grown = count + more + count / 2 + 8;
    void *moved = grown <= PY_SSIZE_T_MAX / size ? PyMem_Realloc(*things, grown * size) : NULL;
    if (moved == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    *things = moved;
    *capacity = grown;
    return 1;
}

#endif
