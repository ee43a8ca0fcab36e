/* What one call runs through, for a fuzzer that keeps the inputs which reach something new.
 *
 * The compiler calls __sanitizer_cov_trace_pc in each basic block. A step from one block to the next is counted, and a
 * step that is taken twice as often as ever before counts as new too.
 */

#include <stdint.h>

enum { STEPS = 1 << 16 };

static unsigned char kinds_seen[STEPS]; /* of each step, a bit for each power of two */
static unsigned counts[STEPS];
static unsigned short taken[STEPS]; /* the steps of this call */
static unsigned taken_count;
static uintptr_t former;
static unsigned long long total; /* blocks, in all calls */

__attribute__((visibility("hidden"))) void __sanitizer_cov_trace_pc(void)
{
    const uintptr_t block = (uintptr_t)__builtin_return_address(0) - (uintptr_t)kinds_seen;
    const unsigned short step = (unsigned short)((block ^ block >> 16) * 31 ^ former);
    former = block >> 1;
    total++;
    if (counts[step]++ == 0)
        taken[taken_count++] = step;
}

/* Ends a call; how many of its steps are new. */
__attribute__((visibility("default"))) unsigned end_call(void)
{
    unsigned fresh = 0;
    while (taken_count > 0) {
        const unsigned short step = taken[--taken_count];
        unsigned kind = 0;
        for (unsigned count = counts[step]; count > 1 && kind < 7; count >>= 1)
            kind++;
        fresh += !(kinds_seen[step] >> kind & 1);
        kinds_seen[step] |= (unsigned char)(1 << kind);
        counts[step] = 0;
    }
    former = 0;
    return fresh;
}

/* How many basic blocks have run since the module was loaded: work, on a machine of any load. */
__attribute__((visibility("default"))) unsigned long long blocks_run(void)
{
    return total;
}
