/* The libraries that the process has mapped, as records (libraries.py). */
#pragma once

#include "mappings.h"

static Table libraries, files;

static bool find_build_id(int fd, Text *hex) {
    ElfW(Ehdr) header;
    if (pread(fd, &header, sizeof header, 0) != sizeof header ||
        memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_phentsize != sizeof(ElfW(Phdr)))
        return false;
    for (int i = 0; i < header.e_phnum; i++) {
        ElfW(Phdr) program;
        if (pread(fd, &program, sizeof program,
                  (off_t)(header.e_phoff + (size_t)i * sizeof program)) != sizeof program)
            return false;
        if (program.p_type != PT_NOTE) continue;
        unsigned char notes[4096];
        size_t wanted = program.p_filesz < sizeof notes ? program.p_filesz : sizeof notes;
        ssize_t got = pread(fd, notes, wanted, (off_t)program.p_offset);
        for (size_t at = 0; got > 0 && at + 12 <= (size_t)got;) {
            uint32_t note[3];
            memcpy(note, notes + at, 12);
            size_t name = at + 12, start = name + (((size_t)note[0] + 3) & ~(size_t)3);
            if (start + note[1] > (size_t)got) break;
            if (note[2] == NT_GNU_BUILD_ID && note[0] == 4 && memcmp(notes + name, "GNU", 4) == 0) {
                for (uint32_t k = 0; k < note[1]; k++) text_format(hex, "%02x", notes[start + k]);
                return note[1] > 0;
            }
            at = start + (((size_t)note[1] + 3) & ~(size_t)3);
        }
    }
    return false;
}

static const char *find_package_path(const char *path) {
    static const char *const folders[] = {"/site-packages/", "/dist-packages/"};
    const char *found = NULL;
    for (int i = 0; i < 2; i++)
        for (const char *p = path; (p = strstr(p, folders[i])) != NULL; p++)
            if (found == NULL || p + strlen(folders[i]) > found) found = p + strlen(folders[i]);
    return found != NULL && *found ? found : NULL;
}

/* Without the file at its path, nothing but the path is known. */
static void write_library(long id, const char *path, size_t length, bool there) {
    Text line = {0};
    text_format(&line, "{\"record\":\"library\",\"id\":%ld,\"library\":{\"path\":", id);
    text_json(&line, path, length);
    struct stat status;
    int fd = there ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (fd >= 0 && fstat(fd, &status) == 0) {
        text_format(&line, ",\"size\":%lld,\"mtime_ns\":%lld", (long long)status.st_size,
                    time_ns(status.st_mtim));
        text_format(&line, ",\"device\":%llu,\"inode\":%llu,\"ctime_ns\":%lld",
                    (unsigned long long)status.st_dev, (unsigned long long)status.st_ino,
                    time_ns(status.st_ctim));
        Text build_id = {0};
        bool found = find_build_id(fd, &build_id);
        line.failed = line.failed || build_id.failed;
        if (found && !build_id.failed) text_field(&line, "build_id", build_id.data);
        free(build_id.data);
        const char *package_path = find_package_path(path);
        if (package_path != NULL) text_field(&line, "package_path", package_path);
    }
    if (fd >= 0) close(fd);
    text_string(&line, "}");
    write_line(&line);
}

/* The id of a mapped file (recorder.py). A file that changes has a record for each state: `again`
 * looks whether it has. One that is gone from its path is what it was when it was last seen. */
static long library_id(const char *path, uint64_t inode, bool again) {
    size_t length = length_undeleted(path);
    struct stat status;
    /* A file may have the mark in its own name. */
    bool gone = path[length] != 0 && (stat(path, &status) != 0 || status.st_ino != inode);
    if (!gone) length = strlen(path);
    Text file = {0}, key = {0};
    text_bytes(&file, path, length);
    text_format(&file, " %llu", (unsigned long long)inode);
    long id = text_get(&files, &file);
    bool there = !gone && (id == 0 || again) && stat(path, &status) == 0;
    if (id != 0 && !there) {
        free(file.data);
        return id;
    }
    text_bytes(&key, path, length);
    if (there)
        text_format(&key, " %llu %llu %lld %lld %lld", (unsigned long long)status.st_dev,
                    (unsigned long long)status.st_ino, (long long)status.st_size,
                    time_ns(status.st_mtim), time_ns(status.st_ctim));
    id = text_get(&libraries, &key);
    if (id == 0) {
        id = ++next_id;
        write_library(id, path, length, there);
        text_put(&libraries, &key, id);
    }
    text_put(&files, &file, id);
    free(file.data);
    free(key.data);
    return id;
}

/* What is mapped, and a record of each library that came since. */
static void refresh_mappings(void) {
    if (!read_mappings() || is_sample) return;
    for (size_t i = 0; i < mapping_count; i++)
        if (mappings[i].has_code && (i == 0 || mappings[i].id.inode != mappings[i - 1].id.inode ||
                                     strcmp(mappings[i].path, mappings[i - 1].path) != 0))
            library_id(mappings[i].path, mappings[i].id.inode, true);
}

static const Mapping *mapping_at(uint64_t address) {
    if (mappings_are_current()) {
        const Mapping *found = search_mappings(address);
        if (found != NULL && found->has_code) return found;
    }
    refresh_mappings();
    return search_mappings(address);
}
