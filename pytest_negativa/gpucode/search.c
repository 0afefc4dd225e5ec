/* The search for words in whole sections and unpacked text; loaded by search.py.
 *
 * It looks at 16 bytes at a time: for containers seven times as fast as memmem(3) for each magic
 * number, for declarations three times as fast as a regular expression, which is tried at every
 * dot.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>

typedef uint8_t block __attribute__((vector_size(16)));

enum { MOST_WORDS = 4 };

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

/* Whether it begins with the word; if `spaced`, with white space behind it, as Python's \s. */
static bool is_hit(const uint8_t *data, size_t left, const char *word, bool spaced) {
    size_t length = strlen(word);
    return left >= length + spaced && memcmp(data, word, length) == 0 &&
           (!spaced || data[length] == ' ' || (data[length] >= '\t' && data[length] <= '\r'));
}

/* The offset of the first hit at or behind `from`, or -1. The words, at most MOST_WORDS, have three
 * bytes or more; the first tells little, because all directives of PTX begin with a dot. */
__attribute__((visibility("default"))) ssize_t negativa_find(const uint8_t *data, size_t size,
                                                             size_t from, const char *const *words,
                                                             size_t count, bool spaced) {
    block seconds[MOST_WORDS], thirds[MOST_WORDS];
    for (size_t w = 0; w < count; w++) {
        seconds[w] = (block){0} + (uint8_t)words[w][1];
        thirds[w] = (block){0} + (uint8_t)words[w][2];
    }
    for (size_t at = from; at < size; at += sizeof(block)) {
        block places = ~(block){0};
        if (size - at >= sizeof(block) + 2) {
            block second = load(data + at + 1), third = load(data + at + 2);
            places = (block){0};
            for (size_t w = 0; w < count; w++)
                places |= (block)((second == seconds[w]) & (third == thirds[w]));
            if (is_zero(places)) continue;
        }
        for (size_t i = 0; i < sizeof(block) && i < size - at; i++)
            for (size_t w = 0; places[i] && w < count; w++)
                if (is_hit(data + at + i, size - at - i, words[w], spaced))
                    return (ssize_t)(at + i);
    }
    return -1;
}
