/* The certificate: a slim library means the same as its original; no relocation lost its target.
 *
 * It trusts no program that made the library, and shares no code with one. It reads the original,
 * the slim library, its spare, and what was declared as unused. All of them may be hostile: sizes
 * are checked before they are used. The note's layout and SHA-256 are those of the other readers in
 * C; the writer is in Python.
 *
 * - Each byte that a segment of the original loads is at its address, with its protection; or a
 * page that the spare has, by the note's word; or within GPU code that was declared as unused.
 * - Library and spare give the original, byte by byte.
 * - What ld.so, unwinders, debuggers and the stub read means the same: dynamic section, strings,
 *   relocations, segments, sections, and the places of symbols in the file.
 *
 * The status is 0 if that holds, 1 if it does not, 2 if it can't be decided.
 *
 * Sources: System V gABI; glibc's elf/dl-load.c, elf/dynamic-link.h.
 */
#define _DEFAULT_SOURCE
#include "../../native/sha256.h"
#include "../../pages/format.h"

#include <elf.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef STUB_SHA256
#define STUB_SHA256 ""
#endif

enum { PAGE = 4096, MAX_ROWS = 65536 };
enum { PARAMETERS = 80, SECOND = 0x50, START = 0x60, ADDED = 4, HEADER = 64 };

typedef struct {
    const char *path;
    uint8_t *data; /* in memory of ours: the original gets what the library may have changed */
    uint64_t size;
} File;

typedef struct {
    File file;
    Elf64_Ehdr header;
    Elf64_Phdr *loads, *others; /* loads: those with addresses, ascending */
    Elf64_Shdr *sections;
    Elf64_Dyn *dynamic; /* rows before DT_NULL */
    Elf64_Phdr *dynamic_segment;
    size_t load_count, other_count, section_count, dynamic_count;
    uint64_t alignment; /* the largest of loads */
} Elf;

typedef struct {
    uint64_t start, end;
    bool changed;
    char digest[65]; /* of what trimmed code became; empty: it is no such code */
} Range;

typedef struct {
    Range *rows;
    size_t count, room;
} Ranges;

static Elf original, slim;
static File spare;
static Note note;
static Hole *holes;
static Ranges regions, declared; /* by offset in the original */
static Ranges gone;              /* by address */
static bool is_cut;
static uint64_t trimmed; /* bytes */

static _Noreturn void stop(int status, const char *format, ...) {
    va_list values;
    va_start(values, format);
    fprintf(stderr, "%s: not certified: ", slim.file.path ? slim.file.path : "certify");
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    exit(status);
}

#define fail(...) stop(1, __VA_ARGS__)    /* the library means something else */
#define give_up(...) stop(2, __VA_ARGS__) /* nobody knows */

/* ---- Bytes ---- */

static void *room_for(size_t count, size_t size) {
    void *room = calloc(count ? count : 1, size);
    if (!room) give_up("no memory");
    return room;
}

static bool within(uint64_t start, uint64_t size, uint64_t limit) {
    return start <= limit && size <= limit - start;
}

static bool is_zero(const uint8_t *data, uint64_t size) {
    return size == 0 || (data[0] == 0 && memcmp(data, data + 1, size - 1) == 0);
}

static void open_file(File *file, const char *path) {
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    file->path = path;
    if (fd < 0 || fstat(fd, &status) || !S_ISREG(status.st_mode)) give_up("can't read %s", path);
    file->size = (uint64_t)status.st_size;
    void *data = file->size ? mmap(NULL, file->size, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_NORESERVE, fd, 0)
                            : room_for(1, 1);
    if (data == MAP_FAILED) give_up("can't map %s", path);
    file->data = data;
    close(fd);
}

static Range *push(Ranges *ranges, uint64_t start, uint64_t end) {
    if (ranges->count == ranges->room) {
        ranges->room = ranges->room * 2 + 64;
        Range *rows = realloc(ranges->rows, ranges->room * sizeof(Range));
        if (!rows) give_up("no memory");
        ranges->rows = rows;
    }
    ranges->rows[ranges->count] = (Range){.start = start, .end = end};
    return &ranges->rows[ranges->count++];
}

static int by_start(const void *a, const void *b) {
    const Range *x = a, *y = b;
    return x->start < y->start ? -1 : x->start > y->start;
}

static void sort(Ranges *ranges, const char *name) {
    if (ranges->count) qsort(ranges->rows, ranges->count, sizeof(Range), by_start);
    for (size_t i = 1; i < ranges->count; i++)
        if (ranges->rows[i - 1].end > ranges->rows[i].start)
            give_up("%s overlap at %#" PRIx64, name, ranges->rows[i].start);
}

/* The first range that ends behind a place; NULL: none. */
static Range *range_behind(const Ranges *ranges, uint64_t place) {
    size_t low = 0, high = ranges->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges->rows[middle].end > place)
            high = middle;
        else
            low = middle + 1;
    }
    return low < ranges->count ? &ranges->rows[low] : NULL;
}

/* ---- SHA-256 ---- */

static bool has_digest(const void *data, uint64_t size, const char *wanted) {
    char hex[65];
    Sha sha = sha_start();
    sha_add(&sha, data, size);
    sha_hex(&sha, hex);
    return strcmp(hex, wanted) == 0;
}

/* ---- ELF ---- */

/* A copy of rows of a file, which may lie at any offset. */
static void *rows_of(const Elf *elf, uint64_t offset, uint64_t count, uint64_t size,
                     const char *name) {
    if (!within(offset, count * size, elf->file.size))
        fail("%s: %s leave the file", elf->file.path, name);
    void *rows = room_for(count, size);
    memcpy(rows, elf->file.data + offset, count * size);
    return rows;
}

static int compare_place(const void *address, const void *row) {
    const uint64_t place = *(const uint64_t *)address;
    const Elf64_Phdr *load = row;
    return place < load->p_vaddr ? -1 : place - load->p_vaddr >= load->p_memsz;
}

static const Elf64_Phdr *load_of(const Elf *elf, uint64_t address) {
    return bsearch(&address, elf->loads, elf->load_count, sizeof *elf->loads, compare_place);
}

/* The bytes of the file that get to an address; NULL: not all of them do. */
static const uint8_t *bytes_at(const Elf *elf, uint64_t address, uint64_t size) {
    const Elf64_Phdr *load = load_of(elf, address);
    if (!load || !within(address - load->p_vaddr, size, load->p_filesz)) return NULL;
    return elf->file.data + load->p_offset + (address - load->p_vaddr);
}

/* Whether the bytes at an offset are those that get to an address, by one PT_LOAD or neighbours. */
static bool gets_bytes(const Elf *elf, uint64_t address, uint64_t offset, uint64_t size) {
    while (size) {
        const Elf64_Phdr *load = load_of(elf, address);
        uint64_t inside = load ? address - load->p_vaddr : 0;
        if (!load || inside >= load->p_filesz || load->p_offset + inside != offset) return false;
        uint64_t part = load->p_filesz - inside < size ? load->p_filesz - inside : size;
        address += part, offset += part, size -= part;
    }
    return true;
}

/* Whether the bytes of a segment may lie in the spare, all but the first: no one reads those of the
 * file. */
static bool has_holes(const Elf64_Phdr *segment) {
    return is_cut && (segment->p_type == PT_GNU_RELRO || segment->p_type == PT_GNU_EH_FRAME);
}

static uint64_t tag(const Elf *elf, int64_t wanted) {
    uint64_t value = 0;
    for (size_t i = 0; i < elf->dynamic_count; i++)
        // NOLINTNEXTLINE(clang-analyzer-security.ArrayBound): rows were counted up to DT_NULL
        if (elf->dynamic[i].d_tag == wanted) value = elf->dynamic[i].d_un.d_val;
    return value;
}

static const uint8_t *table(const Elf *elf, int64_t place, uint64_t size) {
    const uint8_t *bytes = size ? bytes_at(elf, tag(elf, place), size) : (const uint8_t *)"";
    if (!bytes) fail("%s: its table of tag %#" PRIx64 " is not in its file", elf->file.path, place);
    return bytes;
}

static const char *section_name(const Elf *elf, size_t index) {
    const Elf64_Shdr *names = &elf->sections[elf->header.e_shstrndx];
    uint64_t name = elf->sections[index].sh_name;
    const char *text = (const char *)elf->file.data + names->sh_offset + name;
    if (!within(names->sh_offset, names->sh_size, elf->file.size) || name >= names->sh_size ||
        !memchr(text, 0, names->sh_size - name))
        fail("%s: the name of section %zu leaves the file", elf->file.path, index);
    return text;
}

static void read_segments(Elf *elf) {
    const uint64_t limit = (uint64_t)1 << 47;
    uint64_t end = 0;
    size_t count = elf->header.e_phnum;
    Elf64_Phdr *rows = rows_of(elf, elf->header.e_phoff, count, sizeof *rows, "program headers");
    elf->loads = room_for(count, sizeof *rows), elf->others = room_for(count, sizeof *rows);
    for (size_t i = 0; i < count; i++) {
        Elf64_Phdr *row = &rows[i];
        /* No library needs PT_PHDR, so compaction drops it. */
        if (row->p_type != PT_LOAD) {
            if (row->p_type != PT_NULL && (row->p_type != PT_PHDR || elf == &slim))
                elf->others[elf->other_count++] = *row;
            if (row->p_type == PT_DYNAMIC)
                elf->dynamic_segment = &elf->others[elf->other_count - 1];
            continue;
        }
        if (!within(row->p_vaddr, row->p_memsz, limit) || row->p_filesz > row->p_memsz ||
            (row->p_filesz && !within(row->p_offset, row->p_filesz, elf->file.size)))
            fail("%s: PT_LOAD %zu leaves the file or the address space", elf->file.path, i);
        if (row->p_align < PAGE || row->p_align & (row->p_align - 1))
            fail("%s: PT_LOAD %zu is not aligned to pages", elf->file.path, i);
        /* ld.so maps whole pages, also for a segment of no size. */
        if (row->p_vaddr / PAGE * PAGE < end)
            fail("%s: PT_LOAD %zu is out of order, or shares a page", elf->file.path, i);
        if (!row->p_memsz && row->p_vaddr % PAGE)
            fail("%s: PT_LOAD %zu maps a page, but has no size", elf->file.path, i);
        if (!row->p_memsz) continue;
        end = row->p_vaddr + row->p_memsz;
        elf->loads[elf->load_count++] = *row;
        if (row->p_align > elf->alignment) elf->alignment = row->p_align;
    }
    free(rows);
}

static void read_elf(Elf *elf) {
    Elf64_Ehdr *header = &elf->header;
    if (elf->file.size < sizeof *header) fail("%s: is no ELF file", elf->file.path);
    memcpy(header, elf->file.data, sizeof *header);
    if (memcmp(header->e_ident, ELFMAG "\2\1", SELFMAG + 2) != 0 ||
        header->e_phentsize != sizeof(Elf64_Phdr) ||
        (header->e_shnum && header->e_shentsize != sizeof(Elf64_Shdr)))
        fail("%s: is no ELF file of a 64-bit little-endian machine", elf->file.path);
    read_segments(elf);
    elf->section_count = header->e_shnum;
    elf->sections =
        rows_of(elf, header->e_shoff, header->e_shnum, sizeof(Elf64_Shdr), "section headers");
    if (elf->section_count && header->e_shstrndx >= elf->section_count)
        fail("%s: its sections have no names", elf->file.path);
    const Elf64_Phdr *segment = elf->dynamic_segment;
    const uint8_t *rows = segment ? bytes_at(elf, segment->p_vaddr, segment->p_filesz) : NULL;
    if (!rows) fail("%s: has no dynamic section that is loaded", elf->file.path);
    size_t count = segment->p_filesz / sizeof(Elf64_Dyn);
    elf->dynamic =
        rows_of(elf, (uint64_t)(rows - elf->file.data), count, sizeof(Elf64_Dyn), "rows");
    while (elf->dynamic_count < count && elf->dynamic[elf->dynamic_count].d_tag != DT_NULL)
        elf->dynamic_count++;
    if (elf->dynamic_count == count) fail("%s: its dynamic section has no end", elf->file.path);
}

/* ---- What the segments load ---- */

/* Compares bytes of the original, by offset, with what the library has in their place; NULL: zeros.
 */
static void compare(uint64_t offset, const uint8_t *now, uint64_t size) {
    static const uint8_t zeros[1 << 16];
    for (uint64_t next, end = offset + size; offset < end; offset = next) {
        Range *hole = range_behind(&declared, offset);
        bool is_hole = hole && hole->start <= offset;
        next = end - offset < sizeof zeros ? end : offset + sizeof zeros;
        if (hole && next > (is_hole ? hole->end : hole->start))
            next = is_hole ? hole->end : hole->start;
        const uint8_t *was = original.file.data + offset, *is = now ? now : zeros;
        if (now) now += next - offset;
        if (memcmp(was, is, next - offset) == 0) continue;
        if (is_hole) hole->changed = true;
        for (uint64_t i = 0; i < next - offset; i++)
            if (was[i] != is[i] && !(is_hole && is[i] == 0))
                fail("offset %#" PRIx64 " of the original has %#x instead of %#x", offset + i,
                     is[i], was[i]);
    }
}

/* The address that gets a byte of the original; 0: none does. */
static uint64_t address_of(uint64_t offset) {
    for (size_t i = 0; i < original.load_count; i++) {
        const Elf64_Phdr *load = &original.loads[i];
        if (offset >= load->p_offset && offset - load->p_offset < load->p_filesz)
            return load->p_vaddr + (offset - load->p_offset);
    }
    return 0;
}

/* What the library has in place of some bytes of the original, by offset. */
static void read_slim(uint64_t offset, uint8_t *bytes, uint64_t size) {
    uint64_t address = address_of(offset);
    memset(bytes, 0, size);
    for (uint64_t done = 0, part; address && done < size; done += part) {
        const Elf64_Phdr *load = load_of(&slim, address + done);
        uint64_t inside = load ? address + done - load->p_vaddr : 0;
        part = load && inside < load->p_filesz ? load->p_filesz - inside : 1;
        if (part > size - done) part = size - done;
        if (load && inside < load->p_filesz)
            memcpy(bytes + done, slim.file.data + load->p_offset + inside, part);
    }
}

/* The largest page of a kernel that can load the original. */
static uint64_t page_size(void) {
    uint64_t page = original.header.e_machine == EM_X86_64 ? PAGE : 1 << 16;
    for (size_t i = 0; i < original.load_count; i++)
        while ((original.loads[i].p_vaddr - original.loads[i].p_offset) % page) page /= 2;
    return page;
}

static void check_load(const Elf64_Phdr *before, const Elf64_Phdr *now) {
    uint64_t delta = now->p_vaddr - before->p_vaddr, place = now->p_vaddr;
    uint64_t file = before->p_filesz > delta ? before->p_filesz - delta : 0;
    uint64_t lost = (file < now->p_memsz ? file : now->p_memsz) - now->p_filesz;
    bool has_code = is_cut;
    if (now->p_memsz > before->p_memsz - delta || now->p_filesz > file ||
        (delta && place % page_size()))
        fail("PT_LOAD at %#" PRIx64 " has other bounds than the original allows", place);
    for (size_t i = 0; now->p_flags != before->p_flags && i < original.section_count; i++) {
        const Elf64_Shdr *code = &original.sections[i];
        has_code |= code->sh_flags & SHF_ALLOC && code->sh_flags & SHF_EXECINSTR && code->sh_size &&
                    code->sh_addr < place + now->p_filesz && place < code->sh_addr + code->sh_size;
    }
    if (now->p_flags != before->p_flags &&
        (has_code || now->p_flags != (before->p_flags & ~(uint32_t)PF_X)))
        fail("PT_LOAD at %#" PRIx64 " has another protection", place);
    if (lost && now->p_flags & PF_X)
        fail("the zeros behind %#" PRIx64 " would be executable", place);
    compare(before->p_offset + delta, slim.file.data + now->p_offset, now->p_filesz);
    compare(before->p_offset + delta + now->p_filesz, NULL, lost);
}

static void check_hole(const Elf64_Phdr *before, const Hole *hole) {
    uint64_t inside = hole->start - before->p_vaddr, size = hole->end - hole->start;
    /* PF_R, PF_W, PF_X are 4, 2, 1; PROT_READ, PROT_WRITE, PROT_EXEC 1, 2, 4. */
    uint32_t flags = before->p_flags, bits = (flags >> 2 & 1) | (flags & 2) | (flags << 2 & 4);
    if (hole->start % PAGE || hole->end % PAGE || hole->end <= hole->start ||
        hole->protection != bits || !within(inside, size, before->p_filesz) ||
        hole->offset != before->p_offset + inside || hole->constants > 1)
        fail("the hole at %#" PRIx64 " is not described as the original has it", hole->start);
    if (memcmp(original.file.data + hole->offset, spare.data + hole->offset, size) != 0)
        fail("the spare has other bytes for the hole at %#" PRIx64, hole->start);
    push(&gone, hole->start, hole->end);
}

static void check_image(void) {
    size_t next = 0, hole = 0;
    if (slim.loads[0].p_vaddr != original.loads[0].p_vaddr) fail("it begins at another address");
    for (size_t i = 0; i < original.load_count; i++) {
        const Elf64_Phdr *before = &original.loads[i];
        for (uint64_t place = before->p_vaddr, end = place + before->p_memsz; place < end;) {
            bool is_lost = hole < note.hole_count && holes[hole].start == place;
            bool is_loaded = next < slim.load_count && slim.loads[next].p_vaddr == place;
            if (is_lost == is_loaded)
                fail("address %#" PRIx64 " is in %s", place, is_lost ? "both" : "no place");
            if (is_lost) {
                check_hole(before, &holes[hole]), place = holes[hole++].end;
                continue;
            }
            Elf64_Phdr now = slim.loads[next++];
            /* Garbage collectors read what the headers of data cover, holes included. */
            uint64_t file = place + now.p_filesz, data = file;
            size_t most = before->p_flags & PF_W ? note.hole_count : 0;
            for (size_t i = hole; i < most && holes[i].start == data; i++) data = holes[i].end;
            if (data != file && data != place + now.p_memsz)
                fail("no header covers the hole at %#" PRIx64, file);
            if (data != file) now.p_memsz = now.p_filesz;
            check_load(before, &now), place += now.p_memsz;
        }
    }
    if (next + (is_cut ? ADDED : 0) != slim.load_count || hole != note.hole_count)
        fail("it has other addresses than the original");
}

static void check_headers(void) {
    Elf64_Ehdr wanted = original.header;
    const Elf64_Ehdr *now = &slim.header;
    wanted.e_phoff = now->e_phoff, wanted.e_shoff = now->e_shoff;
    wanted.e_phnum = now->e_phnum, wanted.e_shnum = now->e_shnum;
    wanted.e_shstrndx = now->e_shstrndx;
    if (memcmp(now, &wanted, sizeof wanted) != 0)
        fail("its ELF header differs in machine, entry or flags");
    memcpy(original.file.data, now, sizeof *now);
    uint64_t start = now->e_phoff, end = start + now->e_phnum * sizeof(Elf64_Phdr);
    for (size_t i = 0; i < slim.load_count; i++) {
        const Elf64_Phdr *load = &slim.loads[i];
        uint64_t page = page_size();
        uint64_t mapped =
            load->p_offset + load->p_filesz + -(load->p_vaddr + load->p_filesz) % page;
        if ((load->p_vaddr - load->p_offset) & ((load->p_align - 1) | (page - 1)))
            fail("PT_LOAD at %#" PRIx64 " can't be mapped at its offset", load->p_vaddr);
        if (!(is_cut && i == slim.load_count - 1) && load->p_filesz && load->p_offset < end &&
            start < mapped)
            fail("its program headers share a page with the PT_LOAD at %#" PRIx64, load->p_vaddr);
    }
    if (original.alignment != slim.alignment) fail("its load address is aligned to another size");
    for (size_t i = 0; i < original.other_count; i++) {
        const Elf64_Phdr *was = &original.others[i];
        Elf64_Phdr is = i < slim.other_count ? slim.others[i] : (Elf64_Phdr){0};
        uint64_t size = has_holes(was) ? 1 : is.p_filesz;
        bool is_placed = !is.p_filesz || gets_bytes(&slim, is.p_vaddr, is.p_offset, size);
        is.p_offset = was->p_offset;
        /* Ours is writable, see check_dynamic; that of lld's -z rodynamic is not. */
        if (is_cut && was->p_type == PT_DYNAMIC && is.p_type == PT_DYNAMIC &&
            is.p_flags == (PF_R | PF_W) && is.p_memsz == is.p_filesz && is.p_align == was->p_align)
            is = *was;
        if (!is_placed || memcmp(&is, was, sizeof is) != 0)
            fail("segment %zu of type %#x is another one", i, was->p_type);
    }
    if (slim.other_count > original.other_count) fail("it has more segments than the original");
}

/* ---- Sections and the places of symbols ---- */

/* Where a cut library has a table instead; false: it has not moved. */
static bool has_moved(const Elf64_Shdr *section, uint64_t *place, uint64_t *size) {
    static const int64_t tags[][2] = {
        {DT_JMPREL, DT_PLTRELSZ}, {DT_RELA, DT_RELASZ}, {DT_STRTAB, DT_STRSZ}};
    *place = slim.dynamic_segment->p_vaddr, *size = slim.dynamic_segment->p_filesz;
    if (!is_cut || section->sh_type == SHT_DYNAMIC) return is_cut;
    for (size_t i = 0; section->sh_size && section->sh_addr && i < 3; i++)
        if (tag(&original, tags[i][0]) == section->sh_addr) {
            *place = tag(&slim, tags[i][0]), *size = tag(&slim, tags[i][1]);
            return true;
        }
    return false;
}

static bool is_called(size_t index, const char *prefix, const char *name) {
    const char *text = section_name(&slim, index);
    return !strncmp(text, prefix, strlen(prefix)) && !strcmp(text + strlen(prefix), name);
}

/* Where the next bytes of a section lie from an address on; its end: nowhere. */
static uint64_t next_piece(const Elf64_Shdr *section, uint64_t start) {
    uint64_t end = section->sh_addr + section->sh_size;
    for (size_t i = 0; i < slim.load_count; i++) {
        uint64_t from = slim.loads[i].p_vaddr, to = from + slim.loads[i].p_filesz;
        from = from < start ? start : from, to = to < end ? to : end;
        if (from < to) return from;
    }
    return end;
}

/* A section: its bytes; or none, a place behind the file, so that no symbol names other code, and
 * its pieces, from number `next` on. Tools find GPU code by the name of its section. Returns the
 * number behind its pieces. */
static size_t check_section(size_t i, const Elf64_Shdr *was, const Elf64_Shdr *now, size_t next) {
    const char *name = section_name(&original, i);
    uint64_t place, size, end = was->sh_addr + was->sh_size;
    bool has_bytes = was->sh_size && was->sh_type != SHT_NOBITS && was->sh_type != SHT_NULL,
         is_whole = true, is_placed;
    Elf64_Shdr wanted = *was;
    if (was->sh_flags & SHF_ALLOC) {
        if (has_moved(was, &place, &size))
            wanted.sh_addr = place, wanted.sh_size = size;
        else if (has_bytes && now->sh_type == SHT_NOBITS)
            wanted.sh_type = SHT_NOBITS, has_bytes = is_whole = false;
        is_placed = has_bytes ? gets_bytes(&slim, now->sh_addr, now->sh_offset, now->sh_size)
                              : !was->sh_size || was->sh_flags & SHF_TLS ||
                                    now->sh_offset >= slim.file.size;
    } else {
        if (now->sh_type == SHT_NULL &&
            (!strcmp(name, ".symtab") || !strcmp(name, ".strtab") || !strncmp(name, ".debug", 6)))
            return next; /* symbols and debug information may go */
        is_placed = !has_bytes || (within(was->sh_offset, was->sh_size, original.file.size) &&
                                   within(now->sh_offset, was->sh_size, slim.file.size) &&
                                   !memcmp(original.file.data + was->sh_offset,
                                           slim.file.data + now->sh_offset, was->sh_size));
    }
    if (!is_placed) fail("section %zu, %s, has other bytes in the file", i, name);
    wanted.sh_name = now->sh_name, wanted.sh_offset = now->sh_offset;
    place = is_whole ? end : next_piece(was, was->sh_addr);
    if (memcmp(now, &wanted, sizeof wanted) != 0 ||
        !is_called(i, place < end ? ".whole" : "", name))
        fail("section %zu, %s, is another one", i, name);
    for (; place < end; next++) {
        const Elf64_Shdr *piece = &slim.sections[next];
        if (next == slim.section_count || piece->sh_type != was->sh_type ||
            piece->sh_flags != was->sh_flags || !is_called(next, "", name) ||
            piece->sh_addr != place || !within(place, piece->sh_size, end) ||
            (place + piece->sh_size < end && bytes_at(&slim, place + piece->sh_size, 1)) ||
            !gets_bytes(&slim, place, piece->sh_offset, piece->sh_size))
            fail("section %zu is not the next piece of section %zu, %s", next, i, name);
        place = next_piece(was, place + piece->sh_size);
    }
    return next;
}

static void check_sections(void) {
    size_t next = original.section_count;
    if (!next || slim.section_count < next) fail("it has fewer sections, or the original has none");
    for (size_t i = 0; i < original.section_count; i++)
        if (original.sections[i].sh_flags & SHF_ALLOC || i != original.header.e_shstrndx)
            next = check_section(i, &original.sections[i], &slim.sections[i], next);
    for (; next < slim.section_count; next++)
        if (slim.sections[next].sh_flags & SHF_ALLOC ||
            !(is_called(next, "", ".negativa") || next == slim.header.e_shstrndx))
            fail("section %zu is none of the original", next);
}

/* ---- What ld.so uses ---- */

static void use(uint64_t start, uint64_t size, const char *what) {
    const Range *lost = range_behind(&gone, start);
    if (size && lost && (lost->start <= start || lost->start - start < size))
        fail("%s at %#" PRIx64 " is gone", what, start);
}

static void use_relocations(int64_t place, int64_t size_tag) {
    uint64_t size = tag(&original, place) ? tag(&original, size_tag) : 0;
    const uint8_t *rows = table(&original, place, size);
    for (uint64_t at = 0; at + sizeof(Elf64_Rela) <= size; at += sizeof(Elf64_Rela)) {
        Elf64_Rela row;
        memcpy(&row, rows + at, sizeof row);
        uint32_t type = ELF64_R_TYPE(row.r_info);
        use(row.r_offset, type == R_X86_64_TLSDESC || type == R_AARCH64_TLSDESC ? 16 : 8,
            "the target of a relocation");
    }
}

static void use_packed_relocations(void) {
    uint64_t size = tag(&original, DT_RELR) ? tag(&original, DT_RELRSZ) : 0, place = 0, entry;
    const uint8_t *rows = table(&original, DT_RELR, size);
    for (uint64_t at = 0; at + 8 <= size; at += 8) {
        memcpy(&entry, rows + at, 8);
        if (entry & 1)
            for (int bit = 0; bit < 63; bit++)
                use(place + 8 * bit, entry >> (bit + 1) & 1 ? 8 : 0, "the target of a relocation");
        else
            use(entry, 8, "the target of a relocation");
        place = entry & 1 ? place + 63 * 8 : entry + 8;
    }
}

static void use_symbols(const Elf64_Shdr *table, bool is_dynamic) {
    for (uint64_t at = 0; at + sizeof(Elf64_Sym) <= table->sh_size; at += sizeof(Elf64_Sym)) {
        Elf64_Sym row;
        memcpy(&row, original.file.data + table->sh_offset + at, sizeof row);
        int type = ELF64_ST_TYPE(row.st_info);
        uint64_t place, placed;
        if (row.st_shndx == SHN_UNDEF || type == STT_TLS || type == STT_SECTION || type == STT_FILE)
            continue;
        if (is_dynamic && is_cut && type == STT_GNU_IFUNC)
            fail("it exports an IFUNC, which may run before its spare is there");
        if (is_dynamic && !is_cut && row.st_shndx != SHN_ABS)
            use(row.st_value, row.st_size + !row.st_size, "a symbol");
        if (row.st_shndx >= original.section_count ||
            has_moved(&original.sections[row.st_shndx], &place, &placed))
            continue;
        const Elf64_Phdr *was = load_of(&original, row.st_value),
                         *now = load_of(&slim, row.st_value);
        if (type == STT_FUNC && was && was->p_flags & PF_X && !(now && now->p_flags & PF_X) &&
            !is_cut)
            fail("the function at %#" PRIx64 " is not executable", row.st_value);
        const Elf64_Shdr *before = &original.sections[row.st_shndx],
                         *after = &slim.sections[row.st_shndx];
        place = row.st_value - before->sh_addr + before->sh_offset;
        placed = row.st_value - after->sh_addr + after->sh_offset;
        if (placed < slim.file.size && gets_bytes(&original, row.st_value, place, 1) &&
            !gets_bytes(&slim, row.st_value, placed, 1))
            fail("a symbol of address %#" PRIx64 " names another place in the file", row.st_value);
    }
}

static void check_uses(void) {
    /* In a cut library, the last five may go. */
    static const int64_t tables[] = {DT_HASH,       DT_GNU_HASH,   DT_SYMTAB, DT_VERSYM,
                                     DT_VERDEF,     DT_VERNEED,    DT_PLTGOT, DT_RELR,
                                     DT_INIT_ARRAY, DT_FINI_ARRAY, DT_INIT,   DT_FINI,
                                     DT_STRTAB,     DT_RELA,       DT_JMPREL};
    bool has_symbols = false;
    uint64_t place, size;
    sort(&gone, "holes");
    use_relocations(DT_RELA, DT_RELASZ), use_relocations(DT_JMPREL, DT_PLTRELSZ),
        use_packed_relocations();
    if (tag(&original, DT_REL)) fail("relocations without addends are not known");
    for (size_t i = 0; i < sizeof tables / sizeof *tables - (is_cut ? 5 : 0); i++)
        use(tag(&original, tables[i]), 1, "a table");
    for (size_t i = 0; i < original.other_count; i++)
        if (original.others[i].p_type != PT_GNU_STACK && !has_holes(&original.others[i]))
            use(original.others[i].p_vaddr, original.others[i].p_filesz, "a segment");
    for (size_t i = 0; i < original.section_count; i++) {
        const Elf64_Shdr *row = &original.sections[i];
        const char *name = section_name(&original, i);
        has_symbols |= row->sh_type == SHT_DYNSYM && row->sh_addr == tag(&original, DT_SYMTAB);
        bool is_table = row->sh_type != SHT_PROGBITS && row->sh_type != SHT_X86_64_UNWIND &&
                        !has_moved(row, &place, &size);
        bool is_host =
            !is_cut && (row->sh_flags & (SHF_EXECINSTR | SHF_TLS) ||
                        !strncmp(name, ".eh_frame", 9) || !strcmp(name, ".gcc_except_table"));
        if (row->sh_flags & SHF_ALLOC && row->sh_type != SHT_NOBITS && (is_table || is_host))
            use(row->sh_addr, row->sh_size, name);
        bool is_kept = slim.sections[i].sh_type == row->sh_type;
        if ((row->sh_type == SHT_DYNSYM || (row->sh_type == SHT_SYMTAB && is_kept)) &&
            within(row->sh_offset, row->sh_size, original.file.size))
            use_symbols(row, row->sh_type == SHT_DYNSYM);
    }
    if (!has_symbols) fail("no section has its dynamic symbols");
}

/* ---- The spare, the note, the tables and the code of a cut library ---- */

/* Bytes of the text at a place, with its end. */
static uint64_t text_size(const char *start, uint64_t size, uint64_t place) {
    if (place >= size || !memchr(start + place, 0, size - place))
        fail("a text of its note or strings has no end");
    return strlen(start + place) + 1;
}

/* Each place in the note follows from those before, so nothing lies between its parts. */
static void read_note(void) {
    uint64_t address = tag(&slim, DT_NEGATIVA_NOTE);
    const char *text = (const char *)bytes_at(&slim, address, sizeof note);
    if (!text) fail("its note is not loaded");
    const Elf64_Phdr *load = load_of(&slim, address);
    memcpy(&note, text, sizeof note);
    uint64_t size = load->p_filesz - (address - load->p_vaddr),
             rows = note.hole_count * sizeof *holes, name = sizeof note + rows;
    if (!note.hole_count || note.hole_count > MAX_ROWS || name > size)
        fail("its note has no holes, or more than it has room for");
    holes = room_for(note.hole_count, sizeof *holes);
    memcpy(holes, text + sizeof note, rows);
    uint64_t spare_name = name + text_size(text, size, name),
             folders = spare_name + text_size(text, size, spare_name), remedy = folders;
    for (uint64_t next; (next = text_size(text, size, remedy)) > 1; remedy += next)
        if (text[remedy] != '/') fail("a folder of its note is not absolute");
    text_size(text, size, ++remedy);
    Note wanted = note;
    memcpy(wanted.magic, NOTE_MAGIC, 8), wanted.version = NOTE_VERSION;
    wanted.flags = 0, wanted.reserved = 0;
    for (size_t i = 0; i < slim.section_count; i++)
        if (strcmp(section_name(&slim, i), "__rseq_cs") == 0) wanted.flags = RESTARTABLE;
    wanted.holes = sizeof note;
    wanted.name = (uint32_t)name, wanted.spare = (uint32_t)spare_name;
    wanted.folders = (uint32_t)folders, wanted.remedy = (uint32_t)remedy;
    Sha sha = sha_start();
    sha_add(&sha, note.original, 32), sha_add(&sha, holes, rows), sha_end(&sha, wanted.pair);
    char suffix[32] = ".";
    to_hex(wanted.pair, 8, suffix + 1), strcat(suffix, ".spare");
    uint64_t length = spare_name - name - 1;
    if (memcmp(&note, &wanted, sizeof note) != 0 ||
        strncmp(text + spare_name, text + name, length) != 0 ||
        strcmp(text + spare_name + length, suffix) != 0)
        fail("its note is damaged: version, holes, digest and names do not agree");
}

static void require_same(uint64_t offset, const uint8_t *bytes, uint64_t size) {
    if (memcmp(original.file.data + offset, bytes, size) != 0)
        fail("library and spare do not give the original back: see offset %#" PRIx64 " and behind",
             offset);
}

/* Whether the spare and the library give the original. */
static void check_spare(void) {
    uint64_t end = (note.original_size + PAGE - 1) / PAGE * PAGE, position = 0;
    Trailer trailer, wanted;
    if (!within(end, sizeof trailer, spare.size)) fail("its spare is too short");
    memcpy(&trailer, spare.data + end, sizeof trailer), wanted = trailer;
    memcpy(wanted.magic, NOTE_MAGIC, 8), wanted.version = NOTE_VERSION;
    memcpy(wanted.pair, note.pair, 32), memcpy(wanted.original, note.original, 32);
    wanted.original_size = note.original_size;
    if (memcmp(&trailer, &wanted, sizeof trailer) != 0 || trailer.kept_count > MAX_ROWS ||
        spare.size != end + sizeof trailer + trailer.kept_count * UINT64_C(24))
        fail("its spare is that of another library or is damaged");
    for (uint64_t i = 0; i <= trailer.kept_count; i++) {
        uint64_t row[3] = {note.original_size, note.original_size, 0}; /* start, end, place */
        if (i < trailer.kept_count)
            memcpy(row, spare.data + end + sizeof trailer + 24 * i, sizeof row);
        if (row[0] < position || row[1] < row[0] || row[1] > note.original_size ||
            !within(row[2], row[1] - row[0], slim.file.size))
            fail("the rows of its spare are damaged");
        require_same(position, spare.data + position, row[0] - position);
        require_same(row[0], slim.file.data + row[2], row[1] - row[0]);
        position = row[1];
    }
}

static void check_dynamic(void) {
    static const int64_t own[] = {DT_STRTAB,  DT_STRSZ,  DT_RELA,         DT_RELASZ,
                                  DT_RELAENT, DT_JMPREL, DT_NEGATIVA_NOTE};
    enum { OWN = sizeof own / sizeof *own };
    Elf64_Dyn *wanted = room_for(original.dynamic_count + OWN, sizeof *wanted);
    size_t count = 0;
    for (size_t i = 0; i < original.dynamic_count; i++) {
        const Elf64_Dyn *row = &original.dynamic[i];
        bool is_own = false;
        if (row->d_tag == DT_TEXTREL || (row->d_tag == DT_FLAGS && row->d_un.d_val & DF_TEXTREL))
            fail("its code is relocated");
        for (size_t j = 0; j < OWN; j++) is_own |= row->d_tag == own[j];
        if (!is_own) wanted[count++] = *row;
    }
    for (size_t j = 0; j < OWN; j++)
        if (own[j] != DT_JMPREL || tag(&original, DT_JMPREL))
            wanted[count++] = (Elf64_Dyn){own[j], {tag(&slim, own[j])}};
    if (count != slim.dynamic_count || memcmp(slim.dynamic, wanted, count * sizeof *wanted) != 0)
        fail("its dynamic section has other rows");
    free(wanted);
    uint64_t strings = tag(&original, DT_STRSZ),
             rows = tag(&original, DT_RELA) ? tag(&original, DT_RELASZ) : 0,
             jumps = tag(&original, DT_JMPREL) ? tag(&original, DT_PLTRELSZ) : 0,
             before = tag(&original, DT_RELACOUNT) * sizeof(Elf64_Rela);
    if (memcmp(table(&original, DT_STRTAB, strings), table(&slim, DT_STRTAB, strings), strings) !=
        0)
        fail("its dynamic strings are others");
    /* Two rows are new, behind those of DT_RELACOUNT. */
    const Elf64_Phdr *stub = &slim.loads[slim.load_count - 3], *data = stub + 1;
    uint64_t words = data->p_vaddr + slim.dynamic_segment->p_filesz;
    Elf64_Rela new[2] = {{words, R_X86_64_IRELATIVE, (int64_t)stub->p_vaddr + START},
                         {words + 8, R_X86_64_IRELATIVE, (int64_t)stub->p_vaddr + SECOND}};
    const uint8_t *was = table(&original, DT_RELA, rows),
                  *now = table(&slim, DT_RELA, rows + sizeof new);
    if (before > rows || tag(&slim, DT_RELASZ) != rows + sizeof new ||
        tag(&slim, DT_RELAENT) != sizeof *new || memcmp(was, now, before) != 0 ||
        // NOLINTNEXTLINE(clang-analyzer-unix.cstring.UninitializedRead): table gave as many bytes
        memcmp(now + before, new, sizeof new) != 0 ||
        memcmp(was + before, now + before + sizeof new, rows - before) != 0)
        fail("its relocations are others");
    /* Some loaders take jump slots that lie in or behind the other rows for a part of them. */
    uint64_t inside = tag(&original, DT_JMPREL) - tag(&original, DT_RELA);
    if (memcmp(table(&original, DT_JMPREL, jumps), table(&slim, DT_JMPREL, jumps), jumps) != 0 ||
        (jumps && tag(&slim, DT_JMPREL) - tag(&slim, DT_RELA) !=
                      (inside < rows ? inside : rows) + sizeof new))
        fail("its jump slots are others, or a part of other relocations than before");
    if (slim.dynamic_segment->p_vaddr != data->p_vaddr ||
        data->p_filesz != slim.dynamic_segment->p_filesz + 16)
        fail("its dynamic section is elsewhere");
}

/* The four segments behind those of the original: note and tables, stub, dynamic section, headers.
 */
static void check_added(void) {
    static const uint32_t flags[ADDED] = {PF_R, PF_R | PF_X, PF_R | PF_W, PF_R};
    const Elf64_Phdr *added = &slim.loads[slim.load_count - ADDED],
                     *symbols = load_of(&slim, tag(&slim, DT_SYMTAB));
    for (int i = 0; i < ADDED; i++)
        if (added[i].p_flags != flags[i] || added[i].p_filesz != added[i].p_memsz ||
            added[i].p_vaddr % PAGE)
            fail("its own segment at %#" PRIx64 " is damaged", added[i].p_vaddr);
    const uint8_t *stub = bytes_at(&slim, added[1].p_vaddr, PAGE);
    if (!stub || !symbols || added[3].p_offset != slim.header.e_phoff ||
        added[3].p_filesz != slim.header.e_phnum * sizeof(Elf64_Phdr))
        fail("its own segments are damaged");
    Parameters has, wanted = {.own = added[1].p_vaddr,
                              .note = tag(&slim, DT_NEGATIVA_NOTE),
                              .symbols = tag(&slim, DT_SYMTAB),
                              .symbols_start = symbols->p_vaddr / PAGE * PAGE,
                              .headers = added[3].p_vaddr,
                              .header_count = slim.header.e_phnum};
    wanted.symbols_size =
        (symbols->p_vaddr + symbols->p_filesz + PAGE - 1) / PAGE * PAGE - wanted.symbols_start;
    uint64_t place = tag(&original, DT_STRSZ), size = tag(&slim, DT_STRSZ);
    const char *strings = (const char *)table(&slim, DT_STRTAB, size);
    for (int i = 0; i < PROBLEMS; i++) {
        wanted.messages[i] = (uint32_t)place;
        place += text_size(strings, size, place);
    }
    memcpy(&has, stub, sizeof has);
    if (memcmp(&has, &wanted, sizeof has) != 0 || place != size)
        fail("the parameters of the code that maps its spare are damaged");
    if (!has_digest(stub + PARAMETERS, PAGE - PARAMETERS, STUB_SHA256))
        fail("the code that maps its spare is not that of this release");
}

/* ---- Declared unused GPU code ---- */

static uint64_t number(const uint8_t *bytes, int size) {
    uint64_t value = 0;
    memcpy(&value, bytes, (size_t)size);
    return value;
}

/* A region: a reader that follows its headers finds each kept element at its place, and no other
 * one. The original gets those headers, so that all else is compared. */
static void check_region(const Range *region) {
    uint8_t now[HEADER], *data = original.file.data;
    uint64_t place = region->start + 16, end = region->end, next = place;
    if (!within(region->start, end - region->start, original.file.size))
        fail("a declared region leaves the original");
    read_slim(region->start, now, 16);
    bool is_there = !is_zero(now, 16);
    uint64_t last = is_there ? place + number(now + 8, 8) : 0;
    if (memcmp(data + region->start, "\x50\xed\x55\xba\1\0\x10\0", 8) != 0 ||
        number(data + region->start + 8, 8) != end - place ||
        (is_there && (memcmp(now, data + region->start, 8) != 0 || last - place > end - place)))
        fail("the region at offset %#" PRIx64 " is another one", region->start);
    memcpy(data + region->start, now, 16);
    for (uint64_t after; place < end; place = after) {
        uint64_t room = end - place, header = room < HEADER ? 0 : number(data + place + 4, 4);
        if (header < HEADER || !within(header, number(data + place + 8, 8), room))
            fail("an element at offset %#" PRIx64 " leaves its region", place);
        after = place + header + number(data + place + 8, 8);
        read_slim(place, now, HEADER);
        bool is_reached = place == next && next < last,
             is_same = !memcmp(now, data + place, HEADER),
             is_filler = !memcmp(now, "\0\0\1\1\x40\0\0\0", 8) && is_zero(now + 16, HEADER - 16);
        Range *removed = range_behind(&declared, place);
        if (!removed || *removed->digest || removed->start != place || removed->end != after) {
            if (!is_reached || memcmp(now + 2, data + place + 2, 14) != 0)
                fail("the driver no longer finds the kept element at offset %#" PRIx64, place);
            next = after;
            continue;
        }
        if (!is_same && !(is_reached ? is_filler : is_zero(now, HEADER)))
            fail("the header of the removed element at offset %#" PRIx64 " is damaged", place);
        if (is_reached) next = place + number(now + 4, 4) + number(now + 8, 8);
        removed->changed |= !is_same;
        memcpy(data + place, now, HEADER);
    }
    if (is_there && next != last)
        fail("the region at offset %#" PRIx64 " has another end", region->start);
}

/* Kernels were taken out of a cubin: the library has what its maker declared, which is not
 * certified. */
static void check_trimmed(const Range *row) {
    uint64_t size = row->end - row->start;
    if (!within(row->start, size, original.file.size)) fail("a trimmed cubin leaves the original");
    read_slim(row->start, original.file.data + row->start, size);
    if (!has_digest(original.file.data + row->start, size, row->digest))
        fail("the trimmed cubin at offset %#" PRIx64 " is another one", row->start);
    trimmed += size;
}

/* Lines of standard input: "region", "unused" or "trimmed", start and end; for what was trimmed its
 * digest afterwards. */
static void read_declared(void) {
    char kind[16], digest[65] = "";
    uint64_t start, end;
    int found;
    while ((found = scanf("%15s %" SCNu64 " %" SCNu64, kind, &start, &end)) == 3) {
        bool is_region = !strcmp(kind, "region"), is_trimmed = !strcmp(kind, "trimmed");
        if (start >= end || !(is_region || is_trimmed || !strcmp(kind, "unused")) ||
            (is_trimmed && scanf("%64s", digest) != 1))
            break;
        Range *row = push(is_region ? &regions : &declared, start, end);
        if (is_trimmed) memcpy(row->digest, digest, sizeof digest);
    }
    if (found != EOF) give_up("a line of what was declared is not known");
    sort(&regions, "declared regions"), sort(&declared, "declared ranges");
}

/* Declared ranges that did change may hold nothing that the library itself uses. */
static void find_gone(void) {
    for (size_t i = 0; i < declared.count; i++) {
        const Range *row = &declared.rows[i];
        uint64_t address = address_of(row->start);
        if (row->changed && address && !*row->digest)
            push(&gone, address, address + (row->end - row->start));
    }
}

/* ---- The program ---- */

static void certify_cut(const char *sha256) {
    char wanted[65];
    read_note();
    if (!spare.path) fail("it has a spare, which is not given");
    to_hex(note.original, sizeof note.original, wanted);
    if (original.file.size != note.original_size ||
        (*sha256 ? strcmp(wanted, sha256) != 0
                 : !has_digest(original.file.data, original.file.size, wanted)))
        fail("it is not of this original");
    read_elf(&original);
    if (original.header.e_machine != EM_X86_64 || slim.load_count <= ADDED)
        fail("such libraries are not cut");
    check_spare(), check_headers(), check_image(), check_dynamic(), check_added();
    uint64_t headers = original.header.e_phoff, size = original.header.e_phnum * sizeof(Elf64_Phdr);
    if (headers + size <= PAGE && !is_zero(spare.data + headers, size))
        fail("a loader may take its spare for a library");
    check_sections(), check_uses();
}

static void certify_other(void) {
    if (spare.path) fail("it has no note, so no spare belongs to it");
    read_elf(&original);
    for (size_t i = 0; i < regions.count; i++) check_region(&regions.rows[i]);
    for (size_t i = 0; i < declared.count; i++)
        if (*declared.rows[i].digest) check_trimmed(&declared.rows[i]);
    check_headers(), check_image(), find_gone(), check_sections(), check_uses();
}

int main(int count, char **words) {
    if (count < 3 || count > 5)
        give_up("usage: certify ORIGINAL SLIM [SPARE|'' [SHA256]] < DECLARED");
    open_file(&original.file, words[1]);
    open_file(&slim.file, words[2]);
    if (count > 3 && *words[3]) open_file(&spare, words[3]);
    read_elf(&slim);
    is_cut = tag(&slim, DT_NEGATIVA_NOTE) != 0;
    if (!isatty(STDIN_FILENO)) read_declared();
    if (is_cut)
        certify_cut(count > 4 ? words[4] : "");
    else
        certify_other();
    uint64_t bytes = 0;
    for (size_t i = 0; i < gone.count; i++) bytes += gone.rows[i].end - gone.rows[i].start;
    printf("certified: means the same as its original without %" PRIu64 " bytes %s", bytes,
           is_cut ? "that its spare has" : "of unused GPU code");
    if (trimmed) printf("; not certified: %" PRIu64 " bytes of trimmed cubins", trimmed);
    puts("");
    return fflush(stdout) ? 2 : 0;
}
