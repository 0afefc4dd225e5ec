/* Does what its arguments say, one after the other, and prints what came of it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static char **rest;
static void *library;

static void say(void *handle) {
    if (handle == NULL) {
        printf("failed: %s\n", dlerror());
    } else {
        const char *(*which)(void) = (const char *(*)(void))dlsym(handle, "which");
        puts(which == NULL ? "opened" : which());
        if (which != NULL) library = handle;
    }
    fflush(stdout);
}

static void *call(const char *symbol, const char *argument) {
    void *(*function)(const char *) = (void *(*)(const char *))dlsym(library, symbol);
    return function(argument);
}

static void *open_from_thread(void *name) {
    pthread_cancel(pthread_self()); /* waits for the next cancellation point */
    void *handle = dlopen(name, RTLD_NOW);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    return handle;
}

static void *open_small(void *name) { return dlopen(name, RTLD_NOW); }

static void *go_on(void *unused);

static void run(void) {
    for (char *verb; (verb = *rest++) != NULL;) {
        if (strcmp(verb, "open") == 0) {
            say(dlopen(*rest++, RTLD_NOW));
        } else if (strcmp(verb, "namespace") == 0) {
            say(dlmopen(LM_ID_NEWLM, *rest++, RTLD_NOW));
        } else if (strcmp(verb, "descriptor") == 0) {
            char path[64];
            snprintf(path, sizeof path, "/proc/self/fd/%d", open(*rest++, O_RDONLY));
            say(dlopen(path, RTLD_NOW));
        } else if (strcmp(verb, "memory") == 0) { /* a copy of a file, in memory only */
            char path[64], data[4096];
            int from = open(*rest++, O_RDONLY), to = memfd_create("library", 0);
            for (ssize_t count; (count = read(from, data, sizeof data)) > 0;)
                if (write(to, data, (size_t)count) != count) abort();
            snprintf(path, sizeof path, "/proc/self/fd/%d", to);
            say(dlopen(path, RTLD_NOW));
        } else if (strcmp(verb, "unlinked") == 0) {
            char path[64];
            snprintf(path, sizeof path, "/proc/self/fd/%d", open(*rest, O_RDONLY));
            unlink(*rest++);
            say(dlopen(path, RTLD_NOW));
        } else if (strcmp(verb, "path") == 0) {
            puts(call("own_path", NULL));
        } else if (strcmp(verb, "beside") == 0) {
            say(call("open_beside", *rest++));
        } else if (strcmp(verb, "data") == 0) {
            puts(call("read_beside", *rest++));
        } else if (strcmp(verb, "token") == 0) {
            say(call("open_token", *rest++));
        } else if (strcmp(verb, "cd") == 0) {
            if (chdir(*rest++) != 0) abort();
        } else if (strcmp(verb, "chroot") == 0) {
            if (chroot(*rest++) != 0 || chdir("/") != 0) abort();
        } else if (strcmp(verb, "clear") == 0) {
            clearenv();
        } else if (strcmp(verb, "close") == 0) {
            for (int fd = 3; fd < 1024; fd++) close(fd);
            for (int fd = 3; fd < 9; fd++) printf("%d", open("/dev/null", O_RDONLY));
            puts("");
        } else if (strcmp(verb, "limit") == 0) {
            struct rlimit limit;
            getrlimit(RLIMIT_FSIZE, &limit);
            limit.rlim_cur = (rlim_t)atol(*rest++);
            if (setrlimit(RLIMIT_FSIZE, &limit) != 0) abort();
        } else if (strcmp(verb, "cancel") == 0) {
            pthread_t thread;
            void *handle;
            if (pthread_create(&thread, NULL, open_from_thread, *rest++) != 0) abort();
            pthread_join(thread, &handle);
            say(handle == PTHREAD_CANCELED ? NULL : handle);
        } else if (strcmp(verb, "small") == 0) { /* a thread with a stack of 32 KiB */
            pthread_attr_t attributes;
            pthread_t thread;
            void *handle;
            pthread_attr_init(&attributes);
            pthread_attr_setstacksize(&attributes, 32 << 10);
            if (pthread_create(&thread, &attributes, open_small, *rest++) != 0) abort();
            pthread_join(thread, &handle);
            say(handle);
        } else if (strcmp(verb, "leave") == 0) { /* the first thread ends, another goes on */
            pthread_t thread;
            if (pthread_create(&thread, NULL, go_on, NULL) != 0) abort();
            pthread_exit(NULL);
        } else if (strcmp(verb, "fork") == 0) {
            pid_t pid = fork();
            if (pid != 0) {
                int status;
                waitpid(pid, &status, 0);
                exit(WEXITSTATUS(status));
            }
        } else if (strcmp(verb, "exec") == 0) {
            fflush(stdout);
            execve(rest[0], rest, environ);
            abort();
        } else if (strcmp(verb, "kill") == 0) {
            raise(SIGKILL);
        } else {
            abort();
        }
        fflush(stdout);
    }
}

static void *go_on(void *unused) {
    (void)unused;
    char byte;
    for (ssize_t count = 1; count == 1;) { /* /proc/self is empty once the first thread is gone */
        int fd = open("/proc/self/maps", O_RDONLY);
        count = read(fd, &byte, 1);
        close(fd);
    }
    run();
    exit(0);
}

int main(int count, char **arguments) {
    (void)count;
    rest = arguments + 1;
    run();
    return 0;
}
