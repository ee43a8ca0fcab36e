/* Reads the value of a row: see rows.h. */

#include "rows.h"

#include <stdlib.h>

enum { ID_DIGITS_MAX = 16 };

void open_piece(Piece *piece, const unsigned char *keys, Py_ssize_t count)
{
    piece->count = count < PIECE ? (int)count : PIECE;
    piece->every = (uint32_t)(((uint64_t)1 << piece->count) - 1);
    for (int i = 0; i < piece->count; i++)
        write_slot(piece->slots + SLOT_CHARS * i, load_big64(keys + KEY * i), (unsigned)i);
}

/* Find each own block among the slots. */
static void find_own(Slots *slots, const char *value, const Piece *piece)
{
    slots->found = 0;
    slots->shift = -1;
    if (piece->count <= slots->count && memcmp(value, piece->slots, (size_t)piece->count * SLOT_CHARS) == 0) {
        slots->found = piece->every;
        slots->shift = 0;
        return;
    }
    int next = 0, shift = -1;
    for (int i = 0; i < piece->count; i++) {
        const char *own = piece->slots + SLOT_CHARS * i;
        int slot = next < slots->count && memcmp(value + SLOT_CHARS * next, own, SLOT_CHARS) == 0 ? next : 0;
        /* A chain is mostly in consecutive slots; any other block is searched for from the first slot on. */
        while (slot < slots->count && memcmp(value + SLOT_CHARS * slot, own, SLOT_CHARS) != 0)
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

int read_slots(const Input *value, const Piece *piece, Slots *slots, const char **rest)
{
    const char *start = value->start;
    const size_t most = SLOT_CHARS * SLOTS_MAX + 2, size = (size_t)value->size;
    const char *end = memchr(start, ' ', size < most ? size : most);
    if (end == NULL) {
        if (size >= most)
            return 0;
        end = start + size;
    }
    *rest = end;
    slots->is_marked = end > start && end[-1] == '+';
    const Py_ssize_t length = end - start - slots->is_marked;
    if (length % SLOT_CHARS != 0 || length < SLOT_CHARS || length > SLOT_CHARS * SLOTS_MAX)
        return 0;
    slots->count = (int)(length / SLOT_CHARS);
    const char *depth = memchr(depth_digits, start[HEX_DIGITS], PIECE);
    slots->first = depth == NULL ? PIECE : (int)(depth - depth_digits);
    if (slots->first >= piece->count || memcmp(start, piece->slots + SLOT_CHARS * slots->first, SLOT_CHARS) != 0) {
        /* The first slot of a shared branch row is that of the head, except for its leading digits. */
        if (memcmp(start + SHARED_DIGITS, piece->slots + SHARED_DIGITS, SLOT_CHARS - SHARED_DIGITS) != 0)
            return 0;
        slots->first = PIECE;
    }
    find_own(slots, start, piece);
    return 1;
}

/* Return the own blocks of a bitmap of slots. */
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

/* Return the value of a hex digit; -1 for any other character. */
static int hex_digit(char digit)
{
    if (digit >= '0' && digit <= '9')
        return digit - '0';
    return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

/* Read one ` <holder>:<bitmap>` at *at, and move *at to its end. 0 if it cannot be read. A zero follows the value. */
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
        if (next - digits < HEX_DIGITS)
            bitmap = bitmap << 4 | (uint64_t)digit;
    if (*digits == '0' || next == digits || next - digits > HEX_DIGITS)
        return 0;
    if (slots->count < SLOTS_MAX && bitmap >> slots->count != 0)
        return 0;
    holder->blocks = own_blocks(slots, bitmap);
    *at = next;
    return 1;
}

/* Return the ascending order of two ids, as qsort asks for it. */
static int compare_ids(const void *one, const void *other)
{
    const uint64_t a = ((const Holder *)one)->id, b = ((const Holder *)other)->id;
    return (a > b) - (a < b);
}

/* Make room for one more holder, after the last. NULL with an exception. */
static Holder *next_holder(Holders *holders)
{
    if (holders->count == holders->room) {
        const size_t room = holders->room == 0 ? 64 : 2 * holders->room;
        Holder *first = PyMem_Realloc(holders->first, room * sizeof *first);
        if (first == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        holders->first = first;
        holders->room = room;
    }
    return &holders->first[holders->count];
}

int read_holders(const char *at, const char *end, const Slots *slots, Holders *holders)
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

void unite(Holders *holders)
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
