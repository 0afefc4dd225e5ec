/* A hash table from bytes to a number; 0 means absent. */
#pragma once

#include "trace.h"

typedef struct {
    struct Entry {
        char *key;
        size_t size;
        long value;
    } *entries;
    size_t room, used;
} Table;

static uint64_t hash_bytes(const char *bytes, size_t size) {
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    for (size_t i = 0; i < size; i++) hash = (hash ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    return hash;
}

static struct Entry *table_slot(const Table *table, const char *key, size_t size) {
    size_t mask = table->room - 1;
    size_t i = hash_bytes(key, size) & mask;
    while (table->entries[i].key != NULL &&
           (table->entries[i].size != size || memcmp(table->entries[i].key, key, size) != 0))
        i = (i + 1) & mask;
    return &table->entries[i];
}

static long table_get(const Table *table, const char *key, size_t size) {
    if (table->room == 0) return 0;
    struct Entry *entry = table_slot(table, key, size);
    return entry->key == NULL ? 0 : entry->value;
}

static void table_put(Table *table, const char *key, size_t size, long value) {
    if ((table->used + 1) * 2 > table->room) {
        Table bigger = {.room = table->room ? table->room * 2 : 256, .used = table->used};
        bigger.entries = calloc(bigger.room, sizeof *bigger.entries);
        if (bigger.entries == NULL) {
            lose("out of memory");
            return;
        }
        for (size_t i = 0; i < table->room; i++)
            if (table->entries[i].key != NULL)
                *table_slot(&bigger, table->entries[i].key, table->entries[i].size) =
                    table->entries[i];
        free(table->entries);
        *table = bigger;
    }
    struct Entry *entry = table_slot(table, key, size);
    if (entry->key == NULL) {
        char *copy = malloc(size ? size : 1);
        if (copy == NULL) {
            lose("out of memory");
            return;
        }
        memcpy(copy, key, size);
        entry->key = copy;
        entry->size = size;
        table->used++;
    }
    entry->value = value;
}

static long text_get(const Table *table, const Text *key) {
    return key->failed ? 0 : table_get(table, key->data, key->length);
}

static void text_put(Table *table, const Text *key, long value) {
    if (!key->failed) table_put(table, key->data, key->length, value);
}
