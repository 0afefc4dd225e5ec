/* The log of a process: a mapped file of its own, which grows by chunks; libraries that are lost.
 *
 * pages/page_logs.py describes the format.
 */
#pragma once

#include "../../native/files.h"

#include <limits.h>
#include <poll.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum {
    PAGE = 4096,
    CHUNK = 64 << 10, /* the log grows by so much, and by as much as it has: each is a mapping */
    MAX_GROWTH = 1 << 20,
    STARTS = 9, /* programs that are started unwatched */
    START_LENGTH = 384,
};

enum { PROCESS = 1, LIBRARY = 2, HOLES = 4, GPU_CODE = 5, CONSTANTS = 6 };
enum { UNWATCHED = 1 };

typedef struct {
    uint64_t start, end; /* whole pages: addresses of the ELF file; holes: offsets in the original;
                          * GPU code: in the file */
} LogRange;

/* Pages of a library that are watched. */
typedef struct {
    uintptr_t start, end;
    int protection;
    uint64_t first;  /* the page's bit */
    uint64_t logged; /* the start of its LogRange */
} Range;

typedef struct {
    uint32_t size, kind; /* of the record; the size comes last, so that a torn record has none */
    uint32_t flags, major, minor, range_count;
    uint64_t inode, file_size;
    int64_t modified_ns;
    uint32_t path_length, bits_offset;
} LogRecord;

/* What fork wipes, see map_wiped: a child has none of it. */
typedef struct {
    pid_t pid; /* of the process that the log is of */
    /* Held while libraries come and go: the id of the process. A child that another thread forks
     * meanwhile takes it over. */
    atomic_int owner;
} Own;

static Own *own_;

/* The file `lost`, which all processes share. */
typedef struct {
    atomic_uint lost;                  /* libraries without a record */
    atomic_uint started;               /* how many programs were started unwatched */
    char starts[STARTS][START_LENGTH]; /* path, line feed, words */
} Shared;

static struct {
    char folder[PATH_MAX];
    char path[PATH_MAX];
    uint64_t length;         /* of the file */
    uint8_t *chunk;          /* where the next record goes */
    size_t used, chunk_size; /* of the chunk */
    Shared *shared;
} log_;

/* Whether memory can be read: the kernel looks at the set before it refuses the first argument. */
static bool is_readable(uintptr_t start, size_t size) {
    if (start + size < start) return false;
    for (uintptr_t at = start & ~(uintptr_t)7; at < start + size; at = (at | (PAGE - 1)) + 1)
        if (syscall(SYS_rt_sigprocmask, ~0, at, NULL, 8) == 0 || errno != EINVAL) return false;
    return true;
}

/* ---- What can't be recorded ---- */

static bool only_holes;      /* of libraries with a spare, see holes.h */
static struct stat messages; /* what descriptor 2 was when the process began */

/* A message for people, once a process: descriptor 2 may have become a file of the program's. If
 * nobody reads it, the signal that comes of writing would end the program. */
static void say(const char *what, const char *reason) {
    static atomic_bool told;
    struct stat now;
    if (atomic_exchange(&told, true) || fstat(2, &now) != 0) return;
    struct pollfd pipe = {.fd = 2, .events = POLLOUT};
    bool readable = S_ISFIFO(now.st_mode) || S_ISSOCK(now.st_mode) || isatty(2) ||
                    (now.st_dev == messages.st_dev && now.st_ino == messages.st_ino);
    if (!readable || poll(&pipe, 1, 0) != 1 || pipe.revents & (POLLERR | POLLHUP)) return;
    dprintf(2, "negativa: %s: no log of what comes back to %s can be written here: %s\n",
            log_.folder, what, reason);
}

static void note_lost(const char *reason) {
    if (only_holes)
        say("libraries", reason);
    else if (log_.shared != NULL && is_readable((uintptr_t)log_.shared, 1))
        atomic_fetch_add(&log_.shared->lost, 1);
}

static const char NO_ROOM[] = "the folder must be writable for this user, with room for logs.";

/* ---- The file ---- */

/* posix_fallocate would be a cancellation point where the file system can't reserve. */
static bool reserve(int fd, uint64_t offset, size_t size) {
    if (!may_grow_to(offset + size)) return false;
    if (syscall(SYS_fallocate, fd, 0, offset, size) == 0) return true;
    if (errno != EOPNOTSUPP) return false;
    static const char zeros[PAGE];
    for (size_t done = 0; done < size; done += PAGE)
        if (syscall(SYS_pwrite64, fd, zeros, PAGE, offset + done) != PAGE) return false;
    return true;
}

/* Lets the file grow by a chunk that holds `size` bytes. */
static bool grow(size_t size) {
    bool create = log_.length == 0;
    uint64_t now = clock_ns(CLOCK_REALTIME);
    if (create && !name_log(log_.path, sizeof log_.path, log_.folder, own_->pid, now, ".pages"))
        return false;
    int fd = open_file(log_.path, O_RDWR | (create ? O_CREAT | O_EXCL : 0), 0644);
    if (fd < 0) return false;
    size_t least = log_.length < MAX_GROWTH ? (size_t)log_.length : MAX_GROWTH;
    size = ((size > least ? size : least) + CHUNK - 1) & ~(size_t)(CHUNK - 1);
    void *chunk = MAP_FAILED;
    if (reserve(fd, log_.length, size))
        chunk = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)log_.length);
    close_file(fd);
    if (chunk == MAP_FAILED) {
        if (create) unlink(log_.path);
        return false;
    }
    log_.chunk = chunk;
    log_.used = 0;
    log_.chunk_size = size;
    log_.length += size;
    return true;
}

static size_t align8(size_t size) { return (size + 7) & ~(size_t)7; }

/* A record of ranges, a text, and room for bits, zeroed, which come last; NULL: there is no room.
 * Records don't cross chunks. */
static LogRecord *start_record(uint32_t kind, const Range *ranges, size_t count, const char *text,
                               size_t length, size_t bit_bytes) {
    size_t bits = sizeof(LogRecord) + count * sizeof(LogRange) + align8(length);
    size_t size = align8(bits + bit_bytes);
    if (log_.chunk_size - log_.used < size && !grow(size)) return NULL;
    LogRecord *record = (LogRecord *)(log_.chunk + log_.used);
    /* Somebody may have truncated the file. */
    if (!is_readable((uintptr_t)record, size)) return NULL;
    log_.used += size;
    record->kind = kind;
    record->range_count = (uint32_t)count;
    record->path_length = (uint32_t)length;
    record->bits_offset = (uint32_t)bits;
    LogRange *to = (LogRange *)(record + 1);
    for (const Range *range = ranges; range < ranges + count; range++)
        *to++ = (LogRange){range->logged, range->logged + range->end - range->start};
    memcpy(to, text, length);
    return record;
}

/* Gives the record that was started last its size. */
static void publish(LogRecord *record) {
    atomic_thread_fence(memory_order_release);
    *(volatile uint32_t *)&record->size = (uint32_t)(log_.chunk + log_.used - (uint8_t *)record);
}

/* A forked child shares its parent's records and bits. What it loads goes to a log of its own. */
static bool start_log(void) {
    static char executable[PATH_MAX];
    pid_t pid = (pid_t)syscall(SYS_getpid);
    if (own_->pid == pid) return log_.length > 0;
    own_->pid = pid;
    log_.length = log_.used = log_.chunk_size = 0;
    ssize_t length = readlink("/proc/self/exe", executable, sizeof executable);
    if (length < 0) length = 0;
    LogRecord *record = start_record(PROCESS, NULL, 0, executable, (size_t)length, 0);
    if (record == NULL) return false;
    record->inode = (uint64_t)pid;
    record->modified_ns = (int64_t)clock_ns(CLOCK_REALTIME);
    publish(record);
    return true;
}

static void open_shared(void) {
    static char path[PATH_MAX + 8];
    snprintf(path, sizeof path, "%s/lost", log_.folder);
    int fd = open_file(path, O_RDWR, 0);
    if (fd < 0) return;
    struct statx status;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_SIZE, &status) == 0 && status.stx_size >= PAGE) {
        void *memory = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (memory != MAP_FAILED) log_.shared = memory;
    }
    close_file(fd);
}
