/* Warnings in the trace, each once. */
#pragma once

#include "table.h"

static Table warned;

static void write_warning(const char *code, const char *text, bool incomplete) {
    Text line = {0};
    text_string(&line, "{\"record\":\"warning\"");
    text_field(&line, "code", code);
    text_field(&line, "text", text);
    if (incomplete) text_string(&line, ",\"incomplete\":true");
    text_string(&line, "}");
    if (!text_get(&warned, &line)) {
        text_put(&warned, &line, 1);
        write_line(&line);
    }
    free(line.data);
}
