/* A system without MADV_WIPEONFORK. */
#include <errno.h>
#include <stddef.h>

int madvise(void *start, size_t size, int advice) {
    (void)start, (void)size, (void)advice;
    errno = EINVAL;
    return -1;
}
