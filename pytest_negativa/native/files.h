/* Files and names of logs, for code that runs inside of any program.
 *
 * open, read, write and close of libc are cancellation points: in a thread that is to be cancelled
 * they would not return, with the loader's lock held. The loader avoids them, too.
 */
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* For others: all else in these libraries is hidden. */
#define EXPORT __attribute__((visibility("default")))

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

/* Zeroed memory of this process alone; NULL: none is left. */
static inline void *map_zeroed(size_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* A page by which a process tells itself from its forked children, whatever forks them: a process
 * id is not enough, for in a new pid namespace a child may have its parent's. fork wipes this
 * memory (MADV_WIPEONFORK), so a mark that the parent made there is not in the child. A child of
 * vfork shares it. Before Linux 4.14 nothing is wiped: a mark that is the process id still tells
 * most children. NULL: no memory is left. */
static inline void *map_wiped(void) {
    void *memory = map_zeroed(4096);
    if (memory != NULL) madvise(memory, 4096, MADV_WIPEONFORK);
    return memory;
}

/* The bytes of a regular file of at most `most`, and a NUL; closes it. NULL: it can't be read. Not
 * mapped: a file that somebody truncates would be a SIGBUS. */
static inline char *read_whole(int fd, uint64_t most, size_t *size) {
    struct statx status;
    char *data = NULL;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_SIZE | STATX_TYPE, &status) == 0 &&
        S_ISREG(status.stx_mode) && status.stx_size <= most)
        data = map_zeroed(status.stx_size + 1);
    *size = 0;
    while (data != NULL && *size < status.stx_size) {
        ssize_t count = read_file(fd, data + *size, status.stx_size - *size);
        if (count <= 0) {
            munmap(data, status.stx_size + 1);
            data = NULL;
        } else {
            *size += (size_t)count;
        }
    }
    close_file(fd);
    return data;
}

/* Whether a file may grow to a size. Past the limit, writing would be a signal that ends the
 * process. */
static inline bool may_grow_to(uint64_t size) {
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
           (limit.rlim_cur == RLIM_INFINITY || size <= limit.rlim_cur);
}

/* Whether the name of a file, without its folders, begins so. */
static inline bool is_named(const char *path, const char *start) {
    const char *name = strrchr(path, '/');
    name = name == NULL ? path : name + 1;
    return strncmp(name, start, strlen(start)) == 0;
}

static inline int64_t nanoseconds(int64_t seconds, int64_t rest) {
    return seconds * 1000000000 + rest;
}

static inline uint64_t clock_ns(clockid_t clock) {
    struct timespec now = {0};
    clock_gettime(clock, &now);
    return (uint64_t)nanoseconds(now.tv_sec, now.tv_nsec);
}

/* By chance; without the kernel's, by the time and where the stack is. */
static inline uint64_t random_number(void) {
    uint64_t number;
    if (getrandom(&number, sizeof number, GRND_NONBLOCK) != sizeof number)
        number = clock_ns(CLOCK_REALTIME) ^ (uintptr_t)&number;
    return number;
}

/* Writes a path that no other process gives a file: pid, time, a random number. False: it has no
 * room. */
static inline bool name_log(char *path, size_t room, const char *folder, pid_t pid,
                            uint64_t started, const char *suffix) {
    if (folder[0] != '/') return false;
    int length = snprintf(path, room, "%s/%d.%" PRIu64 ".%" PRIu64 "%s", folder, (int)pid, started,
                          random_number(), suffix);
    return length > 0 && (size_t)length < room;
}
