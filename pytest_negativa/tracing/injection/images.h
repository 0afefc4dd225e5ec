/* Images of GPU code, and what driver calls tell of them (mappings.py). */
#pragma once

#include "calls.h"
#include "devices.h"
#include "libraries.h"
#include "memory.h"

static Table images, handles;

typedef struct {
    const char *form;
    bool placed;
    char *path; /* malloc-ed, where placed */
    long library;
    uint64_t offset, size;
    char sha256[65]; /* where not placed; empty: unknown */
    Text prelinked;
} Image;

enum { MAX_PRELINKED = 1 << 14 };
static const uint64_t MAX_SIZE = (uint64_t)1 << 30;
static const uint32_t WRAPPER_MAGIC = 0x466243b1, FATBIN_MAGIC = 0xba55ed50;

static void place_image(Image *image, const char *form, uint64_t address, uint64_t size) {
    const Mapping *mapping = mapping_at(address);
    /* A library may lie in a memfd. Other memory holds images as the heap does. */
    if (mapping != NULL && !mapping->has_code && names_memory(mapping->path)) mapping = NULL;
    image->size = size;
    image->form = form;
    if (mapping != NULL && (image->path = strdup(mapping->path)) == NULL) lose("out of memory");
    if (image->path != NULL) {
        image->placed = true;
        image->library = library_id(mapping->path, mapping->id.inode, !mapping->has_code);
        image->offset = mapping->offset + (address - mapping->start);
    } else if (size == 0 || size > MAX_SIZE || !hash_memory(address, size, image->sha256)) {
        image->form = "unknown";
        image->sha256[0] = 0;
    }
}

static uint16_t half(const unsigned char *p) { return (uint16_t)(p[0] | p[1] << 8); }

static uint64_t word(const unsigned char *p) {
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

/* Up to the end of the last table or section. */
static uint64_t cubin_size(uint64_t address, const unsigned char *head) {
    uint64_t programs = word(head + 32) + (uint64_t)half(head + 54) * half(head + 56);
    uint64_t table = word(head + 40), entry = half(head + 58), count = half(head + 60);
    uint64_t size = table + entry * count;
    if (programs > size) size = programs;
    Elf64_Shdr section;
    for (uint64_t i = 0; entry == sizeof section && i < count; i++) {
        uint64_t place = address + table + i * entry;
        if (read_memory(place, &section, sizeof section) != sizeof section) break;
        uint64_t end = section.sh_offset + section.sh_size;
        if (section.sh_type != SHT_NOBITS && end > size) size = end;
    }
    return size;
}

/* `size` 0: not known */
static void resolve_bare(Image *image, uint64_t address, uint64_t size) {
    unsigned char head[64];
    size_t got = read_memory(address, head, sizeof head);
    if (got >= 16 && memcmp(head, &FATBIN_MAGIC, 4) == 0) {
        place_image(image, "fatbin", address, half(head + 6) + word(head + 8));
    } else if (got == sizeof head && memcmp(head, ELFMAG, SELFMAG) == 0) {
        place_image(image, "cubin", address, cubin_size(address, head));
    } else if (size != 0) {
        /* The size of PTX may count its NUL; without it, it is known from elsewhere. */
        uint64_t text = size;
        char *data = size <= MAX_SIZE ? malloc(size) : NULL;
        bool readable = data != NULL && read_memory(address, data, size) == size;
        while (readable && text > 0 && data[text - 1] == 0) text--;
        bool ptx =
            readable && memchr(data, 0, text) == NULL && memmem(data, text, ".version", 8) != NULL;
        free(data);
        place_image(image, ptx ? "ptx" : "linked", address, ptx ? text : size);
    } else {
        Text text = {0};
        /* PTX ISA, 5.1: a module begins with .version; comments may come before it. */
        if (read_string(address, &text, MAX_SIZE) && text.data != NULL &&
            strstr(text.data, ".version") != NULL)
            place_image(image, "ptx", address, text.length);
        free(text.data);
    }
}

/* __cudaFatCudaBinary of crt/host_runtime.h, and what nvFatbin adds. */
typedef struct {
    uint32_t magic, version;
    uint64_t data, others;
} Wrapper;

static bool read_wrapper(uint64_t address, Wrapper *wrapper) {
    return read_memory(address, wrapper, sizeof *wrapper) == sizeof *wrapper &&
           wrapper->magic == WRAPPER_MAGIC;
}

static void resolve(Image *image, uint64_t address) {
    Wrapper wrapper;
    bool is_wrapped = read_wrapper(address, &wrapper);
    resolve_bare(image, is_wrapped ? wrapper.data : address, 0);
    if (!is_wrapped || wrapper.version < 2 || wrapper.others == 0 || !image->placed) return;
    for (int i = 0; i < MAX_PRELINKED; i++) {
        uint64_t pointer = read_pointer(wrapper.others + 8 * (uint64_t)i);
        if (pointer == 0) break;
        const Mapping *mapping = mapping_at(pointer);
        if (mapping != NULL && strcmp(mapping->path, image->path) == 0)
            text_format(&image->prelinked, "%s%llu", image->prelinked.length ? "," : "",
                        (unsigned long long)(mapping->offset + (pointer - mapping->start)));
    }
}

static void resolve_file(Image *image, uint64_t name_address) {
    Text name = {0};
    unsigned char head[4] = {0};
    struct stat status;
    bool is_read = read_string(name_address, &name, 1 << 16);
    int fd = is_read ? open(name.data, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0 && fstat(fd, &status) == 0 && (image->path = realpath(name.data, NULL)) != NULL) {
        ssize_t got = pread(fd, head, 4, 0);
        image->placed = true;
        image->library = library_id(image->path, status.st_ino, true);
        image->form = got == 4 && memcmp(head, &FATBIN_MAGIC, 4) == 0 ? "fatbin"
                      : got == 4 && memcmp(head, ELFMAG, 4) == 0      ? "cubin"
                                                                      : "ptx";
    }
    if (fd >= 0) close(fd);
    free(name.data);
}

static void bind_handle(uint64_t handle, long image) {
    table_put(&handles, (const char *)&handle, sizeof handle, image);
}

/* Takes what the image owns. */
static long record_image(const char *call, uint64_t handle, Image *image) {
    if (!devices_known) {
        tell_outer_sessions();
        record_devices();
    }
    Text key = {0};
    if (image->placed)
        text_format(&key, "%llu %s %ld", (unsigned long long)image->offset, call, image->library);
    else if (image->sha256[0])
        text_format(&key, "%s %s", image->sha256, call);
    long id = key.length ? text_get(&images, &key) : 0;
    if (id == 0) {
        long context = context_id();
        id = ++next_id;
        if (strcmp(image->form, "unknown") == 0) {
            char text[128];
            snprintf(text, sizeof text, "%s was given something that is no known image", call);
            write_warning("image-unknown", text, false);
        }
        Text line = {0};
        text_format(&line, "{\"record\":\"image\",\"id\":%ld,\"context\":%ld", id, context);
        text_field(&line, "form", image->form);
        text_field(&line, "call", call);
        if (image->placed)
            text_format(&line, ",\"library\":%ld,\"offset\":%llu", image->library,
                        (unsigned long long)image->offset);
        if (image->size && (image->placed || image->sha256[0]))
            text_format(&line, ",\"size\":%llu", (unsigned long long)image->size);
        if (image->sha256[0]) text_field(&line, "sha256", image->sha256);
        line.failed = line.failed || image->prelinked.failed;
        if (image->prelinked.length) {
            text_string(&line, ",\"prelinked\":[");
            text_bytes(&line, image->prelinked.data, image->prelinked.length);
            text_string(&line, "]");
        }
        text_string(&line, "}");
        write_line(&line);
        if (key.length) text_put(&images, &key, id);
    }
    if (handle) bind_handle(handle, id);
    free(key.data);
    free(image->path);
    free(image->prelinked.data);
    return id;
}

static long image_of(const char *call, uint64_t handle) {
    long id = table_get(&handles, (const char *)&handle, sizeof handle);
    if (id) return id;
    /* Loaded before tracing began, or in a gap: from one of the libraries that are mapped. */
    refresh_mappings();
    Image unknown = {.form = "unknown"};
    char before[80];
    snprintf(before, sizeof before, "before %s", call);
    return record_image(before, handle, &unknown);
}

static void record_symbol(const DriverCall *call, uint64_t handle, uint64_t name_address) {
    long image = image_of(call->name, handle);
    Text name = {0}, line = {0};
    if (read_string(name_address, &name, 1 << 20)) {
        text_format(&line,
                    "{\"record\":\"%s\",\"image\":%ld,\"name\":", call->kind ? "data" : "kernel",
                    image);
        text_json(&line, name.data, name.length);
        if (call->kind) text_field(&line, "kind", call->kind);
        write_once(&line);
    } else {
        write_warning("name-unreadable", call->name, true);
    }
    free(name.data);
}

static void record_whole(const char *call, long image) {
    Text line = {0};
    text_format(&line, "{\"record\":\"enumeration\",\"image\":%ld", image);
    text_field(&line, "call", call);
    write_once(&line);
}

/* A call that failed, once for its image, symbol and code. */
static void record_refusal(const DriverCall *call, const uint64_t *slots, int code) {
    uint64_t subject = slots[call->subject], handle = slots[call->handle];
    bool looks_up = call->action == KERNEL || call->action == DATA;
    Text line = {0}, name = {0};
    text_format(&line, "{\"record\":\"refusal\",\"code\":%d", code);
    text_field(&line, "call", call->name);
    if (call->action == LOAD || call->action == LINK_DATA) {
        Wrapper wrapper;
        uint64_t place = read_wrapper(subject, &wrapper) ? wrapper.data : subject;
        const Mapping *mapping = mapping_at(place);
        if (mapping != NULL)
            text_format(&line, ",\"library\":%ld,\"offset\":%llu",
                        library_id(mapping->path, mapping->id.inode, !mapping->has_code),
                        (unsigned long long)(mapping->offset + (place - mapping->start)));
    } else if (looks_up || call->action == ENUMERATE || call->action == MODULE_OF_LIBRARY) {
        uint64_t of = call->action == MODULE_OF_LIBRARY ? subject : handle;
        long image = table_get(&handles, (const char *)&of, sizeof of);
        if (image) text_format(&line, ",\"image\":%ld", image);
    } else {
        free(line.data);
        return;
    }
    if (looks_up && read_string(subject, &name, 1 << 20) && name.length) {
        text_string(&line, ",\"name\":");
        text_json(&line, name.data, name.length);
    }
    write_once(&line);
    free(name.data);
}

static void record_call(const DriverCall *call, const uint64_t *slots) {
    uint64_t handle = slots[call->handle], subject = slots[call->subject];
    Image image = {.form = "unknown"};
    switch (call->action) {
    case LOAD:
        resolve(&image, subject);
        record_image(call->name, read_pointer(handle), &image);
        break;
    case LOAD_FILE:
        resolve_file(&image, subject);
        record_image(call->name, read_pointer(handle), &image);
        break;
    case UNLOAD:
        bind_handle(handle, 0);
        break;
    case KERNEL:
    case DATA:
        if (subject) record_symbol(call, handle, subject);
        break;
    case ENUMERATE:
        record_whole(call->name, image_of(call->name, handle));
        break;
    case MODULE_OF_LIBRARY: {
        long id = image_of(call->name, subject);
        record_whole(call->name, id);
        uint64_t module = read_pointer(handle);
        if (module) bind_handle(module, id);
        break;
    }
    case LINK_DATA:
        resolve_bare(&image, subject, slots[LINK_SIZE_SLOT]);
        record_whole(call->name, record_image(call->name, 0, &image));
        break;
    case LINK_FILE:
        resolve_file(&image, subject);
        record_whole(call->name, record_image(call->name, 0, &image));
        break;
    case LINK_COMPLETE: {
        uint64_t output = read_pointer(subject), size = read_pointer(handle);
        if (output == 0 || size == 0 || size > MAX_SIZE) break;
        image.size = size;
        if (hash_memory(output, size, image.sha256)) image.form = "linked";
        record_image(call->name, 0, &image);
        break;
    }
    }
}
