/* Pages that other processes have touched: records as in a log. */
#pragma once

#include "sections.h"

#ifndef LARGE /* pages: a library for which it pays to look into the logs of other processes */
#define LARGE 256
#endif

static bool read_records(const char *path, Records *records) {
    size_t size = 0;
    int fd = open_file(path, O_RDONLY | O_NONBLOCK, 0);
    char *data = fd < 0 ? NULL : read_whole(fd, SIZE_MAX - 1, &size);
    if (size == 0) return false;
    mprotect(data, size, PROT_READ);
    *records = (Records){(void *)data, size};
    return true;
}

/* The bits of the same file with the same ranges; NULL if there are none. */
static const uint8_t *find_bits(const Records *records, const LogRecord *wanted) {
    for (size_t at = 0; at + sizeof(LogRecord) <= records->size;) {
        const LogRecord *row = (const LogRecord *)(records->data + at);
        if (row->size == 0) {
            at = (at / CHUNK + 1) * CHUNK;
            continue;
        }
        if (row->size < sizeof *row || row->size % 8 || row->size > records->size - at) return NULL;
        if (row->size == wanted->size && memcmp(row, wanted, wanted->bits_offset) == 0)
            return (const uint8_t *)row + wanted->bits_offset;
        at += row->size;
    }
    return NULL;
}

/* ---- What other processes have touched ---- */

/* Logs of processes that began before. Their pages are noted, so they need no watching here. */
static struct {
    bool looked;
    size_t count;
    Records logs[OFFERED];
} known;

static void read_known(void) {
    static char path[PATH_MAX + LOG_NAME + 1];
    known.looked = true;
    for (size_t i = 0; log_.shared != NULL && i < OFFERED; i++) {
        char name[LOG_NAME];
        memcpy(name, log_.shared->names[i], LOG_NAME);
        name[LOG_NAME - 1] = 0;
        if (name[0] == 0 || strchr(name, '/') != NULL) continue;
        strcpy(path, log_.folder);
        strcat(path, "/");
        strcat(path, name);
        known.count += read_records(path, &known.logs[known.count]);
    }
}

static bool is_known(const uint8_t *const *bits, size_t count, uint64_t page) {
    for (size_t i = 0; i < count; i++)
        if (bits[i][page / 8] >> (page % 8) & 1) return true;
    return false;
}

/* Opens the pages that another process has touched. The first touch of such a page in this process
 * would add nothing: all logs together count. */
static void open_known(const Library *library) {
    const uint8_t *bits[OFFERED];
    size_t count = 0, pages = library->bit_bytes * 8;
    if (!atomic_load(&library->guarded)) return;
    if (!known.looked && pages >= LARGE) read_known();
    for (size_t i = 0; i < known.count; i++)
        if ((bits[count] = find_bits(&known.logs[i], library->record)) != NULL) count++;
    for (size_t i = 0; i < library->range_count && count > 0; i++) {
        const Range *range = &library->ranges[i];
        uintptr_t start = range->start;
        for (uintptr_t at = start; at <= range->end; at += PAGE) {
            if (at < range->end && is_known(bits, count, range->first + (at - range->start) / PAGE))
                continue;
            if (start < at) show(library, range, start, at);
            start = at + PAGE;
        }
    }
}
