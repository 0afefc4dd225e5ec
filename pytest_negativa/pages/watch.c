/* Which pages of CPU code and of GPU code a process touches; by guard pages or mprotect.
 *
 * glibc loads it into every process whose LD_AUDIT names it (rtld-audit(7)). It makes the code
 * and the unwind tables of each library inaccessible before the library is relocated. The first
 * touch of a page is a SIGSEGV; the handler sets the page's bit and makes the page accessible.
 * Where the kernel has guard pages for files (madvise(2), MADV_GUARD_INSTALL, Linux 6.15), they do
 * it: a page costs less than half, and no mapping. Elsewhere mprotect does.
 *
 * Environment: NEGATIVA_PAGES_LOGS, the folder for the logs (format: pages/page_logs.py);
 * NEGATIVA_PAGES_GPU, if not empty: GPU code alone; NEGATIVA_PAGES_ARMED, if not empty: of GPU
 * code, what was removed. Or NEGATIVA_SPARE_LOG alone, a folder for logs of what comes back to
 * libraries with a spare. For both see pages/holes.h. The log is a shared mapping of a file, so a
 * process that is killed loses nothing. fallocate reserves its blocks: touching a hole of a file on
 * a full disk would be a SIGBUS.
 *
 * What is not watched: the program itself, libc and the loader, which run before or below us;
 * all other data, because the kernel reads it without a signal (EFAULT); pages that a section
 * shares. What the program hands to libc's write and the like is read before. Constants are looked
 * at when the process ends, see pages/constants.h.
 *
 * Rules: never fail the process. What can't be watched counts as used, and the log says so. No
 * malloc, no descriptor kept open, no lock in the handler. Outside of it one thread works at a
 * time, see lock(), so static buffers suffice.
 */
#define _GNU_SOURCE
#include "watch/holes.h"
#include "watch/constants.h"
#include "../native/maps.h"

#include <stdlib.h>

#ifndef MAX_PARTS             /* mappings that touched pages may add to the process's own */
#define MAX_PARTS (65530 / 2) /* sysctl vm.max_map_count has 65,530 */
#endif

static bool only_gpu; /* no CPU code */

/* A record of a library's constants, of which this process has not noted any; NULL: it has none. */
static LogRecord *expect_constants(int fd, const char *path) {
    Range constants[MAX_RANGES];
    size_t count = 0, pages = 0;
    find_ranges(fd, CONSTANTS, constants, &count);
    for (size_t i = 0; i < count; i++) pages += (constants[i].end - constants[i].start) / PAGE;
    if (pages == 0) return NULL;
    LogRecord *record =
        start_record(CONSTANTS, constants, count, path, strlen(path), (pages + 7) / 8);
    if (record == NULL) {
        note_lost(NO_ROOM);
        return NULL;
    }
    describe(record, fd, "");
    record->flags = 1;
    publish(record);
    return record;
}

/* Watches CPU code or GPU code; NULL: nothing of it. `fd`: the file at `path`; -1: none. */
static Library *watch(const struct link_map *map, int fd, const char *path, bool is_read,
                      uint32_t kind) {
    Library *library = begin_library(map);
    if (library == NULL) return NULL;
    bool watched = is_read && find_ranges(fd, kind, library->ranges, &library->range_count);
    if (kind == GPU_CODE && library->range_count == 0) return NULL;
    for (size_t i = 0; i < library->range_count; i++) {
        library->ranges[i].start += library->base;
        library->ranges[i].end += library->base;
    }
    number_pages(library);
    if (watched && kind == LIBRARY) library->constants = expect_constants(fd, path);
    if (!begin_record(library, kind, path, strlen(path), library->bit_bytes)) {
        note_lost(NO_ROOM);
        return NULL;
    }
    if (fd >= 0) describe(library->record, fd, "");
    library->record->flags = watched ? 0 : UNWATCHED;
    publish(library->record);
    if (!watched) return NULL;
    atomic_store(&library->watched, true); /* the handler finds it now */
    hide(library);
    return library;
}

/* Returns what is watched of a library: its CPU code and its GPU code, or one of them. */
static Library *watch_all(const struct link_map *map) {
    static char path[PATH_MAX];
    /* Who opens an original while the tests run on the copies is not proved. */
    const ArmedRow *row = armed.data == NULL ? NULL : find_row(map);
    const Note *note = row != NULL && row->path > sizeof *row ? (const Note *)(row + 1) : NULL;
    const char *name = row == NULL ? map->l_name : (const char *)row + row->path;
    Mapping mapping;
    bool found = realpath(name, path) != NULL;
    /* A neighbour of a copy has a name in the folder of copies; see redirect.c. */
    if (!found) path[0] = 0;
    if (!found && find_mapping((uintptr_t)map->l_ld, &mapping)) {
        snprintf(path, sizeof path, "%s", mapping.path);
        found = path[0] == '/';
    }
    bool needed = !only_gpu || armed.data == NULL;
    int fd = needed && found ? open_file(path, O_RDONLY | O_NONBLOCK, 0) : -1;
    bool relocates_code =
        find_tag(map, DT_TEXTREL) != NULL || tag_value(map, DT_FLAGS) & DF_TEXTREL;
    bool is_read = fd >= 0 && !relocates_code && read_headers(fd, map);
    Library *code = only_gpu ? NULL : watch(map, fd, path, is_read, LIBRARY);
    Library *gpu =
        armed.data == NULL ? watch(map, fd, path, is_read, GPU_CODE) : watch_holes(map, note);
    if (fd >= 0) close_file(fd);
    return code != NULL ? code : gpu;
}

/* ---- What the loader calls ---- */

EXPORT unsigned int la_version(unsigned int version) {
    const char *folder = getenv("NEGATIVA_PAGES_LOGS");
    const char *table = getenv("NEGATIVA_PAGES_ARMED");
    if (folder == NULL || folder[0] == 0) {
        folder = getenv("NEGATIVA_SPARE_LOG");
        only_holes = true;
        table = NULL;
        fstat(2, &messages);
    }
    if (folder == NULL || strlen(folder) >= sizeof log_.folder) return 0;
    strcpy(log_.folder, folder);
    if (folder[0] != '/') {
        note_lost("its path must be absolute.");
        return 0;
    }
    if (only_holes)
        mkdir(folder, 0777);
    else
        open_shared();
    atomic_store(&parts_left, MAX_PARTS);
    own_ = map_wiped();
    if (own_ == NULL || (!only_holes && !start_log()) ||
        (table != NULL && table[0] != 0 && !read_armed(table)) || !faults_start(serve)) {
        note_lost("the handler of SIGSEGV can't be set.");
        return 0;
    }
    const char *gpu = getenv("NEGATIVA_PAGES_GPU");
    only_gpu = gpu != NULL && gpu[0] != 0;
    return version < LAV_CURRENT ? version : LAV_CURRENT;
}

enum { PROGRAM = 1 }; /* a cookie; a library's is its address */

EXPORT unsigned int la_objopen(struct link_map *map, Lmid_t namespace, uintptr_t *cookie) {
    static bool disabled, begun;
    *cookie = 0;
    if (namespace == LM_ID_BASE && map->l_prev == NULL) *cookie = PROGRAM;
    /* What comes before the program are later auditors, each with a libc of its own: functions of
     * theirs in the place of the program's would set another errno. */
    begun |= *cookie == PROGRAM;
    if (!begun || !is_library(map) || is_named(map->l_name, "ld-linux")) return 0;
    if (is_named(map->l_name, "libc.so.")) {
        disabled = !wrap_libc(map);
        Library *library;
        for (size_t i = 0; disabled && (library = next_watched(&i, 0, UINTPTR_MAX)) != NULL;)
            give_up(library);
        return 0;
    }
    if (disabled) {
        note_lost("libc's functions for signals can't be replaced.");
    } else {
        lock();
        *cookie = (uintptr_t)(only_holes ? watch_holes(map, find_note(map)) : watch_all(map));
        unlock();
    }
    return 0; /* no symbol binding is audited: calls stay as fast as they are */
}

static void forget(Library *library) {
    int pagemap = library->constants != NULL ? open_pagemap() : -1;
    if (pagemap >= 0) {
        note_constants(library, pagemap);
        close_file(pagemap);
    }
    for (size_t i = 0; i < library->range_count; i++) {
        const Range *range = &library->ranges[i];
        show(library, range, range->start, range->end);
    }
    atomic_store(&library->watched, false);
    if (library->open != NULL) munmap(library->open, library->bit_bytes);
    if (library->ranges != library->own_ranges)
        munmap(library->ranges, library->range_count * sizeof *library->ranges);
}

/* Destructors have run; what comes to lie there later is not ours. At the process's end the loader
 * closes the program first (_dl_fini), and unmaps nothing: code of a closed library may still run.
 */
EXPORT unsigned int la_objclose(uintptr_t *cookie) {
    static atomic_bool ends;
    if (*cookie == PROGRAM) atomic_store(&ends, true);
    Library *library = *cookie == PROGRAM ? NULL : (Library *)*cookie;
    if (library == NULL || atomic_load(&ends)) return 0;
    uintptr_t base = library->base;
    lock();
    for (size_t i = 0; i < atomic_load(&library_count); i++)
        if (library_at(i)->base == base && atomic_load(&library_at(i)->watched))
            forget(library_at(i));
    unlock();
    return 0;
}
