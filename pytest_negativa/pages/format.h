/* The formats of a cut library and its spare; see note.py, which writes them. */
#pragma once

#include <stdint.h>

#define NOTE_MAGIC "NEGPAGES"
enum { NOTE_VERSION = 1, DT_NEGATIVA_NOTE = 0x6e656761 };
enum { RESTARTABLE = 1 }; /* flag of a note, see note.py */

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

/* Why a library is refused, the most telling last: the spare is in no folder, can't be opened, is
 * that of another library or cut, is not to be trusted, lies where no code may run, can't be
 * mapped. */
enum { ABSENT, CLOSED, OTHER, UNTRUSTED, NOEXEC, UNMAPPED, PROBLEMS, NONE };

/* Addresses are as in the file; names are offsets in the dynamic strings. See cut.py. */
typedef struct {
    uint64_t own, note;
    uint64_t symbols, symbols_start, symbols_size; /* the pages of their segment */
    uint64_t headers, header_count;
    uint32_t messages[PROBLEMS];
} Parameters;

_Static_assert(sizeof(Parameters) == 80, "cut.py fills it");
