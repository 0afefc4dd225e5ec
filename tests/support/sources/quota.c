/* Preloaded: the user's quota of disk space is used up after three lines of a trace. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    static int lines;
    if (real == NULL) real = (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    if (size > 10 && memcmp(data, "{\"record\":", 10) == 0 && ++lines > 3) {
        errno = EDQUOT;
        return -1;
    }
    return real(fd, data, size);
}
