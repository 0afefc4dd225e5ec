/* A library that says which of its builds was loaded, and what it sees of itself. Needs
 * libnear.so and libfar.so. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int near_symbol(void);
int far_symbol(void);

const char *which(void) { return near_symbol() + far_symbol() == 3 ? WHICH : "broken"; }

const char *own_path(void) {
    Dl_info info;
    return dladdr(&which, &info) ? info.dli_fname : "unknown";
}

/* Opens a library beside this one, by this one's folder. */
void *open_beside(const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s", own_path());
    snprintf(strrchr(path, '/'), 256, "/%s", name);
    return dlopen(path, RTLD_NOW);
}

/* Opens data beside this one. */
const char *read_beside(const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s", own_path());
    snprintf(strrchr(path, '/'), 256, "/%s", name);
    return fopen(path, "r") ? "read" : "no data";
}

void *open_token(const char *name) { return dlopen(name, RTLD_NOW); }
