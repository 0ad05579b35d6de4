/* Large pages for large outputs. */

#ifdef __linux__
#include <sys/mman.h>
#endif
#include <stdint.h>

#define LARGE ((uintptr_t)2 << 20)

/* Ask for large pages where they fit into memory that is not in use yet: each is then fetched and cleared at once and
 * not in 512 parts. Every thread fetches some now; later two of them might both clear one that both need first. A
 * system that has no large pages goes on as before. */
void large_pages(void *memory, int64_t bytes, int64_t threads)
{
#ifdef __linux__
    const uintptr_t first = ((uintptr_t)memory + LARGE - 1) / LARGE * LARGE;
    const uintptr_t end = ((uintptr_t)memory + bytes) / LARGE * LARGE;
    if (end <= first || madvise((void *)first, end - first, MADV_HUGEPAGE))
        return;
#pragma omp parallel for num_threads(threads)
    for (uintptr_t page = first; page < end; page += LARGE)
        *(volatile char *)page = 0;
#endif
}
