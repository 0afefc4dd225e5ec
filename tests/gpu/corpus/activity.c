// Writes the name of each kernel that ran to $CORPUS_LAUNCHES, by CUPTI's activity records. CUDA loads
// it by CUDA_INJECTION64_PATH. It shares nothing with the tracer of the package, which listens to calls.
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// cupti_activity.h: CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, and the offset of `name` in
// CUpti_ActivityKernel4 to CUpti_ActivityKernel10.
enum { CONCURRENT_KERNEL = 10, NAME = 104, BUFFER = 1 << 20 };

static int (*enable)(uint32_t);
static int (*flush)(uint32_t);
static int (*next_record)(uint8_t *, size_t, void **);
static int (*register_callbacks)(void *, void *);

static void give(uint8_t **buffer, size_t *size, size_t *records) {
    *buffer = aligned_alloc(8, BUFFER);
    *size = BUFFER;
    *records = 0;
}

static void take(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    (void)context, (void)stream, (void)size;
    const int file = open(getenv("CORPUS_LAUNCHES"), O_WRONLY | O_APPEND | O_CREAT, 0666);
    char *record = NULL;
    while (next_record(buffer, valid, (void **)&record) == 0) {
        char line[4096];
        const char *name;
        uint32_t kind;
        memcpy(&kind, record, sizeof kind);
        memcpy(&name, record + NAME, sizeof name);
        if (kind != CONCURRENT_KERNEL) continue;
        const int length = snprintf(line, sizeof line, "%s\n", name);
        if (write(file, line, length) != length) abort();
    }
    close(file);
    free(buffer);
}

static void at_exit(void) { flush(1); }

int InitializeInjection(void) {
    void *cupti = dlopen(getenv("CORPUS_CUPTI"), RTLD_NOW);
    if (cupti == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    enable = (int (*)(uint32_t))dlsym(cupti, "cuptiActivityEnable");
    flush = (int (*)(uint32_t))dlsym(cupti, "cuptiActivityFlushAll");
    next_record = (int (*)(uint8_t *, size_t, void **))dlsym(cupti, "cuptiActivityGetNextRecord");
    register_callbacks = (int (*)(void *, void *))dlsym(cupti, "cuptiActivityRegisterCallbacks");
    if (register_callbacks((void *)give, (void *)take) || enable(CONCURRENT_KERNEL)) abort();
    atexit(at_exit);
    return 1;
}
