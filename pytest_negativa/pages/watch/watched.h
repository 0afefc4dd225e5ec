/* The watched libraries; what a touch of a page does: to 64 pages if there are many mappings. */
#pragma once

#include "log.h"
#include "faults.h"

#include <sched.h>
#include <string.h>

#ifndef GUARD_INSTALL /* of madvise; not in glibc's headers before 2.41 */
#define GUARD_INSTALL 102
#endif
#define GUARD_REMOVE 103
#ifndef MAX_LIBRARIES /* at a time */
#define MAX_LIBRARIES 4096
#endif

enum {
    MAX_RANGES = 16,
    BLOCK = 32,  /* libraries */
    COARSE = 64, /* pages to give back at once when a process has many mappings */
};

typedef struct {
    atomic_bool watched;
    atomic_bool kept;     /* stays accessible: no more touches are known */
    atomic_bool guarded;  /* by guard pages, not by mprotect */
    atomic_bool switched; /* from guard pages to mprotect: some may be left for a moment */
    uintptr_t base, low, high;
    size_t range_count;
    Range *ranges, own_ranges[MAX_RANGES]; /* holes are mapped, for there may be more */
    LogRecord *record, *constants;         /* constants: NULL if it has none, see constants.h */
    size_t bit_bytes;
    atomic_uchar *bits;
    atomic_ushort *firsts; /* of holes, one for each page; NULL: no holes */
    /* Pages that mprotect opened one by one, in this process alone: a forked child has a copy, as
     * of the mappings. NULL: no memory. */
    atomic_uchar *open;
} Library;

static struct {
    const uint8_t *data; /* NULL: none */
    size_t size;
} armed; /* which removed code is watched, see holes.h */

/* Mapped when a library needs one, as a program may lock all of its memory (mlockall). */
static Library *blocks[(MAX_LIBRARIES + BLOCK - 1) / BLOCK];
static atomic_size_t library_count;

static Library *library_at(size_t index) { return &blocks[index / BLOCK][index % BLOCK]; }

static atomic_long parts_left;

static void lock(void) {
    pid_t pid = (pid_t)syscall(SYS_getpid);
    int seen = 0;
    while (!atomic_compare_exchange_strong(&own_->owner, &seen, pid)) {
        if (seen == pid) {
            sched_yield();
            seen = 0;
        }
    }
}

static void unlock(void) { atomic_store(&own_->owner, 0); }

/* Sets bits of the log, unless somebody has truncated it. */
static void set_bits(atomic_uchar *bits, uint64_t first, uint64_t end) {
    uintptr_t seen = 0;
    for (uint64_t page = first; page < end; page++) {
        uintptr_t place = (uintptr_t)&bits[page / 8] / PAGE;
        if (place != seen && !is_readable(place * PAGE, 1)) return;
        seen = place;
        atomic_fetch_or(&bits[page / 8], (unsigned char)(1u << (page % 8)));
    }
}

static void touch(Library *library, const Range *range, uintptr_t start, uintptr_t end) {
    uint64_t first = range->first + (start - range->start) / PAGE;
    set_bits(library->bits, first, first + (end - start) / PAGE);
}

/* Cuts addresses down to the pages of a range; false: none are left. */
static bool clip(const Range *range, uintptr_t *start, uintptr_t *end) {
    *start = *start > range->start ? *start & ~(uintptr_t)(PAGE - 1) : range->start;
    *end = *end < range->end ? (*end + PAGE - 1) & ~(uintptr_t)(PAGE - 1) : range->end;
    return *start < *end;
}

/* What was touched first on a page of a hole: where, and whether to run it. */
enum { FIRST_SEEN = 1 << 15, FIRST_FETCHED = 1 << 12 };

static void note_first(Library *library, uint64_t page, uintptr_t address, unsigned long error) {
    unsigned fetched = error & FAULT_EXEC ? FIRST_FETCHED : 0;
    unsigned short none = 0, first = (unsigned short)(address % PAGE | fetched | FIRST_SEEN);
    if (library->firsts != NULL && is_readable((uintptr_t)&library->firsts[page], 1))
        atomic_compare_exchange_strong(&library->firsts[page], &none, first);
}

static bool show(const Library *library, const Range *range, uintptr_t start, uintptr_t end) {
    if (atomic_load(&library->guarded))
        return madvise((void *)start, end - start, GUARD_REMOVE) == 0;
    return mprotect((void *)start, end - start, range->protection) == 0;
}

/* Whether removed code of a copy is watched. */
static bool is_armed(const Library *library) {
    return armed.data != NULL && library->record->kind == HOLES;
}

/* Nothing is watched any more. CPU code counts as touched; the log of GPU code says so. */
static bool give_up(Library *library) {
    bool done = true, of_gpu = is_armed(library) || library->record->kind == GPU_CODE;
    atomic_store(&library->kept, true);
    if (of_gpu) library->record->flags |= UNWATCHED;
    for (size_t i = 0; i < library->range_count; i++) {
        const Range *range = &library->ranges[i];
        if (!of_gpu) touch(library, range, range->start, range->end);
        done &= show(library, range, range->start, range->end);
    }
    return done;
}

static bool is_open(const Library *library, const Range *range, uintptr_t at) {
    uint64_t page = range->first + (at - range->start) / PAGE;
    return range->start <= at && at < range->end &&
           (atomic_load(&library->open[page / 8]) >> (page % 8) & 1);
}

/* How many mappings more there are when a page becomes accessible: 2, 0 or -2. */
static long open_page(const Library *library, const Range *range, uintptr_t at) {
    if (library->open == NULL) return 2;
    uint64_t page = range->first + (at - range->start) / PAGE;
    unsigned char bit = (unsigned char)(1u << (page % 8));
    if (atomic_fetch_or(&library->open[page / 8], bit) & bit) return 0;
    return 2 - 2 * is_open(library, range, at - PAGE) - 2 * is_open(library, range, at + PAGE);
}

/* The next library from number `at` on that is watched between two addresses; NULL: none. */
static Library *next_watched(size_t *at, uintptr_t start, uintptr_t end) {
    for (size_t count = atomic_load(&library_count); *at < count;) {
        Library *library = library_at((*at)++);
        if (start < library->high && end > library->low && atomic_load(&library->watched))
            return library;
    }
    return NULL;
}

/* Two threads may serve one page: the second does the same again. */
static bool serve(uintptr_t address, unsigned long error, int si_code) {
    Library *library;
    for (size_t i = 0; (library = next_watched(&i, address, address + 1)) != NULL;) {
        for (size_t j = 0; j < library->range_count; j++) {
            const Range *range = &library->ranges[j];
            if (address < range->start || address >= range->end) continue;
            bool guarded = atomic_load(&library->guarded);
            /* Behind a guard the access may be forbidden, too: then it faults again. */
            if (si_code != (guarded ? SEGV_MAPERR : SEGV_ACCERR) &&
                !atomic_load(&library->switched))
                return false;
            if (!guarded && ((error & FAULT_WRITE && !(range->protection & PROT_WRITE)) ||
                             (error & FAULT_EXEC && !(range->protection & PROT_EXEC))))
                return false;
            uintptr_t start = address & ~(uintptr_t)(PAGE - 1), end = start + PAGE;
            uint64_t page = range->first + (start - range->start) / PAGE;
            if (!guarded && atomic_load(&parts_left) > 0) {
                atomic_fetch_sub(&parts_left, open_page(library, range, start));
            } else if (!guarded) {
                /* Each page may be a mapping of its own: sysctl vm.max_map_count. */
                start -= (start - range->start) % (COARSE * PAGE);
                end = start + COARSE * PAGE;
                if (end > range->end) end = range->end;
            }
            note_first(library, page, address, error);
            touch(library, range, start, end);
            if (!show(library, range, start, end)) {
                /* The program has unmapped its code. */
                if (guarded && errno == ENOMEM) return false;
                return give_up(library);
            }
            return true;
        }
    }
    return false;
}
