/* The entry points of the C module, as Python calls them: one file for each subject, module.c lists them all.
 *
 * These rules hold for every function unless its comment says otherwise:
 *
 * - It runs with the GIL, and never releases it. Other Python code can run only if objects of the caller are compared,
 *   called or read as a sequence, or if a Python object is made, which may collect garbage.
 * - A PyObject that it takes is borrowed; one that it returns is a new reference, or NULL with an exception.
 * - A function that says "0 with an exception" returns 1 otherwise; one that says "-1 with an exception" returns another
 *   number otherwise. The functions without these words raise nothing.
 * - Lengths are size_t, or Py_ssize_t where Python uses that. A length from outside is bounded by the bytes of its input,
 *   or PyMem_New refuses it.
 */

#ifndef WAYMARK_NATIVE_H
#define WAYMARK_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef PyObject *EntryPoint(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

EntryPoint cut, cut_hashes;             /* lists.c */
EntryPoint plain_post;                  /* heads.c */
EntryPoint digest, hash_blocks, hash_keys, chain; /* hashing.c */
EntryPoint read_batch;                  /* batches.c */
EntryPoint row_runs, piece_runs;        /* row_runs.c */
EntryPoint rank_sums;                   /* sums.c */
EntryPoint offer_sums, pack_sums;       /* offers.c */
EntryPoint add_columns, least_of;       /* columns.c */
/* Put the types of one file into the module. -1 with an exception. */
int add_events(PyObject *module);       /* events.c */
int add_known(PyObject *module);        /* known.c */
int add_places(PyObject *module);       /* places.c */
int add_parts(PyObject *module);        /* parts.c */
int add_waves(PyObject *module);        /* waves.c */

/* Return whether there are `count` arguments; with an exception if there are not. */
static inline int has_arguments(const char *name, Py_ssize_t nargs, Py_ssize_t count)
{
    if (nargs != count)
        PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments (%zd given)", name, count, nargs);
    return nargs == count;
}

/* Return whether a type is called with `count` arguments, none of them by its name; with an exception if it is not. */
static inline int has_only_arguments(const char *name, PyObject *args, PyObject *names, Py_ssize_t count)
{
    if (names != NULL && PyDict_Size(names) > 0) {
        PyErr_Format(PyExc_TypeError, "%s() takes no argument by its name", name);
        return 0;
    }
    return has_arguments(name, PyTuple_Size(args), count);
}

#endif
