/* The file of a trace: one write() for each line, and what is done if one is lost.
 *
 * Everything here is under `lock`, but for `active`.
 */
#pragma once

#include "../../native/files.h"
#include "text.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/un.h>

#define LARGEST_SAMPLE (64 << 20)

static pthread_mutex_t lock = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
static atomic_int active; /* callbacks record; read without the lock, as a first look */
static int trace_fd = -1;
static pid_t *trace_owner; /* the process that opened it; fork wipes it, see map_wiped */
static long next_id;
static char trace_path[4096];
static dev_t trace_device;
static ino_t trace_inode;
static nlink_t trace_links; /* when it was new */
static off_t lost_at;       /* where the header says that nothing is lost */
static char last_error[1024];
/* No child of a session: it is traced for a while, and its trace names no more than GPU code and
 * the files that it lies in (tracing/command.py). */
static bool is_sample;

static long long time_ns(struct timespec t) { return nanoseconds(t.tv_sec, t.tv_nsec); }

static long long now_ns(void) { return (long long)clock_ns(CLOCK_REALTIME); }

/* Tells a process that waits for it (tracing/children.py) something of this one. It needs
 * no right and no space on a disk. */
static void send_to(const char *name, size_t length, const char *fact) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    /* unix(7): an abstract address begins with NUL, and its length is part of it. */
    if (length == 0 || length >= sizeof address.sun_path) return;
    memcpy(address.sun_path + 1, name, length);
    char text[2048], executable[1024];
    ssize_t size = readlink("/proc/self/exe", executable, sizeof executable - 1);
    executable[size > 0 ? size : 0] = 0;
    snprintf(text, sizeof text, "process %d (%s), user %u: %s", (int)getpid(), executable,
             (unsigned)geteuid(), fact);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return;
    sendto(fd, text, strlen(text), MSG_NOSIGNAL, (struct sockaddr *)&address,
           (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length));
    close(fd);
}

/* Why this process is not traced, or not wholly. */
static void tell(const char *problem) {
    const char *name = getenv("NEGATIVA_LACKS");
    if (name != NULL) send_to(name, strlen(name), problem);
}

/* To sessions of which a test started this one: they don't see what it uses. */
static void tell_outer_sessions(void) {
    const char *name = getenv("NEGATIVA_OUTER_LACKS");
    while (name != NULL) {
        const char *comma = strchr(name, ',');
        size_t length = comma != NULL ? (size_t)(comma - name) : strlen(name);
        send_to(name, length, "it is traced into another run");
        name = comma != NULL ? comma + 1 : NULL;
    }
}

/* Whether the trace's descriptor still is the trace: programs may close all descriptors. */
static bool trace_is_open(struct stat *status) {
    return fstat(trace_fd, status) == 0 && status->st_dev == trace_device &&
           status->st_ino == trace_inode;
}

static void close_trace(void) {
    struct stat status;
    if (trace_fd >= 0 && trace_is_open(&status)) close(trace_fd);
    trace_fd = -1;
}

/* The trace lacks a record: no more are written, and no end. The header says so from now on:
 * overwriting its bytes needs no space. If even that fails, an empty file says the same. */
static void lose(const char *problem) {
    static const char yes[] = "true }";
    struct stat status;
    if (trace_fd < 0) return;
    bool is_open = trace_is_open(&status);
    int fd = is_open ? trace_fd : open(trace_path, O_WRONLY | O_CLOEXEC);
    trace_fd = -1;
    if (fd >= 0) {
        /* pwrite(2), bugs: with O_APPEND it appends. */
        fcntl(fd, F_SETFL, 0);
        if (pwrite(fd, yes, sizeof yes - 1, lost_at) != sizeof yes - 1 && ftruncate(fd, 0) != 0)
            problem = "its trace has no end, and cannot be marked as incomplete";
        close(fd);
    }
    if (is_sample) atomic_store(&active, 0);
    tell(problem);
}

/* Whether this process opened the trace, and is no forked child of that one. */
static bool is_owner(void) { return trace_owner != NULL && *trace_owner == getpid(); }

/* Takes the lock; false: this thread has it. A signal handler interrupted a record, and calls
 * exit(), or the driver. False, too, in a child of _Fork or clone, which pthread_atfork doesn't
 * see: the trace is its parent's, and a thread of the parent may have had the lock. */
static bool take_lock(void) {
    if (!is_owner()) return false;
    bool taken = pthread_mutex_lock(&lock) == 0;
    if (!taken) lose("a signal handler interrupted a record");
    return taken;
}

/* Writes a record, which lacks its last brace. */
static void write_line(Text *line) {
    text_string(line, "}\n");
    struct stat status;
    char problem[128];
    if (trace_fd < 0) {
        /* lost */
    } else if (line->failed) {
        lose("out of memory");
    } else if (!trace_is_open(&status)) {
        lose("the program closed the descriptor of its trace");
    } else if (status.st_nlink < trace_links) {
        lose("its trace was deleted");
    } else if (!may_grow_to((uint64_t)status.st_size + line->length)) {
        lose("the limit of file sizes (ulimit -f) is reached");
    } else if (is_sample && status.st_size > LARGEST_SAMPLE) {
        lose("its trace is large enough");
    } else {
        ssize_t written;
        do written = write(trace_fd, line->data, line->length);
        while (written < 0 && errno == EINTR);
        if (written != (ssize_t)line->length) {
            snprintf(problem, sizeof problem, "its trace cannot be written: %s",
                     written < 0 ? strerror(errno) : "no space for a whole line");
            lose(problem);
        }
    }
    free(line->data);
    memset(line, 0, sizeof *line);
}
