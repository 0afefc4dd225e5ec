/* For programs that call functions of libraries; the exit status is the step that failed. */
#include <dlfcn.h>
#include <unistd.h>

static void require(int fulfilled, int step) {
    if (!fulfilled) _exit(step);
}

static void call(void *from, const char *name) {
    void (*function)(void) = (void (*)(void))dlsym(from, name);
    require(function != NULL, 90);
    function();
}
