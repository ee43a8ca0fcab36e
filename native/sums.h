/* The tuples of a decision by sums, and the functions that read them. */

#ifndef WAYMARK_SUMS_H
#define WAYMARK_SUMS_H

#include "objects.h"

/* The fields of a tuple of FleetMember, TargetRow and Load, as far as they are read here. */
enum { PUBLISHER, NAME, TARGET, MEMBER_FIELDS };
enum { DEVICE, HOST, SHARED, DISK, ROW_FIELDS };
enum { LOAD_TOKENS, LOAD_REQUESTS, LOAD_FIELDS };
/* The fields of the tuples that rank_sums makes. */
enum { COST, DRAW, SUM_PUBLISHER, MEMBER, NEW, ROW, LOAD, SOON, SUM_FIELDS };

/* Return whether an object is a tuple of at least `count` fields; with an exception if it is not. */
int has_fields(PyObject *object, Py_ssize_t count, const char *what);

/* Return the weight of a member's target, a new reference; NULL with an exception. */
PyObject *weight_of(PyObject *member);

#endif
