/* Large pages for large outputs. */

#ifdef __linux__
#include <sys/mman.h>
#endif
#include <stdint.h>

#define LARGE ((uintptr_t)2 << 20)
#define SHARE ((int64_t)64 << 20) /* bytes that are worth another thread */

/* Ask for large pages where they fit into memory that is not in use yet: each is then fetched and cleared at once and
 * not in 512 parts. They are fetched now; later two threads might both clear one that both need first. One thread gets
 * back the pages that it gave up last; others get pages that a virtual machine may first have to ask its host for. A
 * system that has no large pages goes on as before. */
void large_pages(void *memory, int64_t bytes, int64_t threads)
{
#ifdef __linux__
    const uintptr_t first = ((uintptr_t)memory + LARGE - 1) / LARGE * LARGE;
    const uintptr_t end = ((uintptr_t)memory + bytes) / LARGE * LARGE;
    if (end <= first || madvise((void *)first, end - first, MADV_HUGEPAGE))
        return;
    const int64_t shares = 1 + bytes / SHARE;
#pragma omp parallel for num_threads(threads < shares ? threads : shares)
    for (uintptr_t page = first; page < end; page += LARGE)
        *(volatile char *)page = 0;
#endif
}
