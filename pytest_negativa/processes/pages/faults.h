/* Keeps SIGSEGV for whoever serves page faults, whatever the program does with signals.
 *
 * A page that is missing on purpose is a SIGSEGV in any thread at any time. The signal must reach
 * our handler, so it must never be blocked and never be another's. faults_wrap_libc() therefore
 * gives the program other versions of libc's signal functions. A handler that the program sets for
 * SIGSEGV is virtual: it gets the signals that are not ours. Masks lose SIGSEGV on their way.
 *
 * How the program gets these versions: the values of libc's dynamic symbols are changed in memory
 * (elf(5), st_value; a private page). Whatever is bound later finds them, by PLT, GOT, dlsym or
 * dlvsym, also from libraries loaded later. What was bound before it does not see.
 * A child of vfork shares our memory, but not its parent's handlers; what it sets stays its own.
 *
 * What it can't see: rt_sigaction and rt_sigprocmask as system calls (Go's runtime), and libc's
 * calls of itself. libc blocks signals only around code of its own. A child of the system calls
 * fork or clone passes for one of vfork: it keeps its parent's virtual handler.
 *
 * Handlers call only what signal-safety(7) allows, and pthread_getcpuclockid(3), which reads a
 * field of the thread (glibc's nptl/pthread_getcpuclockid.c). Nothing allocates, nothing locks.
 * Tested with glibc 2.36; the symbols are libc's own since 2.34.
 */
#pragma once

#include <elf.h>
#include <errno.h>
#include <link.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#if !defined(__x86_64__) || !defined(__GLIBC__)
#error "for x86-64 and glibc"
#endif

/* Bits of a page fault's error code on x86 (Intel SDM volume 3, 4.7; ucontext's REG_ERR). */
enum { FAULT_WRITE = 2, FAULT_EXEC = 16 };

/* Makes the page there; false: the fault is not ours. Called in the signal handler. */
typedef bool (*faults_serve)(uintptr_t address, unsigned long error, int si_code);

typedef struct {
    const char *name;
    void *ours;
    void **real;
} FaultsWrapper;

enum { FAULTS_PLACES = 256 };

static struct {
    faults_serve serve;
    /* What the program set for SIGSEGV: the last of these. Each is written before it is the last,
     * in a place of its own, so that threads and handlers that run meanwhile read a whole one. */
    struct sigaction user[FAULTS_PLACES];
    atomic_uint taken, last;
    int (*sigaction)(int, const struct sigaction *, struct sigaction *);
    __sighandler_t (*signal)(int, __sighandler_t);
    __sighandler_t (*sysv_signal)(int, __sighandler_t);
    __sighandler_t (*sigset)(int, __sighandler_t);
    int (*siginterrupt)(int, int);
    int (*threadmask)(int, const sigset_t *, sigset_t *);
    int (*procmask)(int, const sigset_t *, sigset_t *);
    int (*sighold)(int);
    int (*sigrelse)(int);
    int (*sigignore)(int);
    int (*sigblock)(int);
    int (*sigsetmask)(int);
    int (*sigpause)(int);
    int (*sigsuspend)(const sigset_t *);
    int (*ppoll)(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *);
    int (*ppoll_chk)(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *, size_t);
    int (*pselect)(int, fd_set *, fd_set *, fd_set *, const struct timespec *, const sigset_t *);
    int (*epoll_pwait)(int, struct epoll_event *, int, int, const sigset_t *);
    int (*epoll_pwait2)(int, struct epoll_event *, int, const struct timespec *, const sigset_t *);
    int (*attr_setsigmask)(pthread_attr_t *, const sigset_t *);
} faults;

/* ---- The program's own handler ---- */

static struct sigaction faults_user(void) {
    return faults.user[atomic_load(&faults.last) % FAULTS_PLACES];
}

/* Whether this process shares its memory with its parent, as a child of vfork does: CPython's
 * subprocess resets all handlers in one. What forks in libc gives the child's thread its number;
 * vfork, posix_spawn and clone leave that of the parent. libc shows it as a thread's clock
 * (CPUCLOCK_PID of Linux's include/linux/posix-timers_types.h). */
static bool faults_is_vforked(void) {
    clockid_t clock;
    if (pthread_getcpuclockid(pthread_self(), &clock) != 0) return false;
    return ~(clock >> 3) != (clockid_t)syscall(SYS_gettid);
}

static void faults_set_user(const struct sigaction *new) {
    if (faults_is_vforked()) return;
    unsigned next = atomic_fetch_add(&faults.taken, 1) + 1, last = atomic_load(&faults.last);
    faults.user[next % FAULTS_PLACES] = *new;
    /* Of two threads the one that took the later place wins. */
    while ((int)(next - last) > 0 && !atomic_compare_exchange_weak(&faults.last, &last, next)) {
    }
}

/* ---- The handler ---- */

static void faults_die(int si_code) {
    struct sigaction fatal = {.sa_handler = SIG_DFL}, own;
    sigaction(SIGSEGV, &fatal, &own);
    /* A fault comes again and kills, with its own address. A signal that was sent doesn't. */
    if (si_code > 0) return;
    syscall(SYS_tgkill, getpid(), (pid_t)syscall(SYS_gettid), SIGSEGV);
    /* Nor does it kill the first process of a pid namespace (pid_namespaces(7)). */
    sigaction(SIGSEGV, &own, NULL);
}

/* Set while the program's handler runs, if that would block SIGSEGV: a handler that faults itself
 * must end the process, and not be called again and again. The mark is a blocked signal, so
 * siglongjmp takes it away. It is the signal by which libc cancels threads: libc lets no program
 * block it (SIGCANCEL in glibc's sysdeps/unix/sysv/linux/internal-signals.h). */
static const uint64_t faults_mark = UINT64_C(1) << (32 - 1);

static void faults_set_mark(int how) {
    syscall(SYS_rt_sigprocmask, how, &faults_mark, NULL, sizeof faults_mark);
}

static bool faults_is_marked(const ucontext_t *context) {
    return context->uc_sigmask.__val[0] & faults_mark;
}

static void faults_chain(int number, siginfo_t *info, void *context) {
    struct sigaction user = faults_user();
    if (user.sa_handler == SIG_IGN && info->si_code <= 0) return;
    if (user.sa_handler == SIG_DFL || user.sa_handler == SIG_IGN ||
        (info->si_code > 0 && faults_is_marked(context))) {
        faults_die(info->si_code);
        return;
    }
    if (user.sa_flags & (int)SA_RESETHAND) {
        static const struct sigaction reset = {.sa_handler = SIG_DFL};
        faults_set_user(&reset);
    }
    /* Returning from our handler puts the mask back. */
    sigdelset(&user.sa_mask, SIGSEGV);
    sigprocmask(SIG_BLOCK, &user.sa_mask, NULL);
    if (!(user.sa_flags & SA_NODEFER)) faults_set_mark(SIG_BLOCK);
    if (user.sa_flags & SA_SIGINFO)
        user.sa_sigaction(number, info, context);
    else
        user.sa_handler(number);
}

static void faults_handle(int number, siginfo_t *info, void *context) {
    int saved = errno;
    unsigned long error = (unsigned long)((ucontext_t *)context)->uc_mcontext.gregs[REG_ERR];
    /* A signal that somebody sent has no address. */
    bool fault = info->si_code == SEGV_ACCERR || info->si_code == SEGV_MAPERR;
    if (!fault || !faults.serve((uintptr_t)info->si_addr, error, info->si_code))
        faults_chain(number, info, context);
    errno = saved;
}

/* SA_NODEFER: the program's own handlers touch pages, too. SA_ONSTACK: a thread whose stack is
 * used up reaches the program's handler as before. */
static bool faults_start(faults_serve serve) {
    struct sigaction action = {
        .sa_sigaction = faults_handle,
        .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART,
    };
    sigset_t mask;
    faults.serve = serve;
    sigemptyset(&mask);
    sigaddset(&mask, SIGSEGV);
    return sigaction(SIGSEGV, &action, &faults.user[0]) == 0 &&
           sigprocmask(SIG_UNBLOCK, &mask, NULL) == 0;
}

/* ---- What the program gets ---- */

/* The mask without SIGSEGV, in `own`. */
static const sigset_t *faults_strip(const sigset_t *mask, sigset_t *own) {
    if (mask == NULL || sigismember(mask, SIGSEGV) != 1) return mask;
    *own = *mask;
    sigdelset(own, SIGSEGV);
    return own;
}

static int faults_sigaction(int number, const struct sigaction *new, struct sigaction *old) {
    if (number != SIGSEGV) {
        struct sigaction own;
        if (new != NULL && sigismember(&new->sa_mask, SIGSEGV) == 1) {
            own = *new;
            sigdelset(&own.sa_mask, SIGSEGV);
            new = &own;
        }
        return faults.sigaction(number, new, old);
    }
    struct sigaction before = faults_user();
    if (new != NULL) faults_set_user(new);
    if (old != NULL) *old = before;
    return 0;
}

static __sighandler_t faults_set(__sighandler_t handler, int flags) {
    struct sigaction new = {.sa_handler = handler, .sa_flags = flags}, old;
    faults_sigaction(SIGSEGV, &new, &old);
    return old.sa_handler;
}

static __sighandler_t faults_signal(int number, __sighandler_t handler) {
    return number == SIGSEGV ? faults_set(handler, SA_RESTART) : faults.signal(number, handler);
}

static __sighandler_t faults_sysv_signal(int number, __sighandler_t handler) {
    return number == SIGSEGV ? faults_set(handler, (int)SA_RESETHAND | SA_NODEFER)
                             : faults.sysv_signal(number, handler);
}

static __sighandler_t faults_sigset(int number, __sighandler_t handler) {
    if (number != SIGSEGV) return faults.sigset(number, handler);
    if (handler == SIG_HOLD) return faults_user().sa_handler;
    /* It unblocks the signal. */
    faults_set_mark(SIG_UNBLOCK);
    return faults_set(handler, 0);
}

static int faults_siginterrupt(int number, int flag) {
    return number == SIGSEGV ? 0 : faults.siginterrupt(number, flag);
}

/* A handler that unblocks SIGSEGV may fault. */
static void faults_unblock(int how, const sigset_t *mask) {
    if (how == SIG_UNBLOCK && mask != NULL && sigismember(mask, SIGSEGV) == 1)
        faults_set_mark(SIG_UNBLOCK);
}

static int faults_threadmask(int how, const sigset_t *mask, sigset_t *old) {
    sigset_t own;
    faults_unblock(how, mask);
    return faults.threadmask(how, how == SIG_UNBLOCK ? mask : faults_strip(mask, &own), old);
}

static int faults_procmask(int how, const sigset_t *mask, sigset_t *old) {
    sigset_t own;
    faults_unblock(how, mask);
    return faults.procmask(how, how == SIG_UNBLOCK ? mask : faults_strip(mask, &own), old);
}

static int faults_sighold(int number) { return number == SIGSEGV ? 0 : faults.sighold(number); }

static int faults_sigrelse(int number) {
    if (number == SIGSEGV) faults_set_mark(SIG_UNBLOCK);
    return faults.sigrelse(number);
}

static int faults_sigignore(int number) {
    if (number != SIGSEGV) return faults.sigignore(number);
    faults_set(SIG_IGN, 0);
    return 0;
}

/* sigblock(3): bit n - 1 is signal n. */
static int faults_sigblock(int mask) { return faults.sigblock(mask & ~(1 << (SIGSEGV - 1))); }

static int faults_sigsetmask(int mask) { return faults.sigsetmask(mask & ~(1 << (SIGSEGV - 1))); }

static int faults_sigpause(int mask) { return faults.sigpause(mask & ~(1 << (SIGSEGV - 1))); }

static int faults_sigsuspend(const sigset_t *mask) {
    sigset_t own;
    return faults.sigsuspend(faults_strip(mask, &own));
}

static int faults_ppoll(struct pollfd *files, nfds_t count, const struct timespec *limit,
                        const sigset_t *mask) {
    sigset_t own;
    return faults.ppoll(files, count, limit, faults_strip(mask, &own));
}

static int faults_ppoll_chk(struct pollfd *files, nfds_t count, const struct timespec *limit,
                            const sigset_t *mask, size_t size) {
    sigset_t own;
    return faults.ppoll_chk(files, count, limit, faults_strip(mask, &own), size);
}

static int faults_pselect(int count, fd_set *in, fd_set *out, fd_set *other,
                          const struct timespec *limit, const sigset_t *mask) {
    sigset_t own;
    return faults.pselect(count, in, out, other, limit, faults_strip(mask, &own));
}

static int faults_epoll_pwait(int fd, struct epoll_event *events, int count, int limit,
                              const sigset_t *mask) {
    sigset_t own;
    return faults.epoll_pwait(fd, events, count, limit, faults_strip(mask, &own));
}

static int faults_epoll_pwait2(int fd, struct epoll_event *events, int count,
                               const struct timespec *limit, const sigset_t *mask) {
    sigset_t own;
    return faults.epoll_pwait2(fd, events, count, limit, faults_strip(mask, &own));
}

static int faults_attr_setsigmask(pthread_attr_t *attributes, const sigset_t *mask) {
    sigset_t own;
    return faults.attr_setsigmask(attributes, faults_strip(mask, &own));
}

#define FAULTS_WRAPPER(name, function) {name, (void *)faults_##function, (void **)&faults.function}

static const FaultsWrapper faults_wrappers[] = {
    FAULTS_WRAPPER("sigaction", sigaction),
    FAULTS_WRAPPER("__sigaction", sigaction),
    FAULTS_WRAPPER("signal", signal),
    FAULTS_WRAPPER("bsd_signal", signal),
    FAULTS_WRAPPER("ssignal", signal),
    FAULTS_WRAPPER("sysv_signal", sysv_signal),
    FAULTS_WRAPPER("__sysv_signal", sysv_signal),
    FAULTS_WRAPPER("sigset", sigset),
    FAULTS_WRAPPER("siginterrupt", siginterrupt),
    FAULTS_WRAPPER("pthread_sigmask", threadmask),
    FAULTS_WRAPPER("sigprocmask", procmask),
    FAULTS_WRAPPER("sighold", sighold),
    FAULTS_WRAPPER("sigrelse", sigrelse),
    FAULTS_WRAPPER("sigignore", sigignore),
    FAULTS_WRAPPER("sigblock", sigblock),
    FAULTS_WRAPPER("sigsetmask", sigsetmask),
    FAULTS_WRAPPER("sigpause", sigpause),
    FAULTS_WRAPPER("sigsuspend", sigsuspend),
    FAULTS_WRAPPER("__sigsuspend", sigsuspend),
    FAULTS_WRAPPER("ppoll", ppoll),
    FAULTS_WRAPPER("__ppoll_chk", ppoll_chk),
    FAULTS_WRAPPER("pselect", pselect),
    FAULTS_WRAPPER("epoll_pwait", epoll_pwait),
    FAULTS_WRAPPER("epoll_pwait2", epoll_pwait2),
    FAULTS_WRAPPER("pthread_attr_setsigmask_np", attr_setsigmask),
};

/* ---- How the program gets it ---- */

typedef struct {
    ElfW(Sym) *symbols;
    const char *names;
    const uint32_t *hash; /* of DT_GNU_HASH */
} FaultsTables;

/* glibc has added l_addr to these values, see elf_get_dynamic_info of its elf/dl-load.c. */
static FaultsTables faults_tables(const struct link_map *map) {
    FaultsTables tables = {0};
    for (const ElfW(Dyn) *d = map->l_ld; d != NULL && d->d_tag != DT_NULL; d++) {
        if (d->d_tag == DT_SYMTAB) tables.symbols = (ElfW(Sym) *)d->d_un.d_ptr;
        if (d->d_tag == DT_STRTAB) tables.names = (const char *)d->d_un.d_ptr;
        if (d->d_tag == DT_GNU_HASH) tables.hash = (const uint32_t *)d->d_un.d_ptr;
    }
    return tables;
}

/* How the segment of an address is mapped. libc's first segment holds its headers. */
static int faults_protection(const struct link_map *map, uintptr_t address) {
    const ElfW(Ehdr) *head = (const ElfW(Ehdr) *)map->l_addr;
    const ElfW(Phdr) *segment = (const ElfW(Phdr) *)(map->l_addr + head->e_phoff);
    for (unsigned i = 0; i < head->e_phnum; i++, segment++)
        if (segment->p_type == PT_LOAD &&
            address - map->l_addr - segment->p_vaddr < segment->p_memsz)
            return (segment->p_flags & PF_R ? PROT_READ : 0) |
                   (segment->p_flags & PF_W ? PROT_WRITE : 0) |
                   (segment->p_flags & PF_X ? PROT_EXEC : 0);
    return PROT_READ;
}

/* Gives `ours` as the value of each version of a symbol; the value before goes to `real`.
 * The table: https://sourceware.org/gnu-gabi/program-loading-and-dynamic-linking.txt */
static bool faults_replace(const struct link_map *map, FaultsTables tables, const char *name,
                           void *ours, void **real) {
    uint32_t hash = 5381, count = tables.hash[0], first = tables.hash[1];
    for (const char *c = name; *c; c++) hash = hash * 33 + (unsigned char)*c;
    const uint32_t *buckets = tables.hash + 4 + tables.hash[2] * (sizeof(ElfW(Addr)) / 4);
    const uint32_t *chain = buckets + count;
    uint32_t i = buckets[hash % count];
    bool replaced = false;
    if (i < first) return false;
    do {
        ElfW(Sym) *symbol = &tables.symbols[i];
        if ((chain[i - first] | 1) != (hash | 1) || symbol->st_shndx == SHN_UNDEF ||
            ELF64_ST_TYPE(symbol->st_info) != STT_FUNC ||
            strcmp(tables.names + symbol->st_name, name) != 0)
            continue;
        uintptr_t start = (uintptr_t)symbol & ~(uintptr_t)4095;
        size_t size = ((uintptr_t)(symbol + 1) - start + 4095) & ~(size_t)4095;
        int protection = faults_protection(map, start);
        if (mprotect((void *)start, size, protection | PROT_WRITE) != 0) return false;
        if (*real == NULL) *real = (void *)(map->l_addr + symbol->st_value);
        symbol->st_value = (uintptr_t)ours - map->l_addr;
        mprotect((void *)start, size, protection);
        replaced = true;
    } while ((chain[i++ - first] & 1) == 0);
    return replaced;
}

/* Gives the program our functions; call it with the link map of libc. False: a function that
 * each libc has is not there or can't be replaced. */
static bool faults_wrap(const struct link_map *libc, const FaultsWrapper *wrappers, size_t count) {
    FaultsTables tables = faults_tables(libc);
    bool replaced = tables.symbols != NULL && tables.names != NULL && tables.hash != NULL;
    for (size_t i = 0; replaced && i < count; i++)
        replaced =
            faults_replace(libc, tables, wrappers[i].name, wrappers[i].ours, wrappers[i].real) ||
            /* __, _np and newer ones may be missing. */
            strchr(wrappers[i].name, '_') != NULL;
    return replaced;
}

static bool faults_wrap_libc(const struct link_map *libc) {
    return faults_wrap(libc, faults_wrappers, sizeof faults_wrappers / sizeof *faults_wrappers);
}
