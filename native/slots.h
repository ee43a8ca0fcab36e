/* Slots of a row as text: 16 hex digits of a block's key, and its depth in the piece. */

#ifndef WAYMARK_SLOTS_H
#define WAYMARK_SLOTS_H

#include "bytes.h"

#if defined(__x86_64__) && defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { SLOT_CHARS = 17, HEX_DIGITS = 16, DEPTHS = 32 };

static const char depth_digits[] = "0123456789abcdefghijklmnopqrstuv";

#if defined(__x86_64__) && defined(__SSE2__)
/* Write the 16 hex digits of 64 bits. */
static inline void write_hex(char *at, uint64_t number)
{
    const __m128i bytes = _mm_cvtsi64_si128((long long)as_big64(number)), four_bits = _mm_set1_epi8(15);
    const __m128i upper = _mm_and_si128(_mm_srli_epi16(bytes, 4), four_bits);
    const __m128i digits = _mm_unpacklo_epi8(upper, _mm_and_si128(bytes, four_bits));
    /* From 10 on they are letters, which are 39 characters after the digits. */
    const __m128i letters = _mm_and_si128(_mm_cmpgt_epi8(digits, _mm_set1_epi8(9)), _mm_set1_epi8(39));
    const __m128i text = _mm_add_epi8(_mm_add_epi8(digits, _mm_set1_epi8('0')), letters);
    _mm_storeu_si128((__m128i *)(void *)at, text);
}
#else
/* Write the 8 hex digits of 32 bits, at once. */
static inline void write_hex32(char *out, uint32_t number)
{
    /* Halved until each byte has four bits; the highest are in the lowest byte, which is written first. */
    uint64_t digits = number >> 16 | (uint64_t)(number & 0xFFFF) << 32;
    digits = (digits >> 8 & 0x000000FF000000FF) | (digits & 0x000000FF000000FF) << 16;
    digits = (digits >> 4 & 0x000F000F000F000F) | (digits & 0x000F000F000F000F) << 8;
    /* From 10 on they are letters, which are 39 characters after the digits. */
    const uint64_t letters = (digits + 0x0606060606060606) >> 4 & 0x0101010101010101;
    store_little64(out, digits + 0x3030303030303030 + letters * 39);
}

/* Write the 16 hex digits of 64 bits. */
static inline void write_hex(char *at, uint64_t number)
{
    write_hex32(at, (uint32_t)(number >> 32));
    write_hex32(at + 8, (uint32_t)number);
}
#endif

/* Write the SLOT_CHARS of a slot, without a terminating zero. */
static inline void write_slot(char *at, uint64_t key, unsigned depth)
{
    write_hex(at, key);
    at[HEX_DIGITS] = depth_digits[depth & (DEPTHS - 1)];
}

/* Return the digit of a character, up to 31; -1 if it is not a digit. */
static inline int digit_of(char character)
{
    if (character >= '0' && character <= '9')
        return character - '0';
    return character >= 'a' && character <= 'v' ? character - 'a' + 10 : -1;
}

/* Read the key and the depth of a slot. 0 if the text is not a slot. */
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
