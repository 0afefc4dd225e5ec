/* Memory by which a process tells itself from its forked children, whatever forks them.
 *
 * A process id is not enough: in a new pid namespace a child may have its parent's. fork wipes this
 * memory (MADV_WIPEONFORK), so a mark that the parent made there is not in the child. A child of
 * vfork shares it. Before Linux 4.14 nothing is wiped: a mark that is the process id still tells
 * most children.
 */
#pragma once

#include <stddef.h>
#include <sys/mman.h>

enum { WIPED_SIZE = 4096 };

/* Zeroed; NULL: no memory is left. */
static inline void *map_wiped(void) {
    void *memory =
        mmap(NULL, WIPED_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    madvise(memory, WIPED_SIZE, MADV_WIPEONFORK);
    return memory;
}
