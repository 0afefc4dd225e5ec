/* A table from bytes to a number; 0 means absent. */
#pragma once

#include "trace.h"

#include <search.h>

typedef void *Table; /* the root of a tree, see tsearch(3) */

typedef struct {
    const char *key;
    size_t size;
    long value;
} Entry;

static int compare_entries(const void *a, const void *b) {
    const Entry *x = a, *y = b;
    if (x->size != y->size) return x->size < y->size ? -1 : 1;
    return memcmp(x->key, y->key, x->size);
}

static Entry *table_find(const Table *table, const char *key, size_t size) {
    const Entry wanted = {key, size, 0};
    Entry *const *found = tfind(&wanted, table, compare_entries);
    return found == NULL ? NULL : *found;
}

static long table_get(const Table *table, const char *key, size_t size) {
    const Entry *entry = table_find(table, key, size);
    return entry == NULL ? 0 : entry->value;
}

static void table_put(Table *table, const char *key, size_t size, long value) {
    Entry *entry = table_find(table, key, size);
    if (entry == NULL && (entry = malloc(sizeof *entry + size)) != NULL) {
        *entry = (Entry){memcpy(entry + 1, key, size), size, value};
        if (tsearch(entry, table, compare_entries) == NULL) {
            free(entry);
            entry = NULL;
        }
    }
    if (entry == NULL)
        lose("out of memory");
    else
        entry->value = value;
}

static long text_get(const Table *table, const Text *key) {
    return key->failed ? 0 : table_get(table, key->data, key->length);
}

static void text_put(Table *table, const Text *key, long value) {
    if (!key->failed) table_put(table, key->data, key->length, value);
}
