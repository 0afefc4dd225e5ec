/* The native tracer, with functions by which tests trace their own process (native_detector.py) and
 * stand in for the driver.
 */
// NOLINTNEXTLINE(bugprone-suspicious-include): the tests need its static functions
#include "../../pytest_negativa/tracing/injection.c"

/* For tests: the digest of a buffer. */
EXPORT void negativa_sha256(const void *data, size_t size, char hex[65]) {
    Sha sha = sha_start();
    sha_add(&sha, data, size);
    sha_hex(&sha, hex);
}

EXPORT const char *negativa_error(void) { return last_error; }

/* 0: done, 1: no trace file, 2: no CUPTI, 3: CUPTI is taken */
EXPORT int negativa_start(const char *folder, const char *run_id, const char *role,
                          const char *worker, const char *root) {
    pthread_mutex_lock(&lock);
    if (current_context.length == 0) set_context("import", NULL, 0);
    bool opened =
        trace_fd < 0 && open_trace(folder, run_id, role, worker, root, "native callbacks");
    pthread_mutex_unlock(&lock);
    if (!opened) return 1;
    if (!open_cupti()) return 2;
    int error = take_cupti();
    return error == 0 ? 0 : error == CUPTI_MULTIPLE_SUBSCRIBERS ? 3 : 2;
}

EXPORT void negativa_context(const char *phase, const char *nodeid, const char *detail) {
    pthread_mutex_lock(&lock);
    set_context(phase, nodeid, nodeid ? strlen(nodeid) : 0);
    if (detail != NULL) {
        current_context.length -= strlen("}");
        text_field(&current_context, "detail", detail);
        text_string(&current_context, "}");
    }
    pthread_mutex_unlock(&lock);
}

EXPORT void negativa_warn(const char *code, const char *text, int incomplete) {
    pthread_mutex_lock(&lock);
    write_warning(code, text, incomplete != 0);
    pthread_mutex_unlock(&lock);
}

EXPORT void negativa_drain(void) {
    pthread_mutex_lock(&lock);
    if (!mappings_are_current()) refresh_mappings();
    pthread_mutex_unlock(&lock);
}

EXPORT void negativa_pause(const char *reason) { pause_trace(reason); }

EXPORT int negativa_resume(void) {
    if (subscriber != NULL || trace_fd < 0) return 0;
    int error = take_cupti();
    if (error == CUPTI_MULTIPLE_SUBSCRIBERS) {
        /* Kineto (torch.profiler) never gives CUPTI back once it has had it. The pause was for
         * its sake and is over, so it is detached. */
        Dl_info info;
        void *library =
            dladdr((void *)cupti.subscribe, &info) ? dlopen(info.dli_fname, RTLD_NOW) : NULL;
        int (*finalize)(void) = library ? (int (*)(void))dlsym(library, "cuptiFinalize") : NULL;
        if (finalize != NULL) finalize();
        error = take_cupti();
    }
    pthread_mutex_lock(&lock);
    if (error != 0) {
        write_warning("cupti-taken", last_error, true);
    } else if (open_gap != 0) {
        Text line = {0};
        text_format(&line, "{\"record\":\"gap-end\",\"id\":%ld,\"time_ns\":%lld", open_gap,
                    now_ns());
        write_line(&line);
        open_gap = 0;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

EXPORT void negativa_stop(void) {
    release_cupti();
    pthread_mutex_lock(&lock);
    write_end();
    close_trace();
    forget();
    pthread_mutex_unlock(&lock);
}

/* For tests without a GPU: what a driver call would bring, from memory of this process. */
EXPORT void negativa_test_call(uint32_t cbid, const uint64_t *slots, int result) {
    CallbackData data = {SITE_EXIT, "", slots, &result};
    const DriverCall *call = find_call(cbid);
    if (call != NULL && call->action == UNLOAD) data.site = 0;
    atomic_store(&active, 1);
    on_call(NULL, DOMAIN_DRIVER_API, cbid, &data);
}
