/* The dynamic loader opens copies in place of originals; a log tells which of the two was mapped.
 *
 * glibc loads it into every process whose LD_AUDIT names it (rtld-audit(7)).
 *
 * Environment: NEGATIVA_REDIRECT_TABLE, the table that redirect.py writes (format: there), and
 * NEGATIVA_REDIRECT_LOGS, the folder in which each process makes a log file of its own.
 *
 * What glibc does, from its elf/dl-load.c (2.31 to 2.41):
 * - A name with a slash is shown once, as LA_SER_ORIG, and what is returned becomes l_name, and
 *   its folder $ORIGIN. So la_objopen writes the name that was asked for over l_name: what
 *   dladdr says leads to the original and its neighbours. dlmopen of such a name into another
 *   namespace is not shown at all.
 * - A name without a slash is shown as LA_SER_ORIG, and then each path that is tried. There,
 *   what is returned is opened, but l_name stays the path that was tried: of the original. So
 *   l_name can't tell which file was mapped; /proc/self/maps can.
 * - A folder of a search path in which a first look-up failed, and which isn't there, is
 *   never searched again. The mirror lacks most folders, so such a folder is made when one of
 *   the same name exists outside.
 *
 * Rules: never fail the process. If in doubt, return the name unchanged; the log says what was
 * mapped. The one exception is an original that no log would show. No malloc: it isn't the
 * process's own one, and not safe after a fork. No descriptor is kept open: tests close what they
 * did not open. One write for each record. The loader calls la_objsearch and la_objopen under its
 * lock, so static buffers suffice.
 */
#define _GNU_SOURCE
#include "../native/maps.h"

#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

static const char TABLE_HEAD[] = "negativa-redirect 1\t";
static const char LOG_HEAD[] = "negativa-redirect-log 1";
enum { MAX_TABLE = 16 << 20 };

/* ---- System calls ---- */

static bool same_file(FileId a, FileId b) {
    return a.inode == b.inode && a.major == b.major && a.minor == b.minor;
}

/* statx and not stat: a library built with glibc 2.33 or newer could not use stat on an older. */
static bool identify(const char *path, FileId *id) {
    struct statx status;
    if (statx(AT_FDCWD, path, 0, STATX_INO, &status) != 0) return false;
    *id = (FileId){status.stx_dev_major, status.stx_dev_minor, status.stx_ino};
    return true;
}

static bool is_folder(const char *path) {
    struct statx status;
    return statx(AT_FDCWD, path, 0, STATX_TYPE, &status) == 0 && S_ISDIR(status.stx_mode);
}

/* ---- The table ---- */

typedef struct {
    FileId original_id, copy_id;
    const char *original, *copy; /* real paths; the copy is the root and then the original */
    char *link;                  /* see note_link */
    bool mapped;                 /* whether its copy was mapped in this process */
} Row;

static struct {
    const char *root;
    size_t root_length;
    Row *rows;
    size_t count;
} table;

static bool parse_id(const char **text, FileId *id) {
    return parse_number(text, 10, '\t', &id->major) && parse_number(text, 10, '\t', &id->minor) &&
           parse_number(text, 10, '\t', &id->inode);
}

static bool parse_row(const char *text, Row *row) {
    if (!parse_id(&text, &row->original_id) || !parse_id(&text, &row->copy_id)) return false;
    row->copy = text;
    row->original = text + table.root_length;
    return strncmp(text, table.root, table.root_length) == 0 && row->original[0] == '/';
}

/* Lines: TABLE_HEAD with the root; "library", two identities and the copy's path; "end" and the
 * number of libraries, without which the table is not whole. */
static bool parse_table(char *text) {
    char *line = strsep(&text, "\n");
    table.root = line + strlen(TABLE_HEAD);
    if (strncmp(line, TABLE_HEAD, strlen(TABLE_HEAD)) != 0 || table.root[0] != '/') return false;
    table.root_length = strlen(table.root);
    while ((line = strsep(&text, "\n")) != NULL && strncmp(line, "library\t", 8) == 0)
        if (!parse_row(line + 8, &table.rows[table.count++])) return false;
    if (line == NULL || text == NULL || *text != 0 || strncmp(line, "end\t", 4) != 0) return false;
    const char *number = line + 4;
    uint64_t count;
    return parse_number(&number, 10, 0, &count) && count == table.count;
}

/* NULL, or what is wrong. */
static const char *read_table(const char *path) {
    int fd = open_file(path, O_RDONLY | O_NONBLOCK, 0);
    if (fd < 0) return "the table can't be opened";
    size_t size, lines = 1;
    char *text = read_whole(fd, MAX_TABLE, &size);
    for (size_t i = 0; i < size; i++) lines += text[i] == '\n';
    table.rows = map_zeroed(lines * sizeof *table.rows);
    if (text == NULL || table.rows == NULL) return "the table can't be read";
    return parse_table(text) ? NULL : "the table is damaged or not whole";
}

/* ---- The log ---- */

static char log_path[PATH_MAX];
static bool has_log; /* an empty one shows a problem, too */
static unsigned long lost_records;

/* Appends four fields, each with its zero byte, as a whole or not: O_APPEND, one call. */
static bool write_record(const char *path, int create, const char *a, const char *b, const char *c,
                         const char *d) {
    static char record[4 * PATH_MAX];
    int size = snprintf(record, sizeof record, "%s%c%s%c%s%c%s%c", a, 0, b, 0, c, 0, d, 0);
    struct statx status;
    int fd = path[0] ? open_file(path, O_WRONLY | O_APPEND | create, 0644) : -1;
    if (fd < 0) return false;
    bool written =
        (size_t)size < sizeof record && statx(fd, "", AT_EMPTY_PATH, STATX_SIZE, &status) == 0 &&
        may_grow_to(status.stx_size + (size_t)size) && syscall(SYS_write, fd, record, size) == size;
    close_file(fd);
    return written;
}

static void log_event(const char *kind, const char *first, const char *second) {
    char pid[24], lost[24];
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    snprintf(lost, sizeof lost, "%lu", lost_records);
    if (lost_records > 0 && write_record(log_path, 0, pid, "lost", lost, "")) lost_records = 0;
    if (!write_record(log_path, 0, pid, kind, first, second)) lost_records++;
}

/* A file of its own for each process that was exec'd. It gets its name after its first record: a
 * process that is killed before leaves none. */
static void start_log(const char *folder) {
    static char executable[PATH_MAX], unfinished[PATH_MAX + 8];
    if (!name_log(log_path, sizeof log_path, folder, getpid(), clock_ns(CLOCK_REALTIME), ".log"))
        return;
    if (readlink("/proc/self/exe", executable, sizeof executable - 1) < 0) {
        const char *name = (const char *)getauxval(AT_EXECFN);
        if (name != NULL) strncpy(executable, name, sizeof executable - 1);
    }
    strcat(strcpy(unfinished, log_path), ".new");
    write_record(unfinished, O_CREAT | O_EXCL, LOG_HEAD, executable, "", "");
    has_log = rename(unfinished, log_path) == 0;
}

/* ---- Looking for a library ---- */

/* The part below the root, "/usr/lib/libfoo.so"; NULL for a name that is, or leads, elsewhere. */
static const char *below_root(const char *name) {
    if (strncmp(name, table.root, table.root_length) != 0 || name[table.root_length] != '/')
        return NULL;
    const char *inner = name + table.root_length;
    long depth = 0;
    for (const char *p = inner; *p;) {
        while (*p == '/') p++;
        size_t length = strcspn(p, "/");
        if (length == 2 && p[0] == '.' && p[1] == '.')
            depth--;
        else if (length > 0 && !(length == 1 && p[0] == '.'))
            depth++;
        if (depth < 0) return NULL;
        p += length;
    }
    return inner;
}

/* Folder of a path, without resolving its last part; false if there is none. */
static bool folder_of(const char *path, char folder[PATH_MAX]) {
    size_t length = (size_t)(strrchr(path, '/') - path);
    if (length >= PATH_MAX) return false;
    memcpy(folder, path, length);
    folder[length] = 0;
    return true;
}

/* An original may be loaded by a link that lies elsewhere, and its neighbours beside the link:
 * the folder of the first such link counts, as in the loader. */
static void note_link(Row *row, const char *name) {
    static char folder[PATH_MAX], resolved[PATH_MAX];
    if (row->link != NULL || strchr(name, '/') == NULL || !folder_of(name, folder) ||
        realpath(folder[0] ? folder : "/", resolved) == NULL)
        return;
    size_t length = strlen(resolved);
    if (strncmp(resolved, row->original, length) == 0 &&
        strrchr(row->original, '/') == row->original + length)
        return;
    char *link = map_zeroed(length + 1);
    if (link != NULL) row->link = strcpy(link, resolved);
}

/* The same name, from the folder of a link instead of its original's; NULL if there is none. */
static const char *beside_link(const char *inner) {
    static char path[PATH_MAX];
    for (size_t i = 0; i < table.count; i++) {
        const char *original = table.rows[i].original, *link = table.rows[i].link;
        size_t length = (size_t)(strrchr(original, '/') - original);
        if (link == NULL || strncmp(inner, original, length + 1) != 0) continue;
        int size = snprintf(path, sizeof path, "%s%s", link, inner + length);
        if ((size_t)size < sizeof path) return path;
    }
    return NULL;
}

/* Makes the folder of a name below the root if there is one outside: else the loader would
 * never look into it again. */
static void make_folder(const char *name, const char *outside) {
    static char path[PATH_MAX], folder[PATH_MAX];
    if (!folder_of(outside, folder) || !is_folder(folder) || !folder_of(name, path) ||
        is_folder(path))
        return;
    for (char *end = path + table.root_length; *end; end++) {
        if (*end != '/') continue;
        *end = 0;
        mkdir(path, 0777);
        *end = '/';
    }
    mkdir(path, 0777);
}

/* Whether this process can open the copy, and it is the file of the table. If not, the process
 * goes on with the original, and the log says so; see may_be_original. */
static bool copy_is_there(const Row *row) {
    int fd = open_file(row->copy, O_RDONLY | O_NONBLOCK, 0);
    if (fd < 0) return false;
    close_file(fd);
    FileId id;
    return identify(row->copy, &id) && same_file(id, row->copy_id);
}

/* The row of a file, under any of its names. The loader maps a file once and knows it by its
 * inode, so hard links share the copy that is mapped already; else the one of the path counts. */
static Row *row_of_original(FileId id, const char *path) {
    Row *found = NULL;
    for (size_t i = 0; i < table.count; i++) {
        Row *row = &table.rows[i];
        if (!same_file(id, row->original_id)) continue;
        if (row->mapped) return row;
        if (found == NULL || strcmp(row->original, path) == 0) found = row;
    }
    return found;
}

static Row *row_of_copy(FileId id) {
    for (size_t i = 0; i < table.count; i++)
        if (same_file(id, table.rows[i].copy_id)) return &table.rows[i];
    return NULL;
}

/* A process that could make no log would run on the original, and nothing would show it: a copy
 * would be called proved that it never had. So that library is not to be had in it. */
static bool may_be_original(const char *name) {
    FileId id;
    return has_log || !identify(name, &id) || row_of_original(id, name) == NULL;
}

/* The row of the original that a path leads to. `resolved`: its real path, empty if there is
 * no such file. */
static Row *find_row(const char *name, char resolved[PATH_MAX]) {
    FileId id;
    if (!identify(name, &id) || realpath(name, resolved) == NULL) {
        resolved[0] = 0;
        return NULL;
    }
    /* A file that was replaced since is not the one that the copy was made of. */
    Row *row = row_of_original(id, resolved);
    return row != NULL && copy_is_there(row) ? row : NULL;
}

/* The row whose copy the loader got last, and the name that it had asked for. */
static const Row *given;
static char asked[PATH_MAX];

static const char *give_copy(const Row *row, const char *name) {
    given = row;
    asked[0] = 0;
    if (strlen(name) < sizeof asked) strcpy(asked, name);
    return row->copy;
}

/* Has dladdr tell the name that was asked for, in the place of the copy's name. A relative one
 * would take $ORIGIN from expand_origin. */
static void rename_copy(struct link_map *map) {
    if (asked[0] == '/' && strcmp(map->l_name, given->copy) == 0 &&
        strlen(asked) <= strlen(map->l_name))
        strcpy(map->l_name, asked);
}

/* What to open for a path. */
static const char *redirect(const char *name, bool searching) {
    static char resolved[PATH_MAX], unused[PATH_MAX];
    Row *row = find_row(name, resolved);
    if (row != NULL) {
        note_link(row, name);
        return give_copy(row, name);
    }
    /* Below the root only the copies count; there may be more, from an earlier run. */
    const char *outside = below_root(resolved[0] ? resolved : name);
    if (outside == NULL) return name;
    if (!resolved[0]) {
        /* A neighbour, looked for where the copy lies. */
        const char *beside = beside_link(outside);
        if (searching) {
            make_folder(name, outside);
            if (beside != NULL) make_folder(name, beside);
        }
        FileId id;
        if (beside != NULL && identify(beside, &id)) outside = beside;
    }
    row = find_row(outside, unused);
    return row != NULL ? give_copy(row, outside) : outside;
}

/* "$ORIGIN/name" in the words of the object that looks for it; NULL if that is not possible.
 * The loader itself replaces such tokens after la_objsearch. */
static const char *expand_origin(const char *name, const uintptr_t *cookie) {
    static char path[PATH_MAX];
    size_t token = strncmp(name, "$ORIGIN/", 8) == 0      ? 7
                   : strncmp(name, "${ORIGIN}/", 10) == 0 ? 9
                                                          : 0;
    const struct link_map *loader = (const struct link_map *)*cookie;
    if (token == 0 || loader == NULL || loader->l_name == NULL) return NULL;
    if (loader->l_name[0] == '/') {
        if (strlen(loader->l_name) >= sizeof path) return NULL;
        strcpy(path, loader->l_name);
    } else if (loader->l_name[0] == 0) { /* the program itself */
        ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
        if (length <= 0 || path[0] != '/') return NULL;
        path[length] = 0;
    } else {
        return NULL;
    }
    char *end = strrchr(path, '/');
    if ((size_t)(end - path) + strlen(name + token) >= sizeof path) return NULL;
    strcpy(end, name + token);
    return path;
}

static const char *search(const char *name, const uintptr_t *cookie, unsigned int flag) {
    /* Without a slash: the name of a search to come, or a file in the current folder, when
     * a search path has an empty part. */
    if (flag != LA_SER_ORIG) return redirect(name, true);
    if (strchr(name, '/') == NULL) return name;
    if (name[0] != '$') return redirect(name, false);
    const char *path = expand_origin(name, cookie);
    return path == NULL ? name : redirect(path, false);
}

/* ---- Looking at what was mapped ---- */

static bool log_if_known(FileId id, const char *name) {
    Row *copy = row_of_copy(id);
    const Row *original = copy == NULL ? row_of_original(id, name) : NULL;
    if (copy != NULL) {
        copy->mapped = true;
        log_event("copy", copy->original, "");
    } else if (original != NULL) {
        log_event("original", original->original, name);
    }
    return copy != NULL || original != NULL;
}

/* As this program got it: what it may write over it later doesn't count. Cut, it is no path of
 * ours. */
static char injection[PATH_MAX];

static void look(const struct link_map *map) {
    const char *name = map->l_name;
    Mapping mapping;
    FileId id;
    if (is_named(name, "libcuda.so")) log_event("driver", injection, "");
    if (!find_mapping((uintptr_t)map->l_ld, &mapping)) {
        /* Without /proc: the name of an original may stand for its copy, see above. */
        if (!identify(name, &id) || row_of_copy(id) != NULL || row_of_original(id, name) != NULL)
            log_event("unknown", name, "");
    } else if (mapping.path[0] == '/' && identify(mapping.path, &id)) {
        if (log_if_known(id, name)) return;
        /* Another file at a path of the table: replaced since the table was written. */
        for (size_t i = 0; i < table.count; i++) {
            if (strcmp(table.rows[i].original, mapping.path) == 0)
                log_event("original", mapping.path, name);
            else if (strcmp(table.rows[i].copy, mapping.path) == 0)
                log_event("unknown", name, "");
        }
    } else if (!log_if_known(mapping.id, name)) {
        /* Mapped from a path that is gone, or that this process can't see. */
        if (!identify(name, &id))
            log_event("unknown", name, "");
        else
            log_if_known(id, name);
    }
}

/* ---- What the loader calls ---- */

EXPORT unsigned int la_version(unsigned int version) {
    const char *path = getenv("NEGATIVA_REDIRECT_TABLE");
    const char *folder = getenv("NEGATIVA_REDIRECT_LOGS");
    const char *injected = getenv("CUDA_INJECTION64_PATH");
    if (path == NULL || folder == NULL) return 0;
    if (injected != NULL) strncpy(injection, injected, sizeof injection - 1);
    start_log(folder);
    const char *problem = read_table(path);
    if (problem != NULL) {
        log_event("disabled", problem, path);
        return 0;
    }
    return version < LAV_CURRENT ? version : LAV_CURRENT;
}

EXPORT char *la_objsearch(const char *name, uintptr_t *cookie, unsigned int flag) {
    int saved = errno;
    const char *found = search(name, cookie, flag);
    if (strchr(found, '/') != NULL && !may_be_original(found)) {
        /* No such file: the loader's message will say why. */
        static char refused[PATH_MAX + 128];
        snprintf(refused, sizeof refused,
                 "%s (negativa: on the original, and no log of it can be written)", found);
        found = refused;
    }
    errno = saved;
    return (char *)found;
}

EXPORT unsigned int la_objopen(struct link_map *map, Lmid_t namespace, uintptr_t *cookie) {
    (void)namespace;
    (void)cookie;
    int saved = errno;
    if (is_library(map)) {
        look(map);
        rename_copy(map);
    }
    errno = saved;
    return 0; /* no symbol binding is audited: calls stay as fast as they are */
}
