/* The time of a process's first result of the GPU, for negativa measure.
 *
 * That is the first call that waits for the GPU, or asks whether it is done, and succeeds after a
 * kernel or graph was launched.
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
 * words go through unchanged, and some too many do no harm.
 */
#define _GNU_SOURCE
#include "../native/files.h"

#include <link.h>
#include <stdatomic.h>

typedef uintptr_t Word;

/* By what they say: that there is something to wait for, or that it is done; or they look up
 * others: cuGetProcAddress(name, void **pointer, ...). */
enum Kind { LAUNCH, WAIT, LOOKUP };
/* Entry points of one name: for the legacy and the per-thread default stream, and versions. */
enum { VARIANTS = 4 };

static const char *target;
static atomic_bool launched, finished;

static Word wrap(const char *name, Word real);

static void write_time(void) {
    char text[25];
    int size = snprintf(text, sizeof text, "%" PRIu64 "\n", clock_ns(CLOCK_MONOTONIC));
    int fd = open_file(target, O_WRONLY | O_CREAT | O_EXCL, 0644);
    if (fd < 0) return;
    syscall(SYS_write, fd, text, (size_t)size);
    close_file(fd);
}

static void returned(enum Kind kind) {
    if (atomic_load_explicit(&finished, memory_order_relaxed)) return;
    if (kind == LAUNCH)
        atomic_store(&launched, true);
    else if (atomic_load(&launched) && !atomic_exchange(&finished, true))
        write_time();
}

/* As many as the function with most of them has, cuLaunchKernel. */
#define PARAMETERS \
    Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h, Word i, Word j, Word k

static int call(Word function, enum Kind kind, PARAMETERS) {
    int result = ((int (*)(PARAMETERS))function)(a, b, c, d, e, f, g, h, i, j, k);
    if (result != 0) return result;
    Word *found = (Word *)b;
    if (kind != LOOKUP)
        returned(kind);
    else if (a != 0 && found != NULL && *found != 0)
        *found = wrap((const char *)a, *found);
    return result;
}

/* By their names in cuda.h, without suffixes. */
#define FUNCTIONS(X)                     \
    X(cuLaunchKernel, LAUNCH)            \
    X(cuLaunchKernelEx, LAUNCH)          \
    X(cuLaunchCooperativeKernel, LAUNCH) \
    X(cuGraphLaunch, LAUNCH)             \
    X(cuCtxSynchronize, WAIT)            \
    X(cuStreamSynchronize, WAIT)         \
    X(cuEventSynchronize, WAIT)          \
    X(cuStreamQuery, WAIT)               \
    X(cuEventQuery, WAIT)                \
    X(cuMemcpyDtoH, WAIT)                \
    X(cuGetProcAddress, LOOKUP)

#define WRAPPER(name, kind, n)                                                            \
    static int name##_##n(PARAMETERS) {                                                   \
        return call(atomic_load(&name##_real[n]), kind, a, b, c, d, e, f, g, h, i, j, k); \
    }
#define WRAPPERS(name, kind)                   \
    static _Atomic Word name##_real[VARIANTS]; \
    WRAPPER(name, kind, 0)                     \
    WRAPPER(name, kind, 1)                     \
    WRAPPER(name, kind, 2)                     \
    WRAPPER(name, kind, 3)
FUNCTIONS(WRAPPERS)

#define ROW(name, kind) \
    {#name, name##_real, {(Word)name##_0, (Word)name##_1, (Word)name##_2, (Word)name##_3}},
static const struct {
    const char *name;
    _Atomic Word *real;
    Word wrappers[VARIANTS];
} functions[] = {FUNCTIONS(ROW)};

/* What to bind to instead; `real` itself where nothing is to be seen. */
static Word wrap(const char *name, Word real) {
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        size_t length = strlen(functions[i].name);
        /* Suffixes such as _v2 and _ptsz name versions and the per-thread default stream. */
        if (strncmp(name, functions[i].name, length) != 0 ||
            (name[length] != 0 && name[length] != '_'))
            continue;
        for (int n = 0; n < VARIANTS; n++)
            if (real == functions[i].wrappers[n]) return real;
        for (int n = 0; n < VARIANTS; n++) {
            Word expected = 0;
            if (atomic_compare_exchange_strong(&functions[i].real[n], &expected, real) ||
                expected == real)
                return functions[i].wrappers[n];
        }
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
