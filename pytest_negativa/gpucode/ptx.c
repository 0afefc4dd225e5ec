/* Finds the declarations in PTX; loaded by ptx.py.
 *
 * The regular expression that reads a declaration is tried at every dot, and PTX has one in 25
 * bytes. This search takes a third of the time.
 */

#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))

/* Whether the `left` bytes begin with a word of `length` bytes and white space, as Python's \s. */
static inline bool begins(const char *text, size_t left, const char *word, size_t length)
{
    return left > length && memcmp(text, word, length) == 0 &&
           (text[length] == ' ' || (text[length] >= '\t' && text[length] <= '\r'));
}

static inline bool may_declare(const char *text, size_t left)
{
    switch (left == 0 ? '\0' : text[0]) {
    case 'e':
        return begins(text, left, "entry", 5);
    case 'f':
        return begins(text, left, "func", 4);
    case 'g':
        return begins(text, left, "global", 6);
    case 'c':
        return begins(text, left, "const", 5);
    default:
        return false;
    }
}

/* The offset of the first directive at or behind `from` that may declare a function or a variable;
 * -1 if there is none. */
EXPORT ssize_t negativa_find_declaration(const char *text, size_t size, size_t from)
{
    if (from > size)
        return -1;
    const char *end = text + size;
    for (const char *at = text + from; (at = memchr(at, '.', (size_t)(end - at))) != NULL; at++) {
        if (may_declare(at + 1, (size_t)(end - at - 1)))
            return at - text;
    }
    return -1;
}
