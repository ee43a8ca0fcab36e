/* Makes the offers and the call of `reserve` from the best targets of a decision by sums. */

#include "sums.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* The greatest number of blocks, and of tokens of a block: their product fits into 64 bits. */
#define COUNT_MAX 0x7fffffffL
/* Up to this number a double has every integer. */
#define EXACT_MAX 9007199254740992.0

/* The common values of all offers of a call, and the lists that they are appended to. */
typedef struct {
    PyObject *type, *offers, *promises, *words;
    long long blocks, size, available, reusable, random;
    double weight_new, handicap;
    PyObject *weight; /* None: each has its own */
} Offered;

/* The terms of one offer; two consecutive offers with equal terms share a word. */
typedef struct {
    long long tokens, amounts[ROW_FIELDS], expected;
    double handicap, weight;
    PyObject *promise; /* borrowed from the list of promises */
} OfferTerms;

/* Read a number of blocks, of tokens of a block, or of words. -1 with an exception. */
static long long read_count(PyObject *object)
{
    const long long count = PyLong_AsLongLong(object);
    if (count >= 0 && count <= COUNT_MAX)
        return count;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_OverflowError, "a count is %lld; it must be 0 to %ld", count, COUNT_MAX);
    return -1;
}

/* Read the terms of the target of a sum; `weight` is its weight. 0 with an exception. */
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

/* Return whether the promises of two targets are the same text. */
static int promise_equally(const OfferTerms *a, const OfferTerms *b)
{
    return a->expected == b->expected && memcmp(a->amounts, b->amounts, sizeof a->amounts) == 0;
}

/* Append a new object, and release it. 0 with an exception. */
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
    terms.promise = promise; /* the list has a reference, and no other object has the list */
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

/* Read the arguments after the first ones of offer_sums and pack_sums; *count is the number of sums. 0 with an
 * exception. */
static int read_offered(PyObject *const *args, Offered *of, Py_ssize_t *count)
{
    if (!PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "the sums are a list");
        return 0;
    }
    const Py_ssize_t most = PyLong_AsSsize_t(args[1]), length = PyList_Size(args[0]);
    if (PyErr_Occurred() || (of->blocks = read_count(args[2])) < 0 || (of->size = read_count(args[3])) < 0)
        return 0;
    if (of->size == 0) {
        PyErr_SetString(PyExc_ValueError, "a block has tokens");
        return 0;
    }
    of->weight_new = PyFloat_AsDouble(args[4]);
    long long *const numbers[] = {&of->available, &of->reusable, &of->random};
    for (int i = 0; i < 3 && !PyErr_Occurred(); i++)
        *numbers[i] = PyLong_AsLongLong(args[5 + i]);
    of->handicap = PyErr_Occurred() ? 0.0 : PyFloat_AsDouble(args[8]);
    of->weight = args[9];
    *count = most < 0 ? 0 : most < length ? most : length;
    return !PyErr_Occurred();
}

/* offer_sums(offer, sums, most, blocks, size, weight_new, available, reusable, random, handicap, weight)
 *     -> tuple[list[Offer], list[str], list[str]]
 *
 * For the first `most` of the tuples of rank_sums: the offers, their promises, and the terms as `reserve` reads them.
 * `blocks` is the number of blocks of the prompt; if it is 0, no row counts as having all of them. `handicap` is added
 * to that of each offer. `weight` is the weight of each; with None, each has its own.
 */
PyObject *offer_sums(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    Py_ssize_t count = 0;
    if (!has_arguments("offer_sums", nargs, 11))
        return NULL;
    Offered of = {args[0], NULL, NULL, NULL, 0, 0, 0, 0, 0, 0.0, 0.0, NULL};
    if (!read_offered(args + 1, &of, &count))
        return NULL;
    if (!PyType_Check(args[0]) || !PyType_IsSubtype((PyTypeObject *)args[0], &PyTuple_Type)) {
        PyErr_SetString(PyExc_ValueError, "an offer is a tuple");
        return NULL;
    }
    of.offers = PyList_New(0), of.promises = PyList_New(0), of.words = PyList_New(0);
    PyObject *found = NULL;
    if (of.offers != NULL && of.promises != NULL && of.words != NULL && add_offers(&of, args[1], count))
        found = PyTuple_Pack(3, of.offers, of.promises, of.words);
    Py_XDECREF(of.offers);
    Py_XDECREF(of.promises);
    Py_XDECREF(of.words);
    return found;
}

/* ---- the same, packed -------------------------------------------------------------------------------------------- */

/* The longest word of terms: numbers of up to 20 digits, and two of up to 24 characters. */
#define WORD_MAX 320
/* The most bytes that packing adds to a word: its length, and the ends of two lines. */
#define BULK_MAX 16

/* Text that has room for all that is put into it. */
typedef struct {
    char *at;
    size_t length;
} Text;

/* Append a word in the form of RESP. */
static void put_bulk(Text *text, const char *word, int length)
{
    text->length += (size_t)sprintf(text->at + text->length, "$%d\r\n%.*s\r\n", length, length, word);
}

/* Append a number as a word. */
static void put_number(Text *text, long long number)
{
    char word[32];
    put_bulk(text, word, snprintf(word, sizeof word, "%lld", number));
}

/* Append the terms of the target at a place, which hold for the following targets, too. 0 with an exception. */
static int put_terms(Text *text, const Offered *of, const OfferTerms *terms, Py_ssize_t place)
{
    char *handicap = PyOS_double_to_string(terms->handicap, 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
    char *weight = handicap == NULL ? NULL : PyOS_double_to_string(terms->weight, 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
    if (weight != NULL) {
        char word[WORD_MAX];
        const long long *amounts = terms->amounts;
        put_bulk(text, word,
                 snprintf(word, sizeof word, "%zd %lld %s %s 0 0 %lld-%lld-%lld-%lld-%lld-%lld-%lld", place + 1, terms->tokens, handicap,
                          weight, of->available, amounts[DEVICE], amounts[HOST], amounts[DISK], amounts[SHARED], terms->expected, of->random));
    }
    PyMem_Free(handicap);
    PyMem_Free(weight);
    return weight != NULL;
}

/* Append the publisher of a sum, and its terms if they differ from *last, those of the sum before. 0 with an exception.
 * */
static int put_sum(Text *publishers, Text *words, long long *count, const Offered *of, PyObject *sum, Py_ssize_t place, OfferTerms *last)
{
    OfferTerms terms = {0, {0}, 0, 0.0, 0.0, NULL};
    if (!has_fields(sum, SUM_FIELDS, "a sum"))
        return 0;
    PyObject *weight = of->weight == Py_None ? weight_of(PyTuple_GetItem(sum, MEMBER)) : Py_NewRef(of->weight);
    const int is_read = weight != NULL && read_terms(of, sum, weight, &terms);
    Py_XDECREF(weight);
    const long long publisher = is_read ? PyLong_AsLongLong(PyTuple_GetItem(sum, SUM_PUBLISHER)) : -1;
    if (!is_read || (publisher == -1 && PyErr_Occurred()))
        return 0;
    put_number(publishers, publisher);
    if (place == 0 || !promise_equally(&terms, last) || terms.tokens != last->tokens || terms.handicap != last->handicap ||
        terms.weight != last->weight) {
        if (!put_terms(words, of, &terms, place))
            return 0;
        *count += 1;
    }
    *last = terms;
    return 1;
}

/* pack_sums(head, words, sums, most, blocks, size, weight_new, available, reusable, random, handicap, weight) -> bytes
 *
 * A call of `reserve`, packed for Redis: its first `words` words are packed in `head`, and the publishers and the terms
 * that offer_sums makes of the same arguments follow, each preceded by its number.
 */
PyObject *pack_sums(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    char *head = NULL;
    Py_ssize_t length = 0, count = 0;
    Offered of = {NULL, NULL, NULL, NULL, 0, 0, 0, 0, 0, 0.0, 0.0, NULL};
    if (!has_arguments("pack_sums", nargs, 12) || PyBytes_AsStringAndSize(args[0], &head, &length) < 0)
        return NULL;
    long long words_count = 0;
    const long long all = read_count(args[1]);
    if (all < 0 || !read_offered(args + 2, &of, &count))
        return NULL;
    const size_t room = ((size_t)count + 2) * (WORD_MAX + BULK_MAX);
    Text publishers = {PyMem_Malloc(room), 0}, words = {PyMem_Malloc(room), 0};
    OfferTerms last = {0, {0}, 0, 0.0, 0.0, NULL};
    Py_ssize_t put = 0;
    if (publishers.at == NULL || words.at == NULL)
        PyErr_NoMemory();
    for (; !PyErr_Occurred() && put < count; put++) {
        PyObject *sum = Py_XNewRef(PyList_GetItem(args[2], put));
        const int is_put = sum != NULL && put_sum(&publishers, &words, &words_count, &of, sum, put, &last);
        Py_XDECREF(sum);
        if (!is_put)
            break;
    }
    PyObject *packed = NULL;
    if (!PyErr_Occurred()) {
        char begin[32], counts[2][BULK_MAX + 32];
        Text of_publishers = {counts[0], 0}, of_words = {counts[1], 0};
        put_number(&of_publishers, count);
        put_number(&of_words, words_count);
        const int begun = snprintf(begin, sizeof begin, "*%lld\r\n", all + count + words_count + 2);
        const Text parts[] = {{begin, (size_t)begun}, {head, (size_t)length}, of_publishers, publishers, of_words, words};
        size_t total = 0;
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
            total += parts[i].length;
        packed = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total);
        char *to = packed == NULL ? NULL : PyBytes_AsString(packed);
        for (size_t i = 0; to != NULL && i < sizeof parts / sizeof *parts; to += parts[i].length, i++)
            memcpy(to, parts[i].at, parts[i].length);
    }
    PyMem_Free(publishers.at);
    PyMem_Free(words.at);
    return packed;
}
