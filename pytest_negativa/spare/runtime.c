/* Brings pages back that a library lost, when they are touched, and logs each. Programs preload it
 * (LD_PRELOAD) with NEGATIVA_SPARE_LOG=DIR. Libraries that rewriting/compact/cut.py cut then leave their
 * gaps as they are, instead of mapping their spares (stub.c).
 *
 * glibc maps the gaps with PROT_NONE, so touching one is a SIGSEGV. The handler finds the library by
 * _dl_find_object, the gap in the library's note (format.h), and puts the page from the spare there. It
 * needs no table of libraries: what is unloaded or comes back elsewhere is found as the loader knows it.
 *
 * The spare is mapped as a whole at its library's first miss. A page comes back by mremap with an old
 * size of 0, which copies a part of a shared mapping (mremap(2)). So the handler needs no
 * descriptor, which a program may close or use for another file, and no path, which may be gone.
 *
 * The signal stays ours: see faults.h. Calls that were bound before the runtime came are replaced in
 * the GOTs of all objects.
 *
 * Rules for what the handler calls: raw system calls only, no errno, no allocation, no thread-local
 * storage, less than 2 KiB of stack. tests/spare/test_handler.py counts it, and checks what is
 * called. A page's bytes in the log say nothing about this process, since children share the log and
 * not the mappings. What the note says is checked at the first use of a library: is_sound.
 *
 * A page that is there is never replaced: it may have been written to since. One thread at a time
 * looks and puts (see enter). It has blocked all signals, and calls nothing but the kernel.
 *
 * Sources: mremap(2); _dl_find_object in glibc's elf/dl-find_object.c (2.35).
 */
#include "../processes/faults.h"
#include "../processes/wiped.h"
#include "calls.h"
#include "format.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>

/* Loops stay loops: no calls of memcpy from the handler. */
#pragma GCC optimize("no-tree-loop-distribute-patterns")

enum {
    VERSION = 3,
    PAGE = 4096,
    DT_NEGATIVA_NOTE = 0x6e656761,
    MAX_LIBRARIES = 2048,
    /* Each page that comes back parts a mapping in up to three; a process has 65,530
     * (vm.max_map_count). After so many misses, of a library or in all, more comes back at once. */
    MANY_MISSES = 2000,
    MANY_IN_ALL = 10000,
    /* At most so much of a hole: each page that comes back counts as needed. */
    WINDOW = 1 << 20,
};

static const char MAGIC[8] = "NEGSPARE";

typedef struct {
    char magic[8];
    uint32_t version, reserved;
    uint8_t pair[32], original[32];
    uint64_t original_size;
    char name[256];
} LogHead;

static const char LOG_MAGIC[8] = "NEGMISS";

/* A page in the log: how often it was missed, where in the page first, and how; see misses.py. */
enum { LOG_VERSION = 2, COUNT_MASK = 0xffff, MOST = 0xff00, PLACE_SHIFT = 16 };
enum { LOG_FETCHED = 1 << 28, LOG_BESIDE = 1 << 29, LOG_LOST = 1 << 30 };

/* ---- System calls, without errno ---- */

static long map(uintptr_t address, uint64_t size, int protection, int flags, int fd) {
    return call6(SYS_mmap, (long)address, (long)size, protection, flags, fd, 0);
}

static bool same_bytes(const void *a, const void *b, size_t size) {
    const char *x = a, *y = b;
    while (size && *x == *y) x++, y++, size--;
    return size == 0;
}

/* ---- Messages: gathered in place, written in one go ---- */

typedef struct {
    struct iovec parts[16];
    int count;
    char digits[19]; /* of its one number */
} Message;

static size_t length(const char *text) {
    size_t size = 0;
    while (text[size]) size++;
    return size;
}

static void add(Message *message, const char *text) {
    message->parts[message->count++] = (struct iovec){(void *)text, length(text)};
}

static void add_hex(Message *message, uint64_t value) {
    char *p = message->digits + sizeof message->digits;
    *--p = 0;
    do *--p = "0123456789abcdef"[value & 15];
    while (value >>= 4);
    *--p = 'x';
    *--p = '0';
    add(message, p);
}

/* If nobody reads it, the signal that comes of it must not end the program. One that was pending
 * before is the program's. */
static void say(Message *message) {
    const uint64_t broken = UINT64_C(1) << (SIGPIPE - 1);
    uint64_t before = 0, pending = 0;
    struct timespec none = {0};
    add(message, "\n");
    call6(SYS_rt_sigprocmask, SIG_BLOCK, (long)&broken, (long)&before, sizeof before, 0, 0);
    call3(SYS_rt_sigpending, (long)&pending, sizeof pending, 0);
    if (call3(SYS_writev, 2, (long)message->parts, message->count) == -EPIPE && !(pending & broken))
        call6(SYS_rt_sigtimedwait, (long)&broken, 0, (long)&none, sizeof broken, 0, 0);
    call6(SYS_rt_sigprocmask, SIG_SETMASK, (long)&before, 0, sizeof before, 0, 0);
}

/* ---- Libraries ---- */

enum { CLAIMED, READY };

/* One for each pair of library and spare, wherever and however often it is loaded. */
typedef struct {
    _Atomic int state;
    uint8_t pair[32];
    _Atomic(const char *) reserve; /* the whole spare; NULL: there is none */
    _Atomic int shared; /* protections of pages that are duplicated; others are copied */
    _Atomic(_Atomic uint32_t *) log; /* a word a page; NULL: no log */
    _Atomic uint32_t misses;
    _Atomic bool told;
    char folder[PATH_MAX]; /* the library's own */
} Library;

static Library libraries[MAX_LIBRARIES];
static _Atomic uint32_t all_misses; /* that brought pages back */
static _Atomic uint32_t library_count;

static const char *spare_folder, *log_folder; /* of the environment, or NULL */

static int (*find_object)(void *, struct dl_find_object *);

/* The note of a library, whose tables nobody has checked yet; NULL: it has none. */
static const Note *note_of(const struct dl_find_object *found) {
    const struct link_map *map = found->dlfo_link_map;
    uintptr_t start = (uintptr_t)found->dlfo_map_start, end = (uintptr_t)found->dlfo_map_end;
    for (const ElfW(Dyn) *row = map->l_ld; row && row->d_tag != DT_NULL; row++)
        if (row->d_tag == DT_NEGATIVA_NOTE) {
            uintptr_t place = map->l_addr + row->d_un.d_val;
            if (place % 8 || place < start || place > end || end - place < sizeof(Note)) return NULL;
            const Note *note = (const Note *)place;
            bool known = same_bytes(note->magic, MAGIC, sizeof MAGIC) && note->version == VERSION;
            return known ? note : NULL;
        }
    return NULL;
}

static const char *text_of(const Note *note, uint32_t offset) { return (const char *)note + offset; }

/* The place behind a text; more than `room`: it has no end. */
static uint64_t behind_text(const char *start, uint64_t at, uint64_t room) {
    while (at < room && start[at]) at++;
    return at + 1;
}

/* Whether all that the note names lies in the library, and in the original. */
static bool is_sound(const Note *note, const struct dl_find_object *found) {
    const char *start = (const char *)note;
    uint64_t room = (uint64_t)((const char *)found->dlfo_map_end - start), position = 0;
    uint64_t end = (uint64_t)((uintptr_t)found->dlfo_map_end - found->dlfo_link_map->l_addr);
    if (note->original_size >> 48 || note->holes % 8 || note->holes > room ||
        note->hole_count > (room - note->holes) / sizeof(Hole))
        return false;
    uint64_t size = (note->original_size + PAGE - 1) / PAGE * PAGE;
    const Hole *holes = (const Hole *)(start + note->holes);
    const uint32_t more = PROT_WRITE | PROT_EXEC;
    for (uint32_t i = 0; i < note->hole_count; i++) {
        const Hole *hole = &holes[i];
        if ((hole->protection | more) != (PROT_READ | more) ||
            (hole->start | hole->end | hole->offset) % PAGE || hole->start < position ||
            hole->end <= hole->start || hole->end > end || hole->offset > size ||
            hole->end - hole->start > size - hole->offset)
            return false;
        position = hole->end;
    }
    const uint32_t texts[] = {note->name, note->spare, note->remedy};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (behind_text(start, texts[i], room) > room) return false;
    uint64_t folder = note->folders;
    while (folder < room && start[folder]) folder = behind_text(start, folder, room);
    return folder < room;
}

enum { OTHERS_WRITE = S_IWGRP | S_IWOTH };

/* Whether only root and the library's owner can write to a file or a folder, but for `harmless` bits
 * of its mode. */
static bool is_trusted(const struct stat *status, uid_t owner, mode_t harmless) {
    return (status->st_uid == 0 || status->st_uid == owner) &&
           !(status->st_mode & OTHERS_WRITE & ~harmless);
}

/* Opens a file of a folder. ThreadSanitizer can't see that mmap gives each thread memory of its own. */
__attribute__((no_sanitize_thread)) static int open_in(const char *folder, const char *name, int flags) {
    enum { ROOM = 2 * PATH_MAX };
    char *path = (char *)map(0, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    size_t size = 0;
    if (failed((long)path)) return -1;
    for (const char *c = folder; *c && size < PATH_MAX; c++) path[size++] = *c;
    path[size++] = '/';
    for (const char *c = name; *c && size < ROOM - 1; c++) path[size++] = *c;
    int fd = (int)call6(SYS_openat, AT_FDCWD, (long)path, flags | O_CLOEXEC, 0666, 0, 0);
    call3(SYS_munmap, (long)path, ROOM, 0);
    return fd;
}

/* Opens the spare in a folder. Its code will run here, so others must be able to write neither to it
 * nor to the folder. Beside the library they could exchange that one, too, unless the folder is sticky:
 * there, a spare may be as writable as the library (FAT has one mode for all). */
static int open_spare(const char *folder, const char *name, const char *file, bool beside) {
    struct stat status;
    bool known = call3(SYS_stat, (long)file, (long)&status, 0) == 0;
    uid_t owner = known ? status.st_uid : 0;
    mode_t harmless = known && beside ? status.st_mode : 0;
    int place = open_in(folder, ".", O_PATH | O_DIRECTORY);
    if (place < 0) return -1;
    int flags = O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC;
    int fd = (int)call6(SYS_openat, place, (long)name, flags, 0, 0, 0);
    bool trusted = call3(SYS_fstat, place, (long)&status, 0) == 0 &&
                   (beside ? !(status.st_mode & S_ISVTX) : is_trusted(&status, owner, 0));
    call3(SYS_close, place, 0, 0);
    if (fd < 0) return -1;
    trusted = trusted && call3(SYS_fstat, fd, (long)&status, 0) == 0;
    if (trusted && is_trusted(&status, owner, harmless)) return fd;
    call3(SYS_close, fd, 0, 0);
    return -1;
}

/* Maps the spare in a folder; false: it is none, or not of this library, whose file is `file`. Several
 * threads may do so at once: one of them wins. */
__attribute__((noinline)) static bool map_spare(Library *library, const Note *note, const char *folder,
                                                const char *file, bool beside) {
    int fd = open_spare(folder, text_of(note, note->spare), file, beside);
    if (fd < 0) return false;
    uint64_t end = (note->original_size + PAGE - 1) / PAGE * PAGE;
    Trailer found;
    bool fits = call6(SYS_pread64, fd, (long)&found, sizeof found, (long)end, 0, 0) == sizeof found &&
                same_bytes(found.magic, MAGIC, sizeof MAGIC) && found.version == VERSION &&
                same_bytes(found.pair, note->pair, sizeof note->pair) &&
                found.original_size == note->original_size;
    long reserve = -1;
    int shared = PROT_READ | PROT_EXEC;
    if (fits) {
        reserve = map(0, end, shared, MAP_SHARED, fd);
        if (failed(reserve)) {
            /* On a file system mounted noexec, or under a seccomp filter. */
            shared = PROT_READ;
            reserve = map(0, end, PROT_READ, MAP_SHARED, fd);
        }
        if (failed(reserve)) {
            /* Without shared mappings: FUSE with direct I/O (Linux's fs/fuse/file.c, ENODEV). */
            shared = PROT_NONE;
            reserve = map(0, end, PROT_READ, MAP_PRIVATE, fd);
        }
    }
    call3(SYS_close, fd, 0, 0);
    if (!fits || failed(reserve)) return false;
    const char *none = NULL;
    library->shared = shared;
    if (!atomic_compare_exchange_strong(&library->reserve, &none, (const char *)reserve))
        call3(SYS_munmap, reserve, (long)end, 0);
    return true;
}

/* The folders to look in: those of the note, the library's own, the environment's. */
static bool find_spare(Library *library, const Note *note, const char *file) {
    for (const char *folder = text_of(note, note->folders); *folder; folder += length(folder) + 1)
        if (map_spare(library, note, folder, file, false)) return true;
    return map_spare(library, note, library->folder, file, true) ||
           (spare_folder && map_spare(library, note, spare_folder, file, false));
}

/* Maps the log of this library; false: it can't be written. A full disk must not be a SIGBUS later:
 * fallocate, then map. */
static bool map_log(Library *library, const Note *note) {
    static const char hexadecimal[] = "0123456789abcdef";
    char name[40];
    for (int i = 0; i < 16; i++) {
        name[2 * i] = hexadecimal[note->pair[i] >> 4];
        name[2 * i + 1] = hexadecimal[note->pair[i] & 15];
    }
    for (int i = 0; i < 8; i++) name[32 + i] = ".misses"[i];
    uint64_t size = PAGE + (note->original_size + PAGE - 1) / PAGE * sizeof(uint32_t);
    struct rlimit limit;
    /* A file above the limit is a SIGXFSZ. */
    if (call6(SYS_prlimit64, 0, RLIMIT_FSIZE, 0, (long)&limit, 0, 0) != 0 || limit.rlim_cur < size)
        return false;
    int fd = open_in(log_folder, name, O_RDWR | O_CREAT | O_NOFOLLOW);
    if (fd < 0) return false;
    long mapped = call6(SYS_fallocate, fd, 0, 0, (long)size, 0, 0);
    if (mapped == 0) mapped = map(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
    call3(SYS_close, fd, 0, 0);
    if (failed(mapped)) return false;
    LogHead *head = (LogHead *)mapped;
    for (int i = 0; i < 32; i++) head->pair[i] = note->pair[i], head->original[i] = note->original[i];
    head->version = LOG_VERSION;
    head->original_size = note->original_size;
    const char *own = text_of(note, note->name);
    for (int i = 0; i < 255 && own[i]; i++) head->name[i] = own[i];
    /* Last: a file without the magic is not ready. */
    for (int i = 0; i < 8; i++) ((volatile char *)head->magic)[i] = LOG_MAGIC[i];
    atomic_store(&library->log, (_Atomic uint32_t *)(mapped + PAGE));
    return true;
}

/* Once a process: an empty folder of logs must not read as if nothing came back. */
static void tell_unlogged(const char *file) {
    static _Atomic bool told;
    if (atomic_exchange(&told, true)) return;
    Message message = {.count = 0};
    add(&message, "negativa: ");
    add(&message, log_folder);
    add(&message, ": no log can be written here, so nothing tells what comes back to ");
    add(&message, file);
    add(&message, " and others. The folder must be writable for this user, with room for the log, and "
                  "its file system must know fallocate(2).");
    say(&message);
}

/* Puts the folder of a file into a text of PATH_MAX bytes. */
static void put_folder(char *folder, const char *file) {
    size_t slash = length(file);
    while (slash && file[slash - 1] != '/') slash--;
    folder[0] = slash ? '/' : '.';
    for (size_t i = 0; i + 1 < slash && i + 1 < PATH_MAX; i++) folder[i] = file[i];
}

/* The entry of a library; made at its first fault. NULL: its note can't be used, or
 * there are too many, and a message says so. */
static Library *library_of(const Note *note, const struct dl_find_object *found) {
    const char *file = found->dlfo_link_map->l_name;
    uint32_t count = atomic_load(&library_count);
    for (uint32_t i = 0; i < count && i < MAX_LIBRARIES; i++)
        if (atomic_load(&libraries[i].state) == READY &&
            same_bytes(libraries[i].pair, note->pair, sizeof note->pair))
            return &libraries[i];
    uint32_t index = is_sound(note, found) ? atomic_fetch_add(&library_count, 1) : MAX_LIBRARIES;
    if (index >= MAX_LIBRARIES) {
        if (count >= MAX_LIBRARIES) atomic_store(&library_count, MAX_LIBRARIES);
        Message message = {.count = 0};
        add(&message, "negativa: ");
        add(&message, file);
        add(&message, ": its code can't come back: its table of missing pages is damaged, or the "
                      "process has loaded over 2,048 such libraries. Install the original again.");
        say(&message);
        return NULL;
    }
    Library *library = &libraries[index];
    for (int i = 0; i < 32; i++) library->pair[i] = note->pair[i];
    put_folder(library->folder, file);
    if (log_folder && !map_log(library, note)) tell_unlogged(file);
    find_spare(library, note, file);
    atomic_store(&library->state, READY);
    return library;
}

/* The number of dynamic symbols: the chains of the hash table end with the last one. */
static uint32_t count_symbols(const uint32_t *hash, const uint32_t *gnu_hash) {
    if (hash) return hash[1];
    if (gnu_hash == NULL) return 0;
    uint32_t buckets = gnu_hash[0], first = gnu_hash[1], last = 0;
    const uint32_t *bucket = gnu_hash + 4 + 2 * (size_t)gnu_hash[2], *chain = bucket + buckets;
    for (uint32_t i = 0; i < buckets; i++)
        if (bucket[i] > last) last = bucket[i];
    if (last < first) return first;
    while ((chain[last - first] & 1) == 0) last++;
    return last + 1;
}

typedef struct {
    const ElfW(Sym) *symbols;
    const char *strings;
    uint32_t count;
} Symbols;

/* The dynamic symbols of a library. */
static Symbols symbols_of(const struct link_map *map) {
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    const uint32_t *hash = NULL, *gnu_hash = NULL;
    for (const ElfW(Dyn) *row = map->l_ld; row->d_tag != DT_NULL; row++) {
        const void *place = (const void *)row->d_un.d_ptr;
        if (row->d_tag == DT_SYMTAB) symbols = place;
        if (row->d_tag == DT_STRTAB) strings = place;
        if (row->d_tag == DT_HASH) hash = place;
        if (row->d_tag == DT_GNU_HASH) gnu_hash = place;
    }
    if (symbols == NULL || strings == NULL) return (Symbols){.count = 0};
    return (Symbols){symbols, strings, count_symbols(hash, gnu_hash)};
}

/* The name of the function at an address; NULL: no symbol that the library exports has it. */
static const char *function_at(const struct link_map *map, uintptr_t address) {
    Symbols all = symbols_of(map);
    for (uint32_t i = 1; i < all.count; i++) {
        const ElfW(Sym) *one = &all.symbols[i];
        if (ELF64_ST_TYPE(one->st_info) == STT_FUNC && one->st_shndx != SHN_UNDEF &&
            address - map->l_addr - one->st_value < one->st_size)
            return all.strings + one->st_name;
    }
    return NULL;
}

/* What was needed, and its offset in the original. */
static void tell_missing(const Note *note, const char *file, const char *what, const char *name,
                         uint64_t offset) {
    Message message = {.count = 0};
    add(&message, "negativa: ");
    add(&message, file);
    add(&message, ": ");
    add(&message, what);
    if (name) add(&message, " of ");
    if (name) add(&message, name);
    add(&message, " at offset ");
    add_hex(&message, offset);
    add(&message, " of the original was taken out, and is needed now; its spare ");
    add(&message, text_of(note, note->spare));
    add(&message, " can't be used: it is missing, of another version or of another user, or others may "
                  "write to it or to its folder. ");
    add(&message, text_of(note, note->remedy));
    say(&message);
}

/* ---- A page comes back ---- */

static const Hole *hole_at(const Note *note, uint64_t address) {
    const Hole *holes = (const Hole *)((const char *)note + note->holes);
    uint32_t low = 0, high = note->hole_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (holes[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low < note->hole_count && holes[low].start <= address ? &holes[low] : NULL;
}

/* Notes a miss: at this offset of the original, by an instruction fetch or a read, and whether the
 * page could not come back. */
static void log_miss(const Library *library, uint64_t offset, bool fetched, bool lost) {
    _Atomic uint32_t *log = atomic_load(&library->log);
    if (log == NULL) return;
    _Atomic uint32_t *word = &log[offset / PAGE];
    if (lost) atomic_fetch_or(word, LOG_LOST);
    uint32_t old = atomic_load(word);
    uint32_t place = (uint32_t)(offset % PAGE) << PLACE_SHIFT | (fetched ? LOG_FETCHED : 0);
    while ((old & COUNT_MASK) == 0)
        if (atomic_compare_exchange_weak(word, &old, old | place | 1)) return;
    if ((old & COUNT_MASK) < MOST) atomic_fetch_add(word, 1);
}

/* Notes pages that come back unasked, beside one that was missed. */
static void log_beside(const Library *library, uint64_t offset, uint64_t size) {
    _Atomic uint32_t *log = atomic_load(&library->log);
    for (uint64_t end = offset + size; log && offset < end; offset += PAGE)
        atomic_fetch_or(&log[offset / PAGE], LOG_BESIDE);
}

/* ---- One thread at a time ---- */

/* 1: a thread looks at pages and puts some. fork wipes it (wiped.h): the thread is not in the child.
 * Where nothing is wiped, a child may wait once: see PATIENCE. */
static _Atomic uint32_t *entered;

enum {
    PAUSE_NS = 20 * 1000,
    /* Pauses; 7 s, or more on a busy machine. A child of vfork that was killed meanwhile never leaves. */
    PATIENCE = 100 * 1000,
};

/* Returns the signal mask for leave(). */
static uint64_t enter(void) {
    uint64_t all = ~(uint64_t)0, before = 0;
    call6(SYS_rt_sigprocmask, SIG_SETMASK, (long)&all, (long)&before, sizeof all, 0, 0);
    struct timespec pause = {.tv_nsec = PAUSE_NS};
    uint32_t none = 0;
    for (int i = 0; i < PATIENCE && !atomic_compare_exchange_strong(entered, &none, 1); i++, none = 0)
        call3(SYS_nanosleep, (long)&pause, 0, 0);
    return before;
}

static void leave(uint64_t mask) {
    atomic_store(entered, 0);
    call6(SYS_rt_sigprocmask, SIG_SETMASK, (long)&mask, 0, sizeof mask, 0, 0);
}

/* Whether a page can be read. rt_sigprocmask reads the new mask first, then refuses what to do with
 * it (Linux's kernel/signal.c; abseil's AddressIsReadable does the same). */
static bool is_there(uintptr_t page) {
    return call6(SYS_rt_sigprocmask, -1, (long)page, 0, sizeof(uint64_t), 0, 0) != -EFAULT;
}

/* A fault at a page that is there: another thread was quicker, so the program tries again. If that
 * does not help, the fault is the program's own: false. */
static bool try_again(uintptr_t address) {
    enum { THREADS = 64, MOST_TRIES = 100 };
    static _Atomic uint64_t last[THREADS]; /* address, misses, thread and number of tries */
    uint64_t thread = (uint64_t)call3(SYS_gettid, 0, 0, 0), served = atomic_load(&all_misses);
    /* With the misses so far: a library that is loaded again may miss this page again, and the
     * thread lose again. Tries count only while nothing comes back. */
    uint64_t key = (address ^ served << 20) << 16 | (thread & 255) << 8;
    _Atomic uint64_t *slot = &last[thread % THREADS];
    uint64_t old = atomic_load(slot), tries = (old ^ key) >> 8 ? 1 : (old & 255) + 1;
    if (tries > MOST_TRIES) return false;
    atomic_store(slot, key | tries);
    return true;
}

/* ---- Bytes of the spare to addresses ---- */

/* A copy of bytes in memory of the process's own. */
static long copy_of(const char *from, uint64_t size) {
    long copy = map(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    for (uint64_t i = 0; !failed(copy) && i < size / 8; i++)
        ((uint64_t *)copy)[i] = ((const uint64_t *)from)[i];
    return copy;
}

/* Moves a copy to its address: other threads see it whole or not at all. */
static long move_copy(long copy, uintptr_t target, uint64_t size, int protection) {
    int move = MREMAP_MAYMOVE | MREMAP_FIXED;
    long done = call3(SYS_mprotect, copy, (long)size, protection);
    return done ? done : call6(SYS_mremap, copy, (long)size, (long)size, move, (long)target, 0);
}

/* Duplicates pages of the spare's mapping at an address; see above. */
static long share_pages(const Library *library, const char *from, uintptr_t target, uint64_t size,
                        int protection) {
    int move = MREMAP_MAYMOVE | MREMAP_FIXED;
    long done = call6(SYS_mremap, (long)from, 0, (long)size, move, (long)target, 0);
    /* The spare's mapping is executable as a whole, unwind tables are not. */
    if (!failed(done) && library->shared & ~protection)
        call3(SYS_mprotect, (long)target, (long)size, protection);
    return done;
}

typedef struct {
    uintptr_t start, end; /* addresses in the process */
} Pages;

/* What is missing around a page, and lies in `most`; with that page itself in any case. */
static Pages missing_around(uintptr_t page, Pages most) {
    Pages found = {page, page + PAGE};
    while (found.start > most.start && !is_there(found.start - PAGE)) found.start -= PAGE;
    while (found.end < most.end && !is_there(found.end)) found.end += PAGE;
    return found;
}

/* Brings back a page, and of `pages` what is missing around it: so much it makes of `pages`. `from` is
 * the page in the spare's mapping. Returns 0 if the page is there already, a negative error number, or
 * another number. */
static long put_missing(const Library *library, const char *from, uintptr_t page, Pages *pages,
                        int protection) {
    /* What the program may write to must be its own. */
    bool own = protection & ~library->shared;
    Pages most = *pages = missing_around(page, *pages);
    long done = 0, copy = 0;
    if (own) copy = copy_of(from - (page - most.start), most.end - most.start);
    if (failed(copy)) return copy;
    uint64_t mask = enter();
    if (!is_there(page)) {
        *pages = missing_around(page, most);
        uint64_t size = pages->end - pages->start, before = page - pages->start;
        done = own ? move_copy(copy + (long)(pages->start - most.start), pages->start, size, protection)
                   : share_pages(library, from - before, pages->start, size, protection);
    }
    leave(mask);
    if (own && (done == 0 || failed(done))) pages->start = pages->end = most.start;
    if (own && most.start < pages->start)
        call3(SYS_munmap, copy, (long)(pages->start - most.start), 0);
    if (own && pages->end < most.end)
        call3(SYS_munmap, copy + (long)(pages->end - most.start), (long)(most.end - pages->end), 0);
    return done;
}

/* Protection keys: linux/pkeys(7); the others are in faults.h. */
enum { FAULT_KEY = 32 };

static void tell_refused(const Note *note, const char *file, long error) {
    Message message = {.count = 0};
    add(&message, "negativa: ");
    add(&message, file);
    add(&message, ": the system refuses to map a page of its spare ");
    add(&message, text_of(note, note->spare));
    /* ENOMEM of mremap(2) */
    add(&message, error == -ENOMEM ? ": no memory is left, or the process has as many mappings as "
                                     "vm.max_map_count allows. "
                                   : ". ");
    add(&message, text_of(note, note->remedy));
    say(&message);
}

/* Brings back what was touched; false: the fault is not ours, or can't be served. */
static bool bring_back(uintptr_t address, unsigned long error, int si_code) {
    (void)si_code;
    struct dl_find_object found;
    if (find_object((void *)address, &found) != 0) return false;
    const Note *note = note_of(&found);
    if (note == NULL || error & FAULT_KEY) return false;
    uintptr_t base = found.dlfo_link_map->l_addr;
    Library *library = library_of(note, &found);
    const Hole *hole = library ? hole_at(note, address - base) : NULL;
    if (hole == NULL || (error & FAULT_EXEC && !(hole->protection & PROT_EXEC)) ||
        (error & FAULT_WRITE && !(hole->protection & PROT_WRITE)))
        return false;
    const char *file = found.dlfo_link_map->l_name;
    const char *reserve = atomic_load(&library->reserve);
    uintptr_t page = address & -(uintptr_t)PAGE;
    uint64_t offset = hole->offset + page - base - hole->start;
    /* A spare may come later: a volume that is mounted. */
    if (reserve == NULL) {
        find_spare(library, note, file);
        reserve = atomic_load(&library->reserve);
    }
    if (reserve == NULL) {
        log_miss(library, offset + address % PAGE, error & FAULT_EXEC, true);
        if (!atomic_exchange(&library->told, true))
            tell_missing(note, file, hole->protection & PROT_EXEC ? "code" : "data",
                         function_at(found.dlfo_link_map, address), offset);
        return false;
    }
    bool many = atomic_fetch_add(&library->misses, 1) >= MANY_MISSES;
    many |= atomic_load(&all_misses) >= MANY_IN_ALL;
    Pages pages = {page, page + PAGE};
    if (many) {
        pages.start = page & -(uintptr_t)WINDOW, pages.end = pages.start + WINDOW;
        if (pages.start < base + hole->start) pages.start = base + hole->start;
        if (pages.end > base + hole->end) pages.end = base + hole->end;
    }
    long done = put_missing(library, reserve + offset, page, &pages, (int)hole->protection);
    if (done == 0) return try_again(address);
    log_miss(library, offset + address % PAGE, error & FAULT_EXEC, failed(done));
    if (failed(done)) {
        if (!atomic_exchange(&library->told, true)) tell_refused(note, file, done);
        return false;
    }
    atomic_fetch_add(&all_misses, 1);
    if (many) log_beside(library, offset - (page - pages.start), pages.end - pages.start);
    return true;
}

/* ---- mprotect ---- */

static int (*real_mprotect)(void *, size_t, int);
static int (*real_pkey_mprotect)(void *, size_t, int, int);

/* Makes a page that came back memory of the process, with this protection, as the program wants to
 * write to it. Another thread may have been quicker, and written. */
static void own_page(uintptr_t page, int protection) {
    long copy = copy_of((const char *)page, PAGE);
    if (failed(copy)) return;
    uint64_t mask = enter();
    bool moved = call3(SYS_mprotect, (long)page, PAGE, protection) == -EACCES &&
                 !failed(move_copy(copy, page, PAGE, protection));
    leave(mask);
    if (!moved) call3(SYS_munmap, copy, PAGE, 0);
}

/* A program that makes code writable, to patch it, would find an empty page in a gap. Pages of the
 * spare can't be written to: with `own`, each page in a gap becomes memory of the process. */
static void bring_back_range(uintptr_t start, size_t size, int protection, bool own) {
    struct dl_find_object found;
    if (find_object((void *)start, &found) != 0) return;
    const Note *note = note_of(&found);
    if (note == NULL || library_of(note, &found) == NULL) return;
    uintptr_t base = found.dlfo_link_map->l_addr;
    for (uintptr_t page = start & -(uintptr_t)PAGE; page < start + size; page += PAGE) {
        if (hole_at(note, page - base) == NULL) continue;
        (void)*(volatile const char *)page;
        if (own) own_page(page, protection);
    }
}

static int our_mprotect(void *start, size_t size, int protection) {
    if (protection != PROT_NONE) bring_back_range((uintptr_t)start, size, protection, false);
    int result = real_mprotect(start, size, protection);
    if (result == 0 || errno != EACCES || !(protection & PROT_WRITE)) return result;
    bring_back_range((uintptr_t)start, size, protection, true);
    return real_mprotect(start, size, protection);
}

static int our_pkey_mprotect(void *start, size_t size, int protection, int key) {
    if (protection != PROT_NONE) bring_back_range((uintptr_t)start, size, protection, false);
    int result = real_pkey_mprotect(start, size, protection, key);
    if (result == 0 || errno != EACCES || !(protection & PROT_WRITE)) return result;
    bring_back_range((uintptr_t)start, size, protection, true);
    return real_pkey_mprotect(start, size, protection, key);
}

static const FaultsWrapper own_wrappers[] = {
    {"mprotect", (void *)our_mprotect, (void **)&real_mprotect},
    {"pkey_mprotect", (void *)our_pkey_mprotect, (void **)&real_pkey_mprotect},
};
enum { OWN_WRAPPERS = sizeof own_wrappers / sizeof *own_wrappers };

/* ---- Calls that were bound before ---- */

typedef struct {
    uintptr_t base, sealed_start, sealed_end;
    const ElfW(Sym) *symbols;
    const char *strings;
} Object;

static const FaultsWrapper *wrapper_of(const char *name) {
    for (size_t i = 0; i < sizeof faults_wrappers / sizeof *faults_wrappers; i++)
        if (strcmp(name, faults_wrappers[i].name) == 0) return &faults_wrappers[i];
    for (size_t i = 0; i < OWN_WRAPPERS; i++)
        if (strcmp(name, own_wrappers[i].name) == 0) return &own_wrappers[i];
    return NULL;
}

static void patch_slots(const Object *object, const ElfW(Rela) *rows, size_t count) {
    for (const ElfW(Rela) *row = rows; row < rows + count; row++) {
        unsigned long type = ELF64_R_TYPE(row->r_info);
        if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT && type != R_X86_64_64) continue;
        const char *name = object->strings + object->symbols[ELF64_R_SYM(row->r_info)].st_name;
        const FaultsWrapper *wrapper = strchr("sbpem_", *name) ? wrapper_of(name) : NULL;
        if (wrapper == NULL) continue;
        _Atomic uintptr_t *slot = (_Atomic uintptr_t *)(object->base + row->r_offset);
        /* Another value: not bound yet, or a function of the same name. */
        if (atomic_load(slot) != (uintptr_t)*wrapper->real) continue;
        uintptr_t page = (uintptr_t)slot & -(uintptr_t)PAGE;
        bool sealed = object->sealed_start <= page && page < object->sealed_end;
        if (sealed && mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE) != 0) continue;
        atomic_store(slot, (uintptr_t)wrapper->ours);
        if (sealed) mprotect((void *)page, PAGE, PROT_READ);
    }
}

static int patch_object(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size, (void)data;
    Object object = {.base = info->dlpi_addr};
    const ElfW(Dyn) *dynamic = NULL;
    uintptr_t self = (uintptr_t)patch_object;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *row = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + row->p_vaddr, end = start + row->p_memsz;
        if (row->p_type == PT_DYNAMIC) dynamic = (const ElfW(Dyn) *)start;
        if (row->p_type == PT_LOAD && start <= self && self < end) return 0;
        if (row->p_type == PT_GNU_RELRO) {
            object.sealed_start = start & -(uintptr_t)PAGE;
            object.sealed_end = end & -(uintptr_t)PAGE;
        }
    }
    const ElfW(Rela) *rela = NULL, *plt = NULL;
    size_t rela_count = 0, plt_count = 0, relative = 0;
    for (const ElfW(Dyn) *row = dynamic; row != NULL && row->d_tag != DT_NULL; row++) {
        uintptr_t value = row->d_un.d_val;
        /* ld.so has added the base, except to sections that it may not write (the vDSO's). */
        uintptr_t place = value < info->dlpi_addr ? value + info->dlpi_addr : value;
        if (row->d_tag == DT_SYMTAB) object.symbols = (const ElfW(Sym) *)place;
        if (row->d_tag == DT_STRTAB) object.strings = (const char *)place;
        if (row->d_tag == DT_RELA) rela = (const ElfW(Rela) *)place;
        if (row->d_tag == DT_RELASZ) rela_count = value / sizeof *rela;
        if (row->d_tag == DT_RELACOUNT) relative = value;
        if (row->d_tag == DT_JMPREL) plt = (const ElfW(Rela) *)place;
        if (row->d_tag == DT_PLTRELSZ) plt_count = value / sizeof *plt;
    }
    if (object.symbols == NULL || object.strings == NULL) return 0;
    if (rela != NULL && relative < rela_count)
        patch_slots(&object, rela + relative, rela_count - relative);
    if (plt != NULL) patch_slots(&object, plt, plt_count);
    return 0;
}

/* ---- Starts ---- */

static const char *variable(char **environment, const char *name) {
    size_t size = strlen(name);
    for (; !getauxval(AT_SECURE) && *environment; environment++)
        if (strncmp(*environment, name, size) == 0 && (*environment)[size] == '=')
            return (*environment)[size + 1] ? strdup(*environment + size + 1) : NULL;
    return NULL;
}

static void refuse(const char *reason) {
    Message message = {.count = 0};
    add(&message, "negativa: what libraries miss can't be logged here: ");
    add(&message, reason);
    say(&message);
    _exit(127);
}

/* This file is linked with -z initfirst: glibc runs begin before all other constructors. One of a
 * library that was not cut may call a function of a cut one, which it finds in its stead by name.
 * At a program's start that is before libc's own constructor, which sets environ. */
__attribute__((constructor)) static void begin(int count, char **words, char **environment) {
    (void)count, (void)words;
    find_object = (int (*)(void *, struct dl_find_object *))dlsym(RTLD_DEFAULT, "_dl_find_object");
    void *in_libc = dlsym(RTLD_DEFAULT, "gnu_get_libc_version");
    struct dl_find_object libc;
    if (find_object == NULL || in_libc == NULL || find_object(in_libc, &libc) != 0)
        refuse("it needs glibc 2.35 or newer");
    spare_folder = variable(environment, "NEGATIVA_SPARE_DIR");
    log_folder = variable(environment, "NEGATIVA_SPARE_LOG");
    if (log_folder) mkdir(log_folder, 0777);
    entered = map_wiped();
    if (entered == NULL) refuse("no memory is left");
    if (!faults_start(bring_back)) refuse("the handler of SIGSEGV can't be set");
    if (!faults_wrap_libc(libc.dlfo_link_map) ||
        !faults_wrap(libc.dlfo_link_map, own_wrappers, OWN_WRAPPERS))
        refuse("libc's symbols can't be changed");
    dl_iterate_phdr(patch_object, NULL);
    /* Handlers of other signals must not block ours. */
    for (int number = 1; number < NSIG; number++) {
        struct sigaction action;
        if (number == SIGSEGV || sigaction(number, NULL, &action) != 0) continue;
        if (sigismember(&action.sa_mask, SIGSEGV) != 1) continue;
        sigdelset(&action.sa_mask, SIGSEGV);
        sigaction(number, &action, NULL);
    }
}
