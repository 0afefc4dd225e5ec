/* Watched pages of a library: whole ones of code, unwind tables, GPU code; refused libraries. */
#pragma once

#include "watched.h"

enum { MAX_SECTIONS = 1024, MAX_NAMES = 64 << 10 };

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

/* What the programs of GPUs begin with: a fatbin, or a frame of zstd (RFC 8878). In cuFFT 12.0, 6
 * kB of other data come before the first. */
static bool begins_gpu_code(int fd, const ElfW(Shdr) *section) {
    static uint32_t words[4 * PAGE / sizeof(uint32_t)];
    size_t size = section->sh_size < sizeof words ? section->sh_size : sizeof words;
    if (!read_at(fd, words, size, section->sh_offset)) return false;
    for (size_t i = 0; i < size / sizeof *words; i++)
        if (words[i] == 0xBA55ED50 || words[i] == 0xFD2FB528) return true;
    return false;
}

/* GPU code is data that the driver reads, so it never comes to the kernel's calls. The compiler
 * puts it into the first sections; large data of a library may be anything (gpucode/scan.py).
 */
static bool is_gpu_code(int fd, const ElfW(Shdr) *section, const char *name) {
    if (section->sh_type == SHT_NOBITS ||
        (section->sh_flags & (SHF_ALLOC | SHF_EXECINSTR)) != SHF_ALLOC)
        return false;
    return strcmp(name, ".nv_fatbin") == 0 || strcmp(name, "__nv_relfatbin") == 0 ||
           strcmp(name, ".cask_resource") == 0 ||
           (strcmp(name, ".ldata") == 0 && begins_gpu_code(fd, section));
}

static struct {
    ElfW(Ehdr) head;
    ElfW(Phdr) segments[64];
    ElfW(Shdr) sections[MAX_SECTIONS];
    char names[MAX_NAMES];
} elf;

/* Data, by the names that cut.py takes out of libraries. A page that is written is in memory, too.
 * Unwind tables that may be written are not watched. */
static bool is_constant(const ElfW(Shdr) *section, const char *name) {
    if (section->sh_type != SHT_PROGBITS ||
        (section->sh_flags & (SHF_ALLOC | SHF_TLS | SHF_EXECINSTR)) != SHF_ALLOC)
        return false;
    if (section->sh_flags & SHF_WRITE && strcmp(name, ".eh_frame") == 0) return true;
    if (name[0] != '.') return false;
    name += name[1] == 'l' ? 2 : 1;
    return strncmp(name, "rodata", 6) == 0 || strncmp(name, "data", 4) == 0;
}

/* The segment that holds the addresses. NULL: none does, or the loader protects them later, which
 * matters to what is armed, or the program may write them: CPU code is never written. */
static const ElfW(Phdr) *segment_of(uint64_t start, uint64_t end, uint32_t kind) {
    const ElfW(Phdr) *found = NULL;
    for (unsigned i = 0; i < elf.head.e_phnum; i++) {
        const ElfW(Phdr) *p = &elf.segments[i];
        if (kind != CONSTANTS && p->p_type == PT_GNU_RELRO && start < p->p_vaddr + p->p_memsz &&
            p->p_vaddr < end)
            return NULL;
        if (p->p_type == PT_LOAD && start <= end && start >= p->p_vaddr &&
            end <= p->p_vaddr + p->p_filesz)
            found = p;
    }
    return found != NULL && kind == LIBRARY && found->p_flags & PF_W ? NULL : found;
}

static int protection_of_flags(uint32_t flags) {
    return (flags & PF_R ? PROT_READ : 0) | (flags & PF_W ? PROT_WRITE : 0) |
           (flags & PF_X ? PROT_EXEC : 0);
}

/* Adds the whole pages between two addresses of the ELF file. */
static void add_range(Range *ranges, size_t *count, uint64_t start, uint64_t end,
                      const ElfW(Phdr) *segment, uint32_t kind) {
    start = (start + PAGE - 1) & ~(uint64_t)(PAGE - 1);
    end &= ~(uint64_t)(PAGE - 1);
    if (start >= end || segment == NULL || *count == MAX_RANGES) return;
    uint64_t moved = kind == GPU_CODE ? segment->p_vaddr - segment->p_offset : 0;
    ranges[(*count)++] =
        (Range){start, end, protection_of_flags(segment->p_flags), 0, start - moved};
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

/* Reads the headers of a file that was mapped. */
static bool read_headers(int fd, const struct link_map *map) {
    const ElfW(Ehdr) *head = &elf.head;
    const ElfW(Shdr) *names = &elf.sections[0];
    if (!read_at(fd, &elf.head, sizeof elf.head, 0) ||
        memcmp(head->e_ident, ELFMAG, SELFMAG) != 0 || head->e_ident[EI_CLASS] != ELFCLASS64 ||
        head->e_phentsize != sizeof(ElfW(Phdr)) ||
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
    return true;
}

static bool is_of_kind(int fd, const ElfW(Shdr) *section, const char *name, uint32_t kind) {
    if (kind == GPU_CODE) return is_gpu_code(fd, section, name);
    return kind == LIBRARY ? is_watchable(section, name) : is_constant(section, name);
}

/* The whole pages inside of sections of a kind, by their addresses in the ELF file; neighbours
 * count as one. False: too many. */
static bool find_ranges(int fd, uint32_t kind, Range *ranges, size_t *count) {
    uint64_t start = 0, end = 0;
    const ElfW(Phdr) *last = NULL;
    for (unsigned i = 0; i < elf.head.e_shnum; i++) {
        const ElfW(Shdr) *s = &elf.sections[i];
        if (s->sh_name >= elf.sections[elf.head.e_shstrndx].sh_size) continue;
        /* The kernel reads the code of restartable sequences without a signal: rseq(2). */
        if (kind == LIBRARY && strcmp(elf.names + s->sh_name, "__rseq_cs") == 0) return false;
        if (!is_of_kind(fd, s, elf.names + s->sh_name, kind)) continue;
        const ElfW(Phdr) *segment = segment_of(s->sh_addr, s->sh_addr + s->sh_size, kind);
        if (segment != last || s->sh_addr < end || s->sh_addr - end >= 64) {
            add_range(ranges, count, start, end, last, kind);
            start = s->sh_addr;
            last = segment;
        }
        end = s->sh_addr + s->sh_size;
    }
    add_range(ranges, count, start, end, last, kind);
    return *count < MAX_RANGES;
}

/* Of an open file, whose `path` is empty; or by its path from AT_FDCWD. */
static void describe(LogRecord *record, int fd, const char *path) {
    struct statx status;
    int wanted = STATX_INO | STATX_SIZE | STATX_MTIME;
    if (statx(fd, path, AT_EMPTY_PATH, wanted, &status) != 0) return;
    record->major = status.stx_dev_major;
    record->minor = status.stx_dev_minor;
    record->inode = status.stx_ino;
    record->file_size = status.stx_size;
    record->modified_ns = nanoseconds(status.stx_mtime.tv_sec, status.stx_mtime.tv_nsec);
}
