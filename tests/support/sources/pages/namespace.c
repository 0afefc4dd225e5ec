/* Arguments: a library, another one. As process 1 of a pid namespace it forks a process 1 of a namespace in
 * it, while a thread loads and closes the other library. Exit status: the failed step. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "calls.h"

static const char *other;
static atomic_int loads;
static atomic_bool ended;

static void *run_loader(void *unused) {
    for (; !ended; loads++) {
        void *loaded = dlopen(other, RTLD_NOW);
        require(loaded != NULL && dlclose(loaded) == 0, 91);
    }
    return unused;
}

int main(int count, char **arguments) {
    pthread_t thread;
    int status;
    require(count == 3 && getpid() == 1, 92);
    void *library = dlopen(arguments[1], RTLD_NOW);
    other = arguments[2];
    require(library != NULL && pthread_create(&thread, NULL, run_loader, NULL) == 0, 93);
    require(unshare(CLONE_NEWPID) == 0, 94);
    while (loads < 3) sched_yield();
    pid_t child = fork();
    if (child == 0) {
        require(getpid() == 1, 95);
        require(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, 96); /* it takes the lock */
        call(library, "in_child");
        _exit(0);
    }
    require(waitpid(child, &status, 0) == child && status == 0, 97);
    ended = 1;
    require(pthread_join(thread, NULL) == 0, 98);
    return 0;
}
