/* Which test runs, and what it touched: where tests are told apart, each has bits of its own.
 */
#pragma once

#include "watched.h"

/* The last record of the test that runs; NULL if none does. */
static const LogRecord *test;
static bool by_test;

/* Lets the test have bits for the libraries from `first` on. */
static void add_test(const char *name, size_t length, size_t first) {
    size_t count = atomic_load(&library_count), start = sizeof(LogRecord) + align8(length);
    size_t size = start;
    for (size_t i = first; i < count; i++) size += libraries[i].bit_bytes;
    LogRecord *record = add_record(align8(size));
    if (record == NULL) {
        note_lost(NO_ROOM);
        return;
    }
    record->kind = TEST;
    record->inode = first;
    record->file_size = count - first;
    record->path_length = (uint32_t)length;
    record->bits_offset = (uint32_t)start;
    memcpy(record + 1, name, length);
    atomic_uchar *bits = (atomic_uchar *)((uint8_t *)record + start);
    for (size_t i = first; i < count; i++) {
        atomic_store(&libraries[i].test_bits, bits);
        bits += libraries[i].bit_bytes;
    }
    publish(record, align8(size));
    test = record;
}

/* What was noted of the running test belongs to libraries by their number in the log. */
static void repeat_libraries(void) {
    size_t count = by_test ? atomic_load(&library_count) : 0;
    for (size_t i = 0; i < count; i++) {
        Library *library = &libraries[i];
        size_t start = library->record->bits_offset, size = align8(start + library->bit_bytes);
        LogRecord *record = add_record(size);
        if (record == NULL) {
            note_lost(NO_ROOM);
            by_test = false;
            test = NULL;
            return;
        }
        memcpy(&record->kind, &library->record->kind, start - offsetof(LogRecord, kind));
        library->record = record;
        publish(record, size);
    }
}

/* Makes pages inaccessible that the process has touched before. */
static void watch_again(Library *library) {
    for (size_t i = 0; library->open != NULL && i < library->bit_bytes; i++)
        atomic_store(&library->open[i], 0);
    for (size_t i = 0; i < library->range_count && !atomic_load(&library->kept); i++) {
        const Range *range = &library->ranges[i];
        if (mprotect((void *)range->start, range->end - range->start, PROT_NONE) != 0)
            give_up(library);
    }
    if (atomic_load(&library->kept))
        for (size_t i = 0; i < library->range_count; i++)
            touch(library, &library->ranges[i], library->ranges[i].start, library->ranges[i].end);
}

/* The test that runs from now on; "": none does. False: tests are not told apart. */
static bool enter_test(const char *name) {
    if (!by_test) return false;
    lock();
    size_t count = atomic_load(&library_count);
    test = NULL;
    for (size_t i = 0; i < count; i++) atomic_store(&libraries[i].test_bits, NULL);
    if (name[0] != 0 && start_log() && by_test) add_test(name, strlen(name), 0);
    if (test != NULL) {
        for (size_t i = 0; i < count; i++)
            if (atomic_load(&libraries[i].watched)) watch_again(&libraries[i]);
        atomic_store(&parts_left, most_parts);
    }
    unlock();
    return true;
}
