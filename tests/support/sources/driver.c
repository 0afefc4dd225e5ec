/* Stands in for the driver and for CUPTI, without a GPU: cuInit loads the injection library, and
 * the calls that load images and look up kernels are shown to CUPTI's subscriber. Like the real
 * one, it doesn't work in a child that was forked after cuInit. */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NOT_INITIALIZED = 3, NOT_SUPPORTED = 39, NO_DEVICE = 100, DRIVER_API = 1 };
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
int cuptiUnsubscribe(void *taken) {
    (void)taken;
    subscriber = NULL;
    return 0;
}
int cuptiEnableCallback(uint32_t enable, void *taken, int domain, uint32_t cbid) {
    (void)enable, (void)taken, (void)domain;
    return cbid == 740 && getenv("STANDIN_CUPTI_OLD") != NULL;
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
