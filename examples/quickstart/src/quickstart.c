// The host side: takes arrays in host memory, computes on the GPU, returns 0 or the driver's error.
//
// It uses the driver only, and looks for it when the first function is called: the library
// needs no CUDA runtime and loads on machines without a GPU. One thread at a time may call it.

#include <cuda.h>
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

#define EXPORT __attribute__((visibility("default")))

// Since glibc 2.34 these have a new version, which older systems lack; the old one is in both.
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");

#define DRIVER_CALLS(X) \
    X(cuInit) X(cuDeviceGet) X(cuDeviceGetName) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuCtxSynchronize) \
    X(cuLibraryLoadData) X(cuLibraryGetKernel) X(cuLibraryGetGlobal) X(cuLaunchKernel) X(cuGetErrorName) \
    X(cuMemAlloc) X(cuMemFree) X(cuMemcpyHtoD) X(cuMemcpyDtoH) X(cuMemsetD8)

static struct {
#define MEMBER(name) __typeof__(&name) p_##name;
    DRIVER_CALLS(MEMBER)
} driver;

// cuda.h renames some calls to their newest version by macro; that is the name to look for.
#define SYMBOL_(name) #name
#define SYMBOL(name) SYMBOL_(name)

struct region {
    const void *wrapper;
    CUlibrary library;
};

struct kernel {
    struct region *region;
    const char *name;
    CUkernel handle;
};

extern const char vectors_wrapper[], matrices_wrapper[], statistics_wrapper[], images_wrapper[];
static struct region vectors = {vectors_wrapper}, matrices = {matrices_wrapper}, statistics = {statistics_wrapper}, images = {images_wrapper};

static struct kernel vector_add = {&vectors, "vector_add"}, vector_scale = {&vectors, "vector_scale"};
static struct kernel vector_clamp = {&vectors, "vector_clamp"}, vector_dot = {&vectors, "vector_dot"};
static struct kernel multiply_16 = {&matrices, "_ZN8matrices8multiplyILi16EEEvPKfS2_Pfiii"};
static struct kernel multiply_32 = {&matrices, "_ZN8matrices8multiplyILi32EEEvPKfS2_Pfiii"};
static struct kernel transpose = {&matrices, "_ZN8matrices9transposeEPKfPfii"};
static struct kernel weighted_sum = {&statistics, "statistics_weighted_sum"}, variance = {&statistics, "statistics_variance"};
static struct kernel histogram = {&statistics, "statistics_histogram"};
static struct kernel image_threshold = {&images, "image_threshold"}, image_flip = {&images, "image_flip"}, image_blur = {&images, "image_blur"};

// Of the job at hand: after the first error nothing else is done until finish().
static CUresult status;
static const char *failed_call = "";
static CUdeviceptr buffers[4];
static size_t buffer_count;

#define TRY(call, ...) \
    do { \
        if (!status && (status = driver.p_##call(__VA_ARGS__))) failed_call = #call; \
    } while (0)

static CUdevice device;

static void begin(void) {
    static int ready;
    static CUcontext context;
    status = CUDA_SUCCESS;
    buffer_count = 0;
    if (!ready) {
        void *libcuda = dlopen("libcuda.so.1", RTLD_NOW);
        if (!libcuda) {
            failed_call = "dlopen(libcuda.so.1)";
            status = CUDA_ERROR_NOT_INITIALIZED;
            return;
        }
#define FIND(name) \
    if (!(driver.p_##name = (__typeof__(&name))dlsym(libcuda, SYMBOL(name)))) { \
        failed_call = "dlsym(" SYMBOL(name) ")"; \
        status = CUDA_ERROR_NOT_SUPPORTED; \
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

static CUdeviceptr reserve(size_t bytes) {
    CUdeviceptr address = 0;
    TRY(cuMemAlloc, &address, bytes);
    if (!status) buffers[buffer_count++] = address;
    TRY(cuMemsetD8, address, 0, bytes);
    return address;
}

static CUdeviceptr upload(const void *host, size_t bytes) {
    CUdeviceptr address = reserve(bytes);
    TRY(cuMemcpyHtoD, address, host, bytes);
    return address;
}

// A region is loaded when it is first needed.
static void need(struct region *region) {
    if (!region->library) TRY(cuLibraryLoadData, &region->library, region->wrapper, NULL, NULL, 0, NULL, NULL, 0);
}

static unsigned blocks(int count, unsigned threads) { return ((unsigned)count + threads - 1) / threads; }

static void launch(struct kernel *kernel, unsigned x, unsigned y, unsigned threads_x, unsigned threads_y, void **parameters) {
    need(kernel->region);
    if (!kernel->handle) TRY(cuLibraryGetKernel, &kernel->handle, kernel->region->library, kernel->name);
    TRY(cuLaunchKernel, (CUfunction)kernel->handle, x, y, 1, threads_x, threads_y, 1, 0, NULL, parameters, NULL);
}

static int finish(CUdeviceptr result, void *host, size_t bytes) {
    TRY(cuCtxSynchronize);
    if (host) TRY(cuMemcpyDtoH, host, result, bytes);
    while (buffer_count) driver.p_cuMemFree(buffers[--buffer_count]);
    return status;
}

#define LAUNCH(kernel, x, y, threads_x, threads_y, ...) launch(&kernel, x, y, threads_x, threads_y, (void *[]){__VA_ARGS__})

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

EXPORT int quickstart_add(const float *a, const float *b, float *out, int count) {
    size_t bytes = count * sizeof(float);
    begin();
    CUdeviceptr da = upload(a, bytes), db = upload(b, bytes), dout = reserve(bytes);
    LAUNCH(vector_add, blocks(count, 256), 1, 256, 1, &da, &db, &dout, &count);
    return finish(dout, out, bytes);
}

EXPORT int quickstart_scale(const float *values, float factor, float *out, int count) {
    size_t bytes = count * sizeof(float);
    begin();
    CUdeviceptr dvalues = upload(values, bytes), dout = reserve(bytes);
    LAUNCH(vector_scale, blocks(count, 256), 1, 256, 1, &dvalues, &factor, &dout, &count);
    return finish(dout, out, bytes);
}

EXPORT int quickstart_clamp(const float *values, float low, float high, float *out, int count) {
    size_t bytes = count * sizeof(float);
    begin();
    CUdeviceptr dvalues = upload(values, bytes), dout = reserve(bytes);
    LAUNCH(vector_clamp, blocks(count, 256), 1, 256, 1, &dvalues, &low, &high, &dout, &count);
    return finish(dout, out, bytes);
}

EXPORT int quickstart_dot(const float *a, const float *b, float *out, int count) {
    size_t bytes = count * sizeof(float);
    begin();
    CUdeviceptr da = upload(a, bytes), db = upload(b, bytes), dout = reserve(sizeof(float));
    LAUNCH(vector_dot, 1, 1, 256, 1, &da, &db, &dout, &count);
    return finish(dout, out, sizeof(float));
}

EXPORT int quickstart_multiply(const float *a, const float *b, float *out, int rows, int inner, int columns) {
    size_t bytes = (size_t)rows * columns * sizeof(float);
    begin();
    CUdeviceptr da = upload(a, (size_t)rows * inner * sizeof(float)), db = upload(b, (size_t)inner * columns * sizeof(float));
    CUdeviceptr dout = reserve(bytes);
    // Larger tiles read less memory but leave small matrices with few blocks.
    if (rows >= 512 && columns >= 512)
        LAUNCH(multiply_32, blocks(columns, 32), blocks(rows, 32), 32, 32, &da, &db, &dout, &rows, &inner, &columns);
    else
        LAUNCH(multiply_16, blocks(columns, 16), blocks(rows, 16), 16, 16, &da, &db, &dout, &rows, &inner, &columns);
    return finish(dout, out, bytes);
}

EXPORT int quickstart_transpose(const float *values, float *out, int rows, int columns) {
    size_t bytes = (size_t)rows * columns * sizeof(float);
    begin();
    CUdeviceptr dvalues = upload(values, bytes), dout = reserve(bytes);
    LAUNCH(transpose, blocks(columns, 16), blocks(rows, 16), 16, 16, &dvalues, &dout, &rows, &columns);
    return finish(dout, out, bytes);
}

EXPORT int quickstart_set_weights(const float weights[4]) {
    CUdeviceptr address = 0;
    size_t bytes = 0;
    begin();
    need(&statistics);
    TRY(cuLibraryGetGlobal, &address, &bytes, statistics.library, "statistics_weights");
    TRY(cuMemcpyHtoD, address, weights, bytes);
    return finish(0, NULL, 0);
}

EXPORT int quickstart_weighted_sum(const float *values, float *out, int count) {
    begin();
    CUdeviceptr dvalues = upload(values, count * sizeof(float)), dout = reserve(sizeof(float));
    LAUNCH(weighted_sum, 1, 1, 256, 1, &dvalues, &dout, &count);
    return finish(dout, out, sizeof(float));
}

EXPORT int quickstart_variance(const float *values, float *out, int count) {
    begin();
    CUdeviceptr dvalues = upload(values, count * sizeof(float)), dout = reserve(sizeof(float));
    LAUNCH(variance, 1, 1, 256, 1, &dvalues, &dout, &count);
    return finish(dout, out, sizeof(float));
}

EXPORT int quickstart_histogram(const float *values, unsigned *bins, int bin_count, int count) {
    size_t bytes = bin_count * sizeof(unsigned);
    begin();
    CUdeviceptr dvalues = upload(values, count * sizeof(float)), dbins = reserve(bytes);
    LAUNCH(histogram, blocks(count, 256), 1, 256, 1, &dvalues, &dbins, &bin_count, &count);
    return finish(dbins, bins, bytes);
}

EXPORT int quickstart_threshold(const unsigned char *pixels, unsigned char *out, unsigned char limit, int count) {
    begin();
    CUdeviceptr dpixels = upload(pixels, count), dout = reserve(count);
    LAUNCH(image_threshold, blocks(count, 256), 1, 256, 1, &dpixels, &dout, &limit, &count);
    return finish(dout, out, count);
}

static int image_to_image(struct kernel *kernel, const unsigned char *pixels, unsigned char *out, int width, int height) {
    size_t bytes = (size_t)width * height;
    begin();
    CUdeviceptr dpixels = upload(pixels, bytes), dout = reserve(bytes);
    LAUNCH(*kernel, blocks(width, 16), blocks(height, 16), 16, 16, &dpixels, &dout, &width, &height);
    return finish(dout, out, bytes);
}

EXPORT int quickstart_flip(const unsigned char *pixels, unsigned char *out, int width, int height) {
    return image_to_image(&image_flip, pixels, out, width, height);
}

EXPORT int quickstart_blur(const unsigned char *pixels, unsigned char *out, int width, int height) {
    return image_to_image(&image_blur, pixels, out, width, height);
}
