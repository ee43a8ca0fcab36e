/* Slots of a row as text: 16 hex digits of a block's key, and its depth in the piece. */

#ifndef WAYMARK_SLOTS_H
#define WAYMARK_SLOTS_H

#include "bytes.h"

enum { SLOT_CHARS = 17, HEX_DIGITS = 16 };

static const char depth_digits[] = "0123456789abcdefghijklmnopqrstuv";

static inline void write_hex(char *at, uint64_t number)
{
    for (int digit = 0; digit < HEX_DIGITS; digit++)
        at[digit] = depth_digits[number >> (60 - 4 * digit) & 15];
}

static inline void write_slot(char *at, uint64_t key, unsigned depth)
{
    write_hex(at, key);
    at[HEX_DIGITS] = depth_digits[depth & 31];
}

/* The digit of a character, up to 31; -1 where it is none. */
static inline int digit_of(char character)
{
    if (character >= '0' && character <= '9')
        return character - '0';
    return character >= 'a' && character <= 'v' ? character - 'a' + 10 : -1;
}

/* The key and the depth of a slot. 0 where the text is none. */
static inline int read_slot(const char *at, uint64_t *key, unsigned *depth)
{
    *key = 0;
    for (int i = 0; i < HEX_DIGITS; i++) {
        const int digit = digit_of(at[i]);
        if (digit < 0 || digit > 15)
            return 0;
        *key = *key << 4 | (uint64_t)digit;
    }
    const int last = digit_of(at[HEX_DIGITS]);
    *depth = (unsigned)last;
    return last >= 0;
}

#endif
