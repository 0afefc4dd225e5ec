/* Programs that a process starts without the folder for logs, or without the library that writes
 * them: whoever reads the logs can't know what code they touch. The file `lost` names them. See
 * libc.h.
 *
 * After vfork this runs in the parent's memory, so it changes nothing but that file.
 */
#pragma once

#include "libc.h"
#include "log.h"

#include <fcntl.h>

static bool has(const char *const *environment, const char *name) {
    for (; is_readable((uintptr_t)environment, sizeof *environment) && *environment; environment++)
        if (is_readable((uintptr_t)*environment, 1) &&
            strncmp(*environment, name, strlen(name)) == 0)
            return true;
    return false;
}

/* Appends a string, cut off before the last byte of `text`, which is zeros; returns its length. */
static size_t append(char text[START_LENGTH], size_t used, const char *string) {
    for (; is_readable((uintptr_t)string, 1) && *string && used < START_LENGTH - 1; string++)
        text[used++] = *string;
    return used;
}

static void note_start(const char *path, const char *const *words, const char *const *environment) {
    char text[START_LENGTH] = {0};
    size_t used;
    if (only_holes || log_.shared == NULL || !is_readable((uintptr_t)log_.shared, 1) ||
        (has(environment, "NEGATIVA_PAGES_LOGS=") && has(environment, "LD_AUDIT=")))
        return;
    /* Who looks for a program tries each folder of PATH. */
    if (is_readable((uintptr_t)path, 1) && strchr(path, '/') &&
        syscall(SYS_faccessat, AT_FDCWD, path, X_OK) != 0)
        return;
    used = append(text, 0, path);
    for (const char *gap = "\n"; is_readable((uintptr_t)words, sizeof *words) && *words; gap = " ")
        used = append(text, append(text, used, gap), *words++);
    unsigned known = atomic_load(&log_.shared->started);
    for (unsigned i = 0; i < known && i < STARTS; i++)
        if (strcmp(log_.shared->starts[i], text) == 0) return;
    unsigned place = atomic_fetch_add(&log_.shared->started, 1);
    if (place < STARTS) memcpy(log_.shared->starts[place], text, sizeof text);
}

#define NOTE_START(path, words, environment)                       \
    note_start((const char *)(path), (const char *const *)(words), \
               (const char *const *)(environment))

FORWARD(execvpe, NOTE_START(a, b, c))
FORWARD(posix_spawn, NOTE_START(b, e, f))
FORWARD(posix_spawnp, NOTE_START(b, e, f))
