/* Whether products of bfloat16 can be made here. */

#include "products.h"

#if !defined(HAS_NO_TILES) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ASK_FOR_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18              /* XFEATURE_XTILE_DATA */

/* Whether the processor has a matrix unit for them; the system is asked to let this process use it. */
int has_matrix_unit(void)
{
    unsigned one, two, three, tiles, more;
    if (!__get_cpuid_count(7, 0, &one, &two, &three, &tiles) || !__get_cpuid_count(7, 1, &more, &one, &two, &three))
        return 0;
    const int there = tiles >> 22 & tiles >> 24 & more >> 5 & 1; /* amx-bf16, amx-tile, avx512-bf16 */
    return there && !syscall(SYS_arch_prctl, ASK_FOR_PERMISSION, TILE_DATA);
}

#else

int has_matrix_unit(void) { return 0; }

#endif
