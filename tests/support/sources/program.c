/* program HOW STEP...: calls functions of the driver, found in the way HOW, and prints what each
 * returned. HOW: dlsym, lookup (as CUDA's runtime does), lookup-thread, linked (with LINKED
 * defined; then for launch and wait). */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifdef LINKED
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void *, void **, void **);
int cuStreamSynchronize(void *);
#endif

static void *driver;
static const char *how;

static void *find(const char *name, const char *symbol) {
    if (strcmp(how, "dlsym") == 0) return dlsym(driver, symbol);
    int (*lookup)(const char *, void **, int, uint64_t, int *) = dlsym(driver, "cuGetProcAddress_v2");
    void *found = NULL;
    int status;
    if (lookup("cuGetProcAddress", &found, 13000, 0, &status) != 0) return NULL;
    lookup = found;
    if (lookup(name, &found, 13000, strcmp(how, "lookup-thread") == 0 ? 2 : 0, &status) != 0)
        return NULL;
    return found;
}

static int step(const char *what) {
    if (strcmp(what, "launch") == 0 || strcmp(what, "bad-launch") == 0) {
#ifdef LINKED
        return cuLaunchKernel((void *)(*what == 'b' ? 0L : 21L), 1, 2, 3, 4, 5, 6, 7, (void *)8,
                              (void **)9, (void **)10);
#endif
        int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      void *, void **, void **) = find("cuLaunchKernel", "cuLaunchKernel");
        return launch((void *)(*what == 'b' ? 0L : 21L), 1, 2, 3, 4, 5, 6, 7, (void *)8, (void **)9,
                      (void **)10);
    }
    if (strcmp(what, "wait") == 0 || strcmp(what, "bad-wait") == 0) {
#ifdef LINKED
        return cuStreamSynchronize((void *)(*what == 'b' ? 0L : 8L));
#endif
        int (*wait)(void *) = find("cuStreamSynchronize", "cuStreamSynchronize");
        return wait((void *)(*what == 'b' ? 0L : 8L));
    }
    if (strcmp(what, "ask") == 0 || strcmp(what, "ask-too-early") == 0) {
        int (*ask)(void *) = find("cuStreamQuery", "cuStreamQuery");
        return ask((void *)(what[3] != 0 ? 0L : 8L));
    }
    if (strcmp(what, "copy") == 0) {
        int (*copy)(void *, uint64_t, size_t) = find("cuMemcpyDtoH", "cuMemcpyDtoH_v2");
        return copy(&copy, UINT64_C(0x700000001), 12);
    }
    if (strcmp(what, "allocate") == 0) {
        uint64_t pointer = 0;
        int (*allocate)(uint64_t *, size_t) = find("cuMemAlloc", "cuMemAlloc_v2");
        return allocate(&pointer, 77) != 0 || pointer != 77;
    }
    return -1;
}

int main(int count, char **words) {
    how = words[1];
#ifndef LINKED
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == NULL) return 99;
#endif
    for (int i = 2; i < count; i++) {
        printf("%d\n", step(words[i]));
        fflush(stdout);
    }
    return 0;
}
