/* The searches through whole sections and unpacked text; loaded by search.py.
 *
 * They look at 16 bytes at a time: for containers seven times as fast as memmem(3) for each magic
 * number, for declarations three times as fast as a regular expression, which is tried at every
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

/* The offset of the first hit at or behind `from`, or -1.
 *
 * `may_hit` is not 0 where the bytes of a block may begin a hit; `is_hit` tells. */
static inline __attribute__((always_inline)) ssize_t find(const uint8_t *data, size_t size,
                                                          size_t from,
                                                          block (*may_hit)(const uint8_t *),
                                                          bool (*is_hit)(const uint8_t *, size_t)) {
    for (size_t at = from; at < size; at += sizeof(block)) {
        if (size - at >= REACH && is_zero(may_hit(data + at))) continue;
        for (size_t i = at; i < size && i < at + sizeof(block); i++)
            if (is_hit(data + i, size - i)) return (ssize_t)i;
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

/* Whether it begins with a directive and white space, as Python's \s. */
static inline bool is_directive(const uint8_t *text, size_t left, const char *word, size_t length) {
    return left > length && starts(text, left, word, length) &&
           (text[length] == ' ' || (text[length] >= '\t' && text[length] <= '\r'));
}

static inline bool is_declaration(const uint8_t *text, size_t left) {
    return is_directive(text, left, ".entry", 6) || is_directive(text, left, ".func", 5) ||
           is_directive(text, left, ".global", 7) || is_directive(text, left, ".const", 6);
}

static inline block may_be_declaration(const uint8_t *text) {
    block second = load(text + 1), third = load(text + 2);
    return (block)((load(text) == '.') &
                   (((second == 'e') & (third == 'n')) | ((second == 'f') & (third == 'u')) |
                    ((second == 'g') & (third == 'l')) | ((second == 'c') & (third == 'o'))));
}

/* In PTX, the first directive that may declare a function or a variable. */
EXPORT ssize_t negativa_find_declaration(const uint8_t *text, size_t size, size_t from) {
    return find(text, size, from, may_be_declaration, is_declaration);
}
