/* What driver calls tell of images, as records (recorder.py). */
#pragma once

#include "calls.h"
#include "devices.h"
#include "images.h"

static Table images, handles;

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
