/* Samples of services (one of N processes, for a time): tracing/command.py; pauses of a trace. */
#pragma once

#include "cupti.h"

#include <dirent.h>
#include <signal.h>

/* The end of a sample's time lets CUPTI go under this lock, and not while the process ends. */
static pthread_mutex_t limit_lock = PTHREAD_MUTEX_INITIALIZER;
static bool is_ending;
static long open_gap;

static void pause_trace(const char *reason) {
    pthread_mutex_lock(&lock);
    bool was_active = subscriber != NULL;
    if (was_active && open_gap == 0) {
        long context = context_id();
        open_gap = ++next_id;
        Text line = {0};
        text_format(&line, "{\"record\":\"gap\",\"id\":%ld,\"context\":%ld,\"time_ns\":%lld",
                    open_gap, context, now_ns());
        text_field(&line, "why", reason);
        write_line(&line);
    }
    pthread_mutex_unlock(&lock);
    if (was_active) release_cupti();
}

static long setting(const char *name) {
    const char *text = getenv(name);
    return text != NULL ? strtol(text, NULL, 10) : 0;
}

/* One process in `count`, by chance. */
static bool is_chosen(const char *count) {
    long one_of = strtol(count, NULL, 10);
    return one_of <= 1 ? one_of == 1 : random_number() % (uint64_t)one_of == 0;
}

/* A service that starts again and again must not fill a folder. */
static bool has_room(const char *folder) {
    long most = setting("NEGATIVA_SAMPLE_FILES"), found = 0;
    DIR *opened = opendir(folder);
    if (opened == NULL) return false;
    while (found < most + 2 && readdir(opened) != NULL) found++; /* two: . and .. */
    closedir(opened);
    return found < most + 2;
}

static void keep_cupti(void) {
    /* In a child of _Fork or clone the thread that has the lock may be missing. */
    if (!is_owner()) return;
    pthread_mutex_lock(&limit_lock);
    is_ending = true;
    pthread_mutex_unlock(&limit_lock);
}

static void *wait_for_limit(void *seconds) {
    struct timespec left = {.tv_sec = (time_t)(intptr_t)seconds};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
    pthread_mutex_lock(&limit_lock);
    if (!is_ending) pause_trace("the time for which it is traced is over");
    pthread_mutex_unlock(&limit_lock);
    return NULL;
}

static void start_limit(void) {
    long seconds = setting("NEGATIVA_SAMPLE_SECONDS");
    static atomic_int registered;
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    if (seconds <= 0) return;
    /* After CUPTI's own handlers, so it comes before them at exit. */
    if (!atomic_exchange(&registered, 1)) atexit(keep_cupti);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    /* The program's signals are for its own threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, &attributes, wait_for_limit, (void *)(intptr_t)seconds);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (error != 0) pause_trace("the thread that ends its tracing cannot be started");
}
