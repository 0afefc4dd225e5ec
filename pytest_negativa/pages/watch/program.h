/* What the program does to its memory: mprotect, mseal, prctl, calls that read it. See libc.h. */
#pragma once

#include "hide.h"

#include <sys/prctl.h>
#include <sys/uio.h>

#define SET_MDWE 65   /* of prctl; not in the headers before Linux 6.3 */
#define SYS_MSEAL 462 /* nor this before Linux 6.10 */

/* Pages that the program itself makes accessible are touched unseen. */
static void note_protection(uintptr_t start, size_t size, int protection) {
    uintptr_t end = start + size;
    Library *library;
    if (protection == PROT_NONE) return;
    for (size_t i = 0; (library = next_watched(&i, start, end)) != NULL;) {
        atomic_store(&library->kept, true);
        if (is_armed(library)) library->record->flags |= UNWATCHED;
        for (size_t j = 0; j < library->range_count && !is_armed(library); j++) {
            const Range *range = &library->ranges[j];
            uintptr_t from = start, to = end;
            if (!clip(range, &from, &to)) continue;
            touch(library, range, from, to);
            if (atomic_load(&library->guarded)) show(library, range, from, to);
        }
    }
}

/* An int leaves the upper half of its register as it was. */
FORWARD(mprotect, note_protection(a, b, (int)c))
FORWARD(pkey_mprotect, note_protection(a, b, (int)c))

/* A seccomp filter may forbid to remove guards, as Chromium's does. It allows mprotect, or no code
 * could be loaded. But it may forbid to make memory executable that was not, as PR_SET_MDWE does.
 */
static void before_prctl(int option) {
    if (option != PR_SET_NO_NEW_PRIVS && option != PR_SET_SECCOMP && option != SET_MDWE) return;
    lock();
    without_guards = true;
    Library *library;
    for (size_t i = 0; (library = next_watched(&i, 0, UINTPTR_MAX)) != NULL;) {
        bool of_holes = library->record->kind == HOLES;
        if (!of_holes && !atomic_load(&library->guarded)) continue;
        atomic_store(&library->switched, true);
        if (atomic_load(&library->kept) || of_holes)
            give_up(library); /* the program chose its protection */
        else
            hide_by_mprotect(library);
    }
    unlock();
}

FORWARD(prctl, before_prctl((int)a))

/* The protection of sealed memory stays as it is; guards can be removed all the same. */
static void before_seal(uintptr_t start, size_t size) {
    Library *library;
    lock();
    for (size_t i = 0; (library = next_watched(&i, start, start + size)) != NULL;)
        if (!atomic_load(&library->guarded)) give_up(library);
    unlock();
}

FORWARD(mseal, before_seal(a, b))

/* libc has no mseal of its own before 2.43. */
static long (*real_syscall)(long, WORDS);

static long our_syscall(long number, WORDS) {
    if (number == SYS_MSEAL) before_seal(a, b);
    return real_syscall(number, a, b, c, d, e, f);
}

WRAP(syscall)

/* A system call that reads a page makes no signal, and fails: the page is touched before. */
static void read_pages(uintptr_t start, size_t size) {
    uintptr_t end = start + size;
    const Library *library;
    for (size_t i = 0; (library = next_watched(&i, start, end)) != NULL;) {
        for (size_t j = 0; j < library->range_count; j++) {
            uintptr_t from = start, to = end;
            bool may_read = library->ranges[j].protection & PROT_READ;
            for (clip(&library->ranges[j], &from, &to); may_read && from < to; from += PAGE)
                (void)*(const volatile char *)from;
        }
    }
}

static void read_parts(Word start, int count) {
    const struct iovec *part = (const struct iovec *)start;
    for (; count > 0 && is_readable((uintptr_t)part, sizeof *part); count--, part++)
        read_pages((uintptr_t)part->iov_base, part->iov_len);
}

FORWARD(write, read_pages(b, c))
ALIAS(__write, write)
FORWARD(pwrite, read_pages(b, c))
ALIAS(pwrite64, pwrite)
FORWARD(writev, read_parts(b, (int)c))
FORWARD(send, read_pages(b, c))
FORWARD(sendto, read_pages(b, c))
FORWARD(fwrite, read_pages(a, b *c))
