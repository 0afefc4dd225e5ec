/* Where the kernel says that a file is mapped: a name of the loader can lead to another file. */
#pragma once

#include "files.h"

#include <limits.h>
#include <link.h>
#include <sys/auxv.h>

/* Whether what the loader shows an auditor is a library: the program itself has no name, and the
 * kernel's vdso no file. */
static inline bool is_library(const struct link_map *map) {
    return map->l_name != NULL && map->l_name[0] != 0 && map->l_addr != getauxval(AT_SYSINFO_EHDR);
}

typedef struct {
    uint64_t major, minor, inode;
} FileId;

/* Digits up to `end`, which is stepped over; strtoul would bind to the newest glibc's. */
static inline bool parse_number(const char **text, unsigned base, char end, uint64_t *number) {
    const char *p = *text;
    uint64_t value = 0;
    for (; *p != end; p++) {
        unsigned digit = *p >= '0' && *p <= '9'   ? (unsigned)(*p - '0')
                         : *p >= 'a' && *p <= 'f' ? (unsigned)(*p - 'a') + 10
                                                  : UINT_MAX;
        if (digit >= base || value > (UINT64_MAX - digit) / base) return false;
        value = value * base + digit;
    }
    if (p == *text) return false;
    *text = p + 1;
    *number = value;
    return true;
}

typedef struct {
    uint64_t start, end, offset;
    FileId id; /* as the kernel's mapping has it: of a layer of an overlay file system, say */
    char *path;
    bool has_code;
} Mapping;

/* A line of /proc/PID/maps, without its end. */
static inline bool parse_mapping(char *line, Mapping *mapping) {
    const char *text = line;
    if (!parse_number(&text, 16, '-', &mapping->start) ||
        !parse_number(&text, 16, ' ', &mapping->end) || strnlen(text, 5) < 5)
        return false;
    mapping->has_code = text[2] == 'x';
    text += 5;
    if (!parse_number(&text, 16, ' ', &mapping->offset) ||
        !parse_number(&text, 16, ':', &mapping->id.major) ||
        !parse_number(&text, 16, ' ', &mapping->id.minor) ||
        !parse_number(&text, 10, ' ', &mapping->id.inode))
        return false;
    mapping->path = line + (text - line) + strspn(text, " ");
    /* So the kernel writes a line feed, and nothing else (show_map_vma in fs/proc/task_mmu.c). */
    for (char *place = mapping->path; (place = strstr(place, "\\012")) != NULL;) {
        *place++ = '\n';
        memmove(place, place + 3, strlen(place + 3) + 1);
    }
    return true;
}

/* The mapping at an address. The list is in order of addresses and is read as far as needed;
 * what was mapped last comes first among the libraries. */
static inline bool find_mapping(uintptr_t address, Mapping *mapping) {
    static char data[5 * PATH_MAX];
    /* /proc/self is empty once the first thread has ended. */
    int fd = open_file("/proc/thread-self/maps", O_RDONLY, 0);
    if (fd < 0) return false;
    bool found = false;
    size_t length = 0;
    ssize_t count;
    while (!found && length < sizeof data - 1 &&
           (count = read_file(fd, data + length, sizeof data - 1 - length)) > 0) {
        length += (size_t)count;
        data[length] = 0;
        char *text = data, *newline;
        while (!found && (newline = strchr(text, '\n')) != NULL) {
            *newline = 0;
            found =
                parse_mapping(text, mapping) && mapping->start <= address && address < mapping->end;
            text = newline + 1;
        }
        if (!found) {
            length -= (size_t)(text - data);
            memmove(data, text, length);
        }
    }
    close_file(fd);
    return found;
}
