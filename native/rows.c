/* Rows to runs of equal holders, as app/waymark/domain/row_runs.py describes them. */

#include "bytes.h"
#include "input.h"

enum { KEY = 8, KEY_DIGITS = 2 * KEY, SLOT = KEY_DIGITS + 1, PIECE = 32, SLOTS_MAX = 64, ID_DIGITS_MAX = 16 };

static const char depth_digits[] = "0123456789abcdefghijklmnopqrstuv";

/* A holder in a value: its id as a number and as text, and the own blocks of the piece that it has. */
typedef struct {
    uint64_t id;
    const char *text;
    uint32_t length, blocks;
} Holder;

typedef struct {
    Holder *first;
    size_t count, room;
} Holders;

/* The blocks of a chain in one piece, and their slots as a row has them. */
typedef struct {
    char slots[SLOT * PIECE];
    int count;
    uint32_t every; /* a bit for each */
} Piece;

/* The slots of a value. */
typedef struct {
    int count, is_marked, first; /* first: which own block is in the first slot */
    uint32_t found;              /* own blocks that are in a slot */
    int shift;                   /* each of them is in the slot of its number less this; -1: that is not so */
    signed char slot_of[PIECE];  /* -1: in none */
} Slots;

static int take_memory(void *memory)
{
    if (memory == NULL)
        PyErr_NoMemory();
    return memory != NULL;
}

/* The 8 hex digits of 32 bits, at once. */
static void write_hex(char *out, uint32_t number)
{
    /* Halved until each byte has four bits; the highest are in the lowest byte, which is written first. */
    uint64_t digits = number >> 16 | (uint64_t)(number & 0xFFFF) << 32;
    digits = (digits >> 8 & 0x000000FF000000FF) | (digits & 0x000000FF000000FF) << 16;
    digits = (digits >> 4 & 0x000F000F000F000F) | (digits & 0x000F000F000F000F) << 8;
    /* 10 and more are letters: 39 characters behind the digits. */
    const uint64_t letters = (digits + 0x0606060606060606) >> 4 & 0x0101010101010101;
    store_little64(out, digits + 0x3030303030303030 + letters * 39);
}

static void open_piece(Piece *piece, const unsigned char *keys, Py_ssize_t count)
{
    piece->count = count < PIECE ? (int)count : PIECE;
    piece->every = (uint32_t)(((uint64_t)1 << piece->count) - 1);
    char *out = piece->slots;
    for (int i = 0; i < piece->count; i++, keys += KEY, out += SLOT) {
        const uint64_t key = load_big64(keys);
        write_hex(out, (uint32_t)(key >> 32));
        write_hex(out + KEY, (uint32_t)key);
        out[KEY_DIGITS] = depth_digits[i];
    }
}

/* Where each own block is among the slots. */
static void find_own(Slots *slots, const char *value, const Piece *piece)
{
    slots->found = 0;
    slots->shift = -1;
    if (piece->count <= slots->count && memcmp(value, piece->slots, (size_t)piece->count * SLOT) == 0) {
        slots->found = piece->every;
        slots->shift = 0;
        return;
    }
    int next = 0, shift = -1;
    for (int i = 0; i < piece->count; i++) {
        const char *own = piece->slots + SLOT * i;
        int slot = next < slots->count && memcmp(value + SLOT * next, own, SLOT) == 0 ? next : 0;
        /* A chain is mostly in consecutive slots; a block that is not is searched from the first one on. */
        while (slot < slots->count && memcmp(value + SLOT * slot, own, SLOT) != 0)
            slot++;
        slots->slot_of[i] = (signed char)(slot < slots->count ? slot : -1);
        if (slot == slots->count)
            continue;
        next = slot + 1;
        if (slots->found == 0)
            shift = i - slot;
        else if (shift != i - slot)
            shift = -1;
        slots->found |= (uint32_t)1 << i;
    }
    slots->shift = shift;
}

/* The slots of a value, and in *rest what follows them. 0 where they cannot be read. */
static int read_slots(const Input *value, const Piece *piece, Slots *slots, const char **rest)
{
    const char *start = value->start;
    const size_t most = SLOT * SLOTS_MAX + 2, size = (size_t)value->size;
    const char *end = memchr(start, ' ', size < most ? size : most);
    if (end == NULL) {
        if (size >= most)
            return 0;
        end = start + size;
    }
    *rest = end;
    slots->is_marked = end > start && end[-1] == '+';
    const Py_ssize_t length = end - start - slots->is_marked;
    if (length % SLOT != 0 || length < SLOT || length > SLOT * SLOTS_MAX)
        return 0;
    slots->count = (int)(length / SLOT);
    const char *depth = memchr(depth_digits, start[KEY_DIGITS], PIECE);
    slots->first = depth == NULL ? PIECE : (int)(depth - depth_digits);
    if (slots->first >= piece->count || memcmp(start, piece->slots + SLOT * slots->first, SLOT) != 0)
        return 0;
    find_own(slots, start, piece);
    return 1;
}

/* The own blocks of a bitmap of slots. */
static uint32_t own_blocks(const Slots *slots, uint64_t bitmap)
{
    if (slots->shift >= 0)
        return (uint32_t)(bitmap << slots->shift) & slots->found;
    uint32_t blocks = 0;
    for (uint32_t left = slots->found; left != 0; left &= left - 1) {
        const int i = __builtin_ctz(left);
        blocks |= (uint32_t)(bitmap >> slots->slot_of[i] & 1) << i;
    }
    return blocks;
}

static int hex_digit(char digit)
{
    if (digit >= '0' && digit <= '9')
        return digit - '0';
    return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

/* One ` <holder>:<bitmap>` from *at; *at goes behind it. 0 where it cannot be read. A zero follows the value. */
static int read_holder(const char **at, const Slots *slots, Holder *holder)
{
    const char *text = *at + 1, *next = text;
    holder->id = 0;
    for (; *next >= '0' && *next <= '9'; next++)
        if (next - text < ID_DIGITS_MAX)
            holder->id = 10 * holder->id + (uint64_t)(*next - '0');
    if (**at != ' ' || *text == '0' || next == text || next - text > ID_DIGITS_MAX || *next != ':')
        return 0;
    holder->text = text;
    holder->length = (uint32_t)(next - text);
    const char *digits = ++next;
    uint64_t bitmap = 0;
    for (int digit; (digit = hex_digit(*next)) >= 0; next++)
        if (next - digits < KEY_DIGITS)
            bitmap = bitmap << 4 | (uint64_t)digit;
    if (*digits == '0' || next == digits || next - digits > KEY_DIGITS)
        return 0;
    if (slots->count < SLOTS_MAX && bitmap >> slots->count != 0)
        return 0;
    holder->blocks = own_blocks(slots, bitmap);
    *at = next;
    return 1;
}

static int compare_ids(const void *one, const void *other)
{
    const uint64_t a = ((const Holder *)one)->id, b = ((const Holder *)other)->id;
    return (a > b) - (a < b);
}

static Holder *next_holder(Holders *holders)
{
    if (holders->count == holders->room) {
        const size_t room = holders->room == 0 ? 64 : 2 * holders->room;
        Holder *first = realloc(holders->first, room * sizeof *first);
        if (!take_memory(first))
            return NULL;
        holders->first = first;
        holders->room = room;
    }
    return &holders->first[holders->count];
}

/* The holders of a value behind those of `holders`, ascending. 0 where they cannot be read, -1 with an exception. */
static int read_holders(const char *at, const char *end, const Slots *slots, Holders *holders)
{
    const size_t before = holders->count;
    int is_ascending = 1;
    while (at < end) {
        Holder *holder = next_holder(holders);
        if (holder == NULL)
            return -1;
        if (!read_holder(&at, slots, holder)) {
            holders->count = before;
            return 0;
        }
        is_ascending = is_ascending && (holders->count == before || holder[-1].id < holder->id);
        holders->count++;
    }
    if (is_ascending)
        return 1;
    Holder *first = holders->first + before;
    const size_t count = holders->count - before;
    qsort(first, count, sizeof *first, compare_ids);
    for (size_t i = 1; i < count; i++)
        if (first[i].id == first[i - 1].id) {
            holders->count = before;
            return 0;
        }
    return 1;
}

/* The holders of several values, each once. */
static void unite(Holders *holders)
{
    qsort(holders->first, holders->count, sizeof *holders->first, compare_ids);
    size_t kept = 0;
    for (size_t i = 0; i < holders->count; i++)
        if (kept > 0 && holders->first[kept - 1].id == holders->first[i].id)
            holders->first[kept - 1].blocks |= holders->first[i].blocks;
        else
            holders->first[kept++] = holders->first[i];
    holders->count = kept;
}

/* The runs so far: the last one is not in the list yet, because it may go on. */
typedef struct {
    PyObject *list, *value;
    Py_ssize_t count;
    char *text;
    size_t room;
} Runs;

static int end_run(Runs *runs)
{
    if (runs->value == NULL)
        return 1;
    PyObject *run = Py_BuildValue("Nn", runs->value, runs->count);
    runs->value = NULL;
    const int outcome = run == NULL ? -1 : PyList_Append(runs->list, run);
    Py_XDECREF(run);
    return outcome == 0;
}

static int add_run(Runs *runs, const char *text, size_t size, Py_ssize_t count)
{
    char *value;
    Py_ssize_t length;
    if (runs->value != NULL) {
        if (PyBytes_AsStringAndSize(runs->value, &value, &length) < 0)
            return 0;
        if ((size_t)length == size && memcmp(value, text, size) == 0) {
            runs->count += count;
            return 1;
        }
        if (!end_run(runs))
            return 0;
    }
    runs->value = PyBytes_FromStringAndSize(text, (Py_ssize_t)size);
    runs->count = count;
    return runs->value != NULL;
}

/* The ids of those who have block `at`, in runs->text. *size 0: nobody has. 0 with an exception. */
static int write_holders(Runs *runs, const Holders *holders, int at, size_t *size)
{
    size_t room = 0;
    for (size_t i = 0; i < holders->count; i++)
        room += holders->first[i].length + 1;
    if (room > runs->room) {
        char *text = realloc(runs->text, room);
        if (!take_memory(text))
            return 0;
        runs->text = text;
        runs->room = room;
    }
    char *out = runs->text;
    for (size_t i = 0; i < holders->count; i++) {
        const Holder *holder = &holders->first[i];
        if (holder->blocks >> at & 1) {
            memcpy(out, holder->text, holder->length);
            out += holder->length;
            *out++ = ' ';
        }
    }
    *size = out == runs->text ? 0 : (size_t)(out - runs->text) - 1;
    return 1;
}

/* The runs of the first `count` blocks, up to the first that nobody has; how many blocks they are. -1: an exception. */
static int add_runs(Runs *runs, const Holders *holders, int count)
{
    uint32_t changes = 0;
    for (size_t i = 0; i < holders->count; i++)
        changes |= holders->first[i].blocks ^ (holders->first[i].blocks >> 1);
    int at = 0;
    while (at < count) {
        size_t size;
        const uint32_t until = changes >> at;
        int length = until == 0 ? count : __builtin_ctz(until) + 1;
        if (length > count - at)
            length = count - at;
        if (!write_holders(runs, holders, at, &size))
            return -1;
        if (size == 0)
            break;
        if (!add_run(runs, runs->text, size, length))
            return -1;
        at += length;
    }
    return at;
}

static int begin_runs(Runs *runs)
{
    memset(runs, 0, sizeof *runs);
    runs->list = PyList_New(0);
    return runs->list != NULL;
}

/* The list of all runs, NULL with an exception. */
static PyObject *finish_runs(Runs *runs, int is_whole)
{
    if (is_whole && !end_run(runs))
        is_whole = 0;
    Py_XDECREF(runs->value);
    free(runs->text);
    if (!is_whole)
        Py_CLEAR(runs->list);
    return runs->list;
}

typedef enum { FAILED = -1, GOES_ON, IS_OVER, UNDECIDED } Verdict;

/* The runs of one piece by its row alone. */
static Verdict add_row(Runs *runs, Holders *holders, const Piece *piece, const Input *value)
{
    Slots slots;
    const char *rest;
    holders->count = 0;
    if (!read_slots(value, piece, &slots, &rest) || slots.first != 0)
        return UNDECIDED;
    const int outcome = read_holders(rest, value->start + value->size, &slots, holders);
    if (outcome < 0)
        return FAILED;
    if (outcome == 0 || (slots.is_marked && slots.found != piece->every))
        return UNDECIDED;
    const int blocks = add_runs(runs, holders, piece->count);
    return blocks < 0 ? FAILED : blocks == piece->count ? GOES_ON : IS_OVER;
}

/* As row_runs, for the values of a list. *pieces: how many decided by themselves. */
static Verdict add_rows(Runs *runs, const Input *keys, PyObject *rows, Py_ssize_t *pieces)
{
    Piece piece;
    Input value;
    Holders holders = {NULL, 0, 0};
    Verdict verdict = GOES_ON;
    const Py_ssize_t count = PyList_Size(rows), blocks = keys->size / KEY;
    for (*pieces = 0; verdict == GOES_ON && *pieces < count; *pieces += verdict == GOES_ON) {
        PyObject *row = PyList_GetItem(rows, *pieces);
        const Py_ssize_t at = PIECE * *pieces;
        if (row == Py_None || at >= blocks)
            verdict = IS_OVER;
        else if (!open_bytes(row, &value))
            verdict = FAILED;
        else {
            open_piece(&piece, (const unsigned char *)keys->start + KEY * at, blocks - at);
            verdict = add_row(runs, &holders, &piece, &value);
            close_input(&value);
        }
    }
    free(holders.first);
    return verdict;
}

/* row_runs(keys: bytes, rows: list[bytes | None]) -> tuple[list[tuple[bytes, int]], int, bool]
 *
 * The runs of a chain, as far as the row of each piece decides by itself; for how many pieces; whether nobody has the
 * block after them.
 */
PyObject *row_runs(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Input keys;
    Runs runs;
    Py_ssize_t pieces;
    if (!has_arguments("row_runs", nargs, 2) || !open_bytes(args[0], &keys))
        return NULL;
    PyObject *answer = NULL;
    if (!PyList_Check(args[1]))
        PyErr_Format(PyExc_TypeError, "row_runs() takes a list, not %R", Py_TYPE(args[1]));
    else if (begin_runs(&runs)) {
        const Verdict verdict = add_rows(&runs, &keys, args[1], &pieces);
        PyObject *list = finish_runs(&runs, verdict != FAILED);
        if (list != NULL)
            answer = Py_BuildValue("NnN", list, pieces, PyBool_FromLong(verdict == IS_OVER));
    }
    close_input(&keys);
    return answer;
}

/* One of the values of a piece. 0 with an exception. */
static int add_value(const Piece *piece, const Input *value, int is_row, Holders *holders, uint32_t *missing, int *is_bad)
{
    Slots slots;
    const char *rest;
    int outcome = read_slots(value, piece, &slots, &rest) && (slots.first == 0 || !is_row);
    if (outcome)
        outcome = read_holders(rest, value->start + value->size, &slots, holders);
    *is_bad = outcome == 0;
    if (outcome > 0 && is_row && slots.is_marked)
        *missing = piece->every & ~slots.found;
    return outcome >= 0;
}

/* As piece_runs, for the values of a list, which stay open until the runs are written. */
static PyObject *unite_values(const Piece *piece, PyObject *values, Input *inputs, Py_ssize_t count)
{
    Runs runs;
    Holders holders = {NULL, 0, 0};
    uint32_t missing = 0;
    uint64_t bad = 0;
    Py_ssize_t opened = 0;
    if (!begin_runs(&runs))
        return NULL;
    int is_whole = 1;
    for (Py_ssize_t i = 0; is_whole && i < count; i++) {
        PyObject *value = PyList_GetItem(values, i);
        int is_bad = 0;
        if (value == Py_None)
            continue;
        is_whole = open_bytes(value, &inputs[opened]);
        if (!is_whole)
            break;
        is_whole = add_value(piece, &inputs[opened++], i == 0, &holders, &missing, &is_bad);
        bad |= (uint64_t)is_bad << i;
    }
    if (is_whole && opened > 1 && holders.count > 1)
        unite(&holders);
    is_whole = is_whole && add_runs(&runs, &holders, piece->count) >= 0;
    while (opened > 0)
        close_input(&inputs[--opened]);
    free(holders.first);
    PyObject *list = finish_runs(&runs, is_whole);
    return list == NULL ? NULL : Py_BuildValue("NkK", list, (unsigned long)missing, (unsigned long long)bad);
}

/* piece_runs(keys: bytes, values: list[bytes | None]) -> tuple[list[tuple[bytes, int]], int, int]
 *
 * The runs of one piece by all values that may list its blocks, its row first, at most 64; the blocks that may be in
 * branch rows; which values cannot be read.
 */
PyObject *piece_runs(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Input keys, inputs[64];
    Piece piece;
    if (!has_arguments("piece_runs", nargs, 2) || !open_bytes(args[0], &keys))
        return NULL;
    const Py_ssize_t blocks = keys.size / KEY, count = PyList_Check(args[1]) ? PyList_Size(args[1]) : -1;
    PyObject *answer = NULL;
    if (count < 0)
        PyErr_Format(PyExc_TypeError, "piece_runs() takes a list, not %R", Py_TYPE(args[1]));
    else if (blocks < 1 || blocks > PIECE || count > 64)
        PyErr_Format(PyExc_ValueError, "%zd blocks or %zd values are not those of one piece", blocks, count);
    else {
        open_piece(&piece, (const unsigned char *)keys.start, blocks);
        answer = unite_values(&piece, args[1], inputs, count);
    }
    close_input(&keys);
    return answer;
}
