/* Arguments: a library, how many tests. Tells which of them runs. With another library, threads
 * call functions meanwhile, load and close that library, and fork. Exit status: the failed step. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "calls.h"

static void *library;
static const char *other;
static atomic_bool ended;

static void enter(const char *test) {
    require(mprotect((void *)0x6e656761746976, (size_t)test, PROT_NONE) == 0, 91);
}

static void *run_caller(void *unused) {
    while (!ended) call(library, "in_thread");
    return unused;
}

static void *run_loader(void *unused) {
    while (!ended) {
        void *loaded = dlopen(other, RTLD_NOW);
        require(loaded != NULL, 92);
        call(loaded, "in_thread");
        require(dlclose(loaded) == 0, 93);
    }
    return unused;
}

static void *run_forker(void *unused) {
    do { /* once at least, however late this thread starts */
        int status;
        pid_t child = fork();
        if (child == 0) {
            alarm(30); /* a lock that nobody gives back */
            call(library, "in_child");
            enter("child");
            call(library, "in_grandchild");
            _exit(0);
        }
        require(waitpid(child, &status, 0) == child && status == 0, 94);
    } while (!ended);
    return unused;
}

int main(int count, char **arguments) {
    require(count == 3 || count == 4, 95);
    library = dlopen(arguments[1], RTLD_NOW);
    int tests = atoi(arguments[2]);
    other = arguments[3];
    require(library != NULL, 96);
    void *(*const bodies[])(void *) = {run_caller, run_caller, run_caller, run_loader, run_forker};
    pthread_t threads[sizeof bodies / sizeof *bodies];
    size_t started = other == NULL ? 0 : sizeof bodies / sizeof *bodies;
    for (size_t i = 0; i < started; i++)
        require(pthread_create(&threads[i], NULL, bodies[i], NULL) == 0, 97);
    for (int i = 0; i < tests; i++) {
        char name[16];
        snprintf(name, sizeof name, "test %d", i);
        enter(name);
        call(library, "in_main");
        if (i % 2) call(library, "when_blocked");
        enter("");
        call(library, "at_exit");
    }
    ended = 1;
    for (size_t i = 0; i < started; i++)
        require(pthread_join(threads[i], NULL) == 0, 98);
    return 0;
}
