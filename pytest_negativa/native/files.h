/* Files and names of logs, for code that runs inside of any program.
 *
 * open, read, write and close of libc are cancellation points: in a thread that is to be cancelled
 * they would not return, with the loader's lock held. The loader avoids them, too.
 */
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline int open_file(const char *path, int flags, int mode) {
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, mode);
}

static inline void close_file(int fd) { syscall(SYS_close, fd); }

static inline ssize_t read_file(int fd, void *data, size_t size) {
    ssize_t count;
    do count = syscall(SYS_read, fd, data, size);
    while (count < 0 && errno == EINTR);
    return count;
}

/* Whether a file may grow to a size. Past the limit, writing would be a signal that ends the
 * process. */
static inline bool may_grow_to(uint64_t size) {
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
           (limit.rlim_cur == RLIM_INFINITY || size <= limit.rlim_cur);
}

/* Writes the digits of a number; returns their end. */
static inline char *put_digits(char *end, uint64_t number) {
    char digits[24], *first = digits + sizeof digits;
    do *--first = (char)('0' + number % 10);
    while ((number /= 10) != 0);
    size_t count = (size_t)(digits + sizeof digits - first);
    memcpy(end, first, count);
    return end + count;
}

static inline uint64_t clock_ns(clockid_t clock) {
    struct timespec now = {0};
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Writes a path that no other process gives a file: pid, time, a random number. False: it has no
 * room. */
static inline bool name_log(char *path, size_t room, const char *folder, pid_t pid,
                            uint64_t started, const char *suffix) {
    uint64_t salt = 0;
    if (getrandom(&salt, sizeof salt, GRND_NONBLOCK) != sizeof salt) salt = (uintptr_t)&salt;
    size_t length = strlen(folder);
    if (folder[0] != '/' || length + 80 > room) return false;
    memcpy(path, folder, length);
    char *end = path + length;
    *end++ = '/';
    end = put_digits(end, (uint64_t)pid);
    *end++ = '.';
    end = put_digits(end, started);
    *end++ = '.';
    strcpy(put_digits(end, salt), suffix);
    return true;
}
