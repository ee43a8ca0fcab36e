/* Token ids out of a JSON text, 64 characters at a time, for where there is SSE2 (every x86-64).
 *
 * Reading one number after the other has to find the end of each before it can begin with the next. Here the ends of all
 * numbers in 64 characters are found at once, and four numbers are then read together; none waits for another. What is
 * checked of the characters is checked of all 64 together, by what stands where; two passes over a mask cost less than
 * a branch.
 */

#include <emmintrin.h>

/* Which of 64 characters are `what`, and which are digits; the first in the lowest bit. */
static inline uint64_t which(const __m128i *text, char what)
{
    uint64_t found = 0;
    for (int i = 0; i < 4; i++)
        found |= (uint64_t)(unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(text[i], _mm_set1_epi8(what))) << 16 * i;
    return found;
}

/* Which of 64 characters are digits. */
static inline uint64_t which_digits(const __m128i *text)
{
    uint64_t found = 0;
    for (int i = 0; i < 4; i++) {
        const __m128i number = _mm_sub_epi8(text[i], _mm_set1_epi8('0'));
        const __m128i is_digit = _mm_cmpeq_epi8(_mm_min_epu8(number, _mm_set1_epi8(9)), number);
        found |= (uint64_t)(unsigned)_mm_movemask_epi8(is_digit) << 16 * i;
    }
    return found;
}

enum { ENDS_MAX = 512 };

/* The last `bytes` of eight characters, as numbers. */
#define LAST(bytes) (~(uint64_t)0 << (64 - 8 * (bytes)) & 0x0F0F0F0F0F0F0F0F)

/* The ends of some numbers, and before them that of the number before; each is so many characters from `base`. */
typedef struct {
    const char *base;
    uint32_t gap; /* characters between two numbers */
    uint32_t count;
    uint32_t at[1 + ENDS_MAX];
} Ends;

/* Append the commas of 64 characters, the first of which is `from` characters from the base. */
static inline void add_ends(Ends *ends, uint32_t from, uint64_t commas)
{
    uint32_t *out = ends->at + 1 + ends->count;
    ends->count += (uint32_t)__builtin_popcountll(commas);
    /* Eight at once, whether or not there are so many: how many there are cannot be guessed. */
    for (; commas != 0; out += 8)
        for (int i = 0; i < 8; i++, commas &= commas - 1)
            out[i] = from + (uint32_t)__builtin_ctzll(commas | (uint64_t)1 << 63);
}

/* The digits of number `i` behind as many zeros as make eight. Its length, less 1, goes into *lengths. */
static inline __m128i digits_of(const Ends *ends, uint32_t i, uint64_t *lengths)
{
    static const uint64_t last[16] = {0, LAST(1), LAST(2), LAST(3), LAST(4), LAST(5), LAST(6), LAST(7), LAST(8)};
    const uint32_t end = ends->at[1 + i];
    const uint64_t length = (uint64_t)end - ends->at[i] - ends->gap;
    *lengths |= length - 1;
    const __m128i text = _mm_loadl_epi64((const __m128i *)(const void *)(ends->base + end - 8));
    return _mm_and_si128(text, _mm_loadl_epi64((const __m128i *)(const void *)&last[length & 15]));
}

/* Of two numbers: the upper four digits times 10000, and the lower four. */
static inline __m128i read_two(const Ends *ends, uint32_t i, uint64_t *lengths)
{
    const __m128i zero = _mm_setzero_si128(), tens = _mm_set_epi16(1, 10, 100, 1000, 1, 10, 100, 1000);
    const __m128i one = _mm_madd_epi16(_mm_unpacklo_epi8(digits_of(ends, i, lengths), zero), tens);
    const __m128i other = _mm_madd_epi16(_mm_unpacklo_epi8(digits_of(ends, i + 1, lengths), zero), tens);
    return _mm_madd_epi16(_mm_packs_epi32(one, other), _mm_set_epi16(1, 1, 10000, 10000, 1, 1, 10000, 10000));
}

/* The numbers that end there, into `out`, four at a time, and with `is_last` the rest. Returns all lengths, each less
 * 1, in one: below 8 where each is 1 to 8. */
static inline uint64_t read_ends(Ends *ends, unsigned char **out, int is_last)
{
    uint64_t lengths = 0;
    uint32_t i = 0;
    for (; i + 4 <= ends->count; i += 4, *out += 16) {
        const __m128 two = _mm_castsi128_ps(read_two(ends, i, &lengths));
        const __m128 more = _mm_castsi128_ps(read_two(ends, i + 2, &lengths));
        const __m128i upper = _mm_castps_si128(_mm_shuffle_ps(two, more, _MM_SHUFFLE(2, 0, 2, 0)));
        const __m128i lower = _mm_castps_si128(_mm_shuffle_ps(two, more, _MM_SHUFFLE(3, 1, 3, 1)));
        _mm_storeu_si128((__m128i *)(void *)*out, _mm_add_epi32(upper, lower));
    }
    for (; is_last && i < ends->count; i++, *out += 4) {
        uint64_t number;
        _mm_storel_epi64((__m128i *)(void *)&number, digits_of(ends, i, &lengths));
        store_little32(*out, (uint32_t)eight_digits(number));
    }
    ends->count -= i;
    memmove(ends->at, ends->at + i, (1 + ends->count) * sizeof *ends->at);
    return lengths;
}

/* The numbers between `at` and the bracket at `close` into `out`, one more than there are commas. 0 where they are not
 * plain: 1 to 8 digits each, which no u32 exceeds, without leading zeros, and either `,` or `, ` between all of them.
 * There are eight readable bytes before `at`. */
__attribute__((noinline)) /* inside its caller it runs out of registers and takes twice as long */
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
    ends.at[0] = 8 - ends.gap;
    uint64_t wrong = 0, lengths = 0;
    /* Of the character before these 64: is it a comma, a digit, a zero that begins a number? */
    uint64_t was_comma = 0, was_digit = 0, was_zero = 0;
    for (;; at += 64) {
        const Py_ssize_t left = close - at;
        __m128i text[4];
        if (left >= 64)
            memcpy(text, at, 64);
        else {
            memset(text, ',', 64);
            memcpy(text, at, (size_t)left);
        }
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
            lengths |= read_ends(&ends, &out, left < 64);
        if (left < 64)
            return wrong == 0 && lengths < 8;
    }
}
