/* Stands in for the driver and for CUPTI, without a GPU: cuInit loads the injection library, and
 * the calls that load images and look up kernels are shown to CUPTI's subscriber. Like the real
 * one, it doesn't work in a child that was forked after cuInit. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { INVALID_PARAMETER = 1, NOT_INITIALIZED = 3, NOT_SUPPORTED = 39, NO_DEVICE = 100, DRIVER_API = 1 };
typedef struct {
    int site;
    const char *name;
    const void *params;
    const int *result;
} CallbackData;
typedef void (*Callback)(void *, int, uint32_t, const void *);

static Callback subscriber;
static pid_t initialised_by;
static uint64_t handles = 0x1000;

int cuptiSubscribe(void **taken, Callback callback, void *user) {
    (void)user;
    if (subscriber != NULL || getenv("STANDIN_CUPTI_TAKEN") != NULL) return NOT_SUPPORTED;
    subscriber = callback;
    *taken = (void *)&subscriber;
    return 0;
}
/* cupti_callbacks.h: the last member came with CUDA 13.3. */
typedef struct {
    size_t size;
    const char *name;
    char *other;
    size_t other_size;
    uint8_t allow;
} Params;
int cuptiSubscribe_v2(void **taken, Callback callback, void *user, Params *params) {
    bool shares = getenv("STANDIN_CUPTI_SHARES") != NULL;
    if (params->size != 32 && !(shares && params->size == 33)) return INVALID_PARAMETER;
    if (params->size == 33 && params->allow) {
        subscriber = callback;
        *taken = (void *)&subscriber;
        return 0;
    }
    return cuptiSubscribe(taken, callback, user);
}
int cuptiUnsubscribe(void *taken) {
    (void)taken;
    subscriber = NULL;
    return 0;
}
int cuptiEnableCallback(uint32_t enable, void *taken, int domain, uint32_t cbid) {
    (void)enable, (void)taken, (void)domain;
    return cbid == 740 && getenv("STANDIN_CUPTI_OLD") != NULL;
}

/* Activity records, as cupti_activity.h lays them out; all have the same size here. */
enum { KERNEL = 10, RANGE = 39, CUSTOM2 = 5, RECORD = 160, MOST_RECORDS = 64 };
static void (*give)(uint8_t **, size_t *, size_t *);
static void (*take)(void *, uint32_t, uint8_t *, size_t, size_t);
bool kinds[RANGE + 1];
static char pending[MOST_RECORDS][RECORD];
static size_t pending_count;
uint64_t pushed[64];
int depth, flushes;
static uint32_t launches;

int cuptiActivityRegisterCallbacks(void *giving, void *taking) {
    return give = giving, take = taking, getenv("STANDIN_CUPTI_OLD") != NULL;
}
int cuptiActivityEnable(int kind) {
    const char *refused = getenv("STANDIN_CUPTI_REFUSES");
    if (refused != NULL && atoi(refused) == kind) return 1;
    return kinds[kind] = true, 0;
}
int cuptiActivityDisable(int kind) { return kinds[kind] = false, 0; }
int cuptiActivityEnableDriverApi(uint32_t cbid, uint8_t on) { return cbid == 0 || on > 1; }
int cuptiActivityEnableRuntimeApi(uint32_t cbid, uint8_t on) { return cbid == 0 || on > 1; }
int cuptiActivityFlushPeriod(uint32_t milliseconds) { return milliseconds == 0; }
int cuptiActivityPushExternalCorrelationId(int kind, uint64_t id) {
    return pushed[depth++] = id, kind != CUSTOM2;
}
int cuptiActivityPopExternalCorrelationId(int kind, uint64_t *last) {
    return *last = pushed[--depth], kind != CUSTOM2;
}
int cuptiActivityGetNextRecord(uint8_t *buffer, size_t size, uint8_t **record) {
    uint8_t *next = *record == NULL ? buffer : *record + RECORD;
    if (next >= buffer + size) return 12;
    return *record = next, 0;
}
void hand_over(const void *records, size_t count) {
    uint8_t *buffer;
    size_t size, most;
    give(&buffer, &size, &most);
    memcpy(buffer, records, count);
    take(NULL, 0, buffer, size, count);
}
int cuptiActivityFlushAll(uint32_t flag) {
    size_t count = pending_count * RECORD;
    (void)flag;
    flushes++;
    if (take == NULL) return 1;
    pending_count = 0;
    hand_over(pending, count);
    return 0;
}
int cuCtxSynchronize(void) { return 0; }
static char *add_record(uint32_t kind) {
    char *record = memset(pending[pending_count++ % MOST_RECORDS], 0, RECORD);
    memcpy(record, &kind, sizeof kind);
    return record;
}
/* The record of a range comes after that of the kernel, as it may between CUPTI's buffers. */
void cuLaunchKernel(const char *name, uint64_t gpu_ns) {
    const uint64_t start = 1000, end = start + gpu_ns;
    const uint32_t custom = CUSTOM2;
    launches++;
    if (!kinds[KERNEL]) return;
    char *kernel = add_record(KERNEL);
    memcpy(kernel + 16, &start, sizeof start);
    memcpy(kernel + 24, &end, sizeof end);
    memcpy(kernel + 92, &launches, sizeof launches);
    memcpy(kernel + 104, &name, sizeof name);
    if (!kinds[RANGE] || depth == 0) return;
    char *range = add_record(RANGE);
    memcpy(range + 4, &custom, sizeof custom);
    memcpy(range + 8, &pushed[depth - 1], sizeof *pushed);
    memcpy(range + 16, &launches, sizeof launches);
}

static int show(uint32_t cbid, const char *name, const uint64_t *params) {
    int result = initialised_by == getpid() ? 0 : NOT_INITIALIZED;
    for (int site = 0; site < 2; site++) {
        CallbackData data = {site, name, params, &result};
        if (subscriber != NULL) subscriber(NULL, DRIVER_API, cbid, &data);
    }
    return result;
}

int cuInit(unsigned flags) {
    const char *path = getenv("CUDA_INJECTION64_PATH");
    (void)flags;
    if (initialised_by != 0) return initialised_by == getpid() ? 0 : NOT_INITIALIZED;
    void *injection = path != NULL ? dlopen(path, RTLD_NOW) : NULL;
    int (*initialise)(void) = injection != NULL ? dlsym(injection, "InitializeInjection") : NULL;
    if (initialise != NULL) initialise();
    if (getenv("STANDIN_NO_DEVICE") != NULL) return NO_DEVICE;
    initialised_by = getpid();
    return 0;
}
int cuDeviceGetCount(int *count) {
    *count = 1;
    return initialised_by == getpid() ? 0 : NOT_INITIALIZED;
}
int cuDeviceGet(int *device, int number) { return *device = number, 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    return *value = attribute == 75 ? 9 : 0, 0;
}
int cuDeviceGetName(char *name, int size, int device) {
    (void)device;
    return strncpy(name, "Stand-in", (size_t)size), 0;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    return memset(uuid, device, 16), 0;
}
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuModuleGetLoadingMode(int *mode) {
    const char *wanted = getenv("CUDA_MODULE_LOADING");
    return *mode = wanted != NULL && strcmp(wanted, "EAGER") == 0 ? 1 : 2, 0;
}

int cuLibraryLoadData(uint64_t *library, const void *code) {
    const uint64_t params[8] = {(uint64_t)library, (uint64_t)code};
    *library = ++handles;
    return show(678, "cuLibraryLoadData", params);
}
int cuLibraryGetKernel(uint64_t *kernel, uint64_t library, const char *name) {
    const uint64_t params[8] = {(uint64_t)kernel, library, (uint64_t)name};
    *kernel = ++handles;
    return show(681, "cuLibraryGetKernel", params);
}
