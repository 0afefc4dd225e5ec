/* Keeps SIGSEGV for whoever serves page faults, whatever the program does with signals.
 *
 * A page that is missing on purpose is a SIGSEGV in any thread at any time. The signal must reach
 * our handler, so it must never be blocked and never be another's. So the program gets other
 * versions of libc's signal functions, see libc.h. A handler that the program sets for SIGSEGV is
 * virtual: it gets the signals that are not ours. Masks lose SIGSEGV on their way.
 * A child of vfork shares our memory, but not its parent's handlers; what it sets stays its own.
 *
 * What it can't see: functions that POSIX and Linux have given up (sigset, sigblock, sigpause);
 * rt_sigaction and rt_sigprocmask as system calls (Go's runtime), and libc's
 * calls of itself. libc blocks signals only around code of its own. A child of the system calls
 * fork or clone passes for one of vfork: it keeps its parent's virtual handler.
 *
 * Handlers call only what signal-safety(7) allows, and pthread_getcpuclockid(3), which reads a
 * field of the thread (glibc's nptl/pthread_getcpuclockid.c). Nothing allocates, nothing locks.
 * Tested with glibc 2.36; the symbols are libc's own since 2.34.
 */
#pragma once

#include "libc.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
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

enum { FAULTS_PLACES = 256 };

static struct {
    faults_serve serve;
    /* What the program set for SIGSEGV: the last of these. Each is written before it is the last,
     * in a place of its own, so that threads and handlers that run meanwhile read a whole one. */
    struct sigaction user[FAULTS_PLACES];
    atomic_uint taken, last;
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
static Word faults_strip(Word mask, sigset_t *own) {
    if (mask == 0 || sigismember((const sigset_t *)mask, SIGSEGV) != 1) return mask;
    *own = *(const sigset_t *)mask;
    sigdelset(own, SIGSEGV);
    return (Word)own;
}

/* A handler that unblocks SIGSEGV may fault. */
static Word faults_change(int how, Word mask, sigset_t *own) {
    if (how != SIG_UNBLOCK) return faults_strip(mask, own);
    if (mask != 0 && sigismember((const sigset_t *)mask, SIGSEGV) == 1)
        faults_set_mark(SIG_UNBLOCK);
    return mask;
}

FORWARD(sigprocmask, sigset_t own; b = faults_change((int)a, b, &own))
FORWARD(pthread_sigmask, sigset_t own; b = faults_change((int)a, b, &own))
FORWARD(sigsuspend, sigset_t own; a = faults_strip(a, &own))
ALIAS(__sigsuspend, sigsuspend)
FORWARD(ppoll, sigset_t own; d = faults_strip(d, &own))
FORWARD(__ppoll_chk, sigset_t own; d = faults_strip(d, &own))
FORWARD(pselect, sigset_t own; f = faults_strip(f, &own))
FORWARD(epoll_pwait, sigset_t own; e = faults_strip(e, &own))
FORWARD(epoll_pwait2, sigset_t own; e = faults_strip(e, &own))
FORWARD(pthread_attr_setsigmask_np, sigset_t own; b = faults_strip(b, &own))

static int (*real_sigaction)(int, const struct sigaction *, struct sigaction *);
static __sighandler_t (*real_signal)(int, __sighandler_t);
static __sighandler_t (*real_sysv_signal)(int, __sighandler_t);

static int our_sigaction(int number, const struct sigaction *new, struct sigaction *old) {
    if (number != SIGSEGV) {
        struct sigaction own;
        if (new != NULL && sigismember(&new->sa_mask, SIGSEGV) == 1) {
            own = *new;
            sigdelset(&own.sa_mask, SIGSEGV);
            new = &own;
        }
        return real_sigaction(number, new, old);
    }
    struct sigaction before = faults_user();
    if (new != NULL) faults_set_user(new);
    if (old != NULL) *old = before;
    return 0;
}

WRAP(sigaction)
ALIAS(__sigaction, sigaction)

static __sighandler_t faults_set(__sighandler_t handler, int flags) {
    struct sigaction new = {.sa_handler = handler, .sa_flags = flags}, old;
    our_sigaction(SIGSEGV, &new, &old);
    return old.sa_handler;
}

static __sighandler_t our_signal(int number, __sighandler_t handler) {
    return number == SIGSEGV ? faults_set(handler, SA_RESTART) : real_signal(number, handler);
}

WRAP(signal)

static __sighandler_t our_sysv_signal(int number, __sighandler_t handler) {
    return number == SIGSEGV ? faults_set(handler, (int)SA_RESETHAND | SA_NODEFER)
                             : real_sysv_signal(number, handler);
}

WRAP(sysv_signal)
ALIAS(__sysv_signal, sysv_signal)
