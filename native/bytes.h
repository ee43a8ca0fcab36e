/* Reads and writes numbers in memory, of any alignment, in the byte order that the function's name says. */

#ifndef WAYMARK_BYTES_H
#define WAYMARK_BYTES_H

#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__)
#error "the compiler does not say its byte order"
#endif

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define as_little64(number) (number)
#define as_little32(number) (number)
#define as_big64(number) __builtin_bswap64(number)
#else
#define as_little64(number) __builtin_bswap64(number)
#define as_little32(number) __builtin_bswap32(number)
#define as_big64(number) (number)
#endif

/* Return the number in the bytes at `at`, the lowest first. */
static inline uint64_t load_little64(const void *at)
{
    uint64_t number;
    memcpy(&number, at, sizeof number);
    return as_little64(number);
}

/* Return the number in four bytes, the lowest first. */
static inline uint32_t load_little32(const void *at)
{
    uint32_t number;
    memcpy(&number, at, sizeof number);
    return as_little32(number);
}

/* Write a number to `at` as eight bytes, the lowest first. */
static inline void store_little64(void *at, uint64_t number)
{
    number = as_little64(number);
    memcpy(at, &number, sizeof number);
}

/* Write a number to `at` as four bytes, the lowest first. */
static inline void store_little32(void *at, uint32_t number)
{
    number = as_little32(number);
    memcpy(at, &number, sizeof number);
}

/* Return the number in eight bytes, the highest first. */
static inline uint64_t load_big64(const void *at)
{
    uint64_t number;
    memcpy(&number, at, sizeof number);
    return as_big64(number);
}

/* Write a number to `at` as eight bytes, the highest first. */
static inline void store_big64(void *at, uint64_t number)
{
    number = as_big64(number);
    memcpy(at, &number, sizeof number);
}

#endif
