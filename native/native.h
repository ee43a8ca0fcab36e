/* The entry points of the C module, as Python calls them: one file for each subject, module.c lists them all. */

#ifndef WAYMARK_NATIVE_H
#define WAYMARK_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef PyObject *EntryPoint(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

EntryPoint cut, cut_hashes;             /* lists.c */
EntryPoint digest, hash_blocks, chain;  /* hashing.c */
EntryPoint read_batch;                  /* events.c */
EntryPoint row_runs, piece_runs;        /* rows.c */
/* Each puts its types into the module. -1 with an exception. */
int add_events(PyObject *module);       /* events.c */
int add_known(PyObject *module);        /* known.c */
int add_parts(PyObject *module);        /* parts.c */

/* Whether there are `count` arguments; with an exception where there are not. */
static inline int has_arguments(const char *name, Py_ssize_t nargs, Py_ssize_t count)
{
    if (nargs != count)
        PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments (%zd given)", name, count, nargs);
    return nargs == count;
}

#endif
