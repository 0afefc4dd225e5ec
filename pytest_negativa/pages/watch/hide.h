/* How pages become inaccessible, and where a library that comes has its place. */
#pragma once

#include "watched.h"

static bool without_guards; /* see our_prctl */

static void hide_by_mprotect(Library *library) {
    library->open = map_zeroed(library->bit_bytes);
    atomic_store(&library->guarded, false);
    for (size_t i = 0; i < library->range_count; i++) {
        const Range *range = &library->ranges[i];
        size_t size = range->end - range->start;
        if (mprotect((void *)range->start, size, PROT_NONE) != 0) give_up(library);
        madvise((void *)range->start, size, GUARD_REMOVE);
    }
}

/* Nobody runs a library's code yet. Behind a guard, tracers can't read GPU code by /proc/self/mem.
 */
static void hide(Library *library) {
    bool of_gpu = library->record->kind == GPU_CODE;
    atomic_store(&library->guarded, !without_guards && !of_gpu);
    for (size_t i = 0; i < library->range_count && atomic_load(&library->guarded); i++) {
        const Range *range = &library->ranges[i];
        void *start = (void *)range->start;
        atomic_store(&library->guarded,
                     madvise(start, range->end - range->start, GUARD_INSTALL) == 0);
    }
    if (!atomic_load(&library->guarded)) hide_by_mprotect(library);
}

/* A place for a library, empty but for its base; NULL: nothing can be recorded. One that was
 * closed gives up its own. */
static Library *begin_library(const struct link_map *map) {
    size_t index = 0, count = atomic_load(&library_count);
    while (index < count && atomic_load(&library_at(index)->watched)) index++;
    if (index == MAX_LIBRARIES || !start_log()) {
        note_lost(index == MAX_LIBRARIES ? "the process has too many libraries." : NO_ROOM);
        return NULL;
    }
    Library **block = &blocks[index / BLOCK];
    if (*block == NULL && (*block = map_zeroed(BLOCK * sizeof **block)) == NULL) {
        note_lost(NO_ROOM);
        return NULL;
    }
    Library *library = library_at(index);
    memset(library, 0, sizeof *library);
    if (index == count) atomic_store(&library_count, count + 1);
    library->base = map->l_addr;
    library->ranges = library->own_ranges;
    return library;
}

/* Numbers the pages of the ranges; returns how many they are. */
static size_t number_pages(Library *library) {
    size_t pages = 0;
    library->low = UINTPTR_MAX;
    for (size_t i = 0; i < library->range_count; i++) {
        Range *range = &library->ranges[i];
        range->first = pages;
        pages += (range->end - range->start) / PAGE;
        if (range->start < library->low) library->low = range->start;
        if (range->end > library->high) library->high = range->end;
    }
    library->bit_bytes = (pages + 7) / 8;
    return pages;
}

/* Starts the record of a library; false: there is no room. */
static bool begin_record(Library *library, uint32_t kind, const char *text, size_t length,
                         size_t bit_bytes) {
    LogRecord *record =
        start_record(kind, library->ranges, library->range_count, text, length, bit_bytes);
    if (record == NULL) return false;
    library->record = record;
    library->bits = (atomic_uchar *)record + record->bits_offset;
    return true;
}
