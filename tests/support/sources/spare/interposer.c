/* Preloaded: has the functions for signals, as sanitizers and profilers do, and calls libc's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int calls;

int sigaction(int number, const struct sigaction *new, struct sigaction *old) {
    calls++;
    return NEXT(sigaction)(number, new, old);
}

sighandler_t signal(int number, sighandler_t handler) {
    calls++;
    return NEXT(signal)(number, handler);
}

int pthread_sigmask(int how, const sigset_t *new, sigset_t *old) {
    calls++;
    return NEXT(pthread_sigmask)(how, new, old);
}
