/* Records which pages of CPU code a process touches, and can keep the others unreadable.
 *
 * glibc loads it into every process whose LD_AUDIT names it (rtld-audit(7)). It makes the code
 * and the unwind tables of each library inaccessible before the library is relocated. The first
 * touch of a page is a SIGSEGV; the handler sets the page's bit and makes the page accessible.
 * Where the kernel has guard pages for files (madvise(2), MADV_GUARD_INSTALL, Linux 6.15), they do it:
 * a page costs less than half, and no mapping. Elsewhere mprotect does. It also does where tests are
 * told apart, because a guard discards what a program wrote to a page.
 *
 * Environment: NEGATIVA_PAGES_LOGS, the folder for the logs (format: hostcode/page_logs.py);
 * NEGATIVA_PAGES_ALLOWED, a file of records as in a log whose bits say which pages of a library
 * may be touched. Others stay inaccessible: the touch is noted, and the signal is the program's.
 * NEGATIVA_PAGES_TEST, the test that started the process.
 * Or NEGATIVA_SPARE_LOG alone, a folder for logs of what comes back to libraries with a spare: see "Gaps".
 * The log is a shared mapping of a file, so a process that is killed loses nothing. fallocate
 * reserves its blocks: touching a hole of a file on a full disk would be a SIGBUS.
 *
 * Pages that an earlier process has noted stay accessible: the file `lost` names eight logs, and what
 * they have needs no second mark. Not so where tests are told apart or pages are forbidden.
 *
 * A program can tell which of its tests runs: mprotect(ENTER_TEST, name, 0). Pages become
 * inaccessible again then, and the test has bits of its own for those that it touches.
 *
 * What is not watched: the program itself, libc and the loader, which run before or below us;
 * all data, because the kernel reads it without a signal (EFAULT); pages that a section shares.
 *
 * Rules: never fail the process. What can't be watched counts as used, and the log says so. No
 * malloc, no descriptor kept open, no lock in the handler. Outside of it one thread works at a time,
 * see lock(), so static buffers suffice.
 */
#include "faults.h"
#include "wiped.h"

#include "../spare/format.h"

#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
#ifndef MAX_PARTS /* mappings that touched pages may add to the process's own */
#define MAX_PARTS (max_mappings() / 2)
#endif
#ifndef GUARD_INSTALL /* of madvise; not in glibc's headers before 2.41 */
#define GUARD_INSTALL 102
#endif
#define GUARD_REMOVE 103
#define SET_MDWE 65 /* of prctl; not in the headers before Linux 6.3 */
#ifndef MAX_LIBRARIES /* at a time */
#define MAX_LIBRARIES 4096
#endif
#ifndef LARGE /* pages: a library for which it pays to look into the logs of other processes */
#define LARGE 256
#endif

enum {
    PAGE = 4096,
    CHUNK = 64 << 10, /* the log grows by so much, and by as much as it has: each is a mapping */
    MAX_GROWTH = 1 << 20,
    MAX_RANGES = 16,
    MAX_SECTIONS = 1024,
    MAX_NAMES = 64 << 10,
    COARSE = 64, /* pages to give back at once when a process has many mappings */
    OFFERED = 8, /* logs that later processes look into */
    LOG_NAME = 64,
};

/* ---- The log ---- */

enum { PROCESS = 1, LIBRARY = 2, TEST = 3, GAPS = 4 };
enum { UNWATCHED = 1, RESTRICTED = 2 };

typedef struct {
    uint64_t start, end; /* whole pages: addresses as in the ELF file; of gaps, offsets in the original */
} LogRange;

typedef struct {
    uint32_t size, kind; /* of the record; the size comes last, so that a torn record has none */
    uint32_t flags, major, minor, range_count;
    uint64_t inode, file_size; /* of a test: the log's first library with bits, and how many */
    int64_t modified_ns;
    uint32_t path_length, bits_offset; /* of a test: its name's length */
} LogRecord;

/* What fork wipes, see wiped.h: a child has none of it. */
typedef struct {
    pid_t pid; /* of the process that the log is of */
    /* Held while libraries come, go, and become inaccessible again: the id of the process. A child that
     * another thread forks meanwhile takes it over. */
    atomic_int owner;
} Own;

static Own *own_;

/* The file `lost`, which all processes share. */
typedef struct {
    atomic_uint lost; /* libraries without a record */
    atomic_uint offered;
    char names[OFFERED][LOG_NAME]; /* of logs; the first byte comes last */
} Shared;

static struct {
    char folder[PATH_MAX];
    uint64_t files;
    char path[PATH_MAX];
    uint64_t length;         /* of the file */
    uint8_t *chunk;          /* where the next record goes */
    size_t used, chunk_size; /* of the chunk */
    Shared *shared;
    atomic_uint own_lost;
} log_;

static int open_file(const char *path, int flags, int mode) {
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, mode);
}

static void close_file(int fd) { syscall(SYS_close, fd); }

/* Whether memory can be read: the kernel looks at the set before it refuses the first argument. */
static bool is_readable(uintptr_t start, size_t size) {
    if (start + size < start) return false;
    for (uintptr_t at = start & ~(uintptr_t)7; at < start + size; at = (at | (PAGE - 1)) + 1)
        if (syscall(SYS_rt_sigprocmask, ~0, at, NULL, 8) == 0 || errno != EINVAL) return false;
    return true;
}

/* ---- What can't be recorded ---- */

static bool only_gaps;        /* of libraries with a spare, see "Gaps" */
static struct stat messages; /* what descriptor 2 was when the process began */

/* A message for people, once a process: descriptor 2 may have become a file of the program's. If nobody
 * reads it, the signal that comes of writing would end the program. */
static void say(const char *reason) {
    static atomic_bool told;
    struct stat now;
    if (atomic_exchange(&told, true) || fstat(2, &now) != 0) return;
    struct pollfd pipe = {.fd = 2, .events = POLLOUT};
    bool readable = S_ISFIFO(now.st_mode) || S_ISSOCK(now.st_mode) || isatty(2) ||
                    (now.st_dev == messages.st_dev && now.st_ino == messages.st_ino);
    if (!readable || poll(&pipe, 1, 0) != 1 || pipe.revents & (POLLERR | POLLHUP)) return;
    dprintf(2, "negativa: %s: no log of what comes back to libraries can be written here: %s\n",
            log_.folder, reason);
}

static void note_lost(const char *reason) {
    if (only_gaps)
        say(reason);
    else if (log_.shared != NULL && is_readable((uintptr_t)log_.shared, 1))
        atomic_fetch_add(&log_.shared->lost, 1);
    else
        atomic_fetch_add(&log_.own_lost, 1);
}

static const char NO_ROOM[] = "the folder must be writable for this user, with room for logs.";

static char *put_number(char *end, uint64_t number) {
    char digits[24], *first = digits + sizeof digits;
    do *--first = (char)('0' + number % 10);
    while ((number /= 10) != 0);
    size_t count = (size_t)(digits + sizeof digits - first);
    memcpy(end, first, count);
    return end + count;
}

static uint64_t now_ns(void) {
    struct timespec now = {0};
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* A name that no other process gives: pid, time, a random number. */
static bool name_log(void) {
    uint64_t salt = 0;
    if (getrandom(&salt, sizeof salt, GRND_NONBLOCK) != sizeof salt) salt = (uintptr_t)&salt;
    size_t length = strlen(log_.folder);
    if (length + 80 > sizeof log_.path) return false;
    memcpy(log_.path, log_.folder, length);
    char *end = log_.path + length;
    *end++ = '/';
    end = put_number(end, (uint64_t)own_->pid);
    *end++ = '.';
    end = put_number(end, now_ns());
    *end++ = '.';
    end = put_number(end, salt);
    memcpy(end, ".pages", 7);
    return true;
}

static bool reserve(int fd, uint64_t offset, size_t size) {
    struct rlimit limit;
    /* Growing past the limit would be a signal that ends the process. */
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 ||
        (limit.rlim_cur != RLIM_INFINITY && offset + size > limit.rlim_cur))
        return false;
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
    if (create && !name_log()) return false;
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

/* Room for a record, zeroed; NULL if there is none. Records don't cross chunks. */
static LogRecord *add_record(size_t size) {
    if (log_.chunk_size - log_.used < size && !grow(size)) return NULL;
    LogRecord *record = (LogRecord *)(log_.chunk + log_.used);
    /* Somebody may have truncated the file. */
    if (!is_readable((uintptr_t)record, size)) return NULL;
    log_.used += size;
    return record;
}

static size_t align8(size_t size) { return (size + 7) & ~(size_t)7; }

static void publish(LogRecord *record, size_t size) {
    atomic_thread_fence(memory_order_release);
    *(volatile uint32_t *)&record->size = (uint32_t)size;
}

static void repeat_libraries(void);

/* A forked child shares its parent's records and bits. What it loads goes to a log of its own. */
static bool start_log(void) {
    static char executable[PATH_MAX];
    pid_t pid = (pid_t)syscall(SYS_getpid);
    if (own_->pid == pid) return log_.length > 0;
    own_->pid = pid;
    log_.length = log_.used = log_.chunk_size = 0;
    ssize_t length = readlink("/proc/self/exe", executable, sizeof executable);
    if (length < 0) length = 0;
    size_t size = align8(sizeof(LogRecord) + (size_t)length);
    LogRecord *record = add_record(size);
    if (record == NULL) return false;
    record->kind = PROCESS;
    record->inode = (uint64_t)pid;
    record->modified_ns = (int64_t)now_ns();
    record->path_length = (uint32_t)length;
    memcpy(record + 1, executable, (size_t)length);
    publish(record, size);
    repeat_libraries();
    return true;
}

static void open_shared(void) {
    static char path[PATH_MAX + 8];
    strcpy(path, log_.folder);
    strcat(path, "/lost");
    int fd = open_file(path, O_RDWR, 0);
    if (fd < 0) return;
    struct statx status;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_SIZE, &status) == 0 && status.stx_size >= PAGE) {
        void *memory = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (memory != MAP_FAILED) log_.shared = memory;
    }
    close_file(fd);
}

/* Lets later processes look into this one's log. */
static void offer_log(void) {
    static bool offered;
    if (offered || log_.shared == NULL || atomic_load(&log_.shared->offered) >= OFFERED) return;
    offered = true;
    const char *name = strrchr(log_.path, '/') + 1;
    unsigned place = atomic_fetch_add(&log_.shared->offered, 1);
    if (place >= OFFERED || strlen(name) >= LOG_NAME) return;
    volatile char *to = log_.shared->names[place];
    for (size_t i = 1; name[i] != 0; i++) to[i] = name[i];
    atomic_thread_fence(memory_order_release);
    to[0] = name[0];
}

/* ---- What is watched ---- */

typedef struct {
    uintptr_t start, end;
    int protection;
    uint64_t first; /* the page's bit */
} Range;

typedef struct {
    atomic_bool watched;
    atomic_bool kept; /* stays accessible: no test's touches are known any more */
    atomic_bool guarded;  /* by guard pages, not by mprotect */
    atomic_bool switched; /* from guard pages to mprotect: some may be left for a moment */
    uintptr_t base, low, high;
    size_t range_count;
    Range *ranges, own_ranges[MAX_RANGES]; /* gaps are mapped, for there may be more */
    LogRecord *record;
    size_t bit_bytes;
    atomic_uchar *bits;
    atomic_ushort *firsts; /* of gaps, one for each page; NULL: no gaps */
    _Atomic(atomic_uchar *) test_bits; /* NULL: no test runs */
    const uint8_t *allowed;            /* bits; NULL: all pages */
    /* Pages that mprotect opened one by one, in this process alone: a forked child has a copy, as of the
     * mappings. NULL: no memory. */
    atomic_uchar *open;
} Library;

static Library libraries[MAX_LIBRARIES];
static atomic_size_t library_count;
static atomic_long parts_left;
static long most_parts;

static void lock(void) {
    pid_t pid = (pid_t)syscall(SYS_getpid);
    int seen = 0;
    while (!atomic_compare_exchange_strong(&own_->owner, &seen, pid)) {
        if (seen == pid) {
            sched_yield();
            seen = 0;
        }
    }
}

static void unlock(void) { atomic_store(&own_->owner, 0); }

static bool is_allowed(const Library *library, uint64_t page) {
    return library->allowed == NULL || (library->allowed[page / 8] >> (page % 8) & 1);
}

/* Sets bits of the log, unless somebody has truncated it. */
static void set_bits(atomic_uchar *bits, uint64_t first, uint64_t end) {
    uintptr_t seen = 0;
    for (uint64_t page = first; page < end; page++) {
        uintptr_t place = (uintptr_t)&bits[page / 8] / PAGE;
        if (place != seen && !is_readable(place * PAGE, 1)) return;
        seen = place;
        atomic_fetch_or(&bits[page / 8], (unsigned char)(1u << (page % 8)));
    }
}

static void touch(Library *library, const Range *range, uintptr_t start, uintptr_t end) {
    if (start >= end) return;
    atomic_uchar *test_bits = atomic_load(&library->test_bits);
    uint64_t first = range->first + (start - range->start) / PAGE, last = first + (end - start) / PAGE;
    set_bits(library->bits, first, last);
    if (test_bits != NULL) set_bits(test_bits, first, last);
}

/* What was touched first on a page of a gap: where, and whether to run it. */
enum { FIRST_SEEN = 1 << 15, FIRST_FETCHED = 1 << 12 };

static void note_first(Library *library, uint64_t page, uintptr_t address, unsigned long error) {
    unsigned fetched = error & FAULT_EXEC ? FIRST_FETCHED : 0;
    unsigned short none = 0, first = (unsigned short)(address % PAGE | fetched | FIRST_SEEN);
    if (library->firsts != NULL && is_readable((uintptr_t)&library->firsts[page], 1))
        atomic_compare_exchange_strong(&library->firsts[page], &none, first);
}

static bool show(const Library *library, const Range *range, uintptr_t start, uintptr_t end) {
    if (atomic_load(&library->guarded))
        return madvise((void *)start, end - start, GUARD_REMOVE) == 0;
    return mprotect((void *)start, end - start, range->protection) == 0;
}

/* All of it counts as touched, and nothing is watched any more. */
static bool give_up(Library *library) {
    bool done = true;
    atomic_store(&library->kept, true);
    for (size_t i = 0; i < library->range_count; i++) {
        const Range *range = &library->ranges[i];
        touch(library, range, range->start, range->end);
        done &= show(library, range, range->start, range->end);
    }
    return done;
}

static bool is_open(const Library *library, const Range *range, uintptr_t at) {
    uint64_t page = range->first + (at - range->start) / PAGE;
    return range->start <= at && at < range->end &&
           (atomic_load(&library->open[page / 8]) >> (page % 8) & 1);
}

/* How many mappings more there are when a page becomes accessible: 2, 0 or -2. */
static long open_page(const Library *library, const Range *range, uintptr_t at) {
    if (library->open == NULL) return 2;
    uint64_t page = range->first + (at - range->start) / PAGE;
    unsigned char bit = (unsigned char)(1u << (page % 8));
    if (atomic_fetch_or(&library->open[page / 8], bit) & bit) return 0;
    return 2 - 2 * is_open(library, range, at - PAGE) - 2 * is_open(library, range, at + PAGE);
}

/* Two threads may serve one page: the second does the same again. */
static bool serve(uintptr_t address, unsigned long error, int si_code) {
    size_t count = atomic_load(&library_count);
    for (size_t i = 0; i < count; i++) {
        Library *library = &libraries[i];
        if (address < library->low || address >= library->high || !atomic_load(&library->watched))
            continue;
        for (size_t j = 0; j < library->range_count; j++) {
            const Range *range = &library->ranges[j];
            if (address < range->start || address >= range->end) continue;
            bool guarded = atomic_load(&library->guarded);
            /* Behind a guard the access may be forbidden, too: then it faults again. */
            if (si_code != (guarded ? SEGV_MAPERR : SEGV_ACCERR) && !atomic_load(&library->switched))
                return false;
            if (!guarded && ((error & FAULT_WRITE && !(range->protection & PROT_WRITE)) ||
                             (error & FAULT_EXEC && !(range->protection & PROT_EXEC))))
                return false;
            uintptr_t start = address & ~(uintptr_t)(PAGE - 1), end = start + PAGE;
            uint64_t page = range->first + (start - range->start) / PAGE;
            if (!is_allowed(library, page)) {
                touch(library, range, start, end);
                return false;
            }
            if (!guarded && atomic_load(&parts_left) > 0) {
                atomic_fetch_sub(&parts_left, open_page(library, range, start));
            } else if (!guarded) {
                /* Each page may be a mapping of its own: sysctl vm.max_map_count. */
                start -= (start - range->start) % (COARSE * PAGE);
                end = start + COARSE * PAGE;
                if (end > range->end) end = range->end;
                uintptr_t own = address & ~(uintptr_t)(PAGE - 1);
                for (uintptr_t at = own; at > start; at -= PAGE)
                    if (!is_allowed(library, page - (own - at) / PAGE - 1)) start = at;
                for (uintptr_t at = own + PAGE; at < end; at += PAGE)
                    if (!is_allowed(library, page + (at - own) / PAGE)) end = at;
            }
            note_first(library, page, address, error);
            touch(library, range, start, end);
            if (!show(library, range, start, end)) {
                /* The program has unmapped its code. */
                if (guarded && errno == ENOMEM) return false;
                return give_up(library);
            }
            /* Has a test begun meanwhile? It would not see this page. */
            touch(library, range, start, end);
            return true;
        }
    }
    return false;
}

/* ---- Tests ---- */

/* The last record of the test that runs; NULL if none does. */
static const LogRecord *test;
static bool by_test;

/* Lets the test have bits for the libraries from `first` on. */
static void add_test(const char *name, size_t length, size_t first) {
    size_t count = atomic_load(&library_count), start = sizeof(LogRecord) + align8(length);
    size_t size = start;
    for (size_t i = first; i < count; i++) size += libraries[i].bit_bytes;
    LogRecord *record = add_record(align8(size));
    if (record == NULL) {
        note_lost(NO_ROOM);
        return;
    }
    record->kind = TEST;
    record->inode = first;
    record->file_size = count - first;
    record->path_length = (uint32_t)length;
    record->bits_offset = (uint32_t)start;
    memcpy(record + 1, name, length);
    atomic_uchar *bits = (atomic_uchar *)((uint8_t *)record + start);
    for (size_t i = first; i < count; i++) {
        atomic_store(&libraries[i].test_bits, bits);
        bits += libraries[i].bit_bytes;
    }
    publish(record, align8(size));
    test = record;
}

/* What was noted of the running test belongs to libraries by their number in the log. */
static void repeat_libraries(void) {
    size_t count = by_test ? atomic_load(&library_count) : 0;
    for (size_t i = 0; i < count; i++) {
        Library *library = &libraries[i];
        size_t start = library->record->bits_offset, size = align8(start + library->bit_bytes);
        LogRecord *record = add_record(size);
        if (record == NULL) {
            note_lost(NO_ROOM);
            by_test = false;
            test = NULL;
            return;
        }
        memcpy(&record->kind, &library->record->kind, start - offsetof(LogRecord, kind));
        library->record = record;
        publish(record, size);
    }
}

/* Makes pages inaccessible that the process has touched before. */
static void watch_again(Library *library) {
    for (size_t i = 0; library->open != NULL && i < library->bit_bytes; i++)
        atomic_store(&library->open[i], 0);
    for (size_t i = 0; i < library->range_count && !atomic_load(&library->kept); i++) {
        const Range *range = &library->ranges[i];
        if (mprotect((void *)range->start, range->end - range->start, PROT_NONE) != 0)
            give_up(library);
    }
    if (atomic_load(&library->kept))
        for (size_t i = 0; i < library->range_count; i++)
            touch(library, &library->ranges[i], library->ranges[i].start, library->ranges[i].end);
}

/* The test that runs from now on; "": none does. False: tests are not told apart. */
static bool enter_test(const char *name) {
    if (!by_test) return false;
    lock();
    size_t count = atomic_load(&library_count);
    test = NULL;
    for (size_t i = 0; i < count; i++) atomic_store(&libraries[i].test_bits, NULL);
    if (name[0] != 0 && start_log() && by_test) add_test(name, strlen(name), 0);
    if (test != NULL) {
        for (size_t i = 0; i < count; i++)
            if (atomic_load(&libraries[i].watched)) watch_again(&libraries[i]);
        atomic_store(&parts_left, most_parts);
    }
    unlock();
    return true;
}

/* ---- What the program does to its own memory ---- */

static int (*real_mprotect)(void *, size_t, int);
static int (*real_pkey_mprotect)(void *, size_t, int, int);

/* Pages that the program itself makes accessible are touched unseen. */
static void note_protection(uintptr_t start, size_t size, int protection) {
    uintptr_t end = start + size;
    size_t count = atomic_load(&library_count);
    if (protection == PROT_NONE) return;
    for (size_t i = 0; i < count; i++) {
        Library *library = &libraries[i];
        if (end <= library->low || start >= library->high || !atomic_load(&library->watched))
            continue;
        atomic_store(&library->kept, true);
        for (size_t j = 0; j < library->range_count; j++) {
            const Range *range = &library->ranges[j];
            uintptr_t from = start > range->start ? start & ~(uintptr_t)(PAGE - 1) : range->start;
            uintptr_t to = end < range->end ? (end + PAGE - 1) & ~(uintptr_t)(PAGE - 1) : range->end;
            touch(library, range, from, to);
            if (atomic_load(&library->guarded) && from < to) show(library, range, from, to);
        }
    }
}

/* An address that mprotect(2) refuses: without us, the call does nothing. */
static const uintptr_t ENTER_TEST = 0x6e656761746976;

static int our_mprotect(void *start, size_t size, int protection) {
    if ((uintptr_t)start == ENTER_TEST && enter_test((const char *)size)) return 0;
    note_protection((uintptr_t)start, size, protection);
    return real_mprotect(start, size, protection);
}

static int our_pkey_mprotect(void *start, size_t size, int protection, int key) {
    note_protection((uintptr_t)start, size, protection);
    return real_pkey_mprotect(start, size, protection, key);
}

static void hide_by_mprotect(Library *library);
static bool without_guards;
static int (*real_prctl)(int, ...);

/* A seccomp filter may forbid to remove guards, as Chromium's does. It allows mprotect, or no code
 * could be loaded. But it may forbid to make memory executable that was not, as PR_SET_MDWE does. */
static int our_prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d) {
    if (option == PR_SET_NO_NEW_PRIVS || option == PR_SET_SECCOMP || option == SET_MDWE) {
        lock();
        without_guards = true;
        for (size_t i = 0, count = atomic_load(&library_count); i < count; i++) {
            Library *library = &libraries[i];
            if (!atomic_load(&library->watched) || !(only_gaps || atomic_load(&library->guarded)))
                continue;
            atomic_store(&library->switched, true);
            if (atomic_load(&library->kept) || only_gaps)
                give_up(library); /* the program chose its protection */
            else
                hide_by_mprotect(library);
        }
        unlock();
    }
    return real_prctl(option, a, b, c, d);
}

static const FaultsWrapper wrappers[] = {
    {"prctl", (void *)our_prctl, (void **)&real_prctl},
    {"mprotect", (void *)our_mprotect, (void **)&real_mprotect},
    {"pkey_mprotect", (void *)our_pkey_mprotect, (void **)&real_pkey_mprotect},
};

/* ---- Reading a library's sections ---- */

static bool read_at(int fd, void *data, size_t size, uint64_t offset) {
    return syscall(SYS_pread64, fd, data, size, offset) == (ssize_t)size;
}

static bool ends_with_code(const char *name) {
    /* Small ones that are always used, and share their pages. */
    return strncmp(name, ".plt", 4) != 0 && strcmp(name, ".init") != 0 &&
           strcmp(name, ".fini") != 0;
}

static bool is_watchable(const ElfW(Shdr) *section, const char *name) {
    if (section->sh_type == SHT_NOBITS || !(section->sh_flags & SHF_ALLOC) ||
        (section->sh_flags & (SHF_WRITE | SHF_TLS)))
        return false;
    if (section->sh_flags & SHF_EXECINSTR) return ends_with_code(name);
    return strcmp(name, ".eh_frame") == 0 || strcmp(name, ".eh_frame_hdr") == 0 ||
           strcmp(name, ".gcc_except_table") == 0;
}

static struct {
    ElfW(Ehdr) head;
    ElfW(Phdr) segments[64];
    ElfW(Shdr) sections[MAX_SECTIONS];
    char names[MAX_NAMES];
} elf;

/* How the segment that holds the addresses is mapped; -1 if none does. */
static int protection_of(uint64_t start, uint64_t end) {
    for (unsigned i = 0; i < elf.head.e_phnum; i++) {
        const ElfW(Phdr) *p = &elf.segments[i];
        if (p->p_type != PT_LOAD || start > end || start < p->p_vaddr ||
            end > p->p_vaddr + p->p_filesz)
            continue;
        if (p->p_flags & PF_W) return -1;
        return (p->p_flags & PF_R ? PROT_READ : 0) | (p->p_flags & PF_X ? PROT_EXEC : 0);
    }
    return -1;
}

static void add_range(Library *library, uint64_t start, uint64_t end, int protection) {
    start = (start + PAGE - 1) & ~(uint64_t)(PAGE - 1);
    end &= ~(uint64_t)(PAGE - 1);
    if (start >= end || protection < 0 || library->range_count == MAX_RANGES) return;
    library->ranges[library->range_count++] =
        (Range){library->base + start, library->base + end, protection, 0};
}

/* Where the loader has put bytes of the file, if the file is the one that was mapped; else NULL. */
static const void *find_mapped(const struct link_map *map, uint64_t offset, size_t size) {
    for (unsigned i = 0; i < elf.head.e_phnum; i++) {
        const ElfW(Phdr) *p = &elf.segments[i];
        if (p->p_type != PT_LOAD || offset < p->p_offset || size > p->p_filesz ||
            offset - p->p_offset > p->p_filesz - size)
            continue;
        uintptr_t start = map->l_addr + p->p_vaddr + (offset - p->p_offset);
        return is_readable(start, size) ? (const void *)start : NULL;
    }
    return NULL;
}

/* The file is what was mapped: its headers are the ones in memory. */
static bool is_mapped(const struct link_map *map) {
    size_t size = elf.head.e_phnum * sizeof *elf.segments;
    const void *head = find_mapped(map, 0, sizeof elf.head);
    const void *segments = find_mapped(map, elf.head.e_phoff, size);
    return head != NULL && memcmp(head, &elf.head, sizeof elf.head) == 0 && segments != NULL &&
           memcmp(segments, elf.segments, size) == 0;
}

/* The whole pages inside of watchable sections; neighbours count as one. */
static bool find_ranges(int fd, const struct link_map *map, Library *library) {
    const ElfW(Ehdr) *head = &elf.head;
    const ElfW(Shdr) *names = &elf.sections[0];
    if (!read_at(fd, &elf.head, sizeof elf.head, 0) || memcmp(head->e_ident, ELFMAG, SELFMAG) != 0 ||
        head->e_ident[EI_CLASS] != ELFCLASS64 || head->e_phentsize != sizeof(ElfW(Phdr)) ||
        head->e_phnum > sizeof elf.segments / sizeof *elf.segments ||
        !read_at(fd, elf.segments, head->e_phnum * sizeof *elf.segments, head->e_phoff) ||
        !is_mapped(map) || head->e_shnum == 0 || head->e_shnum > MAX_SECTIONS ||
        head->e_shentsize != sizeof(ElfW(Shdr)) || head->e_shstrndx >= head->e_shnum ||
        !read_at(fd, elf.sections, head->e_shnum * sizeof *elf.sections, head->e_shoff))
        return false;
    names += head->e_shstrndx;
    if (names->sh_size == 0 || names->sh_size > MAX_NAMES ||
        !read_at(fd, elf.names, names->sh_size, names->sh_offset))
        return false;
    elf.names[names->sh_size - 1] = 0;
    uint64_t start = 0, end = 0;
    int protection = -1;
    for (unsigned i = 0; i < head->e_shnum; i++) {
        const ElfW(Shdr) *s = &elf.sections[i];
        if (s->sh_name >= names->sh_size || !is_watchable(s, elf.names + s->sh_name)) continue;
        int own = protection_of(s->sh_addr, s->sh_addr + s->sh_size);
        if (own != protection || s->sh_addr < end || s->sh_addr - end >= 64) {
            add_range(library, start, end, protection);
            start = s->sh_addr;
            protection = own;
        }
        end = s->sh_addr + s->sh_size;
    }
    add_range(library, start, end, protection);
    return library->range_count < MAX_RANGES;
}

static bool relocates_code(const struct link_map *map) {
    for (const ElfW(Dyn) *d = map->l_ld; d->d_tag != DT_NULL; d++)
        if (d->d_tag == DT_TEXTREL || (d->d_tag == DT_FLAGS && (d->d_un.d_val & DF_TEXTREL)))
            return true;
    return false;
}

static void describe(LogRecord *record, int fd) {
    struct statx status;
    if (fd < 0 ||
        statx(fd, "", AT_EMPTY_PATH, STATX_INO | STATX_SIZE | STATX_MTIME, &status) != 0)
        return;
    record->major = status.stx_dev_major;
    record->minor = status.stx_dev_minor;
    record->inode = status.stx_ino;
    record->file_size = status.stx_size;
    record->modified_ns =
        (int64_t)status.stx_mtime.tv_sec * 1000000000 + (int64_t)status.stx_mtime.tv_nsec;
}

/* ---- What may be touched ---- */

typedef struct {
    const uint8_t *data;
    size_t size;
} Records;

static Records allowed;

/* Read, not mapped: a file that somebody truncates would be a SIGBUS. */
static bool read_records(const char *path, Records *records) {
    struct statx status;
    int fd = open_file(path, O_RDONLY | O_NONBLOCK, 0);
    if (fd < 0) return false;
    bool read = false;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_SIZE | STATX_TYPE, &status) == 0 &&
        S_ISREG(status.stx_mode) && status.stx_size > 0) {
        size_t size = status.stx_size;
        void *data =
            mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data != MAP_FAILED && read_at(fd, data, size, 0)) {
            *records = (Records){data, size};
            mprotect(data, size, PROT_READ);
            read = true;
        }
    }
    close_file(fd);
    return read;
}

/* Whether a record is of the same file with the same ranges. */
static bool is_same(const LogRecord *row, const LogRecord *wanted) {
    size_t ranges = wanted->range_count * sizeof(LogRange);
    return row->kind == LIBRARY && row->flags == 0 && row->major == wanted->major &&
           row->minor == wanted->minor && row->inode == wanted->inode &&
           row->file_size == wanted->file_size && row->modified_ns == wanted->modified_ns &&
           row->range_count == wanted->range_count &&
           row->size >= sizeof *row + ranges && memcmp(row + 1, wanted + 1, ranges) == 0;
}

/* What is allowed names no paths. */
static bool is_at_same_path(const LogRecord *row, const LogRecord *wanted) {
    size_t start = sizeof *row + wanted->range_count * sizeof(LogRange);
    return row->path_length == 0 ||
           (row->path_length == wanted->path_length && row->size - start >= row->path_length &&
            memcmp((const uint8_t *)row + start, (const uint8_t *)wanted + start,
                   row->path_length) == 0);
}

/* The bits of the same file with the same ranges; NULL if there are none. `bytes`: of the bits. */
static const uint8_t *find_bits(const Records *records, const LogRecord *wanted, size_t bytes) {
    for (size_t at = 0; at + sizeof(LogRecord) <= records->size;) {
        const LogRecord *row = (const LogRecord *)(records->data + at);
        if (row->size == 0) {
            at = (at / CHUNK + 1) * CHUNK;
            continue;
        }
        if (row->size < sizeof *row || row->size % 8 || row->size > records->size - at) return NULL;
        if (is_same(row, wanted) && is_at_same_path(row, wanted) &&
            row->bits_offset <= row->size && row->size - row->bits_offset >= bytes)
            return (const uint8_t *)row + row->bits_offset;
        at += row->size;
    }
    return NULL;
}

/* ---- What other processes have touched ---- */

/* Logs of processes that began before. Their pages are noted, so they need no watching here. */
static struct {
    bool looked;
    size_t count;
    Records logs[OFFERED];
} known;

static void read_known(void) {
    static char path[PATH_MAX + LOG_NAME + 1];
    known.looked = true;
    for (size_t i = 0; log_.shared != NULL && i < OFFERED; i++) {
        char name[LOG_NAME];
        memcpy(name, log_.shared->names[i], LOG_NAME);
        name[LOG_NAME - 1] = 0;
        if (name[0] == 0 || strchr(name, '/') != NULL) continue;
        strcpy(path, log_.folder);
        strcat(path, "/");
        strcat(path, name);
        known.count += read_records(path, &known.logs[known.count]);
    }
}

static bool is_known(const uint8_t *const *bits, size_t count, uint64_t page) {
    for (size_t i = 0; i < count; i++)
        if (bits[i][page / 8] >> (page % 8) & 1) return true;
    return false;
}

/* Opens the pages that another process has touched. The first touch of such a page in this process
 * would add nothing: all logs together count. */
static void open_known(const Library *library) {
    const uint8_t *bits[OFFERED];
    size_t count = 0, pages = library->bit_bytes * 8;
    if (by_test || allowed.data != NULL || !atomic_load(&library->guarded)) return;
    if (!known.looked && pages >= LARGE) read_known();
    for (size_t i = 0; i < known.count; i++)
        if ((bits[count] = find_bits(&known.logs[i], library->record, library->bit_bytes)) != NULL)
            count++;
    for (size_t i = 0; i < library->range_count && count > 0; i++) {
        const Range *range = &library->ranges[i];
        uintptr_t start = range->start;
        for (uintptr_t at = start; at <= range->end; at += PAGE) {
            if (at < range->end && is_known(bits, count, range->first + (at - range->start) / PAGE))
                continue;
            if (start < at) show(library, range, start, at);
            start = at + PAGE;
        }
    }
}

/* A place for a library. One that was closed gives up its own, unless tests have bits: they know
 * libraries by their number in the log. */
static size_t find_place(void) {
    size_t count = atomic_load(&library_count);
    for (size_t i = 0; i < count && !by_test; i++)
        if (!atomic_load(&libraries[i].watched)) return i;
    return count;
}

/* Zeroed memory of this process alone; NULL: none is left. */
static void *map_own(size_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static void hide_by_mprotect(Library *library) {
    library->open = map_own(library->bit_bytes);
    atomic_store(&library->guarded, false);
    for (size_t i = 0; i < library->range_count; i++) {
        const Range *range = &library->ranges[i];
        size_t size = range->end - range->start;
        if (mprotect((void *)range->start, size, PROT_NONE) != 0) give_up(library);
        madvise((void *)range->start, size, GUARD_REMOVE);
    }
}

/* Nobody runs a library's code yet. */
static void hide(Library *library) {
    atomic_store(&library->guarded, !by_test && !without_guards);
    for (size_t i = 0; i < library->range_count && atomic_load(&library->guarded); i++) {
        const Range *range = &library->ranges[i];
        void *start = (void *)range->start;
        atomic_store(&library->guarded, madvise(start, range->end - range->start, GUARD_INSTALL) == 0);
    }
    if (!atomic_load(&library->guarded)) hide_by_mprotect(library);
}

/* A place for a library, empty but for its base; NULL: nothing can be recorded. */
static Library *begin_library(const struct link_map *map) {
    size_t index = find_place();
    if (index == MAX_LIBRARIES || !start_log()) {
        note_lost(index == MAX_LIBRARIES ? "the process has too many libraries." : NO_ROOM);
        return NULL;
    }
    Library *library = &libraries[index];
    memset(library, 0, sizeof *library);
    library->base = map->l_addr;
    library->ranges = library->own_ranges;
    return library;
}

/* Numbers the pages of the ranges; returns how many they are. */
static size_t number_pages(Library *library) {
    size_t pages = 0;
    library->low = UINTPTR_MAX;
    for (size_t i = 0; i < library->range_count; i++) {
        Range *range = &library->ranges[i];
        range->first = pages;
        pages += (range->end - range->start) / PAGE;
        if (range->start < library->low) library->low = range->start;
        if (range->end > library->high) library->high = range->end;
    }
    library->bit_bytes = (pages + 7) / 8;
    return pages;
}

/* From now on its pages are looked up when they are touched. */
static void show_to_handler(Library *library) {
    size_t index = (size_t)(library - libraries);
    atomic_store(&library->watched, true);
    if (index == atomic_load(&library_count)) atomic_store(&library_count, index + 1);
}

static Library *watch(const struct link_map *map) {
    static char path[PATH_MAX];
    Library *library = begin_library(map);
    if (library == NULL) return NULL;
    if (realpath(map->l_name, path) == NULL) path[0] = 0;
    int fd = path[0] ? open_file(path, O_RDONLY | O_NONBLOCK, 0) : -1;
    bool watched = fd >= 0 && !relocates_code(map) && find_ranges(fd, map, library);
    size_t pages = number_pages(library), length = strlen(path);
    size_t bits = sizeof(LogRecord) + library->range_count * sizeof(LogRange) + align8(length);
    size_t size = align8(bits + library->bit_bytes);
    LogRecord *record = add_record(size);
    if (record == NULL) {
        note_lost(NO_ROOM);
        if (fd >= 0) close_file(fd);
        return NULL;
    }
    record->kind = LIBRARY;
    record->range_count = (uint32_t)library->range_count;
    record->path_length = (uint32_t)length;
    record->bits_offset = (uint32_t)bits;
    describe(record, fd);
    if (fd >= 0) close_file(fd);
    LogRange *ranges = (LogRange *)(record + 1);
    for (size_t i = 0; i < library->range_count; i++)
        ranges[i] = (LogRange){library->ranges[i].start - library->base,
                               library->ranges[i].end - library->base};
    memcpy(ranges + library->range_count, path, length);
    library->record = record;
    library->bits = (atomic_uchar *)((uint8_t *)record + bits);
    library->allowed = watched ? find_bits(&allowed, record, library->bit_bytes) : NULL;
    record->flags = (watched ? 0 : UNWATCHED) | (library->allowed != NULL ? RESTRICTED : 0);
    publish(record, size);
    if (!watched || pages == 0) return NULL;
    show_to_handler(library);
    if (test != NULL)
        add_test((const char *)(test + 1), test->path_length, (size_t)(library - libraries));
    hide(library);
    open_known(library);
    if (pages >= LARGE) offer_log();
    return library;
}

/* ---- Gaps ----
 *
 * A library that rewriting/compact/cut.py cut maps its spare into its gaps while it is relocated, as
 * its note says (spare/stub.c). That is after la_objopen. So the note in memory gets PROT_NONE for each gap:
 * the library itself maps them inaccessible, and the handler gives each page the protection that the
 * file has for it.
 */

enum { NOTE_VERSION = 3, DT_NEGATIVA_NOTE = 0x6e656761, MAX_HOLES = 65536, MAX_NAME = 255 };

static Hole *holes_of(const Note *note) { return (Hole *)((uintptr_t)note + note->holes); }

static bool is_sound(const Note *note) {
    if ((uintptr_t)note % 8 || !is_readable((uintptr_t)note, sizeof *note) ||
        memcmp(note->magic, "NEGSPARE", sizeof note->magic) != 0 || note->version != NOTE_VERSION ||
        note->holes % 8 || note->hole_count == 0 || note->hole_count > MAX_HOLES ||
        !is_readable((uintptr_t)holes_of(note), note->hole_count * sizeof(Hole)) ||
        !is_readable((uintptr_t)note + note->name, MAX_NAME))
        return false;
    uint64_t last = 0;
    for (const Hole *hole = holes_of(note); hole < holes_of(note) + note->hole_count; hole++) {
        if ((hole->start | hole->end | hole->offset) % PAGE || hole->start < last ||
            hole->end <= hole->start || hole->end >> 48 || hole->offset >> 48 ||
            !(hole->protection & PROT_READ))
            return false;
        last = hole->end;
    }
    return true;
}

/* The note of a library; NULL: it has none. */
static const Note *find_note(const struct link_map *map) {
    for (const ElfW(Dyn) *row = map->l_ld; row->d_tag != DT_NULL; row++) {
        const Note *note = (const Note *)(map->l_addr + row->d_un.d_val);
        if (row->d_tag == DT_NEGATIVA_NOTE) return is_sound(note) ? note : NULL;
    }
    return NULL;
}

/* Whether code may become accessible later; see our_prctl. */
static bool may_open_code(void) {
    void *trial = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (trial == MAP_FAILED) return false;
    bool opened = mprotect(trial, PAGE, PROT_READ | PROT_EXEC) == 0;
    munmap(trial, PAGE);
    return opened;
}

/* Lets the library map its gaps inaccessible. */
static bool hide_gaps(const Note *note) {
    Hole *holes = holes_of(note);
    uintptr_t start = (uintptr_t)holes & ~(uintptr_t)(PAGE - 1);
    size_t size = (uintptr_t)(holes + note->hole_count) - start;
    if (mprotect((void *)start, size, PROT_READ | PROT_WRITE) != 0) return false;
    for (size_t i = 0; i < note->hole_count; i++) holes[i].protection = PROT_NONE;
    mprotect((void *)start, size, PROT_READ);
    return true;
}

static LogRecord *add_gaps(Library *library, const Note *note, size_t pages) {
    const char *name = (const char *)note + note->name;
    size_t length = strnlen(name, MAX_NAME);
    size_t bits = sizeof(LogRecord) + library->range_count * sizeof(LogRange) +
                  align8(length + sizeof note->original);
    size_t firsts = bits + align8(library->bit_bytes), size = align8(firsts + pages * 2);
    LogRecord *record = add_record(size);
    if (record == NULL) return NULL;
    record->kind = GAPS;
    record->range_count = (uint32_t)library->range_count;
    record->file_size = note->original_size;
    record->path_length = (uint32_t)length;
    record->bits_offset = (uint32_t)bits;
    LogRange *ranges = (LogRange *)(record + 1);
    for (size_t i = 0; i < library->range_count; i++) {
        const Hole *hole = &holes_of(note)[i];
        ranges[i] = (LogRange){hole->offset, hole->offset + hole->end - hole->start};
    }
    char *text = (char *)(ranges + library->range_count);
    memcpy(text, name, length);
    memcpy(text + length, note->original, sizeof note->original);
    library->bits = (atomic_uchar *)((uint8_t *)record + bits);
    library->firsts = (atomic_ushort *)((uint8_t *)record + firsts);
    publish(record, size);
    return record;
}

static Library *watch_gaps(const struct link_map *map) {
    const Note *note = find_note(map);
    if (note == NULL) return NULL;
    if (!may_open_code()) {
        note_lost("the system does not let this process make code accessible.");
        return NULL;
    }
    Library *library = begin_library(map);
    if (library == NULL) return NULL;
    Range *ranges = map_own(note->hole_count * sizeof *ranges);
    if (ranges != NULL) {
        library->ranges = ranges;
        library->range_count = note->hole_count;
        for (size_t i = 0; i < note->hole_count; i++) {
            const Hole *hole = &holes_of(note)[i];
            ranges[i] = (Range){library->base + hole->start, library->base + hole->end,
                                (int)hole->protection, 0};
        }
        size_t pages = number_pages(library);
        library->record = add_gaps(library, note, pages);
        library->open = library->record != NULL ? map_own(library->bit_bytes) : NULL;
        if (library->open != NULL) {
            show_to_handler(library);
            if (hide_gaps(note)) return library;
            atomic_store(&library->watched, false);
        }
    }
    note_lost(NO_ROOM);
    return NULL;
}

/* ---- What the loader calls ---- */

static bool is_named(const char *path, const char *start) {
    const char *name = strrchr(path, '/');
    name = name == NULL ? path : name + 1;
    return strncmp(name, start, strlen(start)) == 0;
}

static unsigned long max_mappings(void) {
    char text[24] = {0};
    unsigned long number = 0;
    int fd = open_file("/proc/sys/vm/max_map_count", O_RDONLY, 0);
    if (fd >= 0) {
        if (syscall(SYS_read, fd, text, sizeof text - 1) < 0) text[0] = 0;
        close_file(fd);
    }
    for (const char *c = text; *c >= '0' && *c <= '9'; c++) number = number * 10 + (unsigned)(*c - '0');
    return number ? number : 65530;
}

EXPORT unsigned int la_version(unsigned int version) {
    const char *folder = getenv("NEGATIVA_PAGES_LOGS"), *restricted = getenv("NEGATIVA_PAGES_ALLOWED");
    const char *name = getenv("NEGATIVA_PAGES_TEST");
    if (folder == NULL || folder[0] == 0) {
        folder = getenv("NEGATIVA_SPARE_LOG");
        only_gaps = true;
        restricted = name = NULL;
        fstat(2, &messages);
    }
    if (folder == NULL || strlen(folder) >= sizeof log_.folder) return 0;
    strcpy(log_.folder, folder);
    if (folder[0] != '/') {
        note_lost("its path must be absolute.");
        return 0;
    }
    if (only_gaps)
        mkdir(folder, 0777);
    else
        open_shared();
    most_parts = (long)(MAX_PARTS);
    atomic_store(&parts_left, most_parts);
    own_ = map_wiped();
    if (own_ == NULL || (!only_gaps && !start_log()) ||
        (restricted != NULL && !read_records(restricted, &allowed)) || !faults_start(serve)) {
        note_lost("the handler of SIGSEGV can't be set.");
        return 0;
    }
    by_test = name != NULL;
    if (by_test && name[0] != 0) add_test(name, strlen(name), 0);
    return version < LAV_CURRENT ? version : LAV_CURRENT;
}

enum { PROGRAM = 1 }; /* a cookie; a library's is its address */

EXPORT unsigned int la_objopen(struct link_map *map, Lmid_t namespace, uintptr_t *cookie) {
    static bool disabled;
    *cookie = 0;
    /* The program itself has no name, and the kernel's vdso no file. */
    if (namespace == LM_ID_BASE && map->l_prev == NULL) *cookie = PROGRAM;
    if (map->l_name == NULL || map->l_name[0] == 0 || map->l_addr == getauxval(AT_SYSINFO_EHDR) ||
        is_named(map->l_name, "ld-linux"))
        return 0;
    if (is_named(map->l_name, "libc.so.")) {
        disabled = !faults_wrap_libc(map) ||
                   !faults_wrap(map, wrappers, sizeof wrappers / sizeof *wrappers);
        for (size_t i = 0; disabled && i < atomic_load(&library_count); i++)
            give_up(&libraries[i]);
        return 0;
    }
    if (disabled) {
        note_lost("libc's functions for signals can't be replaced.");
    } else {
        lock();
        *cookie = (uintptr_t)(only_gaps ? watch_gaps(map) : watch(map));
        unlock();
    }
    return 0; /* no symbol binding is audited: calls stay as fast as they are */
}

/* Destructors have run; what comes to lie there later is not ours. At the process's end the loader
 * closes the program first (_dl_fini), and unmaps nothing: code of a closed library may still run. */
EXPORT unsigned int la_objclose(uintptr_t *cookie) {
    static atomic_bool ends;
    if (*cookie == PROGRAM) atomic_store(&ends, true);
    Library *library = *cookie == PROGRAM ? NULL : (Library *)*cookie;
    if (library == NULL || atomic_load(&ends)) return 0;
    lock();
    for (size_t i = 0; i < library->range_count; i++) {
        const Range *range = &library->ranges[i];
        show(library, range, range->start, range->end);
    }
    atomic_store(&library->watched, false);
    if (library->open != NULL) munmap(library->open, library->bit_bytes);
    if (library->ranges != library->own_ranges)
        munmap(library->ranges, library->range_count * sizeof *library->ranges);
    unlock();
    return 0;
}
