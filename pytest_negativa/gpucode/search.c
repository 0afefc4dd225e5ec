/* The search for words in whole sections and unpacked text; loaded by search.py.
 *
 * It looks at 16 bytes at a time, which is several times as fast as memmem(3) for each magic
 * number, and as a regular expression for kernels in PTX, which is tried at every dot.
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

/* Not 0 where the bytes of a block may begin a hit. */
static inline block may_hit(const uint8_t *at, const block *seconds, const block *thirds,
                            size_t count) {
    block second = load(at + 1), third = load(at + 2), places = {0};
    for (size_t w = 0; w < count; w++)
        places |= (block)((second == seconds[w]) & (third == thirds[w]));
    return places;
}

/* The compiler unrolls it for each count. */
__attribute__((always_inline)) static inline ssize_t find(const uint8_t *data, size_t size,
                                                          size_t from, const char *const *words,
                                                          size_t count, bool spaced) {
    block seconds[MOST_WORDS], thirds[MOST_WORDS];
    for (size_t w = 0; w < count; w++) {
        seconds[w] = (block){0} + (uint8_t)words[w][1];
        thirds[w] = (block){0} + (uint8_t)words[w][2];
    }
    for (size_t at = from; at < size; at += sizeof(block)) {
        for (; size - at >= 4 * sizeof(block) + 2; at += 4 * sizeof(block)) {
            block places = {0};
            for (size_t i = 0; i < 4; i++)
                places |= may_hit(data + at + i * sizeof(block), seconds, thirds, count);
            if (!is_zero(places)) break;
        }
        block places = ~(block){0};
        if (size - at >= sizeof(block) + 2) places = may_hit(data + at, seconds, thirds, count);
        if (is_zero(places)) continue;
        for (size_t i = 0; i < sizeof(block) && i < size - at; i++)
            for (size_t w = 0; places[i] && w < count; w++)
                if (is_hit(data + at + i, size - at - i, words[w], spaced))
                    return (ssize_t)(at + i);
    }
    return -1;
}

/* The offset of the first hit at or behind `from`, or -1. The words, at most MOST_WORDS, have three
 * bytes or more; the first tells little, because all directives of PTX begin with a dot. */
__attribute__((visibility("default"))) ssize_t negativa_find(const uint8_t *data, size_t size,
                                                             size_t from, const char *const *words,
                                                             size_t count, bool spaced) {
    if (count == 1) return find(data, size, from, words, 1, spaced);
    if (count == 3) return find(data, size, from, words, 3, spaced);
    return find(data, size, from, words, count, spaced);
}
