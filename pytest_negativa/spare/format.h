/* The formats of a cut library and its spare; see note.py. */
#pragma once

#include <stdint.h>

typedef struct {
    uint64_t start, end, offset;    /* addresses as in the file; offset in the original */
    uint32_t protection, constants; /* constants: 1 if it has any */
} Hole;

typedef struct {
    char magic[8];
    uint32_t version, flags;
    uint8_t pair[32], original[32];
    uint64_t original_size, reserved;
    /* From the start of the note: the holes, their number, and strings. */
    uint32_t holes, hole_count, name, spare, folders, remedy;
} Note;

typedef struct {
    char magic[8];
    uint32_t version, kept_count;
    uint8_t pair[32], original[32];
    uint64_t original_size;
} Trailer;
