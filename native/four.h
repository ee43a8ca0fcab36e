/* Four slots of an index at a time, on every x86-64: a branch for each slot would often be predicted wrongly.
 *
 * Slots with a property are bits, and the bit of the first slot is the lowest. HAS_FOUR says whether these functions
 * exist; a slot must have room for a distance of four.
 */

#ifndef WAYMARK_FOUR_H
#define WAYMARK_FOUR_H

#include <stdint.h>

enum { FOUR = 4 };

#if defined(__SSE2__) && NUMBER_BITS < 30
#define HAS_FOUR
#include <emmintrin.h>

/* Return the first four of some slots. */
static inline __m128i load_four(const uint32_t *slots)
{
    return _mm_loadu_si128((const __m128i *)(const void *)slots);
}

/* Return those of four slots that are set, as bits. */
static inline unsigned bits_of_four(__m128i masks)
{
    return (unsigned)_mm_movemask_ps(_mm_castsi128_ps(masks));
}

/* Return those of four slots that have these bits, of the bits in `mask`. */
static inline unsigned four_with(__m128i four, uint32_t mask, uint32_t bits)
{
    return bits_of_four(_mm_cmpeq_epi32(_mm_and_si128(four, _mm_set1_epi32((int)mask)), _mm_set1_epi32((int)bits)));
}

/* Return those of four slots whose things belong to the first slot. */
static inline unsigned four_of_first(__m128i four)
{
    const __m128i are_empty = _mm_cmpeq_epi32(four, _mm_setzero_si128());
    const __m128i are_of_first = _mm_cmpeq_epi32(_mm_srli_epi32(four, NUMBER_BITS), _mm_set_epi32(3, 2, 1, 0));
    return bits_of_four(_mm_andnot_si128(are_empty, are_of_first));
}

/* Move the things of slots 1 to `moved` one slot up, over that of slot 0, and empty slot `moved`. If `moved` is FOUR, the
   caller continues there. `next` has slots 1 to 4, and `step` is one step of a distance. */
static inline void move_four_up(uint32_t *slots, __m128i next, int moved, uint32_t step)
{
    const __m128i numbers = _mm_set_epi32(3, 2, 1, 0), last = _mm_set1_epi32(moved);
    const __m128i nearer = _mm_sub_epi32(next, _mm_set1_epi32((int)step));
    const __m128i now = _mm_and_si128(_mm_cmplt_epi32(numbers, last), nearer);
    const __m128i rest = _mm_and_si128(_mm_cmpgt_epi32(numbers, last), load_four(slots));
    _mm_storeu_si128((__m128i *)(void *)slots, _mm_or_si128(now, rest));
}

#endif

#endif
