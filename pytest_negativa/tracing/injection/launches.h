/* Launches of each kernel, and how long the GPU ran it, by CUPTI's activity records.
 *
 * The detector in Python takes them once a second, and says where a phase of a test begins. Else
 * they are written when CUPTI hands over a buffer: after a second at first, then once in a
 * twentieth of the time since. So a process that is killed loses the launches since.
 */
#pragma once

#include "cupti.h"
#include "ranges.h"

/* cupti_activity.h: kinds of records. CONCURRENT_KERNEL doesn't serialise kernels. */
enum { OF_KERNEL = 10, OF_RANGE = 39 };
/* Offsets in CUpti_ActivityKernel4 to CUpti_ActivityKernel10, and in
 * CUpti_ActivityExternalCorrelation. */
enum { KERNEL_START = 16, KERNEL_END = 24, KERNEL_CALL = 92, KERNEL_NAME = 104 };
enum { RANGE_KIND = 4, RANGE_NUMBER = 8, RANGE_CALL = 16 };
enum { BUFFER_SIZE = 1 << 20, FLUSH_FORCED = 1, FLUSH_MS = 1000 };
/* Ranges of the last calls, by the low bits of their numbers. */
enum { CALL_SLOTS = 1 << 16 };

/* The calls that launch kernels, from cupti_driver_cbid.h and cupti_runtime_cbid.h: with and
 * without stream per thread, cooperative, of graphs, and with attributes. */
static const uint32_t DRIVER_LAUNCHES[] = {307, 442, 477, 478, 480, 514, 515, 652, 653};
static const uint32_t RUNTIME_LAUNCHES[] = {211, 214, 269, 270, 311, 312, 430, 431, 505, 506};

static struct {
    int (*register_callbacks)(void *give, void *take);
    int (*enable)(int kind);
    int (*disable)(int kind);
    int (*enable_driver)(uint32_t cbid, uint8_t on);
    int (*enable_runtime)(uint32_t cbid, uint8_t on);
    int (*next_record)(uint8_t *buffer, size_t size, void **record);
    int (*flush)(uint32_t flag);
    int (*flush_period)(uint32_t milliseconds);
} activity;

/* All of this is under `lock`. */
static Table kernel_names; /* its keys stay */
static Table launch_rows;  /* addresses of rows, by range, phase and name */
static struct Launches {
    struct Launches *next;
    const char *name;
    uint32_t range, phase;
    uint64_t count, gpu_ns;
} *launches, *taken; /* `taken` are not in the table any more */
/* Where phases of tests begin. CUPTI numbers calls in their order, in all threads together
 * (correlationId); it may begin anew at 0. */
struct Phase {
    uint32_t after_call, number;
};
static Text phases;
struct Waiting {
    const char *name;
    uint32_t call;
    uint64_t gpu_ns;
    bool old;
};
static Text waiting; /* launches of calls that no record has named yet */
static struct {
    uint32_t call, range;
} calls[CALL_SLOTS];
static long long counting_since, aged_ns, written_ns;

/* A copy of a kernel's name; NULL: out of memory. */
static const char *kernel_name(const char *name) {
    size_t size = strlen(name) + 1;
    if (!table_get(&kernel_names, name, size)) table_put(&kernel_names, name, size, 1);
    const Entry *known = table_find(&kernel_names, name, size);
    return known != NULL ? known->key : NULL;
}

/* The phase that a call belongs to; 0 where there are none. Most are in the last ones. */
static uint32_t phase_of(uint32_t call) {
    const struct Phase *rows = (const struct Phase *)phases.data;
    size_t i = phases.length / sizeof *rows;
    while (i > 1 && (int32_t)(call - rows[i - 1].after_call) <= 0) i--;
    return i > 0 ? rows[i - 1].number : 0;
}

/* Calls after this one are in the phase. */
static void begin_phase(uint32_t after_call, uint32_t number) {
    const struct Phase phase = {after_call, number};
    const struct Phase *rows = (const struct Phase *)phases.data;
    size_t count = phases.length / sizeof phase;
    if (count > 0 && rows[count - 1].after_call == after_call) phases.length -= sizeof phase;
    text_bytes(&phases, &phase, sizeof phase);
    if (phases.failed) lose("out of memory");
}

static void add_launch(const char *name, uint32_t range, uint32_t call, uint64_t gpu_ns) {
    struct {
        const char *name;
        uint32_t range, phase;
    } key = {name, range, phase_of(call)};
    struct Launches *row = (struct Launches *)table_get(&launch_rows, (char *)&key, sizeof key);
    if (row == NULL && (row = malloc(sizeof *row)) != NULL) {
        *row = (struct Launches){launches, name, range, key.phase, 0, 0};
        launches = row;
        table_put(&launch_rows, (char *)&key, sizeof key, (long)row);
    }
    if (row == NULL) {
        lose("out of memory");
        return;
    }
    row->count++;
    row->gpu_ns += gpu_ns;
}

/* Counts those whose call is known; and, at each second with `aging`, those that waited for one
 * already: they are in no range. */
static void settle(bool aging, bool last) {
    struct Waiting *rows = (struct Waiting *)waiting.data;
    size_t left = 0;
    for (size_t i = 0; i < waiting.length / sizeof *rows; i++) {
        struct Waiting one = rows[i];
        uint32_t slot = one.call % CALL_SLOTS;
        if (calls[slot].call == one.call)
            add_launch(one.name, calls[slot].range, one.call, one.gpu_ns);
        else if (last || (aging && one.old))
            add_launch(one.name, 0, one.call, one.gpu_ns);
        else {
            one.old |= aging;
            rows[left++] = one;
        }
    }
    waiting.length = left * sizeof *rows;
}

static void wait_for_call(const char *name, uint32_t call, uint64_t gpu_ns) {
    const struct Waiting row = {name, call, gpu_ns, false};
    if (!waiting.failed) text_bytes(&waiting, &row, sizeof row);
    if (waiting.failed) add_launch(name, 0, call, gpu_ns);
}

static void write_range(Text *line, uint32_t range) {
    if (ranges[range].parent != 0) write_range(line, ranges[range].parent);
    text_string(line, ranges[range].parent != 0 ? "," : "");
    text_json(line, ranges[range].name, strlen(ranges[range].name));
}

static void write_launches(void) {
    for (struct Launches *row = launches; row != NULL; row = row->next) {
        if (row->count == 0) continue;
        long context = context_id();
        Text line = {0};
        text_format(&line, "{\"record\":\"launch\",\"count\":%llu,\"context\":%ld,\"gpu_ns\":%llu",
                    (unsigned long long)row->count, context, (unsigned long long)row->gpu_ns);
        text_field(&line, "name", row->name);
        if (row->range != 0) {
            text_string(&line, ",\"ranges\":[");
            write_range(&line, row->range);
            text_string(&line, "]");
        }
        write_line(&line);
        row->count = row->gpu_ns = 0;
    }
    written_ns = now_ns();
}

static void add_record(const char *record) {
    uint32_t kind, call, external;
    uint64_t start, end, number;
    const char *name;
    memcpy(&kind, record, sizeof kind);
    if (kind == OF_KERNEL) {
        memcpy(&start, record + KERNEL_START, sizeof start);
        memcpy(&end, record + KERNEL_END, sizeof end);
        memcpy(&call, record + KERNEL_CALL, sizeof call);
        memcpy(&name, record + KERNEL_NAME, sizeof name);
        /* Both are 0 if CUPTI could not measure them. */
        uint64_t gpu_ns = end > start ? end - start : 0;
        if ((name = kernel_name(name)) == NULL) return;
        if (atomic_load(&ranges_on))
            wait_for_call(name, call, gpu_ns);
        else
            add_launch(name, 0, call, gpu_ns);
    } else if (kind == OF_RANGE) {
        memcpy(&external, record + RANGE_KIND, sizeof external);
        memcpy(&number, record + RANGE_NUMBER, sizeof number);
        memcpy(&call, record + RANGE_CALL, sizeof call);
        /* Another tool may number things of its own. */
        if (external != CORRELATION_CUSTOM2 || number == 0 || number > range_count) return;
        calls[call % CALL_SLOTS].call = call;
        calls[call % CALL_SLOTS].range = (uint32_t)number;
    }
}

static void give_buffer(uint8_t **buffer, size_t *size, size_t *most) {
    *buffer = aligned_alloc(8, BUFFER_SIZE);
    *size = *buffer != NULL ? BUFFER_SIZE : 0;
    *most = 0; /* as many records as there is room for */
}

/* In a thread of CUPTI, or in that which flushes. */
static void take_buffer(void *context, uint32_t stream, uint8_t *buffer, size_t size,
                        size_t valid) {
    (void)context, (void)stream, (void)size;
    void *record = NULL;
    if (take_lock()) {
        while (activity.next_record(buffer, valid, &record) == 0) add_record(record);
        long long now = now_ns();
        bool aging = now - aged_ns > FLUSH_MS * 1000000LL;
        if (aging) aged_ns = now;
        settle(aging, false);
        bool is_due = aging && now - written_ns > (now - counting_since) / 20;
        if (is_due && trace_fd >= 0) write_launches();
        pthread_mutex_unlock(&lock);
    }
    free(buffer);
}

static void flush_launches(void) {
    /* A signal handler that interrupted a record has the lock, which the flush would wait for. */
    if (activity.flush == NULL || !take_lock()) return;
    pthread_mutex_unlock(&lock);
    activity.flush(FLUSH_FORCED);
    if (!take_lock()) return;
    settle(false, true);
    pthread_mutex_unlock(&lock);
}

static void end_launches(void) {
    flush_launches();
    if (!take_lock()) return;
    write_launches();
    pthread_mutex_unlock(&lock);
}

/* The calls that launch kernels: CUPTI tells the ranges of those alone that it shows. */
static void show_calls(uint8_t on) {
    for (size_t i = 0; i < sizeof DRIVER_LAUNCHES / sizeof *DRIVER_LAUNCHES; i++)
        activity.enable_driver(DRIVER_LAUNCHES[i], on); /* an older CUPTI lacks the newest */
    for (size_t i = 0; i < sizeof RUNTIME_LAUNCHES / sizeof *RUNTIME_LAUNCHES; i++)
        activity.enable_runtime(RUNTIME_LAUNCHES[i], on);
}

/* Counts by a CUPTI. NULL, or the code of a warning: without ranges, launches are counted. */
static const char *count_launches(void *library, bool in_ranges) {
    static const char *const names[] = {
        "cuptiActivityRegisterCallbacks", "cuptiActivityEnable",
        "cuptiActivityDisable",           "cuptiActivityEnableDriverApi",
        "cuptiActivityEnableRuntimeApi",  "cuptiActivityGetNextRecord",
        "cuptiActivityFlushAll",          "cuptiActivityFlushPeriod"};
    if (!find_functions(library, names, sizeof names / sizeof *names, (void **)&activity))
        return "launches-unavailable";
    counting_since = aged_ns = written_ns = now_ns();
    if (activity.register_callbacks((void *)give_buffer, (void *)take_buffer) != 0 ||
        activity.enable(OF_KERNEL) != 0 || activity.flush_period(FLUSH_MS) != 0)
        return "launches-unavailable";
    if (!in_ranges) return NULL;
    if (activity.enable(OF_RANGE) != 0 || watch_ranges(library) != 0) return "ranges-unavailable";
    show_calls(1);
    return NULL;
}

/* NULL, or the code of a warning. */
static const char *start_launches(void) {
    bool in_ranges = traces_at("range");
    if (!in_ranges && !traces_at("launch")) return NULL;
    const char *lacking = count_launches(cupti_library, in_ranges);
    /* After CUPTI's own handlers, so it comes before them at exit. */
    atexit(end_launches);
    return lacking;
}
