/* Which file lies at an address (mappings.py). */
#pragma once

#include "../../native/maps.h"
#include "contexts.h"

static Text maps_text;
static Mapping *mappings; /* paths lie in maps_text; `has_code`: any part of the file has */
static size_t mapping_count;
static unsigned long long read_at_adds = ~0ull, read_at_subs;
static bool maps_valid;

static int note_generation(struct dl_phdr_info *info, size_t size, void *data) {
    unsigned long long *counters = data;
    if (size >= offsetof(struct dl_phdr_info, dlpi_subs) + sizeof info->dlpi_subs) {
        counters[0] = info->dlpi_adds;
        counters[1] = info->dlpi_subs;
    }
    return 1;
}

static bool starts_with(const char *text, const char *start) {
    return strncmp(text, start, strlen(start)) == 0;
}

/* Length of a path without the mark of a file that has no name any more; else of all of it. */
static size_t length_undeleted(const char *path) {
    static const char deleted[] = " (deleted)";
    size_t length = strlen(path), tail = sizeof deleted - 1;
    bool is_marked = length > tail && strcmp(path + length - tail, deleted) == 0;
    return is_marked ? length - tail : length;
}

/* Whether the kernel gives this name to memory without a file. */
static bool names_memory(const char *path) {
    if (strcmp(path, "/dev/zero") == 0) return true; /* a private mapping */
    if (path[length_undeleted(path)] == 0) return false;
    return starts_with(path, "/memfd:") || starts_with(path, "/SYSV") ||
           starts_with(path, "/dev/zero ") || starts_with(path, "/anon_hugepage ");
}

static bool read_mappings(void) {
    unsigned long long counters[2] = {0, 0};
    dl_iterate_phdr(note_generation, counters);
    maps_text.length = 0;
    mapping_count = 0;
    maps_valid = false;
    if (!text_read(&maps_text, "/proc/self/maps")) {
        /* In a chroot without /proc: no image can be told to lie in a library. */
        write_warning("maps-unreadable", "/proc/self/maps cannot be read", true);
        return false;
    }
    size_t lines = 0;
    for (char *p = maps_text.data; (p = strchr(p, '\n')) != NULL; p++) lines++;
    Mapping *bigger = realloc(mappings, (lines + 1) * sizeof *bigger);
    if (bigger == NULL) {
        lose("out of memory");
        return false;
    }
    mappings = bigger;
    size_t count = 0;
    char *line = maps_text.data;
    for (char *end; count < lines && (end = strchr(line, '\n')) != NULL; line = end + 1) {
        *end = 0;
        if (parse_mapping(line, &bigger[count]) && bigger[count].path[0] == '/') count++;
    }
    /* What the loader mapped has a part with code. Parts of one file lie side by side. */
    for (size_t i = 0, j; i < count; i = j) {
        bool code = false;
        for (j = i; j < count && strcmp(bigger[i].path, bigger[j].path) == 0; j++)
            code = code || bigger[j].has_code;
        for (size_t k = i; k < j; k++) bigger[k].has_code = code;
    }
    mapping_count = count;
    read_at_adds = counters[0];
    read_at_subs = counters[1];
    return maps_valid = true;
}

static int compare_address(const void *address, const void *row) {
    const Mapping *mapping = row;
    uint64_t place = *(const uint64_t *)address;
    return place < mapping->start ? -1 : place >= mapping->end;
}

static const Mapping *search_mappings(uint64_t address) {
    if (mapping_count == 0) return NULL;
    return bsearch(&address, mappings, mapping_count, sizeof *mappings, compare_address);
}

static bool mappings_are_current(void) {
    unsigned long long counters[2] = {0, 0};
    dl_iterate_phdr(note_generation, counters);
    return maps_valid && counters[0] == read_at_adds && counters[1] == read_at_subs;
}
