/* What the program does to its own memory, by other versions of libc's functions.
 */
#pragma once

#include "hide.h"

#include <sys/prctl.h>

#define SET_MDWE 65 /* of prctl; not in the headers before Linux 6.3 */

static int (*real_mprotect)(void *, size_t, int);
static int (*real_pkey_mprotect)(void *, size_t, int, int);

/* Pages that the program itself makes accessible are touched unseen. */
static void note_protection(uintptr_t start, size_t size, int protection) {
    uintptr_t end = start + size;
    size_t count = atomic_load(&library_count);
    if (protection == PROT_NONE) return;
    for (size_t i = 0; i < count; i++) {
        Library *library = &libraries[i];
        if (end <= library->low || start >= library->high || !atomic_load(&library->watched))
            continue;
        atomic_store(&library->kept, true);
        if (armed.data != NULL) library->record->flags |= UNWATCHED;
        for (size_t j = 0; j < library->range_count && armed.data == NULL; j++) {
            const Range *range = &library->ranges[j];
            uintptr_t from = start > range->start ? start & ~(uintptr_t)(PAGE - 1) : range->start;
            uintptr_t to =
                end < range->end ? (end + PAGE - 1) & ~(uintptr_t)(PAGE - 1) : range->end;
            touch(library, range, from, to);
            if (atomic_load(&library->guarded) && from < to) show(library, range, from, to);
        }
    }
}

/* An address that mprotect(2) refuses: without us, the call does nothing. */
static const uintptr_t ENTER_TEST = 0x6e656761746976;

static int our_mprotect(void *start, size_t size, int protection) {
    if ((uintptr_t)start == ENTER_TEST && enter_test((const char *)size)) return 0;
    note_protection((uintptr_t)start, size, protection);
    return real_mprotect(start, size, protection);
}

static int our_pkey_mprotect(void *start, size_t size, int protection, int key) {
    note_protection((uintptr_t)start, size, protection);
    return real_pkey_mprotect(start, size, protection, key);
}

static int (*real_prctl)(int, ...);

/* A seccomp filter may forbid to remove guards, as Chromium's does. It allows mprotect, or no code
 * could be loaded. But it may forbid to make memory executable that was not, as PR_SET_MDWE does.
 */
static int our_prctl(int option, unsigned long a, unsigned long b, unsigned long c,
                     unsigned long d) {
    if (option == PR_SET_NO_NEW_PRIVS || option == PR_SET_SECCOMP || option == SET_MDWE) {
        lock();
        without_guards = true;
        for (size_t i = 0, count = atomic_load(&library_count); i < count; i++) {
            Library *library = &libraries[i];
            if (!atomic_load(&library->watched) || !(only_gaps || atomic_load(&library->guarded)))
                continue;
            atomic_store(&library->switched, true);
            if (atomic_load(&library->kept) || only_gaps)
                give_up(library); /* the program chose its protection */
            else
                hide_by_mprotect(library);
        }
        unlock();
    }
    return real_prctl(option, a, b, c, d);
}

static const FaultsWrapper wrappers[] = {
    {"prctl", (void *)our_prctl, (void **)&real_prctl},
    {"mprotect", (void *)our_mprotect, (void **)&real_mprotect},
    {"pkey_mprotect", (void *)our_pkey_mprotect, (void **)&real_pkey_mprotect},
};
