/* CUPTI: cupti_callbacks.h, cupti_result.h. It is opened at run time. */
#pragma once

#include "records.h"

typedef struct {
    int site; /* CUpti_ApiCallbackSite: 0 enter, 1 exit */
    const char *function_name;
    const void *params;
    const int *result; /* CUresult, valid at exit */
} CallbackData;

typedef void (*Callback)(void *user, int domain, uint32_t cbid, const void *data);

typedef struct {
    size_t struct_size;
    const char *subscriber_name;
    char *old_subscriber_name;
    size_t old_subscriber_size;
    uint8_t allow_multiple_subscribers; /* from CUDA 13.3 on */
} SubscriberParams;

enum {
    DOMAIN_DRIVER_API = 1,
    SITE_EXIT = 1,
    CUPTI_INVALID_PARAMETER = 1,
    CUPTI_MULTIPLE_SUBSCRIBERS = 39
};

static struct {
    int (*subscribe)(void **, Callback, void *);
    int (*unsubscribe)(void *);
    int (*enable_callback)(uint32_t, void *, int, uint32_t);
} cupti;
static int (*subscribe_v2)(void **, Callback, void *, SubscriberParams *); /* or NULL */

static void *cupti_library, *subscriber;

static void on_call(void *user, int domain, uint32_t cbid, const void *raw) {
    (void)user;
    const CallbackData *data = raw;
    if (domain != DOMAIN_DRIVER_API || !atomic_load_explicit(&active, memory_order_relaxed)) return;
    const DriverCall *call = find_call(cbid);
    if (call == NULL) return;
    /* Unloading is noted before it happens: afterwards the driver may give the handle to
     * another thread. Anything else once it is known whether it worked. */
    if ((data->site == SITE_EXIT) == (call->action == UNLOAD)) return;
    if (data->site == SITE_EXIT && data->result == NULL) return;
    int saved = errno, cancel;
    /* A thread that is cancelled must not take the lock with it: system calls are cancellation
     * points. */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    if (take_lock()) {
        if (atomic_load(&active)) {
            /* Libraries that came since are listed now: the process may be killed before its end.
             */
            if (!mappings_are_current()) refresh_mappings();
            if (data->site == SITE_EXIT && *data->result != 0)
                record_refusal(call, data->params, *data->result);
            else
                record_call(call, data->params);
        }
        pthread_mutex_unlock(&lock);
    }
    pthread_setcancelstate(cancel, NULL);
    errno = saved;
}

static bool open_cupti(void) {
    if (cupti.subscribe != NULL) return true;
    const char *wanted = getenv("NEGATIVA_CUPTI");
    /* One that the program has already loaded comes first: two of them get in each other's way. */
    static const char *const names[] = {"libcupti.so.13", "libcupti.so.12"};
    void *library = NULL;
    for (int i = 0; library == NULL && i < 2; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_NOLOAD);
    if (library == NULL && wanted != NULL && *wanted) library = dlopen(wanted, RTLD_NOW);
    for (int i = 0; library == NULL && i < 2; i++) library = dlopen(names[i], RTLD_NOW);
    cupti_library = library;
    if (library == NULL) {
        snprintf(last_error, sizeof last_error, "%s", dlerror());
        return false;
    }
    static const char *const needed[] = {"cuptiSubscribe", "cuptiUnsubscribe",
                                         "cuptiEnableCallback"};
    subscribe_v2 =
        (int (*)(void **, Callback, void *, SubscriberParams *))dlsym(library, "cuptiSubscribe_v2");
    if (find_functions(library, needed, 3, (void **)&cupti)) return true;
    snprintf(last_error, sizeof last_error, "libcupti lacks a function that is needed");
    cupti.subscribe = NULL;
    return false;
}

/* 0, or CUPTI's error; `last_error` then says more. */
static int take_cupti(void) {
    char other[256] = "";
    size_t old_size = offsetof(SubscriberParams, allow_multiple_subscribers);
    SubscriberParams params = {old_size + 1, "pytest-negativa", other, sizeof other, 1};
    void *taken = NULL;
    int error;
    if (subscribe_v2 == NULL) {
        error = cupti.subscribe(&taken, on_call, NULL);
    } else {
        error = subscribe_v2(&taken, on_call, NULL, &params);
        params.struct_size = old_size;
        if (error == CUPTI_INVALID_PARAMETER) error = subscribe_v2(&taken, on_call, NULL, &params);
    }
    if (error != 0) {
        if (error == CUPTI_MULTIPLE_SUBSCRIBERS)
            snprintf(last_error, sizeof last_error,
                     "CUPTI serves one tool at a time and is taken by %s; nothing was traced here",
                     *other && strstr(other, "<not provided>") == NULL ? other : "another tool");
        else
            snprintf(last_error, sizeof last_error, "CUPTI refuses to work here: error %d", error);
        return error;
    }
    subscriber = taken;
    atomic_store(&active, 1);
    for (int i = 0; i < CALL_COUNT; i++) {
        int failed = cupti.enable_callback(1, taken, DOMAIN_DRIVER_API, CALLS[i].cbid);
        if (failed == 0 || error != 0) continue;
        error = failed;
        snprintf(last_error, sizeof last_error, "CUPTI can't show %s: error %d", CALLS[i].name,
                 error);
    }
    return error;
}

static void release_cupti(void) {
    void *taken = subscriber;
    subscriber = NULL;
    atomic_store(&active, 0);
    if (taken == NULL) return;
    for (int i = 0; i < CALL_COUNT; i++)
        cupti.enable_callback(0, taken, DOMAIN_DRIVER_API, CALLS[i].cbid);
    cupti.unsubscribe(taken);
}
