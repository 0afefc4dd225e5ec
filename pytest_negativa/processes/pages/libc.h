/* How the program gets other versions of libc's functions.
 *
 * The values of libc's dynamic symbols are changed in memory (elf(5), st_value; a private page).
 * Whatever is bound later finds them, by PLT, GOT, dlsym or dlvsym, also from libraries loaded
 * later. What was bound before it does not see.
 */
#pragma once

#include <elf.h>
#include <link.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

typedef struct {
    const char *name;
    void *ours;
    void **real;
} Wrapper;

/* All rows, whichever header has them: the linker puts them into one section. */
extern const Wrapper __attribute__((visibility("hidden"))) __start_wrappers[], __stop_wrappers[];

/* The program gets our_NAME in the place of a function. With an alignment of its own, a row has no
 * padding behind it. */
#define ALIAS(alias, name)                                                                       \
    __attribute__((section("wrappers"), used, aligned(8))) static const Wrapper wrap_##alias = { \
        #alias, (void *)our_##name, (void **)&real_##name};
#define WRAP(name) ALIAS(name, name)

/* The ABI passes integers and pointers each in a register, so words go through unchanged, and some
 * too many do no harm. */
typedef uintptr_t Word;
#define WORDS Word a, Word b, Word c, Word d, Word e, Word f

/* Our version does something, and calls the real one. */
#define FORWARD(name, before)                 \
    static Word (*real_##name)(WORDS);        \
    static Word our_##name(WORDS) {           \
        before;                               \
        return real_##name(a, b, c, d, e, f); \
    }                                         \
    WRAP(name)

typedef struct {
    ElfW(Sym) *symbols;
    const char *names;
    const uint32_t *hash; /* of DT_GNU_HASH */
} Tables;

/* glibc has added l_addr to these values, see elf_get_dynamic_info of its elf/dl-load.c. */
static Tables tables_of(const struct link_map *map) {
    Tables tables = {0};
    for (const ElfW(Dyn) *d = map->l_ld; d != NULL && d->d_tag != DT_NULL; d++) {
        if (d->d_tag == DT_SYMTAB) tables.symbols = (ElfW(Sym) *)d->d_un.d_ptr;
        if (d->d_tag == DT_STRTAB) tables.names = (const char *)d->d_un.d_ptr;
        if (d->d_tag == DT_GNU_HASH) tables.hash = (const uint32_t *)d->d_un.d_ptr;
    }
    return tables;
}

static int protection_of_flags(uint32_t flags) {
    return (flags & PF_R ? PROT_READ : 0) | (flags & PF_W ? PROT_WRITE : 0) |
           (flags & PF_X ? PROT_EXEC : 0);
}

/* How the segment of an address is mapped. libc's first segment holds its headers. */
static int protection_at(const struct link_map *map, uintptr_t address) {
    const ElfW(Ehdr) *head = (const ElfW(Ehdr) *)map->l_addr;
    const ElfW(Phdr) *segment = (const ElfW(Phdr) *)(map->l_addr + head->e_phoff);
    for (unsigned i = 0; i < head->e_phnum; i++, segment++)
        if (segment->p_type == PT_LOAD &&
            address - map->l_addr - segment->p_vaddr < segment->p_memsz)
            return protection_of_flags(segment->p_flags);
    return PROT_READ;
}

/* Gives `ours` as the value of each version of a symbol; the value before goes to `real`.
 * The table: https://sourceware.org/gnu-gabi/program-loading-and-dynamic-linking.txt */
static bool replace_symbol(const struct link_map *map, Tables tables, const char *name, void *ours,
                           void **real) {
    uint32_t hash = 5381, count = tables.hash[0], first = tables.hash[1];
    for (const char *c = name; *c; c++) hash = hash * 33 + (unsigned char)*c;
    const uint32_t *buckets = tables.hash + 4 + tables.hash[2] * (sizeof(ElfW(Addr)) / 4);
    const uint32_t *chain = buckets + count;
    uint32_t i = buckets[hash % count];
    bool replaced = false;
    if (i < first) return false;
    do {
        ElfW(Sym) *symbol = &tables.symbols[i];
        if ((chain[i - first] | 1) != (hash | 1) || symbol->st_shndx == SHN_UNDEF ||
            ELF64_ST_TYPE(symbol->st_info) != STT_FUNC ||
            strcmp(tables.names + symbol->st_name, name) != 0)
            continue;
        uintptr_t start = (uintptr_t)symbol & ~(uintptr_t)4095;
        size_t size = ((uintptr_t)(symbol + 1) - start + 4095) & ~(size_t)4095;
        int protection = protection_at(map, start);
        if (mprotect((void *)start, size, protection | PROT_WRITE) != 0) return false;
        if (*real == NULL) *real = (void *)(map->l_addr + symbol->st_value);
        symbol->st_value = (uintptr_t)ours - map->l_addr;
        mprotect((void *)start, size, protection);
        replaced = true;
    } while ((chain[i++ - first] & 1) == 0);
    return replaced;
}

/* Gives the program our functions; call it with the link map of libc. False: a function that
 * each libc has is not there or can't be replaced. */
static bool wrap_libc(const struct link_map *libc) {
    Tables tables = tables_of(libc);
    bool replaced = tables.symbols != NULL && tables.names != NULL && tables.hash != NULL;
    for (const Wrapper *row = __start_wrappers; replaced && row < __stop_wrappers; row++)
        replaced = replace_symbol(libc, tables, row->name, row->ours, row->real) ||
                   /* __, _np and newer ones may be missing. */
                   strchr(row->name, '_') != NULL || strcmp(row->name, "mseal") == 0;
    return replaced;
}
