/* In which test, or where else, something happened, and records that are written once. */
#pragma once

#include "table.h"

static Table contexts;
static Text current_context; /* the "context" object of the record */

static long context_id(void) {
    if (current_context.failed) lose("out of memory");
    long id = text_get(&contexts, &current_context);
    if (id) return id;
    id = ++next_id;
    Text line = {0};
    text_format(&line, "{\"record\":\"context\",\"id\":%ld,\"context\":", id);
    text_bytes(&line, current_context.data, current_context.length);
    text_format(&line, ",\"time_ns\":%lld", now_ns());
    write_line(&line);
    text_put(&contexts, &current_context, id);
    return id;
}

static void set_context(const char *phase, const char *nodeid, size_t nodeid_size) {
    current_context.length = 0;
    text_format(&current_context, "{\"phase\":\"%s\"", phase);
    if (nodeid != NULL) {
        text_string(&current_context, ",\"nodeid\":");
        text_json(&current_context, nodeid, nodeid_size);
    }
    text_string(&current_context, "}");
}

/* pytest leaves "nodeid (phase)" in PYTEST_CURRENT_TEST. */
static void set_context_from_environment(void) {
    static const char *const phases[] = {"setup", "call", "teardown"};
    const char *test = getenv("PYTEST_CURRENT_TEST");
    const char *open = test ? strrchr(test, '(') : NULL;
    for (int i = 0; open != NULL && open > test && open[-1] == ' ' && i < 3; i++) {
        size_t length = strlen(phases[i]);
        if (strncmp(open + 1, phases[i], length) == 0 && strcmp(open + 1 + length, ")") == 0) {
            set_context(phases[i], test, (size_t)(open - 1 - test));
            return;
        }
    }
    set_context("process", NULL, 0);
}

static Table seen; /* records without their context */

/* Whether a record has not been written yet; else frees it. */
static bool is_new(Text *line) {
    if (text_get(&seen, line)) {
        free(line->data);
        return false;
    }
    text_put(&seen, line, 1);
    return true;
}

/* Writes a record, and where it was first. */
static void write_once(Text *line) {
    if (!is_new(line)) return;
    text_format(line, ",\"context\":%ld", context_id());
    write_line(line);
}

static void write_warning(const char *code, const char *text, bool incomplete) {
    Text line = {0};
    text_string(&line, "{\"record\":\"warning\"");
    text_field(&line, "code", code);
    text_field(&line, "text", text);
    if (incomplete) text_string(&line, ",\"incomplete\":true");
    if (is_new(&line)) write_line(&line);
}
