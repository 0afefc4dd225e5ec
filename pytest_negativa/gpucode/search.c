/* The searches through whole sections and unpacked text; loaded by search.py.
 *
 * They look at 16 bytes at a time: for containers seven times as fast as memmem(3) for each magic
 * number, for kernels in PTX three times as fast as a regular expression, which is tried at every
 * dot.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))

typedef uint8_t block __attribute__((vector_size(16)));

/* Bytes behind an offset that a look at the block there reads. */
#define REACH (sizeof(block) + 2)

static inline block load(const uint8_t *at) {
    block loaded;
    memcpy(&loaded, at, sizeof loaded);
    return loaded;
}

static inline bool is_zero(block places) {
    uint64_t halves[2];
    memcpy(halves, &places, sizeof halves);
    return (halves[0] | halves[1]) == 0;
}

/* `at`, or the end of the blocks behind it that have no place for a hit: four at a time. */
static inline __attribute__((always_inline)) size_t skip(const uint8_t *data, size_t size,
                                                         size_t at,
                                                         block (*may_hit)(const uint8_t *)) {
    while (at < size && size - at >= 3 * sizeof(block) + REACH) {
        const uint8_t *four = data + at;
        if (!is_zero(may_hit(four) | may_hit(four + sizeof(block)) |
                     may_hit(four + 2 * sizeof(block)) | may_hit(four + 3 * sizeof(block))))
            break;
        at += 4 * sizeof(block);
    }
    return at;
}

/* The offset of the first hit at or behind `from`, or -1.
 *
 * `may_hit` is not 0 where the bytes of a block may begin a hit; `is_hit` tells. */
static inline __attribute__((always_inline)) ssize_t find(const uint8_t *data, size_t size,
                                                          size_t from,
                                                          block (*may_hit)(const uint8_t *),
                                                          bool (*is_hit)(const uint8_t *, size_t)) {
    size_t at = skip(data, size, from, may_hit);
    for (; at < size && size - at >= REACH; at = skip(data, size, at + sizeof(block), may_hit)) {
        block places = may_hit(data + at);
        for (size_t i = 0; !is_zero(places) && i < sizeof places; i++) {
            if (places[i] != 0 && is_hit(data + at + i, size - at - i)) return (ssize_t)(at + i);
        }
    }
    for (; at < size; at++) {
        if (is_hit(data + at, size - at)) return (ssize_t)at;
    }
    return -1;
}

static inline bool starts(const uint8_t *data, size_t left, const char *word, size_t length) {
    return left >= length && memcmp(data, word, length) == 0;
}

/* The magic numbers of fatbin.py and frames.py. */
static inline bool is_region(const uint8_t *data, size_t left) {
    return starts(data, left, "\x50\xED\x55\xBA", 4);
}

static inline bool is_container(const uint8_t *data, size_t left) {
    return is_region(data, left) || starts(data, left, "\x28\xB5\x2F\xFD", 4) ||
           starts(data, left, "\177ELF\2\1\1", 7);
}

static inline block may_be_region(const uint8_t *data) {
    return (block)((load(data) == 0x50) & (load(data + 1) == 0xED));
}

static inline block may_be_container(const uint8_t *data) {
    block first = load(data), second = load(data + 1);
    return (block)(((first == 0x50) & (second == 0xED)) | ((first == 0x28) & (second == 0xB5)) |
                   ((first == 0x7F) & (second == 'E')));
}

/* The first region. */
EXPORT ssize_t negativa_find_region(const uint8_t *data, size_t size, size_t from) {
    return find(data, size, from, may_be_region, is_region);
}

/* The first region, zstd frame or ELF file. */
EXPORT ssize_t negativa_find_container(const uint8_t *data, size_t size, size_t from) {
    return find(data, size, from, may_be_container, is_container);
}

/* Whether the directive and white space, as Python's \s, begin here. */
static inline bool is_entry(const uint8_t *text, size_t left) {
    return left > 6 && starts(text, left, ".entry", 6) &&
           (text[6] == ' ' || (text[6] >= '\t' && text[6] <= '\r'));
}

static inline block may_be_entry(const uint8_t *text) {
    return (block)((load(text) == '.') & (load(text + 1) == 'e') & (load(text + 2) == 'n'));
}

/* In PTX, the first directive that may declare a kernel. */
EXPORT ssize_t negativa_find_entry(const uint8_t *text, size_t size, size_t from) {
    return find(text, size, from, may_be_entry, is_entry);
}
