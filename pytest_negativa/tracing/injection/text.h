/* Text that grows, and JSON in it. */
#pragma once

#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    char *data;
    size_t length, room;
    bool failed; /* out of memory: the text is not whole and must not be used */
} Text;

static void text_bytes(Text *text, const void *bytes, size_t length) {
    if (text->data == NULL || text->length + length + 1 > text->room) {
        size_t room = (text->length + length + 1) * 2 + 256;
        char *data = realloc(text->data, room);
        if (data == NULL) {
            text->failed = true;
            return;
        }
        text->data = data;
        text->room = room;
    }
    memcpy(text->data + text->length, bytes, length);
    text->length += length;
    text->data[text->length] = 0;
}

static void text_string(Text *text, const char *string) {
    text_bytes(text, string, strlen(string));
}

__attribute__((format(printf, 2, 3))) static void text_format(Text *text, const char *format, ...) {
    char small[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(small, sizeof small, format, arguments);
    va_end(arguments);
    if (length > 0)
        text_bytes(text, small, (size_t)length < sizeof small ? (size_t)length : sizeof small - 1);
}

/* Bytes of the UTF-8 sequence at p (RFC 3629, 4), 0 if there is none. */
static size_t utf8_length(const unsigned char *p, size_t left) {
    if (p[0] < 0x80) return 1;
    if (p[0] < 0xC2 || p[0] > 0xF4) return 0;
    size_t length = p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    if (length > left) return 0;
    for (size_t i = 1; i < length; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    if (p[0] == 0xE0 && p[1] < 0xA0) return 0;
    if (p[0] == 0xED && p[1] > 0x9F) return 0;
    if (p[0] == 0xF0 && p[1] < 0x90) return 0;
    if (p[0] == 0xF4 && p[1] > 0x8F) return 0;
    return length;
}

/* A JSON string; bytes that are not UTF-8 become \xNN, as in Python's backslashreplace. */
static void text_json(Text *text, const char *string, size_t size) {
    const unsigned char *p = (const unsigned char *)string;
    text_string(text, "\"");
    for (size_t i = 0; i < size;) {
        size_t length = utf8_length(p + i, size - i);
        if (length == 0) {
            text_format(text, "\\\\x%02x", p[i]);
            length = 1;
        } else if (p[i] == '"' || p[i] == '\\') {
            text_format(text, "\\%c", p[i]);
        } else if (p[i] < 0x20) {
            text_format(text, "\\u%04x", p[i]);
        } else {
            text_bytes(text, p + i, length);
        }
        i += length;
    }
    text_string(text, "\"");
}

static void text_field(Text *text, const char *name, const char *value) {
    text_format(text, ",\"%s\":", name);
    text_json(text, value, strlen(value));
}

static bool text_read(Text *text, const char *path) {
    char buffer[4096]; /* threads may have little stack; of maps no more is read at once anyway */
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t got;
    while ((got = read(fd, buffer, sizeof buffer)) > 0) text_bytes(text, buffer, (size_t)got);
    close(fd);
    return got == 0 && !text->failed && text->data != NULL;
}
