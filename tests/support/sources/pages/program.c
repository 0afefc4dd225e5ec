/* What programs do with signals, on code that is not there yet. Exit status: the failed step. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static void *library;

static void call(const char *name) {
    void (*function)(void) = (void (*)(void))dlsym(library, name);
    if (function == NULL) _exit(99);
    function();
}

static void require(int fulfilled, int step) {
    if (!fulfilled) _exit(step);
}

static void *run_thread(void *unused) {
    call("in_thread");
    return unused;
}

static void run_at_exit(void) { call("at_exit"); }

static volatile sig_atomic_t handled;
static sigjmp_buf back;

static void handle(int number) {
    handled = number;
    call("in_handler");
}

static void leave(int number) { siglongjmp(back, number); }

/* How a child ends that crashes for real. */
static int ending(void (*crash)(void)) {
    int status;
    pid_t child = fork();
    if (child == 0) {
        crash();
        _exit(0);
    }
    require(waitpid(child, &status, 0) == child, 90);
    return WIFSIGNALED(status) ? WTERMSIG(status) : -1;
}

static void write_to_code(void) { *(volatile char *)dlsym(library, "never") = 1; }
static void read_null(void) { (void)*(volatile char *)8; }
static void send_it(void) { raise(SIGSEGV); }
static void ignore_and_read_null(void) {
    signal(SIGSEGV, SIG_IGN);
    raise(SIGSEGV);
    read_null();
}

int main(int count, char **arguments) {
    require(count == 2, 91);
    /* As from a parent that blocked it: inherited over execve. */
    sigset_t all, old;
    sigfillset(&all);
    require(pthread_sigmask(SIG_SETMASK, &all, &old) == 0, 1);
    library = dlopen(arguments[1], RTLD_NOW);
    require(library != NULL, 92);
    call("when_blocked");

    /* A thread that inherits the mask. */
    pthread_t thread;
    require(pthread_create(&thread, NULL, run_thread, NULL) == 0, 2);
    require(pthread_join(thread, NULL) == 0, 3);
    require(sigprocmask(SIG_SETMASK, &old, NULL) == 0, 4);
    call("in_main");
    atexit(run_at_exit);

    /* The program's own handlers. */
    struct sigaction action = {.sa_handler = handle}, found;
    sigfillset(&action.sa_mask);
    require(sigaction(SIGUSR1, &action, NULL) == 0, 5);
    raise(SIGUSR1);
    require(handled == SIGUSR1, 6);
    require(sigaction(SIGSEGV, &action, &found) == 0 && found.sa_handler == SIG_DFL, 7);
    require(sigaction(SIGSEGV, NULL, &found) == 0 && found.sa_handler == handle, 8);
    raise(SIGSEGV);
    require(handled == SIGSEGV, 9);
    require(signal(SIGSEGV, leave) == handle, 10);
    if (sigsetjmp(back, 1) == 0) {
        read_null();
        _exit(11);
    }
    if (sigsetjmp(back, 0) == 0) {
        read_null();
        _exit(12);
    }
    /* Leaving a handler that way keeps its signal blocked. */
    require(sigprocmask(SIG_SETMASK, &old, NULL) == 0, 15);
    require(signal(SIGSEGV, SIG_DFL) == leave, 13);
    int (*looked_up)(int, const struct sigaction *, struct sigaction *) =
        (int (*)(int, const struct sigaction *, struct sigaction *))dlsym(RTLD_DEFAULT, "sigaction");
    require(looked_up == sigaction, 14);

    require(ending(read_null) == SIGSEGV, 20);
    require(ending(send_it) == SIGSEGV, 21);
    require(ending(ignore_and_read_null) == SIGSEGV, 22);
    require(ending(write_to_code) == SIGSEGV, 23);

    /* A mask that only a call has. */
    struct timespec none = {0};
    require(ppoll(NULL, 0, &none, &all) == 0, 24);

    pid_t child = fork();
    if (child == 0) {
        call("in_child");
        if (fork() == 0) {
            call("in_grandchild");
            _exit(0);
        }
        int status;
        wait(&status);
        _exit(status);
    }
    int status;
    require(waitpid(child, &status, 0) == child && status == 0, 25);
    return 0;
}
