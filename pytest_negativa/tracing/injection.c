/* Traces a process that is not the test process: CUDA loads this library in cuInit when
 * CUDA_INJECTION64_PATH names it, and it writes the same records as the detector in Python
 * (models/trace.py) into a file of its own in NEGATIVA_TRACE_DIR.
 *
 * Needs neither CUDA's nor CUPTI's headers to build; what it must know of them is declared
 * below, with the header it comes from. CUPTI is opened at run time.
 *
 * The negativa_* functions let a Python process use it on itself, through ctypes.
 *
 * NVTX loads it, too, if NVTX_INJECTION64_PATH names it. It then tells CUPTI which range each thread
 * is in, for the launches that the detector in Python counts.
 *
 * Rules: never fail the program (InitializeInjection always says yes), never print, never
 * trust a pointer (memory is read by system call), one lock, one write() for each line.
 */
#define _GNU_SOURCE
#include "../processes/wiped.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include <wchar.h>

#define EXPORT __attribute__((visibility("default")))
#define TRACE_VERSION 1
#define LARGEST_SAMPLE (64 << 20)

/* ---- CUPTI: cupti_callbacks.h, cupti_result.h ---- */

typedef struct {
    int site; /* CUpti_ApiCallbackSite: 0 enter, 1 exit */
    const char *function_name;
    const void *params;
    const int *result; /* CUresult, valid at exit */
} CallbackData;

typedef void (*Callback)(void *user, int domain, uint32_t cbid, const void *data);

typedef struct {
    size_t struct_size;
    const char *subscriber_name;
    char *old_subscriber_name;
    size_t old_subscriber_size;
} SubscriberParams;

enum { DOMAIN_DRIVER_API = 1, SITE_EXIT = 1, CUPTI_MULTIPLE_SUBSCRIBERS = 39 };

static struct {
    int (*subscribe)(void **, Callback, void *);
    int (*subscribe_v2)(void **, Callback, void *, SubscriberParams *);
    int (*unsubscribe)(void *);
    int (*enable_callback)(uint32_t, void *, int, uint32_t);
    int (*finalize)(void);
} cupti;

/* ---- The driver calls; the same table as drivercalls.py, which explains it ---- */

enum Action {
    LOAD, LOAD_FILE, UNLOAD, KERNEL, DATA, ENUMERATE, MODULE_OF_LIBRARY,
    LINK_DATA, LINK_FILE, LINK_COMPLETE
};

typedef struct {
    uint32_t cbid;
    const char *name;
    enum Action action;
    int handle, subject;
    const char *kind;
} DriverCall;

static const DriverCall CALLS[] = {
    {18, "cuModuleLoad", LOAD_FILE, 0, 1, NULL},
    {19, "cuModuleLoadData", LOAD, 0, 1, NULL},
    {20, "cuModuleLoadDataEx", LOAD, 0, 1, NULL},
    {21, "cuModuleLoadFatBinary", LOAD, 0, 1, NULL},
    {22, "cuModuleUnload", UNLOAD, 0, 0, NULL},
    {23, "cuModuleGetFunction", KERNEL, 1, 2, NULL},
    {24, "cuModuleGetGlobal", DATA, 2, 3, "global"},
    {26, "cuModuleGetTexRef", DATA, 1, 2, "texture"},
    {190, "cuModuleGetSurfRef", DATA, 1, 2, "surface"},
    {241, "cuModuleGetGlobal_v2", DATA, 2, 3, "global"},
    {363, "cuLinkAddData", LINK_DATA, 0, 2, NULL},
    {364, "cuLinkAddFile", LINK_FILE, 0, 2, NULL},
    {365, "cuLinkComplete", LINK_COMPLETE, 2, 1, NULL},
    {382, "cuLinkAddData_v2", LINK_DATA, 0, 2, NULL},
    {383, "cuLinkAddFile_v2", LINK_FILE, 0, 2, NULL},
    {678, "cuLibraryLoadData", LOAD, 0, 1, NULL},
    {679, "cuLibraryLoadFromFile", LOAD_FILE, 0, 1, NULL},
    {680, "cuLibraryUnload", UNLOAD, 0, 0, NULL},
    {681, "cuLibraryGetKernel", KERNEL, 1, 2, NULL},
    {682, "cuLibraryGetModule", MODULE_OF_LIBRARY, 0, 1, NULL},
    {684, "cuLibraryGetGlobal", DATA, 2, 3, "global"},
    {685, "cuLibraryGetManaged", DATA, 2, 3, "managed"},
    {700, "cuLibraryGetUnifiedFunction", DATA, 1, 2, "unified-function"},
    {738, "cuModuleEnumerateFunctions", ENUMERATE, 2, 2, NULL},
    {740, "cuLibraryEnumerateKernels", ENUMERATE, 2, 2, NULL},
};
enum { CALL_COUNT = sizeof CALLS / sizeof *CALLS, LINK_SIZE_SLOT = 3 };

/* ---- State, all of it under `lock` ---- */

static pthread_mutex_t lock = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
static atomic_int active; /* callbacks record; read without the lock, as a first look */
static atomic_int ranges_on; /* NVTX ranges go to CUPTI */
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;
static void *subscriber;
static int trace_fd = -1;
static pid_t *trace_owner; /* the process that opened it; fork wipes it, see wiped.h */
static long next_id;
static bool devices_known;
static long open_gap;
static char trace_path[4096];
static dev_t trace_device;
static ino_t trace_inode;
static nlink_t trace_links; /* when it was new */
static off_t lost_at; /* where the header says that nothing is lost */
static char last_error[1024];
/* No child of a session: it is traced for a while, and its trace names no more than GPU code and the
 * files that it lies in (tracing/attach.py). */
static bool is_sample;

static long long nanoseconds(struct timespec t) {
    return (long long)t.tv_sec * 1000000000 + t.tv_nsec;
}

static long long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return nanoseconds(t);
}

/* ---- Text that grows ---- */

typedef struct {
    char *data;
    size_t length, room;
    bool failed; /* out of memory: the text is not whole and must not be used */
} Text;

static void text_bytes(Text *text, const void *bytes, size_t length) {
    if (text->data == NULL || text->length + length + 1 > text->room) {
        size_t room = (text->length + length + 1) * 2 + 256;
        char *data = realloc(text->data, room);
        if (data == NULL) {
            text->failed = true;
            return;
        }
        text->data = data;
        text->room = room;
    }
    memcpy(text->data + text->length, bytes, length);
    text->length += length;
    text->data[text->length] = 0;
}

static void text_string(Text *text, const char *string) { text_bytes(text, string, strlen(string)); }

__attribute__((format(printf, 2, 3))) static void text_format(Text *text, const char *format, ...) {
    char small[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(small, sizeof small, format, arguments);
    va_end(arguments);
    if (length > 0)
        text_bytes(text, small, (size_t)length < sizeof small ? (size_t)length : sizeof small - 1);
}

/* Bytes of the UTF-8 sequence at p (RFC 3629, 4), 0 if there is none. */
static size_t utf8_length(const unsigned char *p, size_t left) {
    if (p[0] < 0x80) return 1;
    if (p[0] < 0xC2 || p[0] > 0xF4) return 0;
    size_t length = p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    if (length > left) return 0;
    for (size_t i = 1; i < length; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    if (p[0] == 0xE0 && p[1] < 0xA0) return 0;
    if (p[0] == 0xED && p[1] > 0x9F) return 0;
    if (p[0] == 0xF0 && p[1] < 0x90) return 0;
    if (p[0] == 0xF4 && p[1] > 0x8F) return 0;
    return length;
}

/* A JSON string; bytes that are not UTF-8 become \xNN, as in Python's backslashreplace. */
static void text_json(Text *text, const char *string, size_t size) {
    const unsigned char *p = (const unsigned char *)string;
    text_string(text, "\"");
    for (size_t i = 0; i < size;) {
        size_t length = utf8_length(p + i, size - i);
        if (length == 0) {
            text_format(text, "\\\\x%02x", p[i]);
            length = 1;
        } else if (p[i] == '"' || p[i] == '\\') {
            text_format(text, "\\%c", p[i]);
        } else if (p[i] < 0x20) {
            text_format(text, "\\u%04x", p[i]);
        } else {
            text_bytes(text, p + i, length);
        }
        i += length;
    }
    text_string(text, "\"");
}

static void text_field(Text *text, const char *name, const char *value) {
    text_format(text, ",\"%s\":", name);
    text_json(text, value, strlen(value));
}

/* Tells a process that waits for it (tracing/children.py) something of this one. It needs no right
 * and no space on a disk. */
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

/* Takes the lock; false: this thread has it. A signal handler interrupted a record, and calls exit(),
 * or the driver. False, too, in a child of _Fork or clone, which pthread_atfork doesn't see: the trace
 * is its parent's, and a thread of the parent may have had the lock. */
static bool take_lock(void) {
    if (!is_owner()) return false;
    bool taken = pthread_mutex_lock(&lock) == 0;
    if (!taken) lose("a signal handler interrupted a record");
    return taken;
}

static void write_line(Text *line) {
    text_string(line, "\n");
    struct stat status;
    struct rlimit limit;
    char problem[128];
    if (trace_fd < 0) {
        /* lost */
    } else if (line->failed) {
        lose("out of memory");
    } else if (!trace_is_open(&status)) {
        lose("the program closed the descriptor of its trace");
    } else if (status.st_nlink < trace_links) {
        lose("its trace was deleted");
    } else if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
               (rlim_t)status.st_size + line->length > limit.rlim_cur) {
        /* To write would be a signal that ends the program (SIGXFSZ). */
        lose("the limit of file sizes (ulimit -f) is reached");
    } else if (is_sample && status.st_size > LARGEST_SAMPLE) {
        lose("its trace is large enough");
    } else {
        ssize_t written;
        do
            written = write(trace_fd, line->data, line->length);
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

/* ---- A hash table from bytes to a number; 0 means absent ---- */

typedef struct {
    struct Entry {
        char *key;
        size_t size;
        long value;
    } *entries;
    size_t room, used;
} Table;

static Table contexts, libraries, files, images, handles, seen, warned;

static uint64_t hash_bytes(const char *bytes, size_t size) {
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    for (size_t i = 0; i < size; i++) hash = (hash ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    return hash;
}

static struct Entry *table_slot(const Table *table, const char *key, size_t size) {
    size_t mask = table->room - 1;
    size_t i = hash_bytes(key, size) & mask;
    while (table->entries[i].key != NULL &&
           (table->entries[i].size != size || memcmp(table->entries[i].key, key, size) != 0))
        i = (i + 1) & mask;
    return &table->entries[i];
}

static long table_get(const Table *table, const char *key, size_t size) {
    if (table->room == 0) return 0;
    struct Entry *entry = table_slot(table, key, size);
    return entry->key == NULL ? 0 : entry->value;
}

static void table_put(Table *table, const char *key, size_t size, long value) {
    if ((table->used + 1) * 2 > table->room) {
        Table bigger = {.room = table->room ? table->room * 2 : 256, .used = table->used};
        bigger.entries = calloc(bigger.room, sizeof *bigger.entries);
        if (bigger.entries == NULL) {
            lose("out of memory");
            return;
        }
        for (size_t i = 0; i < table->room; i++)
            if (table->entries[i].key != NULL)
                *table_slot(&bigger, table->entries[i].key, table->entries[i].size) =
                    table->entries[i];
        free(table->entries);
        *table = bigger;
    }
    struct Entry *entry = table_slot(table, key, size);
    if (entry->key == NULL) {
        char *copy = malloc(size ? size : 1);
        if (copy == NULL) {
            lose("out of memory");
            return;
        }
        memcpy(copy, key, size);
        entry->key = copy;
        entry->size = size;
        table->used++;
    }
    entry->value = value;
}

static void table_clear(Table *table) {
    for (size_t i = 0; i < table->room; i++) free(table->entries[i].key);
    free(table->entries);
    memset(table, 0, sizeof *table);
}

static long text_get(const Table *table, const Text *key) {
    return key->failed ? 0 : table_get(table, key->data, key->length);
}

static void text_put(Table *table, const Text *key, long value) {
    if (!key->failed) table_put(table, key->data, key->length, value);
}

/* ---- This process's memory: a bad pointer is an answer, no crash ---- */

static size_t read_pages(uint64_t address, char *buffer, size_t size) {
    int fd = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    size_t got = 0;
    while (fd >= 0 && got < size) {
        /* Up to page ends: a read into unmapped memory may fail as a whole. */
        size_t part = 4096 - (address + got) % 4096;
        if (part > size - got) part = size - got;
        ssize_t n = pread(fd, buffer + got, part, (off_t)(address + got));
        if (n <= 0) break;
        got += (size_t)n;
    }
    if (fd >= 0) close(fd);
    return got;
}

static size_t read_memory(uint64_t address, void *buffer, size_t size) {
    if (address == 0 || address >= (uint64_t)1 << 62) return 0;
    struct iovec local = {buffer, size};
    struct iovec remote = {(void *)(uintptr_t)address, size};
    ssize_t got = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
    return got == (ssize_t)size ? size : read_pages(address, buffer, size);
}

static uint64_t read_pointer(uint64_t address) {
    uint64_t value = 0;
    return read_memory(address, &value, sizeof value) == sizeof value ? value : 0;
}

/* A NUL-terminated string, appended to `text`; false if it can't be read or has no end. */
static bool read_string(uint64_t address, Text *text, size_t limit) {
    char buffer[4096];
    size_t total = 0;
    while (total < limit) {
        size_t got = read_memory(address + total, buffer, total ? sizeof buffer : 256);
        char *end = memchr(buffer, 0, got);
        size_t length = end == NULL ? got : (size_t)(end - buffer);
        text_bytes(text, buffer, length);
        if (end != NULL) return !text->failed;
        if (got == 0) return false;
        total += got;
    }
    return false;
}

/* ---- SHA-256 (FIPS 180-4) ---- */

typedef struct {
    uint32_t state[8];
    unsigned char block[64];
    uint64_t length;
} Sha256;

static const uint32_t SHA_K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void sha256_block(Sha256 *sha) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++) {
        const unsigned char *p = sha->block + 4 * i;
        w[i] = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
    }
    for (int i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7] +
               (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
    }
    memcpy(s, sha->state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t t1 = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25)) +
                      ((s[4] & s[5]) ^ (~s[4] & s[6])) + SHA_K[i] + w[i];
        uint32_t t2 = (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22)) +
                      ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += t1;
        s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) sha->state[i] += s[i];
}

static void sha256_init(Sha256 *sha) {
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(sha->state, start, sizeof start);
    sha->length = 0;
}

static void sha256_add(Sha256 *sha, const unsigned char *data, size_t size) {
    while (size) {
        size_t used = sha->length % 64, part = 64 - used < size ? 64 - used : size;
        memcpy(sha->block + used, data, part);
        sha->length += part;
        data += part;
        size -= part;
        if (sha->length % 64 == 0) sha256_block(sha);
    }
}

static void sha256_hex(Sha256 *sha, char hex[65]) {
    uint64_t bits = sha->length * 8;
    unsigned char end[8], one = 0x80, zero = 0;
    for (int i = 0; i < 8; i++) end[i] = (unsigned char)(bits >> (56 - 8 * i));
    sha256_add(sha, &one, 1);
    while (sha->length % 64 != 56) sha256_add(sha, &zero, 1);
    sha256_add(sha, end, 8);
    for (int i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", sha->state[i]);
}

/* For tests: the digest of a buffer. */
EXPORT void negativa_sha256(const void *data, size_t size, char hex[65]) {
    Sha256 sha;
    sha256_init(&sha);
    sha256_add(&sha, data, size);
    sha256_hex(&sha, hex);
}

static bool hash_memory(uint64_t address, uint64_t size, char hex[65]) {
    static unsigned char chunk[1 << 16]; /* under the lock */
    Sha256 sha;
    sha256_init(&sha);
    for (uint64_t done = 0; done < size;) {
        size_t part = size - done < sizeof chunk ? (size_t)(size - done) : sizeof chunk;
        if (read_memory(address + done, chunk, part) != part) return false;
        sha256_add(&sha, chunk, part);
        done += part;
    }
    sha256_hex(&sha, hex);
    return true;
}

/* ---- Which file lies at an address (mappings.py) ---- */

typedef struct {
    uint64_t start, end, offset;
    unsigned long inode; /* only for comparing mappings: on overlayfs it may not be that of stat */
    const char *path;    /* into maps_text */
    bool executable, of_loader;
} Mapping;

static Text maps_text;
static Mapping *mappings;
static size_t mapping_count;
static unsigned long long read_at_adds = ~0ull, read_at_subs;
static bool maps_valid;

static int note_generation(struct dl_phdr_info *info, size_t size, void *data) {
    unsigned long long *counters = data;
    if (size >= offsetof(struct dl_phdr_info, dlpi_subs) + sizeof info->dlpi_subs) {
        counters[0] = info->dlpi_adds;
        counters[1] = info->dlpi_subs;
    }
    return 1;
}

static bool read_file(const char *path, Text *text) {
    char buffer[4096]; /* threads may have little stack; of maps no more is read at once anyway */
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t got;
    while ((got = read(fd, buffer, sizeof buffer)) > 0) text_bytes(text, buffer, (size_t)got);
    close(fd);
    return got == 0 && !text->failed && text->data != NULL;
}

static void unescape(char *path) {
    char *out = path;
    for (char *in = path; *in; out++) {
        if (in[0] == '\\' && in[1] >= '0' && in[1] <= '3' && in[2] && in[3]) {
            *out = (char)((in[1] - '0') * 64 + (in[2] - '0') * 8 + (in[3] - '0'));
            in += 4;
        } else {
            *out = *in++;
        }
    }
    *out = 0;
}

static bool starts_with(const char *text, const char *start) {
    return strncmp(text, start, strlen(start)) == 0;
}

/* Whether the kernel gives this name to memory without a file. */
static bool names_memory(const char *path) {
    static const char deleted[] = " (deleted)";
    size_t length = strlen(path), tail = sizeof deleted - 1;
    if (strcmp(path, "/dev/zero") == 0) return true; /* a private mapping */
    if (length <= tail || strcmp(path + length - tail, deleted) != 0) return false;
    return starts_with(path, "/memfd:") || starts_with(path, "/SYSV") ||
           starts_with(path, "/dev/zero ") || starts_with(path, "/anon_hugepage ");
}

static void record_loaded_libraries(void);
static void write_warning(const char *code, const char *text, bool incomplete);

static void refresh_mappings(void) {
    unsigned long long counters[2] = {0, 0};
    dl_iterate_phdr(note_generation, counters);
    maps_text.length = 0;
    mapping_count = 0;
    maps_valid = false;
    if (!read_file("/proc/self/maps", &maps_text)) {
        /* In a chroot without /proc: no image can be told to lie in a library. */
        write_warning("maps-unreadable", "/proc/self/maps cannot be read", true);
        return;
    }
    size_t lines = 0;
    for (char *p = maps_text.data; (p = strchr(p, '\n')) != NULL; p++) lines++;
    Mapping *bigger = realloc(mappings, (lines + 1) * sizeof *bigger);
    if (bigger == NULL) {
        lose("out of memory");
        return;
    }
    mappings = bigger;
    char *line = maps_text.data;
    for (char *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        *end = 0;
        unsigned long start, stop, offset, inode;
        char permissions[5];
        int path_at = 0;
        if (sscanf(line, "%lx-%lx %4s %lx %*s %lu %n", &start, &stop, permissions, &offset, &inode,
                   &path_at) < 5 ||
            path_at == 0 || line[path_at] != '/')
            continue;
        unescape(line + path_at);
        mappings[mapping_count++] = (Mapping){start, stop, offset, inode, line + path_at,
                                              permissions[2] == 'x', false};
    }
    /* What the loader mapped has a part with code. Parts of one file lie side by side. */
    for (size_t i = 0, j; i < mapping_count; i = j) {
        bool code = false;
        for (j = i; j < mapping_count && strcmp(mappings[i].path, mappings[j].path) == 0; j++)
            code = code || mappings[j].executable;
        for (size_t k = i; k < j; k++) mappings[k].of_loader = code;
    }
    read_at_adds = counters[0];
    read_at_subs = counters[1];
    maps_valid = true;
    record_loaded_libraries();
}

static const Mapping *search_mappings(uint64_t address) {
    size_t low = 0, high = mapping_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (mappings[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low < mapping_count && mappings[low].start <= address ? &mappings[low] : NULL;
}

static bool mappings_are_current(void) {
    unsigned long long counters[2] = {0, 0};
    dl_iterate_phdr(note_generation, counters);
    return maps_valid && counters[0] == read_at_adds && counters[1] == read_at_subs;
}

static const Mapping *find_mapping(uint64_t address) {
    if (mappings_are_current()) {
        const Mapping *found = search_mappings(address);
        if (found != NULL && found->of_loader) return found;
    }
    refresh_mappings();
    return search_mappings(address);
}

/* ---- Records ---- */

static Text current_context; /* the "context" object of the record */

static long context_id(void) {
    if (current_context.failed) lose("out of memory");
    long id = text_get(&contexts, &current_context);
    if (id) return id;
    id = ++next_id;
    Text line = {0};
    text_format(&line, "{\"record\":\"context\",\"id\":%ld,\"context\":", id);
    text_bytes(&line, current_context.data, current_context.length);
    text_format(&line, ",\"time_ns\":%lld}", now_ns());
    write_line(&line);
    text_put(&contexts, &current_context, id);
    return id;
}

static void write_warning(const char *code, const char *text, bool incomplete) {
    Text line = {0};
    text_string(&line, "{\"record\":\"warning\"");
    text_field(&line, "code", code);
    text_field(&line, "text", text);
    if (incomplete) text_string(&line, ",\"incomplete\":true");
    text_string(&line, "}");
    if (!text_get(&warned, &line)) {
        text_put(&warned, &line, 1);
        write_line(&line);
    }
    free(line.data);
}

static bool find_build_id(int fd, Text *hex) {
    ElfW(Ehdr) header;
    if (pread(fd, &header, sizeof header, 0) != sizeof header ||
        memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
        header.e_phentsize != sizeof(ElfW(Phdr)))
        return false;
    for (int i = 0; i < header.e_phnum; i++) {
        ElfW(Phdr) program;
        if (pread(fd, &program, sizeof program,
                  (off_t)(header.e_phoff + (size_t)i * sizeof program)) != sizeof program)
            return false;
        if (program.p_type != PT_NOTE) continue;
        unsigned char notes[4096];
        size_t wanted = program.p_filesz < sizeof notes ? program.p_filesz : sizeof notes;
        ssize_t got = pread(fd, notes, wanted, (off_t)program.p_offset);
        for (size_t at = 0; got > 0 && at + 12 <= (size_t)got;) {
            uint32_t note[3];
            memcpy(note, notes + at, 12);
            size_t name = at + 12, start = name + (((size_t)note[0] + 3) & ~(size_t)3);
            if (start + note[1] > (size_t)got) break;
            if (note[2] == NT_GNU_BUILD_ID && note[0] == 4 && memcmp(notes + name, "GNU", 4) == 0) {
                for (uint32_t k = 0; k < note[1]; k++) text_format(hex, "%02x", notes[start + k]);
                return note[1] > 0;
            }
            at = start + (((size_t)note[1] + 3) & ~(size_t)3);
        }
    }
    return false;
}

static const char *find_package_path(const char *path) {
    static const char *const folders[] = {"/site-packages/", "/dist-packages/"};
    const char *found = NULL;
    for (int i = 0; i < 2; i++)
        for (const char *p = path; (p = strstr(p, folders[i])) != NULL; p++)
            if (found == NULL || p + strlen(folders[i]) > found) found = p + strlen(folders[i]);
    return found != NULL && *found ? found : NULL;
}

/* Without the file at its path, nothing but the path is known. */
static void write_library(long id, const char *path, size_t length, bool there) {
    Text line = {0};
    text_format(&line, "{\"record\":\"library\",\"id\":%ld,\"library\":{\"path\":", id);
    text_json(&line, path, length);
    struct stat status;
    int fd = there ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (fd >= 0 && fstat(fd, &status) == 0) {
        text_format(&line, ",\"size\":%lld,\"mtime_ns\":%lld", (long long)status.st_size,
                    nanoseconds(status.st_mtim));
        text_format(&line, ",\"device\":%llu,\"inode\":%llu,\"ctime_ns\":%lld",
                    (unsigned long long)status.st_dev, (unsigned long long)status.st_ino,
                    nanoseconds(status.st_ctim));
        Text build_id = {0};
        bool found = find_build_id(fd, &build_id);
        line.failed = line.failed || build_id.failed;
        if (found && !build_id.failed) text_field(&line, "build_id", build_id.data);
        free(build_id.data);
        const char *package_path = find_package_path(path);
        if (package_path != NULL) text_field(&line, "package_path", package_path);
    }
    if (fd >= 0) close(fd);
    text_string(&line, "}}");
    write_line(&line);
}

/* The id of a mapped file (recorder.py). A file that changes has a record for each state: `again`
 * looks whether it has. One that is gone from its path is what it was when it was last seen. */
static long library_id(const char *path, unsigned long inode, bool again) {
    static const char deleted[] = " (deleted)";
    size_t length = strlen(path), tail = sizeof deleted - 1;
    struct stat status;
    bool gone = false;
    /* A file may have this in its own name. */
    if (length > tail && strcmp(path + length - tail, deleted) == 0)
        gone = stat(path, &status) != 0 || status.st_ino != inode;
    if (gone) length -= tail;
    Text file = {0}, key = {0};
    text_bytes(&file, path, length);
    text_format(&file, " %lu", inode);
    long id = text_get(&files, &file);
    bool there = !gone && (id == 0 || again) && stat(path, &status) == 0;
    if (id != 0 && !there) {
        free(file.data);
        return id;
    }
    text_bytes(&key, path, length);
    if (there)
        text_format(&key, " %llu %llu %lld %lld %lld", (unsigned long long)status.st_dev,
                    (unsigned long long)status.st_ino, (long long)status.st_size,
                    nanoseconds(status.st_mtim), nanoseconds(status.st_ctim));
    id = text_get(&libraries, &key);
    if (id == 0) {
        id = ++next_id;
        write_library(id, path, length, there);
        text_put(&libraries, &key, id);
    }
    text_put(&files, &file, id);
    free(file.data);
    free(key.data);
    return id;
}

static void record_loaded_libraries(void) {
    if (is_sample) return;
    for (size_t i = 0; i < mapping_count; i++)
        if (mappings[i].of_loader &&
            (i == 0 || mappings[i].inode != mappings[i - 1].inode ||
             strcmp(mappings[i].path, mappings[i - 1].path) != 0))
            library_id(mappings[i].path, mappings[i].inode, true);
}

/* cuda.h; asked of the driver that the program has loaded */
static void record_devices(void) {
    devices_known = true;
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (cuda == NULL) return;
    int (*count_of)(int *) = (int (*)(int *))dlsym(cuda, "cuDeviceGetCount");
    int (*get)(int *, int) = (int (*)(int *, int))dlsym(cuda, "cuDeviceGet");
    int (*attribute)(int *, int, int) = (int (*)(int *, int, int))dlsym(cuda, "cuDeviceGetAttribute");
    int (*name_of)(char *, int, int) = (int (*)(char *, int, int))dlsym(cuda, "cuDeviceGetName");
    int (*uuid_of)(unsigned char *, int) =
        (int (*)(unsigned char *, int))dlsym(cuda, "cuDeviceGetUuid_v2");
    int (*version_of)(int *) = (int (*)(int *))dlsym(cuda, "cuDriverGetVersion");
    int (*mode_of)(int *) = (int (*)(int *))dlsym(cuda, "cuModuleGetLoadingMode");
    int count = 0, version = 0, mode = 0;
    if (!count_of || !get || !attribute || !name_of || !uuid_of || !version_of || count_of(&count))
        return;
    version_of(&version);
    char driver[64] = "";
    Text module = {0};
    if (read_file("/proc/driver/nvidia/version", &module)) {
        char *at = strstr(module.data, "Kernel Module");
        while (at != NULL && *at && *at != '\n' && !(at[0] >= '0' && at[0] <= '9' && at[-1] == ' '))
            at++;
        if (at != NULL) sscanf(at, "%63[0-9.]", driver);
    }
    free(module.data);
    for (int i = 0; i < count; i++) {
        int device, major, minor;
        char name[256] = "";
        unsigned char uuid[16];
        /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR */
        if (get(&device, i) || attribute(&major, 75, device) || attribute(&minor, 76, device) ||
            name_of(name, sizeof name, device) || uuid_of(uuid, device)) {
            write_warning("devices-unknown", "the driver doesn't tell one of its devices", true);
            continue;
        }
        Text line = {0};
        text_string(&line, "{\"record\":\"device\",\"device\":{\"name\":");
        text_json(&line, name, strlen(name));
        text_format(&line, ",\"compute_capability\":\"%d.%d\",\"uuid\":\"GPU-", major, minor);
        for (int k = 0; k < 16 && !is_sample; k++)
            text_format(&line, "%s%02x", k == 4 || k == 6 || k == 8 || k == 10 ? "-" : "", uuid[k]);
        text_format(&line, "\",\"cuda_version\":%d", version);
        if (*driver) text_field(&line, "driver_version", driver);
        text_string(&line, "}}");
        write_line(&line);
    }
    if (mode_of != NULL && mode_of(&mode) == 0 && mode == 1)
        write_warning("eager-loading",
                      "CUDA_MODULE_LOADING=EAGER: every image of every library was loaded, used or "
                      "not, and counts as used; trace with lazy loading (the default)",
                      false);
}

/* ---- Images (images.py) ---- */

typedef struct {
    const char *form;
    bool placed;
    char *path; /* malloc-ed, where placed */
    long library;
    uint64_t offset, size;
    char sha256[65]; /* where not placed; empty: unknown */
    Text prelinked;
} Image;

enum { MAX_PRELINKED = 1 << 14 };
static const uint64_t MAX_SIZE = (uint64_t)1 << 30;
static const uint32_t WRAPPER_MAGIC = 0x466243b1, FATBIN_MAGIC = 0xba55ed50;

static void place_image(Image *image, const char *form, uint64_t address, uint64_t size) {
    const Mapping *mapping = find_mapping(address);
    /* A library may lie in a memfd. Other memory holds images as the heap does. */
    if (mapping != NULL && !mapping->of_loader && names_memory(mapping->path)) mapping = NULL;
    image->size = size;
    image->form = form;
    if (mapping != NULL && (image->path = strdup(mapping->path)) == NULL) lose("out of memory");
    if (image->path != NULL) {
        image->placed = true;
        image->library = library_id(mapping->path, mapping->inode, !mapping->of_loader);
        image->offset = mapping->offset + (address - mapping->start);
    } else if (size == 0 || size > MAX_SIZE || !hash_memory(address, size, image->sha256)) {
        image->form = "unknown";
        image->sha256[0] = 0;
    }
}

static uint16_t half(const unsigned char *p) { return (uint16_t)(p[0] | p[1] << 8); }

static uint64_t word(const unsigned char *p) {
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

/* Up to the end of the last table or section. */
static uint64_t cubin_size(uint64_t address, const unsigned char *head) {
    uint64_t programs = word(head + 32) + (uint64_t)half(head + 54) * half(head + 56);
    uint64_t table = word(head + 40), entry = half(head + 58), count = half(head + 60);
    uint64_t size = table + entry * count;
    if (programs > size) size = programs;
    Elf64_Shdr section;
    for (uint64_t i = 0; entry == sizeof section && i < count; i++) {
        uint64_t place = address + table + i * entry;
        if (read_memory(place, &section, sizeof section) != sizeof section) break;
        uint64_t end = section.sh_offset + section.sh_size;
        if (section.sh_type != SHT_NOBITS && end > size) size = end;
    }
    return size;
}

/* `size` 0: not known */
static void resolve_bare(Image *image, uint64_t address, uint64_t size) {
    unsigned char head[64];
    size_t got = read_memory(address, head, sizeof head);
    if (got >= 16 && memcmp(head, &FATBIN_MAGIC, 4) == 0) {
        place_image(image, "fatbin", address, half(head + 6) + word(head + 8));
    } else if (got == sizeof head && memcmp(head, ELFMAG, SELFMAG) == 0) {
        place_image(image, "cubin", address, cubin_size(address, head));
    } else if (size != 0) {
        /* The size of PTX may count its NUL; without it, it is known from elsewhere. */
        uint64_t text = size;
        char *data = size <= MAX_SIZE ? malloc(size) : NULL;
        bool readable = data != NULL && read_memory(address, data, size) == size;
        while (readable && text > 0 && data[text - 1] == 0) text--;
        bool ptx = readable && memchr(data, 0, text) == NULL &&
                   memmem(data, text, ".version", 8) != NULL;
        free(data);
        place_image(image, ptx ? "ptx" : "linked", address, ptx ? text : size);
    } else {
        Text text = {0};
        /* PTX ISA, 5.1: a module begins with .version; comments may come before it. */
        if (read_string(address, &text, MAX_SIZE) && text.data != NULL &&
            strstr(text.data, ".version") != NULL)
            place_image(image, "ptx", address, text.length);
        free(text.data);
    }
}

static void resolve(Image *image, uint64_t address) {
    struct {
        uint32_t magic, version;
        uint64_t data, others;
    } wrapper;
    size_t got = read_memory(address, &wrapper, sizeof wrapper);
    if (got < 4 || wrapper.magic != WRAPPER_MAGIC) {
        resolve_bare(image, address, 0);
        return;
    }
    if (got < sizeof wrapper) return;
    resolve_bare(image, wrapper.data, 0);
    if (wrapper.version < 2 || wrapper.others == 0 || !image->placed) return;
    for (int i = 0; i < MAX_PRELINKED; i++) {
        uint64_t pointer = read_pointer(wrapper.others + 8 * (uint64_t)i);
        if (pointer == 0) break;
        const Mapping *mapping = find_mapping(pointer);
        if (mapping != NULL && strcmp(mapping->path, image->path) == 0)
            text_format(&image->prelinked, "%s%llu", image->prelinked.length ? "," : "",
                        (unsigned long long)(mapping->offset + (pointer - mapping->start)));
    }
}

static void resolve_file(Image *image, uint64_t name_address) {
    Text name = {0};
    char link[64], path[4096];
    unsigned char head[4] = {0};
    if (read_string(name_address, &name, 1 << 16) && name.data != NULL) {
        int fd = open(name.data, O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
            ssize_t got = pread(fd, head, 4, 0);
            snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
            ssize_t length = readlink(link, path, sizeof path - 1);
            if (length > 0) path[length] = 0;
            if (length > 0 && (image->path = strndup(path, (size_t)length)) != NULL) {
                struct stat status;
                image->placed = true;
                image->library =
                    library_id(path, fstat(fd, &status) == 0 ? status.st_ino : 0, true);
                image->form = got == 4 && memcmp(head, &FATBIN_MAGIC, 4) == 0 ? "fatbin"
                              : got == 4 && memcmp(head, ELFMAG, 4) == 0      ? "cubin"
                                                                              : "ptx";
            }
            close(fd);
        }
    }
    free(name.data);
}

static void bind_handle(uint64_t handle, long image) {
    table_put(&handles, (const char *)&handle, sizeof handle, image);
}

/* Takes what the image owns. */
static long record_image(const char *call, uint64_t handle, Image *image) {
    if (!devices_known) {
        tell_outer_sessions();
        record_devices();
    }
    Text key = {0};
    if (image->placed)
        text_format(&key, "%llu %s %ld", (unsigned long long)image->offset, call, image->library);
    else if (image->sha256[0])
        text_format(&key, "%s %s", image->sha256, call);
    long id = key.length ? text_get(&images, &key) : 0;
    if (id == 0) {
        long context = context_id();
        id = ++next_id;
        if (strcmp(image->form, "unknown") == 0) {
            char text[128];
            snprintf(text, sizeof text, "%s was given something that is no known image", call);
            write_warning("image-unknown", text, false);
        }
        Text line = {0};
        text_format(&line, "{\"record\":\"image\",\"id\":%ld,\"context\":%ld", id, context);
        text_field(&line, "form", image->form);
        text_field(&line, "call", call);
        if (image->placed)
            text_format(&line, ",\"library\":%ld,\"offset\":%llu", image->library,
                        (unsigned long long)image->offset);
        if (image->size && (image->placed || image->sha256[0]))
            text_format(&line, ",\"size\":%llu", (unsigned long long)image->size);
        if (image->sha256[0]) text_field(&line, "sha256", image->sha256);
        line.failed = line.failed || image->prelinked.failed;
        if (image->prelinked.length) {
            text_string(&line, ",\"prelinked\":[");
            text_bytes(&line, image->prelinked.data, image->prelinked.length);
            text_string(&line, "]");
        }
        text_string(&line, "}");
        write_line(&line);
        if (key.length) text_put(&images, &key, id);
    }
    if (handle) bind_handle(handle, id);
    free(key.data);
    free(image->path);
    free(image->prelinked.data);
    return id;
}

static long image_of(const char *call, uint64_t handle) {
    long id = table_get(&handles, (const char *)&handle, sizeof handle);
    if (id) return id;
    /* Loaded before tracing began, or in a gap: from one of the libraries that are mapped. */
    refresh_mappings();
    Image unknown = {.form = "unknown"};
    char before[80];
    snprintf(before, sizeof before, "before %s", call);
    return record_image(before, handle, &unknown);
}

static void record_symbol(const DriverCall *call, uint64_t handle, uint64_t name_address) {
    long image = image_of(call->name, handle);
    Text name = {0}, key = {0};
    text_format(&key, "%ld %s ", image, call->kind ? call->kind : "");
    size_t prefix = key.length;
    if (!read_string(name_address, &key, 1 << 20)) {
        write_warning("name-unreadable", call->name, true);
    } else if (!text_get(&seen, &key)) {
        long context = context_id();
        text_format(&name, "{\"record\":\"%s\",\"image\":%ld,\"context\":%ld,\"name\":",
                    call->kind ? "data" : "kernel", image, context);
        text_json(&name, key.data + prefix, key.length - prefix);
        if (call->kind) text_field(&name, "kind", call->kind);
        text_string(&name, "}");
        write_line(&name);
        text_put(&seen, &key, 1);
    }
    free(key.data);
}

static void record_whole(const char *call, long image) {
    Text key = {0};
    text_format(&key, "%ld whole %s", image, call);
    if (!text_get(&seen, &key)) {
        long context = context_id();
        Text line = {0};
        text_format(&line, "{\"record\":\"enumeration\",\"image\":%ld,\"context\":%ld", image,
                    context);
        text_field(&line, "call", call);
        text_string(&line, "}");
        write_line(&line);
        text_put(&seen, &key, 1);
    }
    free(key.data);
}

static void record_call(const DriverCall *call, const uint64_t *slots) {
    uint64_t handle = slots[call->handle], subject = slots[call->subject];
    Image image = {.form = "unknown"};
    switch (call->action) {
    case LOAD:
        resolve(&image, subject);
        record_image(call->name, read_pointer(handle), &image);
        break;
    case LOAD_FILE:
        resolve_file(&image, subject);
        record_image(call->name, read_pointer(handle), &image);
        break;
    case UNLOAD:
        bind_handle(handle, 0);
        break;
    case KERNEL:
    case DATA:
        if (subject) record_symbol(call, handle, subject);
        break;
    case ENUMERATE:
        record_whole(call->name, image_of(call->name, handle));
        break;
    case MODULE_OF_LIBRARY: {
        long id = image_of(call->name, subject);
        record_whole(call->name, id);
        uint64_t module = read_pointer(handle);
        if (module) bind_handle(module, id);
        break;
    }
    case LINK_DATA:
        resolve_bare(&image, subject, slots[LINK_SIZE_SLOT]);
        record_whole(call->name, record_image(call->name, 0, &image));
        break;
    case LINK_FILE:
        resolve_file(&image, subject);
        record_whole(call->name, record_image(call->name, 0, &image));
        break;
    case LINK_COMPLETE: {
        uint64_t output = read_pointer(subject), size = read_pointer(handle);
        if (output == 0 || size == 0 || size > MAX_SIZE) break;
        image.size = size;
        if (hash_memory(output, size, image.sha256)) image.form = "linked";
        record_image(call->name, 0, &image);
        break;
    }
    }
}

static const DriverCall *find_call(uint32_t cbid) {
    for (int i = 0; i < CALL_COUNT; i++)
        if (CALLS[i].cbid == cbid) return &CALLS[i];
    return NULL;
}

static void on_call(void *user, int domain, uint32_t cbid, const void *raw) {
    (void)user;
    const CallbackData *data = raw;
    if (domain != DOMAIN_DRIVER_API || !atomic_load_explicit(&active, memory_order_relaxed)) return;
    const DriverCall *call = find_call(cbid);
    if (call == NULL) return;
    /* Unloading is noted before it happens: afterwards the driver may give the handle to
     * another thread. Anything else once it is known to have worked. */
    if ((data->site == SITE_EXIT) == (call->action == UNLOAD)) return;
    if (data->site == SITE_EXIT && (data->result == NULL || *data->result != 0)) return;
    int saved = errno, cancel;
    /* A thread that is cancelled must not take the lock with it: system calls are cancellation points. */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    if (take_lock()) {
        if (atomic_load(&active)) {
            /* Libraries that came since are listed now: the process may be killed before its end. */
            if (!mappings_are_current()) refresh_mappings();
            record_call(call, data->params);
        }
        pthread_mutex_unlock(&lock);
    }
    pthread_setcancelstate(cancel, NULL);
    errno = saved;
}

/* ---- CUPTI and the life of a trace ---- */

static bool open_cupti(void) {
    if (cupti.subscribe != NULL) return true;
    const char *wanted = getenv("NEGATIVA_CUPTI");
    /* One that the program has already loaded comes first: two of them get in each other's way. */
    static const char *const names[] = {"libcupti.so.13", "libcupti.so.12"};
    void *library = NULL;
    for (int i = 0; library == NULL && i < 2; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_NOLOAD);
    if (library == NULL && wanted != NULL && *wanted) library = dlopen(wanted, RTLD_NOW);
    for (int i = 0; library == NULL && i < 2; i++) library = dlopen(names[i], RTLD_NOW);
    if (library == NULL) {
        snprintf(last_error, sizeof last_error, "%s", dlerror());
        return false;
    }
    cupti.subscribe_v2 = (int (*)(void **, Callback, void *, SubscriberParams *))dlsym(
        library, "cuptiSubscribe_v2");
    cupti.unsubscribe = (int (*)(void *))dlsym(library, "cuptiUnsubscribe");
    cupti.enable_callback =
        (int (*)(uint32_t, void *, int, uint32_t))dlsym(library, "cuptiEnableCallback");
    cupti.finalize = (int (*)(void))dlsym(library, "cuptiFinalize");
    cupti.subscribe = (int (*)(void **, Callback, void *))dlsym(library, "cuptiSubscribe");
    if (cupti.subscribe && cupti.unsubscribe && cupti.enable_callback) return true;
    snprintf(last_error, sizeof last_error, "libcupti lacks a function that is needed");
    cupti.subscribe = NULL;
    return false;
}

/* 0, or CUPTI's error; `last_error` then says more. */
static int take_cupti(void) {
    char other[256] = "";
    SubscriberParams params = {sizeof params, "pytest-negativa", other, sizeof other};
    void *taken = NULL;
    int error = cupti.subscribe_v2 != NULL ? cupti.subscribe_v2(&taken, on_call, NULL, &params)
                                           : cupti.subscribe(&taken, on_call, NULL);
    if (error != 0) {
        if (error == CUPTI_MULTIPLE_SUBSCRIBERS)
            snprintf(last_error, sizeof last_error,
                     "CUPTI serves one tool at a time and is taken by %s; nothing was traced here",
                     *other && strstr(other, "<not provided>") == NULL ? other
                                                                       : "another tool");
        else
            snprintf(last_error, sizeof last_error, "CUPTI refuses to work here: error %d", error);
        return error;
    }
    subscriber = taken;
    atomic_store(&active, 1);
    for (int i = 0; i < CALL_COUNT; i++) {
        int failed = cupti.enable_callback(1, taken, DOMAIN_DRIVER_API, CALLS[i].cbid);
        if (failed == 0 || error != 0) continue;
        error = failed;
        snprintf(last_error, sizeof last_error, "CUPTI can't show %s: error %d", CALLS[i].name,
                 error);
    }
    return error;
}

static void release_cupti(void) {
    void *taken = subscriber;
    subscriber = NULL;
    atomic_store(&active, 0);
    if (taken == NULL) return;
    for (int i = 0; i < CALL_COUNT; i++)
        cupti.enable_callback(0, taken, DOMAIN_DRIVER_API, CALLS[i].cbid);
    cupti.unsubscribe(taken);
}

static void set_context(const char *phase, const char *nodeid, size_t nodeid_size,
                        const char *detail) {
    current_context.length = 0;
    text_format(&current_context, "{\"phase\":\"%s\"", phase);
    if (nodeid != NULL) {
        text_string(&current_context, ",\"nodeid\":");
        text_json(&current_context, nodeid, nodeid_size);
    }
    if (detail != NULL) text_field(&current_context, "detail", detail);
    text_string(&current_context, "}");
}

/* pytest leaves "nodeid (phase)" in PYTEST_CURRENT_TEST. */
static void set_context_from_environment(void) {
    static const char *const phases[] = {"setup", "call", "teardown"};
    const char *test = getenv("PYTEST_CURRENT_TEST");
    const char *open = test ? strrchr(test, '(') : NULL;
    for (int i = 0; open != NULL && open > test && open[-1] == ' ' && i < 3; i++) {
        size_t length = strlen(phases[i]);
        if (strncmp(open + 1, phases[i], length) == 0 && strcmp(open + 1 + length, ")") == 0) {
            set_context(phases[i], test, (size_t)(open - 1 - test), NULL);
            return;
        }
    }
    set_context("process", NULL, 0, NULL);
}

/* What was recorded stands in another file: a new file starts from nothing. In a child the memory
 * stays: a thread of the parent may have been changing the tables. */
static void forget(bool in_child) {
    Table *const tables[] = {&contexts, &libraries, &files, &images,
                             &handles,  &seen,      &warned};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        if (in_child) memset(tables[i], 0, sizeof *tables[i]);
        table_clear(tables[i]);
    }
    if (in_child) {
        maps_text = current_context = (Text){0};
        mappings = NULL;
        mapping_count = 0;
    }
    next_id = 0;
    open_gap = 0;
    devices_known = false;
    maps_valid = false;
}

/* The end of a sample's time lets CUPTI go under this lock, and not while the process ends. */
static pthread_mutex_t limit_lock = PTHREAD_MUTEX_INITIALIZER;
static bool is_ending;
static atomic_int initialized;      /* CUDA called InitializeInjection */
static atomic_int traced_by_python; /* this process; InitializeInjection leaves it alone */
static bool child_can_use_cuda;

static void before_fork(void) {
    child_can_use_cuda = true;
    if (subscriber == NULL && !atomic_load(&initialized)) return;
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int (*count_of)(int *) = cuda ? (int (*)(int *))dlsym(cuda, "cuDeviceGetCount") : NULL;
    int count;
    child_can_use_cuda = count_of == NULL || count_of(&count) != 0;
    if (cuda != NULL) dlclose(cuda);
}

/* The file is the parent's, and so is its use of the GPU, which doesn't survive a fork. If there
 * was none yet (cuInit may have failed), CUPTI is given back, for InitializeInjection to take it in
 * the child. */
static void after_fork_in_child(void) {
    void *taken = subscriber;
    lock = (pthread_mutex_t)PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
    pthread_mutex_init(&ranges_lock, NULL);
    pthread_mutex_init(&limit_lock, NULL);
    is_ending = false;
    atomic_store(&active, 0);
    atomic_store(&ranges_on, 0);
    close_trace();
    subscriber = NULL;
    atomic_store(&traced_by_python, 0);
    forget(true);
    if (!child_can_use_cuda) return;
    atomic_store(&initialized, 0);
    if (taken != NULL) cupti.unsubscribe(taken);
}

static void watch_forks(void) {
    static atomic_int registered;
    if (!atomic_exchange(&registered, 1))
        pthread_atfork(before_fork, NULL, after_fork_in_child);
}

static bool open_trace(const char *folder, const char *run_id, const char *role,
                       const char *worker, const char *root, const char *detector) {
    if (trace_owner == NULL) trace_owner = map_wiped();
    if (trace_owner == NULL) {
        snprintf(last_error, sizeof last_error, "no memory is left");
        return false;
    }
    do {
        unsigned int random = 0;
        if (getrandom(&random, sizeof random, GRND_NONBLOCK) != sizeof random)
            random = (unsigned int)now_ns();
        int length = snprintf(trace_path, sizeof trace_path, "%s/%s.%d.%08x.jsonl", folder, run_id,
                              (int)getpid(), random);
        if (length < 0 || (size_t)length >= sizeof trace_path) {
            snprintf(last_error, sizeof last_error, "the path of its trace is too long");
            return false;
        }
        trace_fd = open(trace_path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    } while (trace_fd < 0 && errno == EEXIST);
    if (trace_fd >= 0 && trace_fd <= STDERR_FILENO) {
        /* A daemon closed it, and may print all the same. */
        int low = trace_fd;
        trace_fd = fcntl(low, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
        close(low);
    }
    struct stat status;
    if (trace_fd < 0 || fstat(trace_fd, &status) != 0) {
        snprintf(last_error, sizeof last_error, "%.800s: %s", trace_path, strerror(errno));
        if (trace_fd >= 0) close(trace_fd);
        trace_fd = -1;
        return false;
    }
    *trace_owner = getpid();
    trace_device = status.st_dev;
    trace_inode = status.st_ino;
    trace_links = status.st_nlink;
    /* Another user's file mask must not hide it from the session. */
    fchmod(trace_fd, 0644);
    /* As long as this process lives, and no longer. */
    bool locked = flock(trace_fd, LOCK_EX | LOCK_NB) == 0;
    char executable[4096] = "", folder_now[4096] = "";
    ssize_t size =
        is_sample ? -1 : readlink("/proc/self/exe", executable, sizeof executable - 1);
    if (size < 0) executable[0] = 0;
    if (is_sample)
        root = "";
    else if ((root == NULL || !*root) && getcwd(folder_now, sizeof folder_now) != NULL)
        root = folder_now;
    Text line = {0}, arguments = {0};
    text_format(&line, "{\"record\":\"header\",\"format_version\":%d,\"pid\":%d,\"ppid\":%d",
                TRACE_VERSION, (int)getpid(), is_sample ? 0 : (int)getppid());
    text_format(&line, ",\"start_ns\":%lld", now_ns());
    text_field(&line, "run_id", run_id);
    text_field(&line, "role", role);
    text_field(&line, "detector", detector);
    text_field(&line, "executable", executable);
    text_field(&line, "root", root ? root : "");
    if (worker != NULL && *worker) text_field(&line, "worker", worker);
    const char *(*python)(void) = (const char *(*)(void))dlsym(RTLD_DEFAULT, "Py_GetVersion");
    if (python != NULL && !is_sample) {
        const char *version = python();
        text_string(&line, ",\"python\":");
        text_json(&line, version, strcspn(version, " "));
    }
    text_string(&line, ",\"argv\":[");
    if (!is_sample && read_file("/proc/self/cmdline", &arguments))
        for (size_t at = 0; at < arguments.length; at += strlen(arguments.data + at) + 1) {
            if (at) text_string(&line, ",");
            text_json(&line, arguments.data + at, strlen(arguments.data + at));
        }
    free(arguments.data);
    text_format(&line, "],\"locked\":%s,\"lost\":false}", locked ? "true" : "false");
    lost_at = (off_t)(line.length - strlen("false}"));
    write_line(&line);
    watch_forks();
    return true;
}

static void write_end(void) {
    if (trace_fd < 0) return;
    refresh_mappings(); /* records what was loaded since */
    Text line = {0};
    text_format(&line, "{\"record\":\"end\",\"time_ns\":%lld}", now_ns());
    write_line(&line);
}

/* At exit CUPTI may be gone already, so it isn't called. What other threads and destructors use
 * after this is recorded, too: this library is never unmapped (-z nodelete). */
__attribute__((destructor)) static void at_exit(void) {
    if (!take_lock()) return;
    write_end();
    pthread_mutex_unlock(&lock);
}

/* ---- Samples of processes outside of sessions ---- */

EXPORT void negativa_pause(const char *reason);

static long setting(const char *name) {
    const char *text = getenv(name);
    return text != NULL ? strtol(text, NULL, 10) : 0;
}

/* One process in `count`, by chance. */
static bool is_chosen(const char *count) {
    long one_of = strtol(count, NULL, 10);
    unsigned long random;
    if (one_of <= 1) return one_of == 1;
    if (getrandom(&random, sizeof random, GRND_NONBLOCK) != sizeof random)
        random = (unsigned long)now_ns();
    return random % (unsigned long)one_of == 0;
}

/* A service that starts again and again must not fill a folder. */
static bool has_room(const char *folder) {
    long most = setting("NEGATIVA_SAMPLE_FILES"), found = 0;
    DIR *opened = opendir(folder);
    if (opened == NULL) return false;
    while (found < most + 2 && readdir(opened) != NULL) found++; /* two: . and .. */
    closedir(opened);
    return found < most + 2;
}

static void keep_cupti(void) {
    /* In a child of _Fork or clone the thread that has the lock may be missing. */
    if (!is_owner()) return;
    pthread_mutex_lock(&limit_lock);
    is_ending = true;
    pthread_mutex_unlock(&limit_lock);
}

static void *wait_for_limit(void *seconds) {
    struct timespec left = {.tv_sec = (time_t)(intptr_t)seconds};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
    pthread_mutex_lock(&limit_lock);
    if (!is_ending) negativa_pause("the time for which it is traced is over");
    pthread_mutex_unlock(&limit_lock);
    return NULL;
}

static void start_limit(void) {
    long seconds = setting("NEGATIVA_SAMPLE_SECONDS");
    static atomic_int registered;
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    if (seconds <= 0) return;
    /* After CUPTI's own handlers, so it comes before them at exit. */
    if (!atomic_exchange(&registered, 1)) atexit(keep_cupti);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    /* The program's signals are for its own threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, &attributes, wait_for_limit, (void *)(intptr_t)seconds);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (error != 0) negativa_pause("the thread that ends its tracing cannot be started");
}

/* ---- For CUDA: called in cuInit, once a process ---- */

static void chain(void) {
    const char *path = getenv("NEGATIVA_CHAINED_INJECTION");
    if (path == NULL || !*path) return;
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    int (*initialize)(void) =
        library ? (int (*)(void))dlsym(library, "InitializeInjection") : NULL;
    if (initialize != NULL) initialize();
}

static void initialize(void) {
    /* The user's own tool first: it was there before us, and if it wants CUPTI we give way. */
    chain();
    if (atomic_load(&traced_by_python)) return;
    const char *sample = getenv("NEGATIVA_SAMPLE");
    is_sample = sample != NULL && *sample;
    if (is_sample) {
        /* A test started it: its session doesn't see what it uses. */
        tell("it is traced as a sample, into another run");
        tell_outer_sessions();
        if (!is_chosen(sample)) return;
    }
    const char *folder = getenv("NEGATIVA_TRACE_DIR"), *run_id = getenv("NEGATIVA_RUN_ID");
    if (folder == NULL || run_id == NULL || !*folder || !*run_id) {
        tell("its environment lacks NEGATIVA_TRACE_DIR or NEGATIVA_RUN_ID");
        return;
    }
    pthread_mutex_lock(&lock);
    if (is_sample)
        set_context("process", NULL, 0, NULL);
    else
        set_context_from_environment();
    bool opened =
        trace_fd < 0 && (!is_sample || has_room(folder)) &&
        open_trace(folder, run_id, is_sample ? "sample" : "child", NULL, getenv("NEGATIVA_ROOT"),
                   "injection");
    pthread_mutex_unlock(&lock);
    if (!opened) {
        tell(last_error);
        return;
    }
    /* Not under the lock: once subscribed, callbacks of other threads may come and want it. */
    int error = open_cupti() ? take_cupti() : -1;
    if (error != 0) {
        pthread_mutex_lock(&lock);
        write_warning(error == CUPTI_MULTIPLE_SUBSCRIBERS ? "cupti-taken" : "cupti-unavailable",
                      last_error, true);
        pthread_mutex_unlock(&lock);
    }
    /* A CUPTI that lacks a call shows the others all the same. */
    if (is_sample && subscriber != NULL) start_limit();
}

EXPORT int InitializeInjection(void) {
    int cancel;
    if (atomic_exchange(&initialized, 1)) return 1;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    initialize();
    pthread_setcancelstate(cancel, NULL);
    return 1;
}

/* ---- NVTX ranges: nvtx3/nvToolsExt.h, nvtx3/nvtxDetail/nvtxTypes.h ---- */

typedef void (*Function)(void);

typedef struct {
    size_t size;
    int (*module_table)(int module, Function ***table, unsigned *length);
} NvtxCallbacks;

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const void *message;
} NvtxAttributes;

enum { NVTX_CALLBACKS = 1, NVTX_CORE = 1, NVTX_CORE2 = 5 };
enum { NVTX_ASCII = 1, NVTX_WIDE = 2, NVTX_REGISTERED = 3 };
/* CUpti_ExternalCorrelationKind in cupti_activity.h: the last of those for tools. */
enum { CORRELATION_CUSTOM2 = 5 };
/* Of a process, and of a thread; a deeper range, or one more, counts as the range around it. */
enum { MOST_RANGES = 10000, RANGE_SLOTS = 1 << 15, MOST_NESTED = 32, LONGEST_NAME = 256 };

static int (*push_correlation)(int, uint64_t);
static int (*pop_correlation)(int, uint64_t *);
/* By number, from 1; range_slots finds the number of a name in the range around it. */
static struct {
    uint32_t parent;
    char *name;
} ranges[MOST_RANGES + 1];
static uint32_t range_count, range_slots[RANGE_SLOTS];
static __thread struct {
    const void *domain;
    uint32_t range;
    bool ended;
} nested[MOST_NESTED];
static __thread int nesting, too_deep;

/* Copies a name without numbers that differ each time: torch's emit_nvtx ends with them
 * (torch/csrc/profiler/util.cpp, getNvtxStr), XLA has ids of programs. */
static void clean_name(char *clean, const char *name) {
    static const char *const ends[] = {", seq = ", ", op_id = ", ", sizes = ", ", input_op_ids = "};
    static const char *const ids[] = {",program_id=", ",unique_hlo_op_id="};
    size_t length = 0;
    while (*name != 0 && length < LONGEST_NAME) {
        if (*name == ',') {
            for (int i = 0; i < 4; i++)
                if (strncmp(name, ends[i], strlen(ends[i])) == 0) goto done;
            const char *after = name;
            for (int i = 0; i < 2; i++)
                if (strncmp(name, ids[i], strlen(ids[i])) == 0) after += strlen(ids[i]);
            if (after != name) {
                name = after + strspn(after, "0123456789");
                continue;
            }
        }
        clean[length++] = *name++;
    }
done:
    clean[length] = 0;
}

static uint32_t range_number(uint32_t parent, const char *raw) {
    char name[LONGEST_NAME + 1];
    clean_name(name, raw);
    uint64_t hash = hash_bytes(name, strlen(name)) * (2 * (uint64_t)parent + 1);
    uint32_t slot = (uint32_t)(hash % RANGE_SLOTS), number;
    pthread_mutex_lock(&ranges_lock);
    for (; (number = range_slots[slot]) != 0; slot = (slot + 1) % RANGE_SLOTS)
        if (ranges[number].parent == parent && strcmp(ranges[number].name, name) == 0) break;
    if (number == 0) {
        char *copy = range_count < MOST_RANGES ? strdup(name) : NULL;
        number = parent;
        if (copy != NULL) {
            number = ++range_count;
            ranges[number].parent = parent;
            ranges[number].name = copy;
            range_slots[slot] = number;
        }
    }
    pthread_mutex_unlock(&ranges_lock);
    return number;
}

static int enter_range(const void *domain, const char *name) {
    if (!atomic_load(&ranges_on)) return 0;
    if (nesting == MOST_NESTED) return nesting + too_deep++;
    uint32_t range = range_number(nesting ? nested[nesting - 1].range : 0, name ? name : "");
    nested[nesting].domain = domain;
    nested[nesting].range = range;
    nested[nesting].ended = false;
    push_correlation(CORRELATION_CUSTOM2, range);
    return nesting++;
}

/* Each domain nests for itself: a range may end before one inside of it that is of another domain. */
static int leave_range(const void *domain) {
    if (!atomic_load(&ranges_on)) return -1;
    if (too_deep > 0) return nesting + --too_deep;
    int level = nesting - 1;
    while (level >= 0 && (nested[level].ended || nested[level].domain != domain)) level--;
    if (level >= 0) nested[level].ended = true;
    for (uint64_t last; nesting > 0 && nested[nesting - 1].ended; nesting--)
        pop_correlation(CORRELATION_CUSTOM2, &last);
    return level;
}

/* A wide string in UTF-8, to be freed. */
static char *narrow(const wchar_t *wide) {
    Text text = {0};
    for (; *wide != 0; wide++) {
        uint32_t c = (uint32_t)*wide;
        char bytes[] = {(char)(0xF0 | c >> 18), (char)(0x80 | (c >> 12 & 0x3F)),
                        (char)(0x80 | (c >> 6 & 0x3F)), (char)(0x80 | (c & 0x3F))};
        if (c < 0x80)
            text_bytes(&text, &(char){(char)c}, 1);
        else if (c < 0x800)
            text_bytes(&text, (char[]){(char)(0xC0 | c >> 6), bytes[3]}, 2);
        else if (c < 0x10000)
            text_bytes(&text, (char[]){(char)(0xE0 | c >> 12), bytes[2], bytes[3]}, 3);
        else
            text_bytes(&text, bytes, 4);
    }
    return text.data;
}

static int enter_wide(const void *domain, const wchar_t *wide) {
    char *name = wide != NULL ? narrow(wide) : NULL;
    int level = enter_range(domain, name);
    free(name);
    return level;
}

static int range_push_a(const char *name) { return enter_range(NULL, name); }
static int range_push_w(const wchar_t *name) { return enter_wide(NULL, name); }
static int range_pop(void) { return leave_range(NULL); }
static int domain_range_pop(const void *domain) { return leave_range(domain); }

static int domain_range_push(const void *domain, const NvtxAttributes *attributes) {
    int type = attributes != NULL ? attributes->message_type : 0;
    if (type == NVTX_WIDE) return enter_wide(domain, attributes->message);
    bool has_name = type == NVTX_ASCII || type == NVTX_REGISTERED;
    return enter_range(domain, has_name ? attributes->message : NULL);
}

static int range_push_ex(const NvtxAttributes *attributes) {
    return domain_range_push(NULL, attributes);
}

/* Handles: a domain's must be one of its own, a string's is its text. Programs keep both. */
static const void *domain_create_a(const char *name) { return strdup(name != NULL ? name : ""); }
static const void *domain_create_w(const wchar_t *name) { (void)name; return strdup(""); }
static const void *register_a(const void *domain, const char *string) {
    (void)domain;
    return string != NULL ? strdup(string) : NULL;
}
static const void *register_w(const void *domain, const wchar_t *string) {
    (void)domain;
    return string != NULL ? narrow(string) : NULL;
}

/* For NVTX: called at the first range of each library that has NVTX compiled in. */
EXPORT int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    /* NvtxCallbackIdCore, NvtxCallbackIdCore2 */
    static const struct {
        int module;
        unsigned id;
        Function function;
    } ours[] = {
        {NVTX_CORE, 8, (Function)range_push_ex},      {NVTX_CORE, 9, (Function)range_push_a},
        {NVTX_CORE, 10, (Function)range_push_w},      {NVTX_CORE, 11, (Function)range_pop},
        {NVTX_CORE2, 4, (Function)domain_range_push}, {NVTX_CORE2, 5, (Function)domain_range_pop},
        {NVTX_CORE2, 10, (Function)register_a},       {NVTX_CORE2, 11, (Function)register_w},
        {NVTX_CORE2, 12, (Function)domain_create_a},  {NVTX_CORE2, 13, (Function)domain_create_w},
    };
    /* A child process has the variable, too, but nothing counts its launches. */
    if (!atomic_load(&ranges_on)) return 0;
    const NvtxCallbacks *callbacks = export_table(NVTX_CALLBACKS);
    if (callbacks == NULL) return 0;
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++) {
        Function **table;
        unsigned length;
        if (callbacks->module_table(ours[i].module, &table, &length) && ours[i].id < length)
            *table[ours[i].id] = ours[i].function;
    }
    return 1;
}

/* ---- For Python ---- */

/* Tell CUPTI, which lies in this file and is loaded, the ranges from now on; 0: done. */
EXPORT int negativa_watch_ranges(const char *cupti_path) {
    void *library = dlopen(cupti_path, RTLD_NOW | RTLD_NOLOAD);
    if (library == NULL) return 1;
    push_correlation =
        (int (*)(int, uint64_t))dlsym(library, "cuptiActivityPushExternalCorrelationId");
    pop_correlation =
        (int (*)(int, uint64_t *))dlsym(library, "cuptiActivityPopExternalCorrelationId");
    if (push_correlation == NULL || pop_correlation == NULL) return 1;
    atomic_store(&ranges_on, 1);
    watch_forks();
    return 0;
}

/* The name of a range by its number, and the number of the range around it, or 0. */
EXPORT const char *negativa_range(uint32_t number, uint32_t *parent) {
    *parent = number <= range_count ? ranges[number].parent : 0;
    return number <= range_count ? ranges[number].name : NULL;
}

/* This process traces itself (tracing/start.py). Its forked children don't. */
EXPORT void negativa_leave_to_python(void) {
    atomic_store(&traced_by_python, 1);
    watch_forks();
}

/* ---- For tests: a Python process that traces itself (tests/support/native_detector.py) ---- */

EXPORT const char *negativa_error(void) { return last_error; }

/* 0: done, 1: no trace file, 2: no CUPTI, 3: CUPTI is taken */
EXPORT int negativa_start(const char *folder, const char *run_id, const char *role,
                          const char *worker, const char *root) {
    pthread_mutex_lock(&lock);
    if (current_context.length == 0) set_context("import", NULL, 0, NULL);
    bool opened =
        trace_fd < 0 && open_trace(folder, run_id, role, worker, root, "native callbacks");
    pthread_mutex_unlock(&lock);
    if (!opened) return 1;
    if (!open_cupti()) return 2;
    int error = take_cupti();
    return error == 0 ? 0 : error == CUPTI_MULTIPLE_SUBSCRIBERS ? 3 : 2;
}

EXPORT void negativa_context(const char *phase, const char *nodeid, const char *detail) {
    pthread_mutex_lock(&lock);
    set_context(phase, nodeid, nodeid ? strlen(nodeid) : 0, detail);
    pthread_mutex_unlock(&lock);
}

EXPORT void negativa_warn(const char *code, const char *text, int incomplete) {
    pthread_mutex_lock(&lock);
    write_warning(code, text, incomplete != 0);
    pthread_mutex_unlock(&lock);
}

EXPORT void negativa_drain(void) {
    pthread_mutex_lock(&lock);
    if (!mappings_are_current()) refresh_mappings();
    pthread_mutex_unlock(&lock);
}

void negativa_pause(const char *reason) {
    pthread_mutex_lock(&lock);
    bool was_active = subscriber != NULL;
    if (was_active && open_gap == 0) {
        long context = context_id();
        open_gap = ++next_id;
        Text line = {0};
        text_format(&line, "{\"record\":\"gap\",\"id\":%ld,\"context\":%ld,\"time_ns\":%lld",
                    open_gap, context, now_ns());
        text_field(&line, "why", reason);
        text_string(&line, "}");
        write_line(&line);
    }
    pthread_mutex_unlock(&lock);
    if (was_active) release_cupti();
}

EXPORT int negativa_resume(void) {
    if (subscriber != NULL || trace_fd < 0) return 0;
    int error = take_cupti();
    if (error == CUPTI_MULTIPLE_SUBSCRIBERS && cupti.finalize != NULL) {
        /* Kineto (torch.profiler) never gives CUPTI back once it has had it. The pause was for
         * its sake and is over, so it is detached. */
        cupti.finalize();
        error = take_cupti();
    }
    pthread_mutex_lock(&lock);
    if (error != 0) {
        write_warning("cupti-taken", last_error, true);
    } else if (open_gap != 0) {
        Text line = {0};
        text_format(&line, "{\"record\":\"gap-end\",\"id\":%ld,\"time_ns\":%lld}", open_gap,
                    now_ns());
        write_line(&line);
        open_gap = 0;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

EXPORT void negativa_stop(void) {
    release_cupti();
    pthread_mutex_lock(&lock);
    write_end();
    close_trace();
    forget(false);
    pthread_mutex_unlock(&lock);
}

/* For tests without a GPU: what a driver call would bring, from memory of this process. */
EXPORT void negativa_test_call(uint32_t cbid, const uint64_t *slots, int result) {
    CallbackData data = {SITE_EXIT, "", slots, &result};
    const DriverCall *call = find_call(cbid);
    if (call != NULL && call->action == UNLOAD) data.site = 0;
    atomic_store(&active, 1);
    on_call(NULL, DOMAIN_DRIVER_API, cbid, &data);
}
