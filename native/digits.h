/* Turns decimal digits into numbers. A character that is not a digit must follow them in readable memory. */

#ifndef WAYMARK_DIGITS_H
#define WAYMARK_DIGITS_H

#include "bytes.h"

/* Read the digits from `at` as a number; *at moves to their end. -1 if there are none, or more than 10. */
static inline int64_t read_number(const char **at)
{
    const char *first = *at;
    int64_t number = 0;
    for (unsigned digit; (digit = (unsigned)((unsigned char)**at - '0')) < 10; ++*at) {
        if (*at - first == 10)
            return -1;
        number = number * 10 + digit;
    }
    return *at == first ? -1 : number;
}

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
/* Return 0 if eight bytes are digits; otherwise a number whose lowest set bit is in the first byte that is not a digit.
 *
 * A digit is 0x30..0x39: its upper half is 3, and stays so with 6 added. Only a byte that is not a digit carries into
 * the next byte.
 */
static inline uint64_t not_digits(uint64_t text)
{
    const uint64_t upper = 0xF0F0F0F0F0F0F0F0, more = 0x0606060606060606;
    return ((text & upper) | ((text + more) & upper) >> 4) ^ 0x3333333333333333;
}

/* Return the number that eight bytes of 0..9 stand for, the first of them the highest. */
static inline uint64_t eight_digits(uint64_t number)
{
    number = number * 10 + (number >> 8); /* pairs of digits, then fours, then all eight */
    number = (number & 0x00FF00FF00FF00FF) * 100 + (number >> 16 & 0x00FF00FF00FF00FF);
    return ((number & 0xFFFF) * 10000 + (number >> 32 & 0xFFFF)) & 0xFFFFFFFF;
}

/* Read like read_number, for up to 7 digits with 8 readable bytes: all at once, because with a branch for each digit
 * the processor would mispredict the end of each number. */
static inline int64_t read_short_number(const char **at)
{
    uint64_t text;
    memcpy(&text, *at, 8);
    const uint64_t wrong = not_digits(text);
    if (wrong == 0)
        return read_number(at);
    const int digits = __builtin_ctzll(wrong) / 8;
    if (digits == 0)
        return -1;
    *at += digits;
    return (int64_t)eight_digits((text & 0x0F0F0F0F0F0F0F0F) << (64 - 8 * digits));
}

/* Read the digits from `at` as a number, eight at once, as long as there are eight; *at moves to their end. */
static inline uint64_t read_eights(const char **at, const char *end)
{
    uint64_t number = 0, text;
    for (int eights = 0; eights < 2 && end - *at >= 8; eights++, *at += 8) {
        memcpy(&text, *at, 8);
        if (not_digits(text))
            break;
        number = number * 100000000 + eight_digits(text & 0x0F0F0F0F0F0F0F0F);
    }
    return number;
}
#else
#define read_short_number read_number
#define read_eights(at, end) 0
#endif

#endif
