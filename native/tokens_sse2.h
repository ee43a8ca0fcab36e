/* Token ids out of a JSON text, 64 characters at a time, for where there is SSE2 (every x86-64).
 *
 * Reading one number after the other has to find the end of each before it can begin with the next. Here the ends of all
 * numbers in 64 characters are found at once, and no number waits for another: half the time. What is checked of the
 * characters is checked of all 64 together, by what stands where; two passes over a mask cost less than a branch.
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

/* The last `bytes` of eight characters, as numbers. */
#define LAST(bytes) (~(uint64_t)0 << (64 - 8 * (bytes)) & 0x0F0F0F0F0F0F0F0F)

/* The numbers between `at` and the bracket at `close` into `out`, one more than there are commas. 0 where they are not
 * plain: 1 to 8 digits each, which no u32 exceeds, without leading zeros, and either `,` or `, ` between all of them.
 * There are eight readable bytes before `at`. */
__attribute__((noinline)) /* inside its caller it runs out of registers and takes twice as long */
static int read_plain_tokens(const char *at, const char *close, unsigned char *out)
{
    static const uint64_t last[16] = {0, LAST(1), LAST(2), LAST(3), LAST(4), LAST(5), LAST(6), LAST(7), LAST(8)};
    const char *comma = memchr(at, ',', (size_t)(close - at));
    const int has_spaces = comma != NULL && comma[1] == ' ';
    const char *start = at;
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
        for (; commas != 0; commas &= commas - 1, out += 4) {
            const char *end = at + __builtin_ctzll(commas);
            const size_t length = (size_t)(end - start);
            uint64_t number;
            memcpy(&number, end - 8, 8);
            const uint32_t token = (uint32_t)eight_digits(number & last[length & 15]);
            memcpy(out, &token, 4);
            lengths |= length - 1;
            start = end + 1 + has_spaces;
        }
        if (left < 64)
            return wrong == 0 && lengths < 8;
    }
}
