/* The tracer of processes other than the test process: CUDA loads it in cuInit.
 *
 * CUDA_INJECTION64_PATH names it. It writes the same records as the detector in Python
 * (models/trace.py) into a file of its own in NEGATIVA_TRACE_DIR.
 *
 * Needs neither CUDA's nor CUPTI's headers to build; what it must know of them is declared
 * below, with the header it comes from. CUPTI is opened at run time.
 *
 * The negativa_* functions count the launches of a Python process, through ctypes.
 *
 * NVTX loads it, too, if NVTX_INJECTION64_PATH names it. It then tells CUPTI which range each
 * thread is in, for the launches that are counted.
 *
 * Rules: never fail the program (InitializeInjection always says yes), never print, never
 * trust a pointer (memory is read by system call), one lock, one write() for each line.
 */
#define _GNU_SOURCE
#include "injection/launches.h"
#include "injection/samples.h"

#include <sys/file.h>

/* ---- The life of a trace ---- */

/* What was recorded stands in another file: a new file starts from nothing. The memory
 * stays: a thread of the parent may have been changing the tables. */
static void forget(void) {
    Table *const tables[] = {&contexts, &libraries, &files,        &images,
                             &handles,  &seen,      &kernel_names, &launch_rows};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) *tables[i] = NULL;
    maps_text = current_context = phases = waiting = (Text){0};
    mappings = NULL;
    mapping_count = 0;
    launches = taken = NULL;
    memset(calls, 0, sizeof calls);
    next_id = 0;
    open_gap = 0;
    devices_known = false;
    maps_valid = false;
}

static atomic_int initialized;      /* CUDA called InitializeInjection */
static atomic_int traced_by_python; /* this process; InitializeInjection leaves it alone */
static bool child_can_use_cuda;

static void before_fork(void) {
    child_can_use_cuda = true;
    if (subscriber == NULL && !atomic_load(&initialized)) return;
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int (*count_of)(int *) = cuda ? (int (*)(int *))dlsym(cuda, "cuDeviceGetCount") : NULL;
    int count;
    child_can_use_cuda = count_of == NULL || count_of(&count) != 0;
    if (cuda != NULL) dlclose(cuda);
}

/* The file is the parent's, and so is its use of the GPU, which doesn't survive a fork. If there
 * was none yet (cuInit may have failed), CUPTI is given back, for InitializeInjection to take it in
 * the child. */
static void after_fork_in_child(void) {
    void *held = subscriber;
    lock = (pthread_mutex_t)PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
    pthread_mutex_init(&ranges_lock, NULL);
    pthread_mutex_init(&limit_lock, NULL);
    is_ending = false;
    atomic_store(&active, 0);
    atomic_store(&ranges_on, 0);
    activity.flush = NULL;
    close_trace();
    subscriber = NULL;
    atomic_store(&traced_by_python, 0);
    forget();
    if (!child_can_use_cuda) return;
    atomic_store(&initialized, 0);
    if (held != NULL) cupti.unsubscribe(held);
}

static void watch_forks(void) {
    static atomic_int registered;
    if (!atomic_exchange(&registered, 1)) pthread_atfork(before_fork, NULL, after_fork_in_child);
}

static bool open_trace(const char *folder, const char *run_id, const char *role, const char *worker,
                       const char *root, const char *detector) {
    if (trace_owner == NULL) trace_owner = map_wiped();
    if (trace_owner == NULL) {
        snprintf(last_error, sizeof last_error, "no memory is left");
        return false;
    }
    int length = snprintf(trace_path, sizeof trace_path, "%s/%s.%d.%08x.jsonl", folder, run_id,
                          (int)getpid(), (unsigned)random_number());
    if (length < 0 || (size_t)length >= sizeof trace_path) {
        snprintf(last_error, sizeof last_error, "the path of its trace is too long");
        return false;
    }
    trace_fd = open(trace_path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    if (trace_fd >= 0 && trace_fd <= STDERR_FILENO) {
        /* A daemon closed it, and may print all the same. */
        int low = trace_fd;
        trace_fd = fcntl(low, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
        close(low);
    }
    struct stat status;
    if (trace_fd < 0 || fstat(trace_fd, &status) != 0) {
        snprintf(last_error, sizeof last_error, "%.800s: %s", trace_path, strerror(errno));
        if (trace_fd >= 0) close(trace_fd);
        trace_fd = -1;
        return false;
    }
    *trace_owner = getpid();
    trace_device = status.st_dev;
    trace_inode = status.st_ino;
    trace_links = status.st_nlink;
    /* Another user's file mask must not hide it from the session. */
    fchmod(trace_fd, 0644);
    /* As long as this process lives, and no longer. */
    bool locked = flock(trace_fd, LOCK_EX | LOCK_NB) == 0;
    char executable[4096] = "", folder_now[4096] = "";
    ssize_t size = is_sample ? -1 : readlink("/proc/self/exe", executable, sizeof executable - 1);
    if (size < 0) executable[0] = 0;
    if (is_sample)
        root = "";
    else if ((root == NULL || !*root) && getcwd(folder_now, sizeof folder_now) != NULL)
        root = folder_now;
    Text line = {0}, arguments = {0};
    text_format(&line, "{\"record\":\"header\",\"format\":1,\"pid\":%d,\"ppid\":%d", (int)getpid(),
                is_sample ? 0 : (int)getppid());
    text_format(&line, ",\"start_ns\":%lld", now_ns());
    text_field(&line, "run_id", run_id);
    text_field(&line, "role", role);
    text_field(&line, "detector", detector);
    text_field(&line, "executable", executable);
    text_field(&line, "root", root ? root : "");
    if (worker != NULL && *worker) text_field(&line, "worker", worker);
    text_string(&line, ",\"argv\":[");
    if (!is_sample && text_read(&arguments, "/proc/self/cmdline"))
        for (size_t at = 0; at < arguments.length; at += strlen(arguments.data + at) + 1) {
            if (at) text_string(&line, ",");
            text_json(&line, arguments.data + at, strlen(arguments.data + at));
        }
    free(arguments.data);
    text_format(&line, "],\"locked\":%s,\"lost\":false", locked ? "true" : "false");
    lost_at = (off_t)(line.length - strlen("false"));
    write_line(&line);
    watch_forks();
    return true;
}

static void write_end(void) {
    if (trace_fd < 0) return;
    refresh_mappings(); /* records what was loaded since */
    Text line = {0};
    text_format(&line, "{\"record\":\"end\",\"time_ns\":%lld", now_ns());
    write_line(&line);
}

/* At exit CUPTI may be gone already, so it isn't called. What other threads and destructors use
 * after this is recorded, too: this library is never unmapped (-z nodelete). */
__attribute__((destructor)) static void at_exit(void) {
    if (!take_lock()) return;
    write_end();
    pthread_mutex_unlock(&lock);
}

/* ---- For CUDA: called in cuInit, once a process ---- */

static void chain(void) {
    const char *path = getenv("NEGATIVA_CHAINED_INJECTION");
    if (path == NULL || !*path) return;
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    int (*initialize)(void) = library ? (int (*)(void))dlsym(library, "InitializeInjection") : NULL;
    if (initialize != NULL) initialize();
}

static void initialize(void) {
    /* The user's own tool first: it was there before us, and if it wants CUPTI we give way. */
    chain();
    if (atomic_load(&traced_by_python)) return;
    const char *sample = getenv("NEGATIVA_SAMPLE");
    is_sample = sample != NULL && *sample;
    if (is_sample) {
        /* A test started it: its session doesn't see what it uses. */
        tell("it is traced as a sample, into another run");
        tell_outer_sessions();
        if (!is_chosen(sample)) return;
    }
    const char *folder = getenv("NEGATIVA_TRACE_DIR"), *run_id = getenv("NEGATIVA_RUN_ID");
    if (folder == NULL || run_id == NULL || !*folder || !*run_id) {
        tell("its environment lacks NEGATIVA_TRACE_DIR or NEGATIVA_RUN_ID");
        return;
    }
    pthread_mutex_lock(&lock);
    if (is_sample)
        set_context("process", NULL, 0);
    else
        set_context_from_environment();
    bool opened = trace_fd < 0 && (!is_sample || has_room(folder)) &&
                  open_trace(folder, run_id, is_sample ? "sample" : "child", NULL,
                             getenv("NEGATIVA_ROOT"), "injection");
    pthread_mutex_unlock(&lock);
    if (!opened) {
        tell(last_error);
        return;
    }
    /* Not under the lock: once subscribed, callbacks of other threads may come and want it. */
    int error = open_cupti() ? take_cupti() : -1;
    const char *lacking = is_sample || subscriber == NULL ? NULL : start_launches();
    pthread_mutex_lock(&lock);
    if (error != 0)
        write_warning(error == CUPTI_MULTIPLE_SUBSCRIBERS ? "cupti-taken" : "cupti-unavailable",
                      last_error, true);
    if (lacking != NULL)
        write_warning(lacking, "CUPTI doesn't count launches here, or not by their ranges", false);
    pthread_mutex_unlock(&lock);
    /* A CUPTI that lacks a call shows the others all the same. */
    if (is_sample && subscriber != NULL) start_limit();
}

EXPORT int InitializeInjection(void) {
    int cancel;
    if (atomic_exchange(&initialized, 1)) return 1;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    initialize();
    pthread_setcancelstate(cancel, NULL);
    return 1;
}

/* ---- For Python ---- */

/* Count the launches of this process by the CUPTI that is loaded from this file. NULL, or the code
 * of a warning: see count_launches. */
EXPORT const char *negativa_count_launches(const char *cupti_path, int in_ranges) {
    void *library = dlopen(cupti_path, RTLD_NOW | RTLD_NOLOAD);
    if (trace_owner == NULL) trace_owner = map_wiped();
    if (library == NULL || trace_owner == NULL) return "launches-unavailable";
    *trace_owner = getpid();
    watch_forks();
    return count_launches(library, in_ranges != 0);
}

EXPORT void negativa_stop_launches(void) {
    activity.disable(OF_KERNEL);
    activity.disable(OF_RANGE);
    show_calls(0);
}

/* A phase of a test begins after a call of the driver, by its number of CUPTI; with `anew`, CUPTI
 * may have begun to number calls anew. */
EXPORT void negativa_begin_phase(uint32_t after_call, uint32_t number, int anew) {
    if (!take_lock()) return;
    if (anew) {
        phases.length = 0;
        memset(calls, 0, sizeof calls);
    }
    begin_phase(after_call, number);
    pthread_mutex_unlock(&lock);
}

EXPORT void negativa_flush_launches(void) { flush_launches(); }

/* Takes the launches of a kernel in a phase and range, of those that there were when `first` was
 * asked for. Its name, or NULL: of none. `numbers` are of its range and its phase. */
EXPORT const char *negativa_take_launches(int first, uint32_t numbers[2], uint64_t counts[2]) {
    if (!take_lock()) return NULL;
    if (first) {
        struct Launches **last = &taken;
        while (*last != NULL) last = &(*last)->next;
        *last = launches;
        launches = NULL;
        tdestroy(launch_rows, free);
        launch_rows = NULL;
    }
    struct Launches *row = taken;
    const char *name = NULL;
    if (row != NULL) {
        taken = row->next;
        name = row->name;
        numbers[0] = row->range;
        numbers[1] = row->phase;
        counts[0] = row->count;
        counts[1] = row->gpu_ns;
        free(row);
    }
    pthread_mutex_unlock(&lock);
    return name;
}

/* The name of a range by its number, and the number of the range around it, or 0. */
EXPORT const char *negativa_range(uint32_t number, uint32_t *parent) {
    *parent = number <= range_count ? ranges[number].parent : 0;
    return number <= range_count ? ranges[number].name : NULL;
}

/* This process traces itself (tracing/start.py). Its forked children don't. */
EXPORT void negativa_leave_to_python(void) {
    atomic_store(&traced_by_python, 1);
    watch_forks();
}
