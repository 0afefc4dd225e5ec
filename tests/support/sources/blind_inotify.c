// Preloaded: inotify watches report no opens, as on a file system that tells of none.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <sys/inotify.h>

int inotify_add_watch(int inotify, const char *path, uint32_t mask)
{
    int (*real)(int, const char *, uint32_t) = dlsym(RTLD_NEXT, "inotify_add_watch");
    return real(inotify, path, (mask & ~(uint32_t)IN_OPEN) | IN_DELETE_SELF);
}
