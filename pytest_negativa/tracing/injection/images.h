/* Images of GPU code: where they lie, of which form and size (images.py). */
#pragma once

#include "libraries.h"
#include "memory.h"

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

/* Up to the end of the last table or section. */
static uint64_t cubin_size(uint64_t address, const Elf64_Ehdr *head) {
    uint64_t programs = head->e_phoff + (uint64_t)head->e_phentsize * head->e_phnum;
    uint64_t table = head->e_shoff, entry = head->e_shentsize, count = head->e_shnum;
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
    union {
        Elf64_Ehdr elf;
        struct {
            uint32_t magic;
            uint16_t version, size;
            uint64_t rest;
        } fatbin;
    } head;
    size_t got = read_memory(address, &head, sizeof head);
    if (got >= sizeof head.fatbin && head.fatbin.magic == FATBIN_MAGIC) {
        place_image(image, "fatbin", address, head.fatbin.size + head.fatbin.rest);
    } else if (got == sizeof head && memcmp(&head, ELFMAG, SELFMAG) == 0) {
        place_image(image, "cubin", address, cubin_size(address, &head.elf));
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
