/* What the program does to its own memory, by other versions of libc's functions.
 */
#pragma once

#include "hide.h"

#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

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

static int our_mprotect(void *start, size_t size, int protection) {
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

/* A system call that reads a page makes no signal, and fails: the page is touched before. */
static void read_pages(const void *data, size_t size) {
    uintptr_t start = (uintptr_t)data, end = start + size;
    size_t count = atomic_load(&library_count);
    for (size_t i = 0; i < count; i++) {
        const Library *library = &libraries[i];
        if (end <= library->low || start >= library->high || !atomic_load(&library->watched))
            continue;
        for (size_t j = 0; j < library->range_count; j++) {
            const Range *range = &library->ranges[j];
            uintptr_t from = start > range->start ? start & ~(uintptr_t)(PAGE - 1) : range->start;
            for (; range->protection & PROT_READ && from < end && from < range->end; from += PAGE)
                (void)*(const volatile char *)from;
        }
    }
}

static ssize_t (*real_write)(int, const void *, size_t);
static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);
static ssize_t (*real_writev)(int, const struct iovec *, int);
static ssize_t (*real_send)(int, const void *, size_t, int);
static ssize_t (*real_sendto)(int, const void *, size_t, int, const struct sockaddr *, socklen_t);
static size_t (*real_fwrite)(const void *, size_t, size_t, FILE *);

static ssize_t our_write(int fd, const void *data, size_t size) {
    read_pages(data, size);
    return real_write(fd, data, size);
}

static ssize_t our_pwrite(int fd, const void *data, size_t size, off_t offset) {
    read_pages(data, size);
    return real_pwrite(fd, data, size, offset);
}

static ssize_t our_writev(int fd, const struct iovec *parts, int count) {
    for (int i = 0; i < count && is_readable((uintptr_t)&parts[i], sizeof *parts); i++)
        read_pages(parts[i].iov_base, parts[i].iov_len);
    return real_writev(fd, parts, count);
}

static ssize_t our_send(int fd, const void *data, size_t size, int flags) {
    read_pages(data, size);
    return real_send(fd, data, size, flags);
}

static ssize_t our_sendto(int fd, const void *data, size_t size, int flags,
                          const struct sockaddr *to, socklen_t length) {
    read_pages(data, size);
    return real_sendto(fd, data, size, flags, to, length);
}

static size_t our_fwrite(const void *data, size_t size, size_t count, FILE *file) {
    read_pages(data, size * count);
    return real_fwrite(data, size, count, file);
}

static const FaultsWrapper wrappers[] = {
    {"write", (void *)our_write, (void **)&real_write},
    {"__write", (void *)our_write, (void **)&real_write},
    {"pwrite", (void *)our_pwrite, (void **)&real_pwrite},
    {"pwrite64", (void *)our_pwrite, (void **)&real_pwrite},
    {"writev", (void *)our_writev, (void **)&real_writev},
    {"send", (void *)our_send, (void **)&real_send},
    {"sendto", (void *)our_sendto, (void **)&real_sendto},
    {"fwrite", (void *)our_fwrite, (void **)&real_fwrite},
    {"prctl", (void *)our_prctl, (void **)&real_prctl},
    {"mprotect", (void *)our_mprotect, (void **)&real_mprotect},
    {"pkey_mprotect", (void *)our_pkey_mprotect, (void **)&real_pkey_mprotect},
};
