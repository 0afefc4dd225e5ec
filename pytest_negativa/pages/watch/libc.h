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

/* The row of a library's dynamic section; NULL: it has none. */
static const ElfW(Dyn) *find_tag(const struct link_map *map, ElfW(Sxword) tag) {
    for (const ElfW(Dyn) *row = map->l_ld; row != NULL && row->d_tag != DT_NULL; row++)
        if (row->d_tag == tag) return row;
    return NULL;
}

/* Its value, or 0. To addresses glibc has added l_addr (elf_get_dynamic_info of its elf/dl-load.c).
 */
static uintptr_t tag_value(const struct link_map *map, ElfW(Sxword) tag) {
    const ElfW(Dyn) *row = find_tag(map, tag);
    return row == NULL ? 0 : row->d_un.d_val;
}

typedef struct {
    ElfW(Sym) *symbols;
    const char *names;
    const uint32_t *hash; /* of DT_GNU_HASH */
} Tables;

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
        if (mprotect((void *)start, size, PROT_READ | PROT_WRITE) != 0) return false;
        if (*real == NULL) *real = (void *)(map->l_addr + symbol->st_value);
        symbol->st_value = (uintptr_t)ours - map->l_addr;
        /* Tables alone: libc has many pages of them, and its code lies far behind. */
        mprotect((void *)start, size, PROT_READ);
        replaced = true;
    } while ((chain[i++ - first] & 1) == 0);
    return replaced;
}

/* Gives the program our functions; call it with the link map of libc. False: a function that
 * each libc has is not there or can't be replaced. */
static bool wrap_libc(const struct link_map *libc) {
    Tables tables = {(ElfW(Sym) *)tag_value(libc, DT_SYMTAB),
                     (const char *)tag_value(libc, DT_STRTAB),
                     (const uint32_t *)tag_value(libc, DT_GNU_HASH)};
    bool replaced = tables.symbols != NULL && tables.names != NULL && tables.hash != NULL;
    for (const Wrapper *row = __start_wrappers; replaced && row < __stop_wrappers; row++)
        replaced = replace_symbol(libc, tables, row->name, row->ours, row->real) ||
                   /* __, _np and newer ones may be missing. */
                   strchr(row->name, '_') != NULL || strcmp(row->name, "mseal") == 0;
    return replaced;
}
