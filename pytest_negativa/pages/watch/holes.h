/* Holes of libraries with a spare, removed code of overwritten ones: inaccessible, if they can be.
 *
 * A library that rewriting/compact/cut.py cut maps its spare into its holes while it is relocated,
 * as its note says (spare/stub.c). That is after la_objopen. So the note in memory gets PROT_NONE
 * for each hole: the library itself maps them inaccessible, and the handler gives each page the
 * protection that the file has for it. Not so for holes with constants, because the kernel reads
 * these for system calls without a signal: they come from the spare as always, and no log has them.
 *
 * Overwritten libraries have no note: the file that NEGATIVA_PAGES_ARMED names has a row for each,
 * with a note behind it if it has holes (verifying/tripwire.py). Their holes are armed:
 * inaccessible from la_objopen on. Only whoever needs what was removed touches them.
 */
#pragma once

#include "../format.h"
#include "hide.h"
#include "sections.h"

enum { MAX_HOLES = 65536, MAX_NAME = 255 };

static Hole *holes_of(const Note *note) { return (Hole *)((uintptr_t)note + note->holes); }

static bool is_sound(const Note *note) {
    if ((uintptr_t)note % 8 || !is_readable((uintptr_t)note, sizeof *note) ||
        memcmp(note->magic, NOTE_MAGIC, sizeof note->magic) != 0 || note->version != NOTE_VERSION ||
        note->holes % 8 || note->hole_count == 0 || note->hole_count > MAX_HOLES ||
        !is_readable((uintptr_t)holes_of(note), note->hole_count * sizeof(Hole)) ||
        !is_readable((uintptr_t)note + note->name, MAX_NAME))
        return false;
    uint64_t last = 0;
    for (const Hole *hole = holes_of(note); hole < holes_of(note) + note->hole_count; hole++) {
        if ((hole->start | hole->end | hole->offset) % PAGE || hole->start < last ||
            hole->end <= hole->start || hole->end >> 48 || hole->offset >> 48 ||
            (hole->protection | PROT_WRITE | PROT_EXEC) != (PROT_READ | PROT_WRITE | PROT_EXEC))
            return false;
        last = hole->end;
    }
    return true;
}

/* The loader names a library by its original's path if it was found by a search. */
typedef struct {
    uint32_t size; /* of the row, with its note if the copy has holes, and with the copy's path */
    uint32_t path; /* where that begins in the row */
    struct {
        uint32_t major, minor;
        uint64_t inode, size;
        int64_t modified_ns;
    } files[2]; /* the copy and its original */
} ArmedRow;

static bool read_armed(const char *path) {
    int fd = open_file(path, O_RDONLY | O_NONBLOCK, 0);
    armed.data = fd < 0 ? NULL : (uint8_t *)read_whole(fd, SIZE_MAX - 1, &armed.size);
    return armed.data != NULL && armed.size > 0;
}

static const ArmedRow *find_row(const struct link_map *map) {
    LogRecord file = {0};
    /* Who opens an original while the tests run on the copies is found out. */
    describe(&file, AT_FDCWD, map->l_name);
    for (size_t at = 0; at + sizeof(ArmedRow) <= armed.size;) {
        const ArmedRow *row = (const ArmedRow *)(armed.data + at);
        if (row->size <= sizeof *row || row->size % 8 || row->size > armed.size - at ||
            row->path < sizeof *row || row->path >= row->size ||
            ((const char *)row)[row->size - 1] != 0)
            return NULL;
        for (int i = 0; i < 2; i++)
            if (row->files[i].major == file.major && row->files[i].minor == file.minor &&
                row->files[i].inode == file.inode && row->files[i].size == file.file_size &&
                row->files[i].modified_ns == file.modified_ns)
                return row;
        at += row->size;
    }
    return NULL;
}

/* The note of a library with a spare; NULL: it has none. */
static const Note *find_note(const struct link_map *map) {
    uintptr_t place = tag_value(map, DT_NEGATIVA_NOTE);
    return place == 0 ? NULL : (const Note *)(map->l_addr + place);
}

/* Whether code may become accessible later; see our_prctl. */
static bool may_open_code(void) {
    void *trial = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (trial == MAP_FAILED) return false;
    bool opened = mprotect(trial, PAGE, PROT_READ | PROT_EXEC) == 0;
    munmap(trial, PAGE);
    return opened;
}

/* Lets the library map its holes inaccessible. */
static bool hide_holes(const Note *note) {
    Hole *holes = holes_of(note);
    uintptr_t start = (uintptr_t)holes & ~(uintptr_t)(PAGE - 1);
    size_t size = (uintptr_t)(holes + note->hole_count) - start;
    if (mprotect((void *)start, size, PROT_READ | PROT_WRITE) != 0) return false;
    for (size_t i = 0; i < note->hole_count; i++)
        if (!holes[i].constants) holes[i].protection = PROT_NONE;
    mprotect((void *)start, size, PROT_READ);
    return true;
}

static bool add_holes(Library *library, const Note *note, size_t pages) {
    char text[MAX_NAME + sizeof note->original];
    const char *name = (const char *)note + note->name;
    size_t length = strnlen(name, MAX_NAME), bytes = align8(library->bit_bytes);
    memcpy(text, name, length);
    memcpy(text + length, note->original, sizeof note->original);
    if (!begin_record(library, HOLES, text, length + sizeof note->original, bytes + pages * 2))
        return false;
    library->record->file_size = note->original_size;
    library->record->path_length = (uint32_t)length;
    library->firsts = (atomic_ushort *)((uint8_t *)library->bits + bytes);
    publish(library->record);
    return true;
}

static Library *watch_holes(const struct link_map *map, const Note *note) {
    if (note == NULL || !is_sound(note)) return NULL;
    if (only_holes && note->flags & RESTARTABLE) {
        say((const char *)note + note->name,
            "it has restartable sequences (rseq), whose code the kernel reads without a signal.");
        return NULL;
    }
    if (!may_open_code()) {
        note_lost("the system does not let this process make code accessible.");
        return NULL;
    }
    Library *library = begin_library(map);
    if (library == NULL) return NULL;
    Range *ranges = map_zeroed(note->hole_count * sizeof *ranges);
    if (ranges != NULL) {
        library->ranges = ranges;
        library->range_count = note->hole_count;
        for (size_t i = 0; i < note->hole_count; i++) {
            const Hole *hole = &holes_of(note)[i];
            ranges[i] = (Range){library->base + hole->start,
                                library->base + (hole->constants ? hole->start : hole->end),
                                (int)hole->protection, 0, hole->offset};
        }
        size_t pages = number_pages(library);
        if (add_holes(library, note, pages)) {
            atomic_store(&library->watched, true); /* the handler finds it now */
            if (armed.data != NULL)
                hide_by_mprotect(library);
            else
                library->open = map_zeroed(library->bit_bytes);
            if (armed.data != NULL || hide_holes(note)) return library;
            give_up(library);
            atomic_store(&library->watched, false);
        }
    }
    note_lost(NO_ROOM);
    return NULL;
}
