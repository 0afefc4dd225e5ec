/* The certificate: a slim library means the same as its original; no relocation lost its target.
 *
 * It trusts no program that made the library, and shares no code with one. It reads the original
 * (or its digest, and puts the original together from library and spare), the slim library, its
 * spare, and what was declared as unused. All of them may be hostile: sizes are checked before they
 * are used. The note's layout and SHA-256 are those of the other readers in C; the writer is in
 * Python.
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
#include "../../spare/format.h"

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
    const uint8_t *data;
    uint64_t size;
} File;

typedef struct {
    File file;
    Elf64_Ehdr header;
    Elf64_Phdr *segments, *loads; /* loads: those with addresses, ascending */
    Elf64_Shdr *sections;
    Elf64_Dyn *dynamic; /* rows before DT_NULL */
    Elf64_Phdr *dynamic_segment;
    size_t load_count, section_count, dynamic_count;
} Elf;

enum Kind { UNUSED, TRIMMED, REGION, CHECKED };

typedef struct {
    uint64_t start, end;
    enum Kind kind;
    bool changed;
    char digest[65]; /* of what trimmed code became */
} Range;

typedef struct {
    Range *rows;
    size_t count, room;
} Ranges;

static Elf original, slim;
static File spare;
static Note note;
static Hole *holes;
static Ranges declared, checked,
    gone; /* the last by address, the others by offset in the original */
static bool is_cut, is_overwritten;
static uint64_t largest_page; /* bytes; 0: that of the machine's kernels */

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
    void *data = file->size ? mmap(NULL, file->size, PROT_READ, MAP_PRIVATE, fd, 0) : (void *)"";
    if (data == MAP_FAILED) give_up("can't map %s", path);
    file->data = data;
    close(fd);
}

static void push(Ranges *ranges, uint64_t start, uint64_t end, enum Kind kind) {
    if (ranges->count == ranges->room) {
        ranges->room = ranges->room * 2 + 64;
        Range *rows = realloc(ranges->rows, ranges->room * sizeof(Range));
        if (!rows) give_up("no memory");
        ranges->rows = rows;
    }
    ranges->rows[ranges->count++] = (Range){.start = start, .end = end, .kind = kind};
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

static void sha_of(const void *data, uint64_t size, char hex[65]) {
    Sha sha = sha_start();
    sha_add(&sha, data, size);
    sha_hex(&sha, hex);
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

static void read_loads(Elf *elf) {
    const uint64_t limit = (uint64_t)1 << 47;
    uint64_t end = 0;
    elf->loads = room_for(elf->header.e_phnum, sizeof *elf->loads);
    for (size_t i = 0; i < elf->header.e_phnum; i++) {
        Elf64_Phdr *row = &elf->segments[i];
        if (row->p_type == PT_DYNAMIC) elf->dynamic_segment = row;
        if (row->p_type != PT_LOAD) continue;
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
    }
}

static void read_elf(Elf *elf) {
    Elf64_Ehdr *header = &elf->header;
    if (elf->file.size < sizeof *header) fail("%s: is no ELF file", elf->file.path);
    memcpy(header, elf->file.data, sizeof *header);
    if (memcmp(header->e_ident, ELFMAG "\2\1", SELFMAG + 2) != 0 ||
        header->e_phentsize != sizeof(Elf64_Phdr) ||
        (header->e_shnum && header->e_shentsize != sizeof(Elf64_Shdr)))
        fail("%s: is no ELF file of a 64-bit little-endian machine", elf->file.path);
    elf->segments =
        rows_of(elf, header->e_phoff, header->e_phnum, sizeof(Elf64_Phdr), "program headers");
    elf->section_count = header->e_shnum;
    elf->sections =
        rows_of(elf, header->e_shoff, header->e_shnum, sizeof(Elf64_Shdr), "section headers");
    if (elf->section_count && header->e_shstrndx >= elf->section_count)
        fail("%s: its sections have no names", elf->file.path);
    read_loads(elf);
    const Elf64_Phdr *segment = elf->dynamic_segment;
    const uint8_t *rows = segment ? bytes_at(elf, segment->p_vaddr, segment->p_filesz) : NULL;
    if (!rows) fail("%s: has no dynamic section that is loaded", elf->file.path);
    size_t count = segment->p_filesz / sizeof(Elf64_Dyn);
    elf->dynamic = room_for(count, sizeof(Elf64_Dyn));
    memcpy(elf->dynamic, rows, count * sizeof(Elf64_Dyn));
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
        Range *known = range_behind(&checked, offset), *hole = range_behind(&declared, offset);
        bool is_known = known && known->start <= offset, is_hole = hole && hole->start <= offset;
        next = end - offset < sizeof zeros ? end : offset + sizeof zeros;
        if (known && next > (is_known ? known->end : known->start))
            next = is_known ? known->end : known->start;
        if (hole && next > (is_hole ? hole->end : hole->start))
            next = is_hole ? hole->end : hole->start;
        const uint8_t *was = original.file.data + offset, *is = now ? now : zeros;
        if (now) now += next - offset;
        if (memcmp(was, is, next - offset) == 0) continue;
        if (is_hole) hole->changed = true;
        if (is_known || (is_hole && hole->kind == TRIMMED)) continue;
        for (uint64_t i = 0; i < next - offset; i++)
            if (was[i] != is[i] && !(is_hole && is[i] <= 1))
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
    uint64_t page = largest_page;
    if (!page) page = original.header.e_machine == EM_X86_64 ? PAGE : 1 << 16;
    for (size_t i = 0; i < original.load_count; i++)
        while ((original.loads[i].p_vaddr - original.loads[i].p_offset) % page) page /= 2;
    return page;
}

static void check_load(const Elf64_Phdr *before, const Elf64_Phdr *now) {
    uint64_t delta = now->p_vaddr - before->p_vaddr, place = now->p_vaddr;
    uint64_t file = before->p_filesz > delta ? before->p_filesz - delta : 0;
    uint64_t lost = (file < now->p_memsz ? file : now->p_memsz) - now->p_filesz;
    uint32_t flags = before->p_flags & ~(uint32_t)(is_cut ? 0 : PF_X);
    if (now->p_memsz > before->p_memsz - delta || now->p_filesz > file ||
        (delta && place % page_size()))
        fail("PT_LOAD at %#" PRIx64 " has other bounds than the original allows", place);
    if (now->p_flags != before->p_flags && (now->p_flags != flags || !original.section_count))
        fail("PT_LOAD at %#" PRIx64 " has another protection", place);
    for (size_t i = 0; i < original.section_count && now->p_flags != before->p_flags; i++) {
        const Elf64_Shdr *code = &original.sections[i];
        if (code->sh_flags & SHF_ALLOC && code->sh_flags & SHF_EXECINSTR && code->sh_size &&
            code->sh_addr < place + now->p_filesz && place < code->sh_addr + code->sh_size)
            fail("the code at %#" PRIx64 " would not be executable", place);
    }
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
    push(&gone, hole->start, hole->end, UNUSED);
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
            if (is_lost)
                check_hole(before, &holes[hole]), place = holes[hole++].end;
            else
                check_load(before, &slim.loads[next]), place += slim.loads[next++].p_memsz;
        }
    }
    if (next + (is_cut ? ADDED : 0) != slim.load_count || hole != note.hole_count)
        fail("it has other addresses than the original");
}

static void check_headers(void) {
    const Elf64_Ehdr *before = &original.header, *now = &slim.header;
    const size_t phoff = offsetof(Elf64_Ehdr, e_phoff), flags = offsetof(Elf64_Ehdr, e_flags),
                 phnum = offsetof(Elf64_Ehdr, e_phnum);
    if (memcmp(now, before, phoff) != 0 ||
        memcmp(&now->e_flags, &before->e_flags, phnum - flags) != 0)
        fail("its ELF header differs in machine, entry or flags");
    push(&checked, phoff, flags, CHECKED), push(&checked, phnum, sizeof *now, CHECKED);
    uint64_t largest[2] = {0, 0}, start = slim.header.e_phoff,
             end = start + slim.header.e_phnum * sizeof(Elf64_Phdr);
    for (size_t i = 0; i < original.load_count; i++)
        if (original.loads[i].p_align > largest[0]) largest[0] = original.loads[i].p_align;
    for (size_t i = 0; i < slim.load_count; i++) {
        const Elf64_Phdr *load = &slim.loads[i];
        uint64_t page = page_size();
        uint64_t mapped =
            load->p_offset + load->p_filesz + -(load->p_vaddr + load->p_filesz) % page;
        if ((load->p_vaddr - load->p_offset) & ((load->p_align - 1) | (page - 1)))
            fail("PT_LOAD at %#" PRIx64 " can't be mapped at its offset", load->p_vaddr);
        if (load->p_align > largest[1]) largest[1] = load->p_align;
        if (!(is_cut && i == slim.load_count - 1) && load->p_filesz && load->p_offset < end &&
            start < mapped)
            fail("its program headers share a page with the PT_LOAD at %#" PRIx64, load->p_vaddr);
    }
    if (largest[0] != largest[1]) fail("its load address is aligned to another size");
    size_t next = 0;
    for (size_t i = 0; i < before->e_phnum; i++) {
        const Elf64_Phdr *was = &original.segments[i];
        if (was->p_type == PT_LOAD || was->p_type == PT_NULL || was->p_type == PT_PHDR) continue;
        while (next < slim.header.e_phnum && slim.segments[next].p_type == PT_LOAD) next++;
        Elf64_Phdr is = next < slim.header.e_phnum ? slim.segments[next++] : (Elf64_Phdr){0};
        bool is_placed = !is.p_filesz || is.p_type == PT_GNU_STACK ||
                         gets_bytes(&slim, is.p_vaddr, is.p_offset, is.p_filesz);
        is.p_offset = was->p_offset;
        /* Ours is writable, see check_dynamic; that of lld's -z rodynamic is not. */
        bool is_ours = is.p_type == PT_DYNAMIC && is.p_flags == (PF_R | PF_W) &&
                       is.p_memsz == is.p_filesz && is.p_align == was->p_align;
        if (is_cut && was->p_type == PT_DYNAMIC && is_ours) is = *was;
        if (!is_placed || memcmp(&is, was, sizeof is) != 0)
            fail("segment %zu of type %#x is another one", i, was->p_type);
    }
    while (next < slim.header.e_phnum)
        if (slim.segments[next++].p_type != PT_LOAD) fail("it has more segments than the original");
}

/* ---- Sections and the places of symbols ---- */

static int64_t moved_tag(const Elf64_Shdr *section) {
    static const int64_t tags[] = {DT_JMPREL, DT_RELA, DT_STRTAB};
    for (size_t i = 0; is_cut && section->sh_size && i < 3; i++)
        if (tag(&original, tags[i]) == section->sh_addr && section->sh_addr) return tags[i];
    return is_cut && section->sh_type == SHT_DYNAMIC ? DT_NULL : -1;
}

static bool same_section(const Elf64_Shdr *was, const Elf64_Shdr *now) {
    Elf64_Shdr row = *now;
    row.sh_name = was->sh_name, row.sh_offset = was->sh_offset;
    return memcmp(&row, was, sizeof row) == 0;
}

/* A section that is never loaded: it is there, or holds symbols or debug information. */
static void check_unloaded(size_t i, const Elf64_Shdr *was, const Elf64_Shdr *now) {
    const char *name = section_name(&original, i);
    bool has_bytes = was->sh_type != SHT_NULL && was->sh_type != SHT_NOBITS;
    if (now->sh_type == SHT_NULL && was->sh_type != SHT_NULL &&
        (!strcmp(name, ".symtab") || !strcmp(name, ".strtab") || !strncmp(name, ".debug", 6)))
        return;
    if (!same_section(was, now) || strcmp(name, section_name(&slim, i)) != 0 ||
        (has_bytes && (!within(was->sh_offset, was->sh_size, original.file.size) ||
                       !within(now->sh_offset, now->sh_size, slim.file.size) ||
                       memcmp(original.file.data + was->sh_offset, slim.file.data + now->sh_offset,
                              was->sh_size) != 0)))
        fail("section %zu, %s, is gone or another one", i, name);
}

/* A loaded section: its bytes, or none and a place behind the file, so that no symbol names other
 * code. */
static bool check_loaded(size_t i, const Elf64_Shdr *was, Elf64_Shdr now) {
    const char *name = section_name(&original, i), *named = section_name(&slim, i);
    int64_t moved = moved_tag(was), size_tag = moved == DT_STRTAB ? DT_STRSZ : DT_RELASZ;
    if (moved == DT_JMPREL) size_tag = DT_PLTRELSZ;
    bool has_bytes = was->sh_type != SHT_NOBITS && was->sh_size,
         is_lost = has_bytes && now.sh_type == SHT_NOBITS;
    if (moved >= 0) {
        uint64_t size = slim.dynamic_segment->p_filesz, place = slim.dynamic_segment->p_vaddr;
        if (moved) place = tag(&slim, moved), size = tag(&slim, size_tag);
        if (now.sh_addr != place || now.sh_size != size ||
            !gets_bytes(&slim, place, now.sh_offset, size))
            fail("section %zu, %s, is not where the dynamic section has it", i, name);
        now.sh_addr = was->sh_addr, now.sh_size = was->sh_size;
    } else if (has_bytes && !is_lost
                   ? !gets_bytes(&slim, now.sh_addr, now.sh_offset, now.sh_size)
                   : was->sh_size && !(was->sh_flags & SHF_TLS) && now.sh_offset < slim.file.size) {
        fail("section %zu, %s, has another place in the file than in memory", i, name);
    }
    now.sh_type = is_lost ? was->sh_type : now.sh_type;
    if (!same_section(was, &now) ||
        strcmp(is_lost && !strncmp(named, ".whole", 6) ? named + 6 : named, name) != 0)
        fail("section %zu, %s, is another one", i, name);
    return is_lost;
}

/* Where the next bytes of a section lie from an address on; 0: nowhere. */
static uint64_t next_piece(const Elf64_Shdr *section, uint64_t start) {
    uint64_t end = section->sh_addr + section->sh_size;
    for (size_t i = 0; i < slim.load_count; i++) {
        uint64_t from = slim.loads[i].p_vaddr, to = from + slim.loads[i].p_filesz;
        from = from < start ? start : from, to = to < end ? to : end;
        if (from < to) return from;
    }
    return 0;
}

static void check_sections(void) {
    size_t count = original.section_count;
    if (slim.section_count < count) fail("it has fewer sections");
    /* Of sections with holes: the address of the next piece; of others, and behind the last: 0. */
    uint64_t *next = room_for(count, sizeof *next);
    for (size_t i = 0; i < count; i++) {
        const Elf64_Shdr *was = &original.sections[i], *now = &slim.sections[i];
        bool is_loaded = was->sh_flags & SHF_ALLOC;
        next[i] = is_loaded && check_loaded(i, was, *now) ? next_piece(was, was->sh_addr) : 0;
        if (!is_loaded && i != original.header.e_shstrndx) check_unloaded(i, was, now);
        if (next[i] && strncmp(section_name(&slim, i), ".whole", 6) != 0)
            fail("section %zu has its old name", i);
    }
    /* Tools find GPU code by the name of its section. */
    for (size_t i = count; i < slim.section_count; i++) {
        const Elf64_Shdr *piece = &slim.sections[i];
        const char *name = section_name(&slim, i);
        if (!(piece->sh_flags & SHF_ALLOC) &&
            (!strcmp(name, ".negativa") || i == slim.header.e_shstrndx))
            continue;
        size_t whole = 0;
        while (whole < count && (!next[whole] || next[whole] != piece->sh_addr)) whole++;
        const Elf64_Shdr *was = &original.sections[whole];
        uint64_t end = piece->sh_addr + piece->sh_size;
        if (whole == count || piece->sh_type != was->sh_type || piece->sh_flags != was->sh_flags ||
            strcmp(name, section_name(&original, whole)) != 0 ||
            !within(piece->sh_addr - was->sh_addr, piece->sh_size, was->sh_size) ||
            (end < was->sh_addr + was->sh_size && bytes_at(&slim, end, 1)) ||
            !gets_bytes(&slim, piece->sh_addr, piece->sh_offset, piece->sh_size))
            fail("section %zu, %s, is no piece of one of the original", i, name);
        next[whole] = next_piece(was, end);
    }
    for (size_t i = 0; i < count; i++)
        if (next[i]) fail("section %zu, %s, lacks pieces", i, section_name(&original, i));
    free(next);
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
        if (row.st_shndx == SHN_UNDEF || type == STT_TLS || type == STT_SECTION || type == STT_FILE)
            continue;
        if (is_dynamic && is_cut && type == STT_GNU_IFUNC)
            fail("it exports an IFUNC, which may run before its spare is there");
        if (is_dynamic && !is_cut && row.st_shndx != SHN_ABS)
            use(row.st_value, row.st_size + !row.st_size, "a symbol");
        if (row.st_shndx >= original.section_count ||
            moved_tag(&original.sections[row.st_shndx]) >= 0)
            continue;
        const Elf64_Phdr *was = load_of(&original, row.st_value),
                         *now = load_of(&slim, row.st_value);
        if (type == STT_FUNC && was && was->p_flags & PF_X && !(now && now->p_flags & PF_X) &&
            !is_cut)
            fail("the function at %#" PRIx64 " is not executable", row.st_value);
        const Elf64_Shdr *before = &original.sections[row.st_shndx],
                         *after = &slim.sections[row.st_shndx];
        uint64_t place = row.st_value - before->sh_addr + before->sh_offset;
        uint64_t placed = row.st_value - after->sh_addr + after->sh_offset;
        if (placed < slim.file.size && gets_bytes(&original, row.st_value, place, 1) &&
            !gets_bytes(&slim, row.st_value, placed, 1))
            fail("a symbol of address %#" PRIx64 " names another place in the file", row.st_value);
    }
}

static void check_uses(void) {
    static const int64_t tables[] = {DT_HASH,       DT_SYMTAB,     DT_INIT,     DT_FINI,
                                     DT_INIT_ARRAY, DT_FINI_ARRAY, DT_GNU_HASH, DT_VERSYM,
                                     DT_VERDEF,     DT_VERNEED,    DT_PLTGOT,   DT_RELR,
                                     DT_STRTAB,     DT_RELA,       DT_JMPREL};
    sort(&gone, "holes");
    use_relocations(DT_RELA, DT_RELASZ), use_relocations(DT_JMPREL, DT_PLTRELSZ),
        use_packed_relocations();
    if (tag(&original, DT_REL)) fail("relocations without addends are not known");
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        bool may_go = is_cut && (i >= 12 || tables[i] == DT_INIT || tables[i] == DT_FINI);
        if (tag(&original, tables[i]) && !may_go) use(tag(&original, tables[i]), 1, "a table");
    }
    for (size_t i = 0; i < original.header.e_phnum; i++) {
        const Elf64_Phdr *row = &original.segments[i];
        if (row->p_type != PT_LOAD && row->p_type != PT_NULL && row->p_type != PT_GNU_STACK)
            use(row->p_vaddr, row->p_memsz, "a segment");
    }
    bool has_symbols = !original.section_count;
    for (size_t i = 0; i < original.section_count; i++) {
        const Elf64_Shdr *row = &original.sections[i];
        const char *name = section_name(&original, i);
        has_symbols |= row->sh_type == SHT_DYNSYM && row->sh_addr == tag(&original, DT_SYMTAB);
        bool is_table =
            row->sh_type != SHT_PROGBITS && row->sh_type != SHT_X86_64_UNWIND && moved_tag(row) < 0;
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
    memcpy(wanted.magic, "NEGSPARE", 8), wanted.version = NOTE_VERSION;
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

/* Puts the original together at a place, or compares it with what is there. */
static void put(uint8_t *target, uint64_t offset, const uint8_t *bytes, uint64_t size) {
    if (target)
        memcpy(target + offset, bytes, size);
    else if (memcmp(original.file.data + offset, bytes, size) != 0)
        fail("library and spare do not give the original back: see offset %#" PRIx64 " and behind",
             offset);
}

/* Whether the spare and the library give the original; if that is not given, it is what they give.
 */
static void check_spare(void) {
    uint64_t end = (note.original_size + PAGE - 1) / PAGE * PAGE, position = 0;
    Trailer trailer, wanted;
    if (note.original_size > spare.size || !within(end, sizeof trailer, spare.size))
        fail("its spare is too short");
    memcpy(&trailer, spare.data + end, sizeof trailer), wanted = trailer;
    memcpy(wanted.magic, "NEGSPARE", 8), wanted.version = NOTE_VERSION;
    memcpy(wanted.pair, note.pair, 32), memcpy(wanted.original, note.original, 32);
    wanted.original_size = note.original_size;
    if (memcmp(&trailer, &wanted, sizeof trailer) != 0 || trailer.kept_count > MAX_ROWS ||
        spare.size != end + sizeof trailer + trailer.kept_count * UINT64_C(24))
        fail("its spare is that of another library or is damaged");
    uint8_t *target = original.file.path ? NULL : room_for(note.original_size, 1);
    for (uint64_t i = 0; i <= trailer.kept_count; i++) {
        uint64_t row[3] = {note.original_size, note.original_size, 0}; /* start, end, place */
        if (i < trailer.kept_count)
            memcpy(row, spare.data + end + sizeof trailer + 24 * i, sizeof row);
        if (row[0] < position || row[1] < row[0] || row[1] > note.original_size ||
            !within(row[2], row[1] - row[0], slim.file.size))
            fail("the rows of its spare are damaged");
        put(target, position, spare.data + position, row[0] - position);
        put(target, row[0], slim.file.data + row[2], row[1] - row[0]);
        position = row[1];
    }
    if (target) original.file = (File){"the original", target, note.original_size};
}

static bool is_ours(int64_t name) {
    return name == DT_STRTAB || name == DT_STRSZ || name == DT_RELA || name == DT_RELASZ ||
           name == DT_RELAENT || name == DT_JMPREL || name == DT_NEGATIVA_NOTE;
}

static void check_dynamic(void) {
    size_t at = 0, extra = 0;
    Elf64_Rela ours[2];
    for (size_t i = 0; i < original.dynamic_count; i++) {
        const Elf64_Dyn *row = &original.dynamic[i];
        if (row->d_tag == DT_TEXTREL || (row->d_tag == DT_FLAGS && row->d_un.d_val & DF_TEXTREL))
            fail("its code is relocated");
        /* The row of the note equals none of these: the comparison ends there at the latest. */
        if (!is_ours(row->d_tag) && memcmp(&slim.dynamic[at++], row, sizeof *row) != 0)
            fail("row %zu of its dynamic section is another one", i);
    }
    for (; at < slim.dynamic_count; at++, extra++)
        if (!is_ours(slim.dynamic[at].d_tag)) fail("its dynamic section has more rows");
    if (extra != 6 + (tag(&original, DT_JMPREL) != 0))
        fail("its dynamic section has more rows of a kind");
    uint64_t strings = tag(&original, DT_STRSZ),
             rows = tag(&original, DT_RELA) ? tag(&original, DT_RELASZ) : 0;
    uint64_t jumps = tag(&original, DT_JMPREL) ? tag(&original, DT_PLTRELSZ) : 0;
    uint64_t before = tag(&original, DT_RELACOUNT) * sizeof(Elf64_Rela),
             own = 2 * sizeof(Elf64_Rela);
    if (memcmp(table(&original, DT_STRTAB, strings), table(&slim, DT_STRTAB, strings), strings) !=
        0)
        fail("its dynamic strings are others");
    const uint8_t *was = table(&original, DT_RELA, rows), *now = table(&slim, DT_RELA, rows + own);
    if (before > rows || tag(&slim, DT_RELASZ) != rows + own ||
        tag(&slim, DT_RELAENT) != sizeof *ours || memcmp(was, now, before) != 0 ||
        // NOLINTNEXTLINE(clang-analyzer-unix.cstring.UninitializedRead): table gave rows + own
        memcmp(was + before, now + before + own, rows - before) != 0)
        fail("its relocations are others");
    uint64_t inside = tag(&original, DT_JMPREL) - tag(&original, DT_RELA),
             is_inside = tag(&slim, DT_JMPREL) - tag(&slim, DT_RELA);
    if (jumps && (inside < rows ? is_inside != inside + (inside < before ? 0 : own)
                                : is_inside < rows + own))
        fail("its jump slots are a part of other relocations than before");
    if (memcmp(table(&original, DT_JMPREL, jumps), table(&slim, DT_JMPREL, jumps), jumps) != 0)
        fail("its jump slots are others");
    const Elf64_Phdr *added = &slim.loads[slim.load_count - ADDED], *data = &added[2];
    memcpy(ours, now + before, sizeof ours);
    for (int i = 0; i < 2; i++)
        if (ours[i].r_info != R_X86_64_IRELATIVE ||
            (uint64_t)ours[i].r_addend != added[1].p_vaddr + (i ? SECOND : START) ||
            ours[i].r_offset != data->p_vaddr + slim.dynamic_segment->p_filesz + 8 * i)
            fail("row %d of the two that map its spare is damaged", i);
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
    char digest[65];
    sha_of(stub + PARAMETERS, PAGE - PARAMETERS, digest);
    if (strcmp(digest, STUB_SHA256) != 0)
        fail("the code that maps its spare is not that of this release");
}

/* ---- Declared unused GPU code ---- */

static uint64_t number(const uint8_t *bytes, int size) {
    uint64_t value = 0;
    memcpy(&value, bytes, (size_t)size);
    return value;
}

static bool is_declared(uint64_t start, uint64_t end) {
    const Range *found = range_behind(&declared, start);
    return found && found->kind == UNUSED && found->start == start && found->end == end;
}

/* A region: a reader that follows its headers finds each kept element at its place, and no other
 * one. */
static void check_region(const Range *region) {
    uint8_t was[HEADER], now[HEADER], dead[HEADER];
    uint64_t place = region->start + 16, end = region->end;
    if (!within(region->start, end - region->start, original.file.size))
        fail("a declared region leaves the original");
    const uint8_t *data = original.file.data;
    read_slim(region->start, now, 16);
    uint64_t size = number(now + 8, 8);
    bool is_there = !is_zero(now, 16);
    if (memcmp(data + region->start, "\x50\xed\x55\xba\1\0\x10\0", 8) != 0 ||
        number(data + region->start + 8, 8) != end - place ||
        (is_there && (memcmp(now, data + region->start, 8) != 0 || size > end - place)))
        fail("the region at offset %#" PRIx64 " is another one", region->start);
    push(&checked, region->start, place, CHECKED);
    uint64_t next = place, last = is_there ? place + size : 0;
    for (uint64_t after; place < end; place = after) {
        uint64_t room = end - place, header = room < HEADER ? 0 : number(data + place + 4, 4);
        if (header < HEADER || !within(header, number(data + place + 8, 8), room))
            fail("an element at offset %#" PRIx64 " leaves its region", place);
        after = place + header + number(data + place + 8, 8);
        memcpy(was, data + place, HEADER), memcpy(dead, was, HEADER), read_slim(place, now, HEADER);
        bool is_reached = place == next && next < last, is_same = !memcmp(now, was, HEADER);
        memcpy(dead, "\0", 2), memcpy(dead + 28, "\xe7\3\0", 4); /* of no kind, for sm_999 */
        if (!is_declared(place, after)) {
            if (!is_reached || memcmp(now + 2, was + 2, 14) != 0)
                fail("the driver no longer finds the kept element at offset %#" PRIx64, place);
            next = after;
            continue;
        }
        push(&checked, place, place + HEADER, CHECKED);
        if (!is_reached ? !is_zero(now, HEADER) && !is_same : false)
            fail("a removed element at offset %#" PRIx64 " has a header", place);
        if (!is_reached) continue;
        bool is_filler = !memcmp(now, "\0\0\1\1\x40\0\0\0", 8) && is_zero(now + 16, HEADER - 16) &&
                         number(now + 8, 8) <= last - place - HEADER;
        if (!is_filler && !is_same && memcmp(now, dead, HEADER) != 0)
            fail("the header at offset %#" PRIx64 " is damaged", place);
        next = is_filler ? place + HEADER + number(now + 8, 8) : after;
    }
    if (is_there && next != last)
        fail("the region at offset %#" PRIx64 " has another end", region->start);
}

/* Kernels were taken out of a cubin: the library has what its maker declared, which is not
 * certified. */
static void check_trimmed(const Range *row) {
    uint8_t bytes[1 << 14];
    char digest[65];
    Sha sha = sha_start();
    for (uint64_t at = row->start, part; at < row->end; at += part) {
        part = row->end - at < sizeof bytes ? row->end - at : sizeof bytes;
        read_slim(at, bytes, part);
        sha_add(&sha, bytes, part);
    }
    sha_hex(&sha, digest);
    if (strcmp(digest, row->digest) != 0)
        fail("the trimmed cubin at offset %#" PRIx64 " is another one", row->start);
}

static Ranges regions;

/* Lines of standard input: "region", "unused" or "trimmed", start and end; for what was trimmed its
 * digest afterwards. */
static void read_declared(void) {
    char kind[16], digest[65];
    uint64_t start, end;
    int found;
    while ((found = scanf("%15s %" SCNu64 " %" SCNu64, kind, &start, &end)) == 3) {
        enum Kind is = !strcmp(kind, "unused")    ? UNUSED
                       : !strcmp(kind, "trimmed") ? TRIMMED
                                                  : REGION;
        bool is_known = is != REGION || !strcmp(kind, "region");
        if (!is_known || start >= end || (is == TRIMMED && scanf("%64s", digest) != 1)) break;
        push(is == REGION ? &regions : &declared, start, end, is);
        if (is == TRIMMED) memcpy(declared.rows[declared.count - 1].digest, digest, sizeof digest);
    }
    if (found != EOF) give_up("a line of what was declared is not known");
    sort(&regions, "declared regions"), sort(&declared, "declared ranges");
}

/* Declared ranges that did change may hold nothing that the library itself uses. */
static void find_gone(void) {
    for (size_t i = 0; i < declared.count; i++) {
        const Range *row = &declared.rows[i];
        uint64_t address = address_of(row->start);
        if (row->changed && address && row->kind == UNUSED)
            push(&gone, address, address + (row->end - row->start), row->kind);
    }
}

/* ---- The program ---- */

static void certify_cut(const char *sha256) {
    char wanted[65], known[65];
    read_note();
    if (!spare.path) fail("it has a spare, which is not given");
    bool is_given = original.file.path != NULL, is_known = is_given && *sha256;
    if (!is_given) check_spare();
    sha_of(original.file.data, is_known ? 0 : original.file.size, known);
    to_hex(note.original, sizeof note.original, wanted);
    if (original.file.size != note.original_size || (!is_known && strcmp(wanted, known) != 0) ||
        (*sha256 && strcmp(wanted, sha256) != 0))
        fail("it is not of this original");
    read_elf(&original);
    if (original.header.e_machine != EM_X86_64 || slim.load_count <= ADDED ||
        !original.section_count)
        fail("such libraries are not cut");
    if (is_given) check_spare();
    check_headers(), check_image(), check_dynamic(), check_added();
    uint64_t headers = original.header.e_phoff, size = original.header.e_phnum * sizeof(Elf64_Phdr);
    if (headers + size <= PAGE && !is_zero(spare.data + headers, size))
        fail("a loader may take its spare for a library");
    check_sections(), check_uses();
}

static void certify_other(void) {
    if (spare.path) fail("it has no note, so no spare belongs to it");
    read_elf(&original);
    is_overwritten = original.file.size == slim.file.size &&
                     !memcmp(&original.header, &slim.header, sizeof slim.header);
    for (size_t i = 0; i < regions.count; i++) check_region(&regions.rows[i]);
    for (size_t i = 0; i < declared.count; i++)
        if (declared.rows[i].kind == TRIMMED) check_trimmed(&declared.rows[i]);
    if (!is_overwritten) check_headers();
    sort(&checked, "headers");
    if (is_overwritten)
        compare(0, slim.file.data, slim.file.size), find_gone();
    else
        check_image(), find_gone(), check_sections(), check_uses();
}

int main(int count, char **words) {
    if (count < 3 || count > 6)
        give_up("usage: certify ORIGINAL|'' SLIM [SPARE|'' [SHA256|'' [PAGE]]] < DECLARED");
    const char *digest = count > 4 ? words[4] : "", *page = count > 5 ? words[5] : "0";
    if (*words[1]) open_file(&original.file, words[1]);
    open_file(&slim.file, words[2]);
    if (count > 3 && *words[3]) open_file(&spare, words[3]);
    largest_page = strtoull(page, NULL, 10);
    if (largest_page & (largest_page - 1)) give_up("%s is no size of a page", page);
    read_elf(&slim);
    is_cut = tag(&slim, DT_NEGATIVA_NOTE) != 0;
    if (!isatty(STDIN_FILENO)) read_declared();
    if (!(is_cut && *digest) && !*words[1]) give_up("the original is not given");
    if (is_cut)
        certify_cut(digest);
    else
        certify_other();
    uint64_t bytes = 0, trimmed = 0;
    for (size_t i = 0; i < gone.count; i++) bytes += gone.rows[i].end - gone.rows[i].start;
    for (size_t i = 0; i < declared.count; i++)
        trimmed +=
            declared.rows[i].kind == TRIMMED ? declared.rows[i].end - declared.rows[i].start : 0;
    printf("certified: means the same as its original without %" PRIu64 " bytes %s", bytes,
           is_cut ? "that its spare has" : "of unused GPU code");
    if (trimmed) printf("; not certified: %" PRIu64 " bytes of trimmed cubins", trimmed);
    puts("");
    return fflush(stdout) ? 2 : 0;
}
