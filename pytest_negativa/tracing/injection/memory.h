/* This process's memory: a bad pointer is an answer, no crash. */
#pragma once

#include "../../native/sha256.h"
#include "text.h"

/* Watched pages of GPU code, too, which the process itself may not read. The kernel copies page by
   page, and ends before the first that is not there. */
static size_t read_memory(uint64_t address, void *buffer, size_t size) {
    if (address == 0 || address >= (uint64_t)1 << 62) return 0;
    int fd = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t got = pread(fd, buffer, size, (off_t)address);
    close(fd);
    return got > 0 ? (size_t)got : 0;
}

static uint64_t read_pointer(uint64_t address) {
    uint64_t value = 0;
    return read_memory(address, &value, sizeof value) == sizeof value ? value : 0;
}

/* A NUL-terminated string, appended to `text`; false if it can't be read or has no end. */
static bool read_string(uint64_t address, Text *text, size_t limit) {
    char buffer[4096];
    size_t total = 0;
    while (total < limit) {
        size_t got = read_memory(address + total, buffer, total ? sizeof buffer : 256);
        char *end = memchr(buffer, 0, got);
        size_t length = end == NULL ? got : (size_t)(end - buffer);
        text_bytes(text, buffer, length);
        if (end != NULL) return !text->failed;
        if (got == 0) return false;
        total += got;
    }
    return false;
}

static bool hash_memory(uint64_t address, uint64_t size, char hex[65]) {
    static unsigned char chunk[1 << 16]; /* under the lock */
    Sha sha = sha_start();
    for (uint64_t done = 0; done < size;) {
        size_t part = size - done < sizeof chunk ? (size_t)(size - done) : sizeof chunk;
        if (read_memory(address + done, chunk, part) != part) return false;
        sha_add(&sha, chunk, part);
        done += part;
    }
    sha_hex(&sha, hex);
    return true;
}
