/* Which pages of its libraries' constants a process has in memory when it ends.
 *
 * Nothing is armed: the kernel reads constants for system calls, and would fail them (EFAULT). The
 * page table says what was mapped (proc_pid_pagemap(5)): with a page come the 16 around it that are
 * in memory already (fault-around), and since Linux 6.18 their whole folios. It belongs to one
 * process. So a record counts the processes that have its library and have not noted their pages:
 * the one that loaded it, and forked children. If that is not 0 at the end, because a signal or a
 * system call ended one, all of them count as read.
 */
#pragma once

#include "program.h"
#include "starts.h"

#define PRESENT (UINT64_C(3) << 62) /* in memory, or swapped */

/* Sets the bits of the pages from `first` on that are in memory. */
static bool note_present(int pagemap, atomic_uchar *bits, uint64_t first, uintptr_t start,
                         uintptr_t end) {
    uint64_t words[512];
    for (uintptr_t at = start; at < end; at += sizeof words / 8 * PAGE) {
        size_t count = (end - at) / PAGE, run = 0;
        if (count > sizeof words / 8) count = sizeof words / 8;
        if (syscall(SYS_pread64, pagemap, words, count * 8, at / PAGE * 8) != (ssize_t)count * 8)
            return false;
        uint64_t page = first + (at - start) / PAGE;
        for (size_t i = 0; i < count; i = run + 1) {
            for (run = i; run < count && words[run] & PRESENT; run++) {
            }
            set_bits(bits, page + i, page + run);
        }
    }
    return true;
}

static void note_constants(Library *library, int pagemap) {
    LogRecord *record = library->constants;
    if (record == NULL || !is_readable((uintptr_t)record, record->size)) return;
    const LogRange *ranges = (const LogRange *)(record + 1);
    atomic_uchar *bits = (atomic_uchar *)record + record->bits_offset;
    uint64_t first = 0;
    for (uint32_t i = 0; i < record->range_count; i++) {
        if (!note_present(pagemap, bits, first, library->base + ranges[i].start,
                          library->base + ranges[i].end))
            return;
        first += (ranges[i].end - ranges[i].start) / PAGE;
    }
    atomic_fetch_sub((atomic_uint *)&record->flags, 1);
}

static int open_pagemap(void) { return open_file("/proc/self/pagemap", O_RDONLY, 0); }

/* As the process ends, or becomes another program. */
static void note_all_constants(void) {
    /* A child of vfork shares its parent's memory, and the parent goes on. */
    int pagemap = only_holes || faults_is_vforked() ? -1 : open_pagemap();
    if (pagemap < 0) return;
    for (size_t i = 0, count = atomic_load(&library_count); i < count; i++)
        if (atomic_load(&library_at(i)->watched)) note_constants(library_at(i), pagemap);
    close_file(pagemap);
}

/* One more process will note, or one less. */
static void expect_notes(unsigned more) {
    for (size_t i = 0, count = atomic_load(&library_count); i < count; i++) {
        LogRecord *record = atomic_load(&library_at(i)->watched) ? library_at(i)->constants : NULL;
        if (record != NULL && is_readable((uintptr_t)record, sizeof *record))
            atomic_fetch_add((atomic_uint *)&record->flags, more);
    }
}

__attribute__((destructor)) static void note_at_end(void) { note_all_constants(); }

static pid_t (*real_fork)(void);
static int (*real_execve)(Word, Word, Word);
static int (*real_execv)(Word, Word);

static pid_t our_fork(void) {
    expect_notes(1);
    pid_t pid = real_fork();
    if (pid < 0) expect_notes(-1U);
    return pid;
}

/* This process goes on. */
static int after_exec(int status) {
    if (!faults_is_vforked()) expect_notes(1);
    return status;
}

static int our_execve(Word path, Word arguments, Word environment) {
    note_all_constants();
    NOTE_START(path, arguments, environment);
    return after_exec(real_execve(path, arguments, environment));
}

static int our_execv(Word path, Word arguments) {
    note_all_constants();
    return after_exec(real_execv(path, arguments));
}

WRAP(fork)
WRAP(execve)
WRAP(execv)
FORWARD(_exit, note_all_constants())
ALIAS(_Exit, _exit)
