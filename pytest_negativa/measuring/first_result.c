/* Notes when a process first learns that the GPU has finished something: the first call that
 * waits for the GPU, or asks whether it is done, and succeeds after a kernel or graph was launched.
 *
 * glibc loads it into every process whose LD_AUDIT names it (rtld-audit(7)), beside the library
 * that redirects. It changes where symbols of libcuda.so.1 are bound to: CUDA's runtime finds
 * cuGetProcAddress by dlsym, and through it all other functions of the driver ("Driver Entry
 * Point Access" in the CUDA Programming Guide). No CUPTI, so profilers are free to use it; a call
 * costs one more jump. What the loader binds without a PLT entry (a program linked with libcuda
 * and built with -fno-plt) it does not show, so that is missed.
 *
 * Environment: NEGATIVA_FIRST_RESULT, a file that the first process to get there creates, with
 * the time in nanoseconds of CLOCK_MONOTONIC.
 *
 * It must be the first of several auditors: in _dl_audit_symbind_alt, which dlsym calls, glibc 2.36
 * does not step on to the next one after an auditor that has no la_symbind.
 *
 * The wrappers take every parameter as a word. The ABIs for Linux of x86-64 (System V) and aarch64
 * (AAPCS64) pass integers and pointers each in a register or an eight-byte slot of the stack, so
 * words go through unchanged, and one too many does no harm.
 */
#define _GNU_SOURCE
#include "../native/files.h"

#include <link.h>
#include <stdatomic.h>

#define EXPORT __attribute__((visibility("default")))

typedef uintptr_t Word;

/* By what they tell: that there is something to wait for, or that it is done. */
enum { LAUNCH, WAIT };
/* Entry points of one name: for the legacy and the per-thread default stream, and versions. */
enum { VARIANTS = 4 };

static const char *target;
static atomic_bool launched, finished;

static void write_time(void) {
    char text[25], *end = put_digits(text, clock_ns(CLOCK_MONOTONIC));
    *end++ = '\n';
    int fd = open_file(target, O_WRONLY | O_CREAT | O_EXCL, 0644);
    if (fd < 0) return;
    syscall(SYS_write, fd, text, (size_t)(end - text));
    close_file(fd);
}

static void returned(int kind, int result) {
    if (result != 0 || atomic_load_explicit(&finished, memory_order_relaxed)) return;
    if (kind == LAUNCH)
        atomic_store(&launched, true);
    else if (atomic_load(&launched) && !atomic_exchange(&finished, true))
        write_time();
}

/* Name, kind and number of parameters, as in cuda.h. */
#define PARAMS_1 (Word a)
#define ARGS_1 (a)
#define PARAMS_2 (Word a, Word b)
#define ARGS_2 (a, b)
#define PARAMS_3 (Word a, Word b, Word c)
#define ARGS_3 (a, b, c)
#define PARAMS_4 (Word a, Word b, Word c, Word d)
#define ARGS_4 (a, b, c, d)
#define PARAMS_10 (Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h, Word i, Word j)
#define ARGS_10 (a, b, c, d, e, f, g, h, i, j)
#define PARAMS_11 \
    (Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h, Word i, Word j, Word k)
#define ARGS_11 (a, b, c, d, e, f, g, h, i, j, k)
/* cuCtxSynchronize has a context from CUDA 13 on, and had nothing before. */
#define FUNCTIONS(X)                         \
    X(cuLaunchKernel, LAUNCH, 11)            \
    X(cuLaunchKernelEx, LAUNCH, 4)           \
    X(cuLaunchCooperativeKernel, LAUNCH, 10) \
    X(cuGraphLaunch, LAUNCH, 2)              \
    X(cuCtxSynchronize, WAIT, 1)             \
    X(cuStreamSynchronize, WAIT, 1)          \
    X(cuEventSynchronize, WAIT, 1)           \
    X(cuStreamQuery, WAIT, 1)                \
    X(cuEventQuery, WAIT, 1)                 \
    X(cuMemcpyDtoH, WAIT, 3)

#define WRAPPER(name, kind, count, n)                                                    \
    static int name##_##n PARAMS_##count {                                               \
        int(*real) PARAMS_##count = (int(*) PARAMS_##count)atomic_load(&name##_real[n]); \
        int result = real ARGS_##count;                                                  \
        returned(kind, result);                                                          \
        return result;                                                                   \
    }
#define WRAPPERS(name, kind, count)            \
    static _Atomic Word name##_real[VARIANTS]; \
    WRAPPER(name, kind, count, 0)              \
    WRAPPER(name, kind, count, 1)              \
    WRAPPER(name, kind, count, 2)              \
    WRAPPER(name, kind, count, 3)
FUNCTIONS(WRAPPERS)

#define ROW(name, kind, count) \
    {#name, name##_real, {(Word)name##_0, (Word)name##_1, (Word)name##_2, (Word)name##_3}},
static const struct {
    const char *name;
    _Atomic Word *real;
    Word wrappers[VARIANTS];
} functions[] = {FUNCTIONS(ROW)};

static bool ends_here(const char *suffix) {
    return *suffix == 0 || strcmp(suffix, "_v2") == 0 || strcmp(suffix, "_ptsz") == 0 ||
           strcmp(suffix, "_ptds") == 0 || strcmp(suffix, "_v2_ptds") == 0 ||
           strcmp(suffix, "_v2_ptsz") == 0;
}

static Word wrap(const char *name, Word real);

/* cuGetProcAddress(name, void **pointer, int version, uint64 flags), and _v2 with a fifth. */
static _Atomic Word lookup_real[2];
static int lookup(int version, const char *name, Word *pointer, Word c, Word d, Word e) {
    int (*real)(const char *, Word *, Word, Word, Word) =
        (int (*)(const char *, Word *, Word, Word, Word))atomic_load(&lookup_real[version]);
    int result = real(name, pointer, c, d, e);
    if (result == 0 && name != NULL && pointer != NULL && *pointer != 0)
        *pointer = wrap(name, *pointer);
    return result;
}
static int lookup_v1(const char *n, Word *p, Word c, Word d, Word e) {
    return lookup(0, n, p, c, d, e);
}
static int lookup_v2(const char *n, Word *p, Word c, Word d, Word e) {
    return lookup(1, n, p, c, d, e);
}

/* What to bind to instead; `real` itself where nothing is to be seen. */
static Word wrap(const char *name, Word real) {
    static const char LOOKUP[] = "cuGetProcAddress";
    if (strncmp(name, LOOKUP, sizeof LOOKUP - 1) == 0 && ends_here(name + sizeof LOOKUP - 1)) {
        /* Asked for through itself, either version may come under the plain name. */
        if (real == (Word)lookup_v1 || real == (Word)lookup_v2) return real;
        for (int version = 0; version < 2; version++) {
            Word expected = 0;
            if (atomic_compare_exchange_strong(&lookup_real[version], &expected, real) ||
                expected == real)
                return version == 0 ? (Word)lookup_v1 : (Word)lookup_v2;
        }
        return real;
    }
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        size_t length = strlen(functions[i].name);
        if (strncmp(name, functions[i].name, length) != 0 || !ends_here(name + length)) continue;
        for (int n = 0; n < VARIANTS; n++)
            if (real == functions[i].wrappers[n]) return real;
        for (int n = 0; n < VARIANTS; n++) {
            Word expected = 0;
            if (atomic_compare_exchange_strong(&functions[i].real[n], &expected, real) ||
                expected == real)
                return functions[i].wrappers[n];
        }
        return real;
    }
    return real;
}

/* ---- What the dynamic loader calls ---- */

EXPORT unsigned int la_version(unsigned int version) {
    for (char **entry = environ; *entry != NULL; entry++)
        if (strncmp(*entry, "NEGATIVA_FIRST_RESULT=", 22) == 0) target = strdup(*entry + 22);
    /* 0: the loader forgets this library. */
    return target != NULL ? version : 0;
}

EXPORT unsigned int la_objopen(struct link_map *map, Lmid_t namespace, uintptr_t *cookie) {
    (void)namespace;
    bool is_driver = is_named(map->l_name, "libcuda.so");
    *cookie = is_driver;
    return LA_FLG_BINDFROM | (is_driver ? LA_FLG_BINDTO : 0);
}

EXPORT uintptr_t la_symbind64(Elf64_Sym *symbol, unsigned int index, uintptr_t *from, uintptr_t *to,
                              unsigned int *flags, const char *name) {
    (void)index;
    (void)from;
    (void)flags;
    /* glibc 2.36 asks for dlsym where either flag is set, not both. */
    return *to ? wrap(name, symbol->st_value) : symbol->st_value;
}
