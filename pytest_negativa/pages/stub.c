/* Maps lost pages from the spare while ld.so relocates the library; which spares it trusts.
 *
 * rewriting/compact/cut.py puts this code into each library that it cuts, and two rows of type
 * R_X86_64_IRELATIVE in front of the others of that type. ld.so calls the functions that such rows
 * name: start first, then second. All other relocations are done by then but those of this type,
 * and no code of the library has run. From then on the kernel brings the pages in, as those of any
 * file.
 *
 * Without its spare the library must not load. Then start turns symbol 0, which second's row names,
 * into an undefined one whose name is the message. ld.so looks it up, and refuses the library in
 * its own way: dlopen returns NULL, a program's start ends with status 127.
 *
 * There is no libc here, and no data but Parameters: the linker writes bare bytes (see stub.ld).
 * All calls of the kernel are those that ld.so makes itself, so a filter of system calls allows
 * them, and one ioctl that may fail.
 *
 * Sources: elf/dynamic-link.h, elf/do-rel.h, sysdeps/x86_64/dl-machine.h (RESOLVE_MAP) of glibc;
 * linux/fs.h (PROCMAP_QUERY).
 */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "format.h"

__attribute__((section(".parameters"), used)) static const volatile Parameters parameters = {0};

enum { PAGE = 4096, MAX_COPIED = 16 << 20, CHUNK = 4096 };

/* What is known of the library's file, and room to read into. */
typedef struct {
    const Note *note;
    bool asked, known; /* whether the next two and the path are filled in */
    uid_t owner;
    mode_t mode;
    char path[PATH_MAX], value[PATH_MAX], chunk[CHUNK];
} Search;

static long call6(long number, long a, long b, long c, long d, long e, long f) {
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

static long call3(long number, long a, long b, long c) { return call6(number, a, b, c, 0, 0, 0); }

static bool failed(long result) { return result < 0 && result > -4096; }

static long map(uintptr_t place, uint64_t size, int protection, int flags, int fd,
                uint64_t offset) {
    return call6(SYS_mmap, (long)place, (long)size, protection, flags, fd, (long)offset);
}

static int open_at(int folder, const char *name, int flags) {
    return (int)call6(SYS_openat, folder, (long)name, flags | O_CLOEXEC, 0, 0, 0);
}

static void close_file(int fd) { call3(SYS_close, fd, 0, 0); }

static bool same(const void *a, const void *b, size_t size) {
    const char *x = a, *y = b;
    while (size && *x == *y) x++, y++, size--;
    return size == 0;
}

/* ---- The library's own file, and the environment ---- */

/* A file of /proc, byte by byte; -1: its end. */
typedef struct {
    int fd;
    long at, size;
    char *chunk;
} Reader;

static int next(Reader *reader) {
    if (reader->at >= reader->size) {
        reader->size = call3(SYS_read, reader->fd, (long)reader->chunk, CHUNK);
        reader->at = 0;
    }
    return reader->size > 0 ? (unsigned char)reader->chunk[reader->at++] : -1;
}

/* struct procmap_query, of Linux 6.11. */
typedef struct {
    uint64_t size, flags, address, start, end, vma_flags, page_size, offset, inode;
    uint32_t major, minor, name_size, build_id_size;
    uint64_t name, build_id;
} MapQuery;

/* The path of the file that is mapped at an address; false: unknown. */
static bool read_path(Search *search, uintptr_t address) {
    const unsigned long procmap_query = 0xc0686611;
    Reader reader = {.fd = open_at(AT_FDCWD, "/proc/self/maps", O_RDONLY), .chunk = search->chunk};
    if (reader.fd < 0) return false;
    MapQuery query = {.size = sizeof query,
                      .address = address,
                      .name_size = PATH_MAX,
                      .name = (uintptr_t)search->path};
    bool found = call3(SYS_ioctl, reader.fd, (long)procmap_query, (long)&query) == 0;
    /* start-end protection offset device inode path */
    for (int c = 0; !found && c >= 0;) {
        uint64_t ends[2] = {0, 0};
        for (int i = 0; i < 2; i++)
            while ((c = next(&reader)) > ' ' && c != '-')
                ends[i] = ends[i] << 4 | (uint64_t)(c <= '9' ? c - '0' : c - 'a' + 10);
        size_t size = 0;
        while ((c = next(&reader)) >= 0 && c != '\n')
            if ((size || c == '/') && size < PATH_MAX - 1) search->path[size++] = (char)c;
        search->path[size] = 0;
        found = ends[0] <= address && address < ends[1];
    }
    close_file(reader.fd);
    return found && search->path[0] == '/';
}

/* The owner and the mode of the library's file. If it is gone, nobody's. */
static void ask_library(Search *search) {
    if (search->asked) return;
    search->asked = true;
    if (!read_path(search, (uintptr_t)&parameters)) return;
    /* So the kernel names a file that is gone. Another one of this very name is another's. */
    static const char gone[] = " (deleted)";
    size_t length = 0;
    while (search->path[length]) length++;
    if (length >= sizeof gone &&
        same(search->path + length - (sizeof gone - 1), gone, sizeof gone - 1))
        return;
    struct stat status;
    int fd = open_at(AT_FDCWD, search->path, O_PATH);
    search->known = fd >= 0 && call3(SYS_fstat, fd, (long)&status, 0) == 0;
    if (fd >= 0) close_file(fd);
    if (!search->known) return;
    search->owner = status.st_uid; /* NOLINT: the analyzer does not see that the kernel fills it */
    search->mode = status.st_mode;
}

/* Whether the kernel started the program with more rights than its caller has, or nobody can tell.
 */
static bool is_secure(Search *search) {
    Elf64_auxv_t row = {0};
    Reader reader = {.fd = open_at(AT_FDCWD, "/proc/self/auxv", O_RDONLY), .chunk = search->chunk};
    if (reader.fd < 0) return true;
    bool secure = true;
    for (int c = 0; c >= 0;) {
        for (size_t i = 0; i < sizeof row && (c = next(&reader)) >= 0; i++)
            ((char *)&row)[i] = (char)c;
        if (c >= 0 && row.a_type == AT_SECURE) secure = row.a_un.a_val != 0, c = -1;
    }
    close_file(reader.fd);
    return secure;
}

/* The value of a variable of the environment; false: there is none. */
static bool read_variable(Search *search, const char *name) {
    Reader reader = {.fd = open_at(AT_FDCWD, "/proc/self/environ", O_RDONLY),
                     .chunk = search->chunk};
    if (reader.fd < 0) return false;
    bool found = false;
    for (int c = 0; !found && c >= 0;) {
        const char *expected = name;
        while ((c = next(&reader)) > 0 && *expected && c == *expected) expected++;
        found = *expected == 0 && c == '=';
        size_t size = 0;
        while (c > 0 && (c = next(&reader)) > 0)
            if (found && size < PATH_MAX - 1) search->value[size++] = (char)c;
        if (found) search->value[size] = 0;
    }
    close_file(reader.fd);
    return found && search->value[0];
}

/* ---- The spare ---- */

enum { OTHERS_WRITE = S_IWGRP | S_IWOTH };

/* Whether only root and the library's owner can write to a file or folder, but for `harmless` bits.
 */
static bool is_trusted(Search *search, const struct stat *status, mode_t harmless) {
    if (status->st_mode & OTHERS_WRITE & ~harmless) return false;
    if (status->st_uid == 0) return true;
    ask_library(search);
    return search->known && status->st_uid == search->owner;
}

/* Opens the spare in a folder. Its code will run here, so others must be able to write neither to
 * it nor to the folder. Beside the library they could exchange that one, too, unless the folder is
 * sticky: there, a spare may be as writable as the library (FAT has one mode for all).
 * slimming/spares.py (why_untrusted) judges alike: change both. */
static int open_spare(Search *search, const char *folder, bool beside, int *problem) {
    struct stat at_folder, at_spare;
    const Note *note = search->note;
    int worst = ABSENT;
    int place = open_at(AT_FDCWD, folder, O_PATH | O_DIRECTORY);
    int fd = place < 0 ? place
                       : open_at(place, (const char *)note + note->spare,
                                 O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
    if (fd < 0) {
        if (fd != -ENOENT && fd != -ENOTDIR) worst = CLOSED;
    } else {
        uint64_t end = (note->original_size + PAGE - 1) / PAGE * PAGE;
        Trailer found;
        worst = OTHER;
        /* NOLINTNEXTLINE: as in ask_library */
        if (call3(SYS_fstat, fd, (long)&at_spare, 0) == 0 && S_ISREG(at_spare.st_mode) &&
            call3(SYS_fstat, place, (long)&at_folder, 0) == 0 &&
            call6(SYS_pread64, fd, (long)&found, sizeof found, (long)end, 0, 0) == sizeof found &&
            same(found.magic, note->magic, sizeof found.magic) &&
            same(found.pair, note->pair, sizeof found.pair) &&
            found.original_size == note->original_size) {
            mode_t harmless = beside ? search->mode : 0;
            worst = is_trusted(search, &at_spare, harmless) &&
                            (beside ? !(at_folder.st_mode & S_ISVTX)
                                    : is_trusted(search, &at_folder, 0))
                        ? NONE
                        : UNTRUSTED;
        }
    }
    if (place >= 0) close_file(place);
    if (worst == NONE) return fd;
    if (fd >= 0) close_file(fd);
    if (worst > *problem) *problem = worst;
    return -1;
}

/* The folders to look in: those of the note, the library's own, the environment's. */
static int find_spare(Search *search, int *problem) {
    const char *folder = (const char *)search->note + search->note->folders;
    for (int fd; *folder; folder++) {
        if ((fd = open_spare(search, folder, false, problem)) >= 0) return fd;
        while (*folder) folder++;
    }
    ask_library(search);
    if (search->known) {
        char *slash = search->path;
        for (char *c = search->path; *c; c++)
            if (*c == '/') slash = c;
        *slash = 0;
        int fd = open_spare(search, slash == search->path ? "/" : search->path, true, problem);
        if (fd >= 0) return fd;
    }
    if (!read_variable(search, "NEGATIVA_SPARE_DIR") || is_secure(search)) return -1;
    return open_spare(search, search->value, false, problem);
}

/* ---- The holes ---- */

/* For file systems from which no code may run (noexec). */
static bool copy_hole(uintptr_t place, const Hole *hole, int fd) {
    uint64_t size = hole->end - hole->start;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (failed(map(place, size, PROT_READ | PROT_WRITE, flags, -1, 0))) return false;
    for (uint64_t done = 0; done < size;) {
        long count = call6(SYS_pread64, fd, (long)(place + done), (long)(size - done),
                           (long)(hole->offset + done), 0, 0);
        if (count <= 0) return false;
        done += (uint64_t)count;
    }
    return !failed(call3(SYS_mprotect, (long)place, (long)size, (int)hole->protection));
}

/* Puts the spare's pages into the holes; returns NONE or a problem. */
static int fill_holes(uintptr_t base, const Note *note, int fd) {
    const Hole *holes = (const Hole *)((const char *)note + note->holes);
    uint64_t total = 0;
    for (uint32_t i = 0; i < note->hole_count; i++) total += holes[i].end - holes[i].start;
    /* A trial elsewhere: a call that fails may unmap what is there, and other threads take the
     * place. */
    long trial = map(0, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
    bool copied = trial == -EPERM || trial == -EACCES;
    if (!failed(trial)) call3(SYS_munmap, trial, PAGE, 0);
    if (copied && total > MAX_COPIED) return NOEXEC;
    for (uint32_t i = 0; i < note->hole_count; i++) {
        uintptr_t place = base + holes[i].start;
        int flags = MAP_PRIVATE | MAP_FIXED;
        if (copied ? !copy_hole(place, &holes[i], fd)
                   : failed(map(place, holes[i].end - holes[i].start, (int)holes[i].protection,
                                flags, fd, holes[i].offset)))
            return copied ? NOEXEC : UNMAPPED;
    }
    return NONE;
}

/* Lets the first header of each segment cover the holes behind it, in memory, also those at the
 * start of the next segment. Unwinders that find an object by its PT_LOADs know nothing else: those
 * of libgcc before 12, glibc before 2.35, LLVM. Returns NONE or a problem. */
static int join_segments(uintptr_t base, const Note *note) {
    Elf64_Phdr *headers = (Elf64_Phdr *)(base + parameters.headers), *first = 0;
    uint64_t count = parameters.header_count;
    const Hole *hole = (const Hole *)((const char *)note + note->holes),
               *end = hole + note->hole_count;
    uint64_t size = (count * sizeof *headers + PAGE - 1) / PAGE * PAGE;
    if (failed(call3(SYS_mprotect, (long)headers, (long)size, PROT_READ | PROT_WRITE)))
        return UNMAPPED;
    for (Elf64_Phdr *row = headers; row < headers + count; row++) {
        if (row->p_type != PT_LOAD) continue;
        bool joined = false;
        for (; first && hole < end && hole->end <= row->p_vaddr; hole++) {
            /* Sanitizers read writable segments, all of their bytes: no padding may be among them.
             */
            if (first->p_flags & PF_W && first->p_vaddr + first->p_memsz != hole->start) continue;
            joined = row->p_vaddr == hole->end && row->p_flags == first->p_flags;
            uint64_t last = joined ? row->p_vaddr + row->p_memsz : hole->end;
            *(volatile uint64_t *)&first->p_memsz = last - first->p_vaddr;
        }
        /* A thread may read it meanwhile: first longer, then gone. */
        if (joined)
            *(volatile uint32_t *)&row->p_type = PT_NULL;
        else
            first = row;
    }
    call3(SYS_mprotect, (long)headers, (long)size, PROT_READ);
    return NONE;
}

/* See the top. The whole segment becomes writable for a moment: a part of it would part the
 * mapping. */
static void refuse(uintptr_t base, int problem) {
    long start = (long)(base + parameters.symbols_start), size = (long)parameters.symbols_size;
    if (failed(call3(SYS_mprotect, start, size, PROT_READ | PROT_WRITE))) {
        /* Nothing else ends the load. */
        call3(SYS_exit_group, 127, 0, 0);
    }
    Elf64_Sym *symbol = (Elf64_Sym *)(base + parameters.symbols);
    symbol->st_name = parameters.messages[problem];
    symbol->st_info = ELF64_ST_INFO(STB_GLOBAL, STT_NOTYPE);
    call3(SYS_mprotect, start, size, PROT_READ);
}

__attribute__((section(".text.start"))) uintptr_t start(void) {
    uintptr_t base = (uintptr_t)&parameters - parameters.own;
    const Note *note = (const Note *)(base + parameters.note);
    long memory =
        map(0, sizeof(Search), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int problem = UNMAPPED;
    if (!failed(memory)) {
        Search *search = (Search *)memory;
        search->note = note;
        problem = ABSENT;
        int fd = find_spare(search, &problem);
        if (fd >= 0) {
            problem = fill_holes(base, note, fd);
            close_file(fd);
        }
        if (problem == NONE) problem = join_segments(base, note);
        call3(SYS_munmap, memory, sizeof(Search), 0);
    }
    if (problem != NONE) refuse(base, problem);
    return base;
}

__attribute__((section(".text.second"))) uintptr_t second(void) { return 0; }
