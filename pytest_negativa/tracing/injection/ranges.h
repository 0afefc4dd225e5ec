/* NVTX ranges of the test process: 10,000 at most, 32 within another. nvtx3/nvToolsExt.h,
 * nvtx3/nvtxDetail/nvtxTypes.h. */
#pragma once

#include "table.h"

static atomic_int ranges_on; /* they go to CUPTI */
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;

typedef void (*Function)(void);

typedef struct {
    size_t size;
    int (*module_table)(int module, Function ***table, unsigned *length);
} NvtxCallbacks;

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const void *message;
} NvtxAttributes;

enum { NVTX_CALLBACKS = 1, NVTX_CORE = 1, NVTX_CORE2 = 5 };
enum { NVTX_ASCII = 1, NVTX_REGISTERED = 3 };
/* CUpti_ExternalCorrelationKind in cupti_activity.h: the last of those for tools. */
enum { CORRELATION_CUSTOM2 = 5 };
/* Of a process, and of a thread; a deeper range, or one more, counts as the range around it. */
enum { MOST_RANGES = 10000, MOST_NESTED = 32, LONGEST_NAME = 256 };

static int (*push_correlation)(int, uint64_t);
static int (*pop_correlation)(int, uint64_t *);
/* By number, from 1. The table finds it by the range around it and the name. */
static struct {
    uint32_t parent;
    char *name;
} ranges[MOST_RANGES + 1];
static uint32_t range_count;
static Table range_numbers;
static __thread struct {
    const void *domain;
    uint32_t range;
    bool ended;
} nested[MOST_NESTED];
static __thread int nesting, too_deep;

static bool traces_at(const char *level) {
    const char *wanted = getenv("NEGATIVA_LEVEL");
    return wanted != NULL && strcmp(wanted, level) == 0;
}

/* Copies a name up to numbers that differ each time: torch's emit_nvtx ends with them
 * (torch/csrc/profiler/util.cpp, getNvtxStr), XLA has ids of programs. */
static void clean_name(char *clean, const char *name) {
    static const char *const ends[] = {", seq = ",          ", op_id = ",   ", sizes = ",
                                       ", input_op_ids = ", ",program_id=", ",unique_hlo_op_id="};
    size_t length = strnlen(name, LONGEST_NAME);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        const char *end = strstr(name, ends[i]);
        if (end != NULL && (size_t)(end - name) < length) length = (size_t)(end - name);
    }
    memcpy(clean, name, length);
    clean[length] = 0;
}

static uint32_t range_number(uint32_t parent, const char *raw) {
    char key[sizeof parent + LONGEST_NAME + 1], *name = key + sizeof parent;
    memcpy(key, &parent, sizeof parent);
    clean_name(name, raw);
    size_t size = sizeof parent + strlen(name);
    pthread_mutex_lock(&ranges_lock);
    uint32_t number = (uint32_t)table_get(&range_numbers, key, size);
    char *copy = number == 0 && range_count < MOST_RANGES ? strdup(name) : NULL;
    if (copy != NULL) {
        number = ++range_count;
        ranges[number].parent = parent;
        ranges[number].name = copy;
        table_put(&range_numbers, key, size, number);
    }
    pthread_mutex_unlock(&ranges_lock);
    return number ? number : parent;
}

static int enter_range(const void *domain, const char *name) {
    if (!atomic_load(&ranges_on)) return 0;
    if (nesting == MOST_NESTED) return nesting + too_deep++;
    uint32_t range = range_number(nesting ? nested[nesting - 1].range : 0, name ? name : "");
    nested[nesting].domain = domain;
    nested[nesting].range = range;
    nested[nesting].ended = false;
    push_correlation(CORRELATION_CUSTOM2, range);
    return nesting++;
}

/* Each domain nests for itself: a range may end before one inside of it that is of another domain.
 */
static int leave_range(const void *domain) {
    if (!atomic_load(&ranges_on)) return -1;
    if (too_deep > 0) return nesting + --too_deep;
    int level = nesting - 1;
    while (level >= 0 && (nested[level].ended || nested[level].domain != domain)) level--;
    if (level >= 0) nested[level].ended = true;
    for (uint64_t last; nesting > 0 && nested[nesting - 1].ended; nesting--)
        pop_correlation(CORRELATION_CUSTOM2, &last);
    return level;
}

/* Wide names are not read: nobody was seen to use them. NVTX itself gives NULL for wide strings,
 * and for domains, which count as the default one. */
static int range_push_a(const char *name) { return enter_range(NULL, name); }
static int range_push_w(const void *name) {
    (void)name;
    return enter_range(NULL, "");
}
static int range_pop(void) { return leave_range(NULL); }
static int domain_range_pop(const void *domain) { return leave_range(domain); }

static int domain_range_push(const void *domain, const NvtxAttributes *attributes) {
    int type = attributes != NULL ? attributes->message_type : 0;
    bool has_name = type == NVTX_ASCII || type == NVTX_REGISTERED;
    return enter_range(domain, has_name ? attributes->message : NULL);
}

static int range_push_ex(const NvtxAttributes *attributes) {
    return domain_range_push(NULL, attributes);
}

/* Handles: a domain's must be one of its own, a string's is its text. Programs keep both. */
static const void *domain_create_a(const char *name) { return strdup(name != NULL ? name : ""); }
static const void *register_a(const void *domain, const char *string) {
    (void)domain;
    return string != NULL ? strdup(string) : NULL;
}

/* Tell CUPTI, which is this library, the ranges from now on; 0: done. */
static int watch_ranges(void *library) {
    push_correlation =
        (int (*)(int, uint64_t))dlsym(library, "cuptiActivityPushExternalCorrelationId");
    pop_correlation =
        (int (*)(int, uint64_t *))dlsym(library, "cuptiActivityPopExternalCorrelationId");
    if (push_correlation == NULL || pop_correlation == NULL) return 1;
    atomic_store(&ranges_on, 1);
    return 0;
}

/* For NVTX: called at the first range of each library that has NVTX compiled in. */
EXPORT int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    /* NvtxCallbackIdCore, NvtxCallbackIdCore2 */
    static const struct {
        int module;
        unsigned id;
        Function function;
    } ours[] = {
        {NVTX_CORE, 8, (Function)range_push_ex},      {NVTX_CORE, 9, (Function)range_push_a},
        {NVTX_CORE, 10, (Function)range_push_w},      {NVTX_CORE, 11, (Function)range_pop},
        {NVTX_CORE2, 4, (Function)domain_range_push}, {NVTX_CORE2, 5, (Function)domain_range_pop},
        {NVTX_CORE2, 10, (Function)register_a},       {NVTX_CORE2, 12, (Function)domain_create_a},
    };
    /* NVTX asks once, a child perhaps before it uses CUDA. */
    if (!atomic_load(&ranges_on) && !traces_at("range")) return 0;
    const NvtxCallbacks *callbacks = export_table(NVTX_CALLBACKS);
    if (callbacks == NULL) return 0;
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++) {
        Function **table;
        unsigned length;
        if (callbacks->module_table(ours[i].module, &table, &length) && ours[i].id < length)
            *table[ours[i].id] = ours[i].function;
    }
    return 1;
}
