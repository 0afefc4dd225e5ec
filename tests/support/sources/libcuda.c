/* Stands in for the driver: the functions that first_result.c looks at, without a GPU. Each
 * checks what it is given, so that a lost parameter is an error. */
#include <stdint.h>
#include <string.h>

#define STREAM ((void *)8)
enum { INVALID = 1, NOT_FOUND = 500, NOT_READY = 600 };

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **parameters, void **extra) {
    return function == (void *)21 && gx == 1 && gy == 2 && gz == 3 && bx == 4 && by == 5 &&
                   bz == 6 && shared == 7 && stream == STREAM && parameters == (void **)9 &&
                   extra == (void **)10
               ? 0
               : INVALID;
}
int cuLaunchKernel_ptsz(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, void *stream, void **parameters,
                        void **extra) {
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}
int cuStreamSynchronize(void *stream) { return stream == STREAM ? 0 : INVALID; }
int cuStreamQuery(void *stream) { return stream == STREAM ? 0 : NOT_READY; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    return to != NULL && from == UINT64_C(0x700000001) && size == 12 ? 0 : INVALID;
}
int cuMemAlloc_v2(uint64_t *pointer, size_t size) {
    *pointer = size;
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **pointer, int version, uint64_t flags, int *status) {
    static const struct {
        const char *name;
        void *function, *of_thread;
    } functions[] = {
        {"cuGetProcAddress", (void *)cuGetProcAddress_v2, (void *)cuGetProcAddress_v2},
        {"cuLaunchKernel", (void *)cuLaunchKernel, (void *)cuLaunchKernel_ptsz},
        {"cuStreamSynchronize", (void *)cuStreamSynchronize, (void *)cuStreamSynchronize},
        {"cuStreamQuery", (void *)cuStreamQuery, (void *)cuStreamQuery},
        {"cuMemcpyDtoH", (void *)cuMemcpyDtoH_v2, (void *)cuMemcpyDtoH_v2},
        {"cuMemAlloc", (void *)cuMemAlloc_v2, (void *)cuMemAlloc_v2},
    };
    *status = 0;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (version == 13000 && strcmp(name, functions[i].name) == 0) {
            *pointer = flags == 2 ? functions[i].of_thread : functions[i].function;
            return 0;
        }
    *status = 1;
    return NOT_FOUND;
}
