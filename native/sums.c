/* The order of targets whose costs are sums, and what Redis is told of the best. */

#include "objects.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The greatest number of blocks, and of tokens of a block: their product fits into 64 bits. */
#define COUNT_MAX 0x7fffffffL
/* Up to this number a double has every integer. */
#define EXACT_MAX 9007199254740992.0

/* The fields of a tuple of FleetMember, TargetRow and Load, as far as they are read here. */
enum { PUBLISHER, NAME, TARGET, MEMBER_FIELDS };
enum { DEVICE, HOST, SHARED, DISK, ROW_FIELDS };
enum { LOAD_TOKENS, LOAD_REQUESTS, LOAD_FIELDS };
/* The fields of the tuples that rank_sums makes. */
enum { COST, DRAW, SUM_PUBLISHER, MEMBER, NEW, ROW, LOAD, SOON, SUM_FIELDS };

static PyObject *weight_name[1];

/* Whether an object is a tuple of at least `count` fields; with an exception where it is not. */
static int has_fields(PyObject *object, Py_ssize_t count, const char *what)
{
    if (PyTuple_Check(object) && PyTuple_Size(object) >= count)
        return 1;
    PyErr_Format(PyExc_TypeError, "%s is a tuple of at least %zd fields", what, count);
    return 0;
}

/* The numbers of the first fields of a tuple, or zeros of None. 0 with an exception. */
static int read_fields(PyObject *tuple, double *numbers, int count, const char *what)
{
    for (int i = 0; i < count; i++)
        numbers[i] = 0.0;
    if (tuple == Py_None)
        return 1;
    if (!has_fields(tuple, count, what))
        return 0;
    for (int i = 0; i < count; i++) {
        numbers[i] = PyFloat_AsDouble(PyTuple_GetItem(tuple, i));
        if (numbers[i] == -1.0 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

/* The weight of a member's target, a new reference; NULL with an exception. */
static PyObject *weight_of(PyObject *member)
{
    static const char *const names[] = {"weight"};
    if (!has_fields(member, MEMBER_FIELDS, "a member") || !intern_names(names, weight_name, 1))
        return NULL;
    return PyObject_GetAttr(PyTuple_GetItem(member, TARGET), weight_name[0]);
}

/* ---- in which order ---------------------------------------------------------------------------------------------- */

/* What the costs of all members have in common. */
typedef struct {
    PyObject *rows, *loads, *expected, *draw; /* called with a name, a publisher, a publisher, and nothing */
    double tokens, least, size, credits[ROW_FIELDS], weight_new, weight_active;
} Terms;

typedef struct {
    double cost, draw;
    long long publisher;
    PyObject *tuple; /* a reference */
} Sum;

/* The order of two sums, as qsort asks for it. */
static int compare_sums(const void *one, const void *other)
{
    const Sum *a = one, *b = other;
    if (a->cost != b->cost)
        return a->cost < b->cost ? -1 : 1;
    if (a->draw != b->draw)
        return a->draw < b->draw ? -1 : 1;
    return a->publisher < b->publisher ? -1 : a->publisher > b->publisher;
}

/* The new tokens of a target and its cost, in the order of Python's additions. 0 with an exception. */
static int add_up(const Terms *terms, PyObject *member, PyObject *row, PyObject *load, double soon, double *new, double *cost)
{
    double blocks[ROW_FIELDS], loads[LOAD_FIELDS];
    if (!read_fields(row, blocks, ROW_FIELDS, "a row") || !read_fields(load, loads, LOAD_FIELDS, "a load"))
        return 0;
    const double *credits = terms->credits;
    const double has = credits[0] * blocks[DEVICE] + credits[1] * blocks[HOST] + credits[2] * blocks[DISK] + credits[3] * blocks[SHARED];
    *new = terms->tokens - terms->size * (soon > has ? soon : has);
    if (*new < terms->least)
        *new = terms->least;
    *cost = terms->weight_new * *new;
    if (load == Py_None)
        return 1;
    PyObject *object = weight_of(member);
    const double weight = object == NULL ? -1.0 : PyFloat_AsDouble(object);
    Py_XDECREF(object);
    if (PyErr_Occurred())
        return 0;
    if (weight == 0.0) {
        PyErr_SetString(PyExc_ZeroDivisionError, "the weight of a target is 0");
        return 0;
    }
    *cost += (loads[LOAD_TOKENS] + terms->weight_active * loads[LOAD_REQUESTS]) / weight;
    return 1;
}

/* The number of blocks that a publisher has soon, as an object; NULL with an exception. */
static PyObject *soon_of(const Terms *terms, PyObject *publisher)
{
    PyObject *soon = terms->expected == Py_None ? NULL : PyObject_CallFunctionObjArgs(terms->expected, publisher, NULL);
    if (soon != NULL && soon != Py_None)
        return soon;
    Py_XDECREF(soon);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(0);
}

/* The sum of a member; without its tuple with an exception. */
static Sum sum_of(const Terms *terms, PyObject *member)
{
    Sum sum = {0.0, 0.0, 0, NULL};
    if (!has_fields(member, MEMBER_FIELDS, "a member"))
        return sum;
    PyObject *publisher = PyTuple_GetItem(member, PUBLISHER), *load = NULL, *soon = NULL, *draw = NULL, *made[2] = {NULL, NULL};
    PyObject *row = PyObject_CallFunctionObjArgs(terms->rows, PyTuple_GetItem(member, NAME), NULL);
    if (row != NULL && (load = PyObject_CallFunctionObjArgs(terms->loads, publisher, NULL)) != NULL &&
        (soon = soon_of(terms, publisher)) != NULL) {
        double new = 0.0;
        const double blocks = PyFloat_AsDouble(soon);
        if (!PyErr_Occurred() && add_up(terms, member, row, load, blocks, &new, &sum.cost) &&
            (draw = PyObject_CallNoArgs(terms->draw)) != NULL) {
            sum.draw = PyFloat_AsDouble(draw);
            sum.publisher = PyLong_AsLongLong(publisher);
            if (!PyErr_Occurred() && (made[0] = PyFloat_FromDouble(sum.cost)) != NULL && (made[1] = PyFloat_FromDouble(new)) != NULL)
                sum.tuple = PyTuple_Pack(SUM_FIELDS, made[0], draw, publisher, member, made[1], row, load, soon);
        }
    }
    PyObject *const parts[] = {row, load, soon, draw, made[0], made[1]};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        Py_XDECREF(parts[i]);
    return sum;
}

/* The tuples of sums, least first, in a list, which takes them over; NULL with an exception. */
static PyObject *listed(Sum *sums, Py_ssize_t count)
{
    if (count > 1)
        qsort(sums, (size_t)count, sizeof *sums, compare_sums);
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyList_SetItem(list, i, sums[i].tuple);
        sums[i].tuple = NULL;
    }
    return list;
}

/* rank_sums(members, rows, loads, expected, draw, tokens, least, size, device_credit, host_credit, disk_credit,
 *           shared_credit, weight_new, weight_active) -> list[tuple]
 *
 * `rows`, `loads` and `expected` return what is known of a name, or of a publisher, or None; `expected` may be None.
 * `draw` returns the number by which equal targets are ordered, and is called once for each member, in their order.
 */
PyObject *rank_sums(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    Terms terms;
    double *const numbers[] = {&terms.tokens,     &terms.least,      &terms.size,       &terms.credits[0], &terms.credits[1],
                               &terms.credits[2], &terms.credits[3], &terms.weight_new, &terms.weight_active};
    if (!has_arguments("rank_sums", nargs, 14))
        return NULL;
    terms.rows = args[1], terms.loads = args[2], terms.expected = args[3], terms.draw = args[4];
    for (int i = 0; i < 9; i++) {
        *numbers[i] = PyFloat_AsDouble(args[5 + i]);
        if (*numbers[i] == -1.0 && PyErr_Occurred())
            return NULL;
    }
    PyObject *members = PySequence_Tuple(args[0]); /* a list could change while objects are called */
    if (members == NULL)
        return NULL;
    const Py_ssize_t count = PyTuple_Size(members);
    Sum *sums = PyMem_New(Sum, (size_t)count + 1);
    Py_ssize_t made = 0;
    if (sums == NULL)
        PyErr_NoMemory();
    for (; sums != NULL && made < count; made++)
        if ((sums[made] = sum_of(&terms, PyTuple_GetItem(members, made))).tuple == NULL)
            break;
    PyObject *list = sums != NULL && made == count ? listed(sums, count) : NULL;
    for (Py_ssize_t i = 0; i < made; i++)
        Py_XDECREF(sums[i].tuple);
    PyMem_Free(sums);
    Py_DECREF(members);
    return list;
}

/* ---- what Redis is told ------------------------------------------------------------------------------------------ */

/* What all offers of a call have in common, and the lists that they are put into. */
typedef struct {
    PyObject *type, *offers, *promises, *words;
    long long blocks, size, available, reusable, random;
    double weight_new, handicap;
    PyObject *weight; /* None: each has its own */
} Offered;

/* The terms of one offer; two neighbours with equal ones share a word. */
typedef struct {
    long long tokens, amounts[ROW_FIELDS], expected;
    double handicap, weight;
    PyObject *promise; /* borrowed from the list of promises */
} OfferTerms;

/* A number of blocks, or of tokens of a block. -1 with an exception. */
static long long read_count(PyObject *object)
{
    const long long count = PyLong_AsLongLong(object);
    if (count >= 0 && count <= COUNT_MAX)
        return count;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_OverflowError, "a count is %lld; it must be 0 to %ld", count, COUNT_MAX);
    return -1;
}

/* The terms of the target of a sum; `weight` is its weight. 0 with an exception. */
static int read_terms(const Offered *of, PyObject *sum, PyObject *weight, OfferTerms *terms)
{
    long long blocks[ROW_FIELDS] = {0}, matched = 0;
    PyObject *row = PyTuple_GetItem(sum, ROW);
    const double new = PyFloat_AsDouble(PyTuple_GetItem(sum, NEW));
    const long long soon = PyErr_Occurred() ? -1 : read_count(PyTuple_GetItem(sum, SOON));
    terms->weight = PyFloat_AsDouble(weight);
    if (PyErr_Occurred() || (row != Py_None && !has_fields(row, ROW_FIELDS, "a row")))
        return 0;
    for (int i = 0; row != Py_None && i < ROW_FIELDS; i++) {
        if ((blocks[i] = read_count(PyTuple_GetItem(row, i))) < 0)
            return 0;
        terms->amounts[i] = of->size * blocks[i];
        matched += blocks[i];
    }
    if (!(new >= 0.0 && new <= EXACT_MAX)) {
        PyErr_SetString(PyExc_OverflowError, "the new tokens of a target are no number that a double has exactly");
        return 0;
    }
    /* A target with all complete blocks gives nothing back, so its last tokens count in the cost alone. */
    const int is_whole = row != Py_None && !blocks[SHARED] && of->blocks && matched == of->blocks && new <= (double)of->size;
    terms->tokens = is_whole ? 0 : (long long)ceil(new);
    terms->handicap = of->handicap + of->weight_new * (new - (double)terms->tokens);
    if (row != Py_None || soon) {
        const long long most = matched > soon ? matched : soon;
        terms->expected = most <= of->reusable / of->size ? most * of->size : of->reusable;
    }
    return 1;
}

/* Whether the promise of two targets is the same text. */
static int promise_equally(const OfferTerms *a, const OfferTerms *b)
{
    return a->expected == b->expected && memcmp(a->amounts, b->amounts, sizeof a->amounts) == 0;
}

/* Append what is made, and let it go. 0 with an exception. */
static int append(PyObject *list, PyObject *made)
{
    const int result = made == NULL ? -1 : PyList_Append(list, made);
    Py_XDECREF(made);
    return result == 0;
}

/* Append the offer, the promise and perhaps the word of a sum; *last: the terms of the one before. 0 with an exception. */
static int add_offer(const Offered *of, PyObject *sum, PyObject *weight, Py_ssize_t place, OfferTerms *last)
{
    OfferTerms terms = {0, {0}, 0, 0.0, 0.0, NULL};
    if (!read_terms(of, sum, weight, &terms))
        return 0;
    PyObject *offer = Py_BuildValue("(OLdOii)", PyTuple_GetItem(sum, SUM_PUBLISHER), terms.tokens, terms.handicap, weight, 0, 0);
    if (!append(of->offers, build_named(of->type, offer)))
        return 0;
    const int is_same = last->promise != NULL && promise_equally(&terms, last);
    const long long *amounts = terms.amounts;
    PyObject *promise = is_same ? Py_NewRef(last->promise)
                                : PyUnicode_FromFormat("%lld-%lld-%lld-%lld-%lld-%lld-%lld", of->available, amounts[DEVICE], amounts[HOST],
                                                       amounts[DISK], amounts[SHARED], terms.expected, of->random);
    terms.promise = promise; /* the list has a reference, and nobody else has the list */
    if (!append(of->promises, promise))
        return 0;
    if (!is_same || terms.tokens != last->tokens || terms.handicap != last->handicap || terms.weight != last->weight) {
        PyObject *handicap = PyFloat_FromDouble(terms.handicap);
        PyObject *word = handicap == NULL ? NULL
                                          : PyUnicode_FromFormat("%zd %lld %R %R 0 0 %U", place + 1, terms.tokens, handicap, weight, promise);
        Py_XDECREF(handicap);
        if (!append(of->words, word))
            return 0;
    }
    *last = terms;
    return 1;
}

/* Put the first `count` sums into the lists. 0 with an exception. */
static int add_offers(const Offered *of, PyObject *sums, Py_ssize_t count)
{
    OfferTerms last = {0, {0}, 0, 0.0, 0.0, NULL};
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *sum = PyList_GetItem(sums, i), *weight = NULL;
        Py_XINCREF(sum);
        int is_added = 0;
        if (sum != NULL && has_fields(sum, SUM_FIELDS, "a sum"))
            weight = of->weight == Py_None ? weight_of(PyTuple_GetItem(sum, MEMBER)) : Py_NewRef(of->weight);
        if (weight != NULL)
            is_added = add_offer(of, sum, weight, i, &last);
        Py_XDECREF(weight);
        Py_XDECREF(sum);
        if (!is_added)
            return 0;
    }
    return 1;
}

/* offer_sums(offer, sums, most, blocks, size, weight_new, available, reusable, random, handicap, weight)
 *     -> tuple[list[Offer], list[str], list[str]]
 *
 * The first `most` of the tuples of rank_sums as offers, what is promised of each, and the terms as `reserve` reads
 * them. `blocks` are those of the prompt; no row has all of them if it is 0. Each has the `handicap` in addition to its
 * own, and the `weight`; with None, its own weight.
 */
PyObject *offer_sums(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (!has_arguments("offer_sums", nargs, 11))
        return NULL;
    Offered of = {args[0], NULL, NULL, NULL, 0, 0, 0, 0, 0, 0.0, 0.0, args[10]};
    if (!PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "the sums are a list");
        return NULL;
    }
    const Py_ssize_t most = PyLong_AsSsize_t(args[2]), length = PyList_Size(args[1]);
    if (PyErr_Occurred() || (of.blocks = read_count(args[3])) < 0 || (of.size = read_count(args[4])) < 0)
        return NULL;
    if (!PyType_Check(args[0]) || !PyType_IsSubtype((PyTypeObject *)args[0], &PyTuple_Type) || of.size == 0) {
        PyErr_SetString(PyExc_ValueError, "an offer is a tuple, and a block has tokens");
        return NULL;
    }
    of.weight_new = PyFloat_AsDouble(args[5]);
    long long *const numbers[] = {&of.available, &of.reusable, &of.random};
    for (int i = 0; i < 3 && !PyErr_Occurred(); i++)
        *numbers[i] = PyLong_AsLongLong(args[6 + i]);
    of.handicap = PyErr_Occurred() ? 0.0 : PyFloat_AsDouble(args[9]);
    if (PyErr_Occurred())
        return NULL;
    of.offers = PyList_New(0), of.promises = PyList_New(0), of.words = PyList_New(0);
    PyObject *found = NULL;
    if (of.offers != NULL && of.promises != NULL && of.words != NULL &&
        add_offers(&of, args[1], most < length ? most : length))
        found = PyTuple_Pack(3, of.offers, of.promises, of.words);
    Py_XDECREF(of.offers);
    Py_XDECREF(of.promises);
    Py_XDECREF(of.words);
    return found;
}
