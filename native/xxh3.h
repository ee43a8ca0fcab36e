/* XXH3-64 with a seed, from its published description: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
 *
 * The primes, the secret and the offsets into it are part of the format. Inputs of up to 16, up to 240 and more bytes
 * are hashed in three different ways; a block of 16 tokens is 64 bytes, a pair of hashes 16.
 */

#ifndef WAYMARK_XXH3_H
#define WAYMARK_XXH3_H

#include "bytes.h"

#include <stddef.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u
#define PRIME_MX1 0x165667919E3779F9u
#define PRIME_MX2 0x9FB21C651E98DF25u

enum {
    SECRET_BYTES = 192,
    SMALL_MAX = 16,   /* bytes of an input */
    PAIRED_MAX = 128, /* bytes of an input that is read from both ends */
    MEDIUM_MAX = 240, /* bytes of an input for which the secret is not derived from the seed */
    STRIPE = 64,
    STRIPES_PER_ROUND = (SECRET_BYTES - STRIPE) / 8,
    LANES = STRIPE / 8,
};

static const unsigned char default_secret[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

/* The state that is prepared once for all inputs of one seed. */
typedef struct {
    uint64_t seed;
    unsigned char secret[SECRET_BYTES]; /* for inputs above MEDIUM_MAX only */
} Xxh3;

/* Prepare the state for inputs of up to `length_max` bytes. */
static inline void xxh3_prepare(Xxh3 *state, uint64_t seed, size_t length_max)
{
    state->seed = seed;
    if (length_max <= MEDIUM_MAX)
        return;
    for (size_t at = 0; at < SECRET_BYTES; at += 16) {
        store_little64(state->secret + at, load_little64(default_secret + at) + seed);
        store_little64(state->secret + at + 8, load_little64(default_secret + at + 8) - seed);
    }
}

/* Rotate a number left by 1 to 63 bits. */
static inline uint64_t rotate_left(uint64_t number, int bits)
{
    return number << bits | number >> (64 - bits);
}

/* Return the two halves of the 128-bit product, folded into one. */
static inline uint64_t fold_product(uint64_t one, uint64_t other)
{
    const unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Do the last step for inputs of more than 8 bytes. */
static inline uint64_t avalanche(uint64_t hash)
{
    hash = (hash ^ hash >> 37) * PRIME_MX1;
    return hash ^ hash >> 32;
}

/* Do the last step for inputs of up to 3 bytes. */
static inline uint64_t avalanche_tiny(uint64_t hash)
{
    hash = (hash ^ hash >> 33) * PRIME64_2;
    hash = (hash ^ hash >> 29) * PRIME64_3;
    return hash ^ hash >> 32;
}

/* Hash 0 to 3 bytes. */
static inline uint64_t hash_tiny(const unsigned char *input, size_t length, uint64_t seed)
{
    if (length == 0)
        return avalanche_tiny(seed ^ load_little64(default_secret + 56) ^ load_little64(default_secret + 64));
    const uint32_t flip = load_little32(default_secret) ^ load_little32(default_secret + 4);
    const uint32_t bytes = (uint32_t)input[length - 1] | (uint32_t)length << 8 | (uint32_t)input[0] << 16 |
                           (uint32_t)input[length / 2] << 24;
    return avalanche_tiny((flip + seed) ^ bytes);
}

/* Hash 4 to 8 bytes. */
static inline uint64_t hash_word(const unsigned char *input, size_t length, uint64_t seed)
{
    const uint64_t flip = load_little64(default_secret + 8) ^ load_little64(default_secret + 16);
    const uint64_t both = (uint64_t)load_little32(input) << 32 | load_little32(input + length - 4);
    seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
    uint64_t hash = (flip - seed) ^ both;
    hash = (hash ^ rotate_left(hash, 49) ^ rotate_left(hash, 24)) * PRIME_MX2;
    hash = (hash ^ ((hash >> 35) + length)) * PRIME_MX2;
    return hash ^ hash >> 28;
}

/* Hash 9 to 16 bytes. */
static inline uint64_t hash_pair(const unsigned char *input, size_t length, uint64_t seed)
{
    const uint64_t first_flip = load_little64(default_secret + 24) ^ load_little64(default_secret + 32);
    const uint64_t last_flip = load_little64(default_secret + 40) ^ load_little64(default_secret + 48);
    const uint64_t first = (first_flip + seed) ^ load_little64(input);
    const uint64_t last = (last_flip - seed) ^ load_little64(input + length - 8);
    return avalanche(length + __builtin_bswap64(first) + last + fold_product(first, last));
}

/* Mix 16 bytes of the input with 16 of the secret. */
static inline uint64_t mix(const unsigned char *input, size_t secret_at, uint64_t seed)
{
    const unsigned char *secret = default_secret + secret_at;
    return fold_product(load_little64(input) ^ (load_little64(secret) + seed),
                        load_little64(input + 8) ^ (load_little64(secret + 8) - seed));
}

/* Hash 17 to 128 bytes: 16 from the start and 16 from the end at a time, until they meet. */
static inline uint64_t hash_from_both_ends(const unsigned char *input, size_t length, uint64_t seed)
{
    const unsigned char *end = input + length;
    uint64_t hash = length * PRIME64_1;
    for (size_t at = 0, pairs = (length + 31) / 32; at < 16 * pairs; at += 16)
        hash += mix(input + at, 2 * at, seed) + mix(end - at - 16, 2 * at + 16, seed);
    return avalanche(hash);
}

/* Hash 129 to 240 bytes. */
static uint64_t hash_medium(const unsigned char *input, size_t length, uint64_t seed)
{
    uint64_t hash = length * PRIME64_1;
    for (size_t at = 0; at < 128; at += 16)
        hash += mix(input + at, at, seed);
    hash = avalanche(hash);
    for (size_t at = 128; at + 16 <= length; at += 16)
        hash += mix(input + at, at - 128 + 3, seed);
    return avalanche(hash + mix(input + length - 16, 119, seed));
}

#if defined(__SSE2__)
/* Two lanes in each register. Memory holds them as the format does: x86 is little-endian. */
typedef struct {
    __m128i pairs[LANES / 2];
} Lanes;

/* Load the two lanes with number `pair` from `at`, of any alignment. */
static inline __m128i load_pair(const unsigned char *at, int pair)
{
    return _mm_loadu_si128((const __m128i *)(const void *)(at + 16 * pair));
}

/* Add a stripe, mixed with 64 bytes of the secret. */
static inline void accumulate(Lanes *lanes, const unsigned char *stripe, const unsigned char *secret)
{
    for (int i = 0; i < LANES / 2; i++) {
        const __m128i words = load_pair(stripe, i), value = _mm_xor_si128(words, load_pair(secret, i));
        const __m128i product = _mm_mul_epu32(value, _mm_srli_epi64(value, 32));
        const __m128i crossed = _mm_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
        lanes->pairs[i] = _mm_add_epi64(_mm_add_epi64(lanes->pairs[i], crossed), product);
    }
}

/* Mix the lanes with 64 bytes of the secret. */
static inline void scramble(Lanes *lanes, const unsigned char *secret)
{
    const __m128i prime = _mm_set1_epi32((int)PRIME32_1);
    for (int i = 0; i < LANES / 2; i++) {
        __m128i lane = _mm_xor_si128(lanes->pairs[i], _mm_srli_epi64(lanes->pairs[i], 47));
        lane = _mm_xor_si128(lane, load_pair(secret, i));
        const __m128i upper = _mm_slli_epi64(_mm_mul_epu32(_mm_srli_epi64(lane, 32), prime), 32);
        lanes->pairs[i] = _mm_add_epi64(_mm_mul_epu32(lane, prime), upper);
    }
}
#else
typedef struct {
    uint64_t lane[LANES];
} Lanes;

/* Add a stripe, mixed with 64 bytes of the secret. */
static inline void accumulate(Lanes *lanes, const unsigned char *stripe, const unsigned char *secret)
{
    for (int i = 0; i < LANES; i++) {
        const uint64_t word = load_little64(stripe + 8 * i), value = word ^ load_little64(secret + 8 * i);
        lanes->lane[i ^ 1] += word;
        lanes->lane[i] += (value & UINT32_MAX) * (value >> 32);
    }
}

/* Mix the lanes with 64 bytes of the secret. */
static inline void scramble(Lanes *lanes, const unsigned char *secret)
{
    for (int i = 0; i < LANES; i++) {
        const uint64_t lane = lanes->lane[i] ^ lanes->lane[i] >> 47 ^ load_little64(secret + 8 * i);
        lanes->lane[i] = lane * PRIME32_1;
    }
}
#endif

/* Hash 241 bytes and more: stripes into lanes, with the secret 8 bytes further on for each; the lanes are scrambled
 * after every 16 stripes. */
static uint64_t hash_large(const unsigned char *input, size_t length, const unsigned char *secret)
{
    uint64_t lane[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    Lanes lanes;
    memcpy(&lanes, lane, sizeof lanes);
    const size_t stripes = (length - 1) / STRIPE; /* the last one is counted from the end, full or not */
    for (size_t i = 0, step = 0; i < stripes; i++) {
        accumulate(&lanes, input + STRIPE * i, secret + 8 * step);
        if (++step == STRIPES_PER_ROUND) {
            scramble(&lanes, secret + SECRET_BYTES - STRIPE);
            step = 0;
        }
    }
    accumulate(&lanes, input + length - STRIPE, secret + SECRET_BYTES - STRIPE - 7);
    memcpy(lane, &lanes, sizeof lane);
    uint64_t hash = length * PRIME64_1;
    for (int i = 0; i < LANES; i += 2)
        hash += fold_product(lane[i] ^ load_little64(secret + 11 + 8 * i), lane[i + 1] ^ load_little64(secret + 19 + 8 * i));
    return avalanche(hash);
}

/* Return the hash of an input of any length, for which the state is prepared. */
static inline uint64_t xxh3(const Xxh3 *state, const void *data, size_t length)
{
    const unsigned char *input = data;
    if (length > MEDIUM_MAX)
        return hash_large(input, length, state->secret);
    if (length > PAIRED_MAX)
        return hash_medium(input, length, state->seed);
    if (length > SMALL_MAX)
        return hash_from_both_ends(input, length, state->seed);
    if (length > 8)
        return hash_pair(input, length, state->seed);
    if (length > 3)
        return hash_word(input, length, state->seed);
    return hash_tiny(input, length, state->seed);
}

#endif
