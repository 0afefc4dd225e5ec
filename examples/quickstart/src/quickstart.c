// The host side: runs a kernel on arrays in host memory, and returns 0 or the driver's error.
//
// It uses the driver only, and looks for it when the first function is called: the library
// needs no CUDA runtime and loads on machines without a GPU. One thread at a time may call it.

#include <cuda.h>
#include <dlfcn.h>
#include <nvtx3/nvToolsExt.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

// Since glibc 2.34 these have a new version, which older systems lack; the old one is in both.
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
__asm__(".symver dlclose, dlclose@GLIBC_2.2.5");

#define DRIVER_CALLS(X) \
    X(cuInit) X(cuDeviceGet) X(cuDeviceGetName) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuCtxSynchronize) \
    X(cuLibraryLoadData) X(cuLibraryGetKernel) X(cuLaunchKernel) X(cuGetErrorName) \
    X(cuMemAlloc) X(cuMemFree) X(cuMemcpyHtoD) X(cuMemcpyDtoH)

static struct {
#define MEMBER(name) __typeof__(&name) p_##name;
    DRIVER_CALLS(MEMBER)
} driver;

// cuda.h renames some calls to their newest version by macro; that is the name to look for.
#define SYMBOL_(name) #name
#define SYMBOL(name) SYMBOL_(name)

#define MODULES(X) X(vectors) X(matrices) X(statistics) X(images) X(signals) X(fourier) X(sorting)
#define DECLARE(name) extern const char name##_wrapper[];
MODULES(DECLARE)

// A module is loaded when it is first needed.
static struct module {
    const char *name;
    const void *wrapper;
    CUlibrary library;
} modules[] = {
#define MODULE(name) {#name, name##_wrapper, NULL},
    MODULES(MODULE)
};

// An argument of a kernel: an array, which is copied to the GPU and back, or a number.
struct argument {
    void *host;
    size_t size;
    int is_array;
};

enum { MOST_ARGUMENTS = 8 };

// Of the call at hand: after the first error nothing else is done.
static CUresult status;
static const char *failed_call = "";
static CUdevice device;

#define TRY(call, ...) \
    do { \
        if (!status && (status = driver.p_##call(__VA_ARGS__))) failed_call = #call; \
    } while (0)

static void fail(CUresult error, const char *what) {
    status = error;
    failed_call = what;
}

static void begin(void) {
    static int ready;
    static CUcontext context;
    status = CUDA_SUCCESS;
    if (!ready) {
        void *libcuda = dlopen("libcuda.so.1", RTLD_NOW);
        if (!libcuda) {
            fail(CUDA_ERROR_NOT_INITIALIZED, "dlopen(libcuda.so.1)");
            return;
        }
#define FIND(name) \
    if (!(driver.p_##name = (__typeof__(&name))dlsym(libcuda, SYMBOL(name)))) { \
        fail(CUDA_ERROR_NOT_SUPPORTED, "dlsym(" SYMBOL(name) ")"); \
        return; \
    }
        DRIVER_CALLS(FIND)
        TRY(cuInit, 0);
        TRY(cuDeviceGet, &device, 0);
        TRY(cuDevicePrimaryCtxRetain, &context, device);
        ready = !status;
    }
    TRY(cuCtxSetCurrent, context);
}

static CUlibrary loaded(const char *name) {
    for (struct module *module = modules; module < modules + sizeof modules / sizeof *modules; ++module)
        if (!strcmp(module->name, name)) {
            if (!module->library) TRY(cuLibraryLoadData, &module->library, module->wrapper, NULL, NULL, 0, NULL, NULL, 0);
            return module->library;
        }
    fail(CUDA_ERROR_NOT_FOUND, name);
    return NULL;
}

// Writes why the last function failed, or nothing.
EXPORT void quickstart_error(char *text, size_t size) {
    const char *name = "no driver";
    if (driver.p_cuGetErrorName) driver.p_cuGetErrorName(status, &name);
    snprintf(text, size, "%s%s%s", status ? failed_call : "", status ? ": " : "", status ? name : "");
}

EXPORT int quickstart_device(char *name, int size) {
    begin();
    TRY(cuDeviceGetName, name, size, device);
    return status;
}

// Runs a kernel, by its mangled name, and waits for it. The arrays then hold what it wrote.
EXPORT int quickstart_run(const char *module, const char *name, const unsigned grid[2], const unsigned block[2], const struct argument *arguments, int count) {
    CUdeviceptr arrays[MOST_ARGUMENTS] = {0};
    void *parameters[MOST_ARGUMENTS];
    CUkernel kernel = NULL;
    begin();
    CUlibrary library = loaded(module);
    TRY(cuLibraryGetKernel, &kernel, library, name);
    for (int i = 0; i < count; ++i) {
        parameters[i] = arguments[i].host;
        if (arguments[i].is_array) {
            TRY(cuMemAlloc, &arrays[i], arguments[i].size);
            TRY(cuMemcpyHtoD, arrays[i], arguments[i].host, arguments[i].size);
            parameters[i] = &arrays[i];
        }
    }
    TRY(cuLaunchKernel, (CUfunction)kernel, grid[0], grid[1], 1, block[0], block[1], 1, 0, NULL, parameters, NULL);
    TRY(cuCtxSynchronize);
    for (int i = 0; i < count; ++i) {
        if (!arrays[i]) continue;
        TRY(cuMemcpyDtoH, arguments[i].host, arrays[i], arguments[i].size);
        driver.p_cuMemFree(arrays[i]);
    }
    return status;
}

// NVTX ranges: profilers show them, and pytest-negativa at level `range`.
EXPORT void quickstart_range_begin(const char *name) { nvtxRangePushA(name); }
EXPORT void quickstart_range_end(void) { nvtxRangePop(); }
