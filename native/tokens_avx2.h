/* Reads token ids from a JSON text, 64 characters at a time, for an x86-64 with AVX2 (Intel's since 2013, AMD's since
 * 2015).
 *
 * Reading one number after the other has to find the end of each before it can begin with the next. Here the ends of all
 * numbers in 64 characters are found at once, and eight numbers are then read together; none waits for another. All 64
 * characters are checked together, by masks of their positions; two passes over a mask cost less than a branch.
 */

#include <immintrin.h>

/* The module is for every x86-64, so a function that needs more says so, and is called after has_avx2 only. */
#define NEEDS_AVX2 __attribute__((target("avx2,bmi")))

/* Return whether the processor can do what these functions need. */
static inline int has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi");
}

/* 64 characters. */
typedef struct {
    __m256i half[2];
} Text;

/* Load the first characters from `at`, of which `left` may be read, followed by commas. */
NEEDS_AVX2 static inline Text load_text(const char *at, Py_ssize_t left)
{
    char few[64];
    if (left < 64) {
        memset(few, ',', 64);
        memcpy(few, at, (size_t)left);
        at = few;
    }
    /* Not by memcpy, which may store two halves that are then loaded as one: that load waits for the memory. */
    return (Text){{_mm256_loadu_si256((const __m256i *)(const void *)at),
                   _mm256_loadu_si256((const __m256i *)(const void *)(at + 32))}};
}

/* Return the upper bits of all bytes of two halves, the first in the lowest bit. */
NEEDS_AVX2 static inline uint64_t bits_of(__m256i first, __m256i second)
{
    return (uint32_t)_mm256_movemask_epi8(first) | (uint64_t)(uint32_t)_mm256_movemask_epi8(second) << 32;
}

/* Return a bit for each character, set if it is `what`. */
NEEDS_AVX2 static inline uint64_t which(Text text, char what)
{
    const __m256i wanted = _mm256_set1_epi8(what);
    return bits_of(_mm256_cmpeq_epi8(text.half[0], wanted), _mm256_cmpeq_epi8(text.half[1], wanted));
}

/* Return a bit for each character, set if it is a digit. */
NEEDS_AVX2 static inline uint64_t which_digits(Text text)
{
    __m256i is_digit[2];
    for (int i = 0; i < 2; i++) {
        const __m256i number = _mm256_sub_epi8(text.half[i], _mm256_set1_epi8('0'));
        is_digit[i] = _mm256_cmpeq_epi8(_mm256_min_epu8(number, _mm256_set1_epi8(9)), number);
    }
    return bits_of(is_digit[0], is_digit[1]);
}

enum { ENDS_MAX = 512 };

/* The ends of some numbers, after the end of the number before them; each end is counted in characters from `base`.
 * `lengths` has all lengths so far, each less 1, joined by OR: it is below 8 if each length is 1 to 8. */
typedef struct {
    const char *base;
    uint32_t gap; /* characters between two numbers */
    uint32_t count;
    __m128i lengths;
    uint32_t at[1 + ENDS_MAX];
} Ends;

/* Append the commas of 64 characters, the first of which is `from` characters from the base. */
NEEDS_AVX2 static inline void add_ends(Ends *ends, uint32_t from, uint64_t commas)
{
    uint32_t *out = ends->at + 1 + ends->count;
    ends->count += (uint32_t)__builtin_popcountll(commas);
    /* Four at once, even if there are fewer, because the processor cannot predict their number. */
    for (; commas != 0; out += 4)
        for (int i = 0; i < 4; i++, commas = _blsr_u64(commas))
            out[i] = from + (uint32_t)_tzcnt_u64(commas);
}

/* Return the eight characters before the end of number `i`. */
static inline const void *before_end(const Ends *ends, uint32_t i)
{
    return ends->base + ends->at[1 + i] - 8;
}

/* Load the eight characters before the end of number `i`, and those before the end of the next one. */
NEEDS_AVX2 static inline __m128i load_two(const Ends *ends, uint32_t i)
{
    const __m128 one = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)before_end(ends, i)));
    return _mm_castps_si128(_mm_loadh_pi(one, (const __m64 *)before_end(ends, i + 1)));
}

/* Return, for four numbers from number `i` on, the upper four digits of each, and the lower four. */
NEEDS_AVX2 static inline __m256i read_four(Ends *ends, uint32_t i)
{
    const __m128i former = _mm_loadu_si128((const __m128i *)(const void *)(ends->at + i));
    const __m128i end = _mm_loadu_si128((const __m128i *)(const void *)(ends->at + i + 1));
    const __m128i length = _mm_sub_epi32(_mm_sub_epi32(end, former), _mm_set1_epi32((int)ends->gap));
    ends->lengths = _mm_or_si128(ends->lengths, _mm_sub_epi32(length, _mm_set1_epi32(1)));
    /* Zeros in place of the bits that stand before the digits. */
    const __m128i bits = _mm_sub_epi32(_mm_set1_epi32(64), _mm_slli_epi32(length, 3));
    const __m256i is_digit = _mm256_sllv_epi64(_mm256_set1_epi8(0x0F), _mm256_cvtepu32_epi64(bits));
    const __m256i text = _mm256_set_m128i(load_two(ends, i + 2), load_two(ends, i));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_and_si256(text, is_digit), _mm256_set1_epi16(1 << 8 | 10));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi32(1 << 16 | 100));
}

/* Read number `i` by itself. */
NEEDS_AVX2 static inline uint32_t read_one(Ends *ends, uint32_t i)
{
    const uint32_t length = ends->at[1 + i] - ends->at[i] - ends->gap;
    const uint64_t text = load_little64(before_end(ends, i)) & 0x0F0F0F0F0F0F0F0F;
    ends->lengths = _mm_or_si128(ends->lengths, _mm_cvtsi32_si128((int)(length - 1)));
    return (uint32_t)eight_digits(text & ~(uint64_t)0 << (64 - 8 * length) % 64);
}

/* Read the numbers of these ends into `out`, eight at a time, and with `is_last` also the rest. */
NEEDS_AVX2 static inline void read_ends(Ends *ends, unsigned char **out, int is_last)
{
    uint32_t i = 0;
    for (; i + 8 <= ends->count; i += 8, *out += 32) {
        const __m256i fours = _mm256_packus_epi32(read_four(ends, i), read_four(ends, i + 4));
        const __m256i numbers = _mm256_madd_epi16(fours, _mm256_set1_epi32(1 << 16 | 10000));
        /* The two halves of a register were packed separately. */
        _mm256_storeu_si256((__m256i *)(void *)*out, _mm256_permute4x64_epi64(numbers, _MM_SHUFFLE(3, 1, 2, 0)));
    }
    for (; is_last && i < ends->count; i++, *out += 4)
        store_little32(*out, read_one(ends, i));
    ends->count -= i;
    memmove(ends->at, ends->at + i, (1 + ends->count) * sizeof *ends->at);
}

/* Read the numbers between `at` and the bracket at `close` into `out`, one more than there are commas. 0 if they are
 * not plain: each of 1 to 8 digits, so that it fits a u32, without leading zeros, and either `,` or `, ` between all of
 * them. There are eight readable bytes before `at`. */
NEEDS_AVX2 __attribute__((noinline)) /* inside its caller it runs out of registers and takes twice as long */
static int read_plain_tokens(const char *at, const char *close, unsigned char *out)
{
    if (close - at > INT32_MAX)
        return 0;
    const char *comma = memchr(at, ',', (size_t)(close - at));
    const int has_spaces = comma != NULL && comma[1] == ' ';
    Ends ends;
    ends.base = at - 8;
    ends.gap = 1 + (uint32_t)has_spaces;
    ends.count = 0;
    ends.lengths = _mm_setzero_si128();
    ends.at[0] = 8 - ends.gap;
    uint64_t wrong = 0;
    /* Of the character before these 64: is it a comma, a digit, a zero that begins a number? */
    uint64_t was_comma = 0, was_digit = 0, was_zero = 0;
    for (;; at += 64) {
        const Py_ssize_t left = close - at;
        const Text text = load_text(at, left);
        const uint64_t digits = which_digits(text), spaces = which(text, ' ');
        uint64_t commas = which(text, ',');
        wrong |= ~(digits | commas | spaces);
        const uint64_t zeros = which(text, '0') & ~(digits << 1 | was_digit);
        wrong |= (zeros << 1 | was_zero) & digits;
        if (left < 64)
            commas &= ((uint64_t)1 << left) - 1;
        wrong |= spaces ^ (has_spaces ? commas << 1 | was_comma : 0);
        was_comma = commas >> 63;
        was_digit = digits >> 63;
        was_zero = zeros >> 63;
        if (left < 64)
            commas |= (uint64_t)1 << left; /* the bracket */
        add_ends(&ends, (uint32_t)(at - ends.base), commas);
        if (left < 64 || ends.count >= ENDS_MAX / 2)
            read_ends(&ends, &out, left < 64);
        if (left < 64) {
            const __m128i long_ones = _mm_andnot_si128(_mm_set1_epi32(7), ends.lengths);
            return wrong == 0 && _mm_testz_si128(long_ones, long_ones);
        }
    }
}
