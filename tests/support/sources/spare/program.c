/* Loads a library made of library.cpp (argv[2]) and does what argv[1] says; prints what came out.
 * argv[3] is the number of its pages. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <setjmp.h>
#include <pty.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/rseq.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static void *library;
static int pages, left;
static int (*within)(int (*)(void), int *);
static long (*sum)(int, int);
static int (*thrown)(int);
static int (*constructed)(void);
static const char *(*page)(int);

static void load(const char *path) {
    library = dlopen(path, RTLD_NOW);
    if (library == NULL) {
        printf("%s\n", dlerror());
        exit(3);
    }
    sum = dlsym(library, "sum");
    thrown = dlsym(library, "thrown");
    constructed = dlsym(library, "constructed");
    page = dlsym(library, "page");
    within = dlsym(library, "within");
}

static void use(void) {
    printf("%d %ld", constructed(), sum(0, pages));
    for (int i = 0; i < 150; i += 30) printf(" %d", thrown(i));
    puts("");
    fflush(stdout);
}

static long expected(void) {
    long total = 0;
    for (int i = 0; i < pages; i++) total += i + 7;
    return total;
}

static void *race(void *own) {
    unsigned seed = (unsigned)(long)own;
    long wrong = 0;
    for (int i = 0; i < pages; i++) {
        int one = rand_r(&seed) % pages;
        wrong += sum(one, one + 1) != one + 7;
        if (i % 64 == 0) wrong += thrown(rand_r(&seed) % 150) < 0;
    }
    return (void *)(wrong + (sum(0, pages) != expected()));
}

static int raced(void) {
    pthread_t threads[8];
    long wrong = 0;
    for (long i = 0; i < 8; i++) pthread_create(&threads[i], NULL, race, (void *)(i + 1));
    pid_t children[8];
    for (int i = 0; i < 8; i++)
        if ((children[i] = fork()) == 0) _exit(race((void *)(long)(i + 20)) != NULL);
    for (int i = 0; i < 8; i++) {
        void *result;
        int status;
        pthread_join(threads[i], &result);
        waitpid(children[i], &status, 0);
        wrong += (long)result + status;
    }
    return wrong != 0;
}

static void *call_use(void *unused) {
    (void)unused;
    use();
    return NULL;
}

static void in_thread(size_t stack) {
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    if (stack) pthread_attr_setstacksize(&attributes, stack);
    if (pthread_create(&thread, &attributes, call_use, NULL) != 0) exit(4);
    pthread_join(thread, NULL);
}

/* The least alternate stack that the kernel's frame and a handler of 2 KiB fit on; a guard below. */
static void *on_alternate_stack(void *unused) {
    size_t size = (getauxval(AT_MINSIGSTKSZ) + 2048 + 4095) / 4096 * 4096;
    char *area = mmap(NULL, 4096 + size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(area + 4096, size, PROT_READ | PROT_WRITE);
    size_t least = getauxval(AT_MINSIGSTKSZ) + 2048;
    stack_t stack = {.ss_sp = area + 4096, .ss_size = least};
    if (sigaltstack(&stack, NULL)) exit(4);
    return call_use(unused);
}

/* As a profiler does: a signal at any place, whose handler needs pages, too. */
static volatile sig_atomic_t storms, storms_wrong;

static void on_alarm(int number) {
    (void)number;
    int one = (int)(storms++ * 7919u % (unsigned)pages);
    if (sum(one, one + 1) != one + 7) storms_wrong++;
}

static sigjmp_buf back;
static void *fault_address;
static int handled;

static void on_segv(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    handled++;
    fault_address = info->si_addr;
    /* The handler itself needs pages. */
    if (sum != NULL && sum(0, pages) != expected()) _exit(9);
    siglongjmp(back, 1);
}

static void on_usr1(int number) {
    (void)number;
    use();
}

static void set_handler(void) {
    struct sigaction action = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO};
    sigfillset(&action.sa_mask);
    sigaction(SIGSEGV, &action, NULL);
}

/* Faults itself; at first it unblocks the signal, if it may. */
static int unblocks;

static void on_segv_crash(int number) {
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, number);
    if (write(1, "handled\n", 8) != 8) _exit(9);
    if (unblocks-- > 0) sigprocmask(SIG_UNBLOCK, &one, NULL);
    *(volatile int *)24 = 1;
}

static void crash(void) {
    if (sigsetjmp(back, 1) == 0) *(volatile int *)24 = 1;
    printf("handled %d at %p\n", handled, fault_address);
}

static void block_all(void) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
}

/* Whether this is the child; the parent has waited for it, but for a daemon. */
static bool in_child(const char *how) {
    pid_t child = 0;
    int output = dup(1), terminal = -1, status = 0;
    if (!strcmp(how, "fork")) child = fork();
    if (!strcmp(how, "_Fork")) child = _Fork();
    if (!strcmp(how, "forkpty")) child = forkpty(&terminal, NULL, NULL, NULL);
    if (!strcmp(how, "daemon") && daemon(1, 1)) exit(4);
    if (child == 0) dup2(output, 1);
    close(output);
    if (child > 0) waitpid(child, &status, 0);
    if (child < 0 || status) exit(4);
    return child == 0;
}

/* Lets mmap fail, and if `also` mprotect, by these bits of this argument. */
static void deny(unsigned argument, unsigned bits, bool also, unsigned error) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, also ? SYS_mprotect : SYS_mmap, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args) + 8 * argument),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, bits, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        exit(5);
}

/* As systemd's MemoryDenyWriteExecute and stricter: no executable mapping can be made any more. */
static void deny_executable(void) {
    deny(2, PROT_EXEC, true, EPERM);
    if (mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED)
        exit(6);
}

/* ---- What the kernel and libc do with pages ---- */

static unsigned long digest = 14695981039346656037u;

static void digest_pages(ssize_t (*copy)(void *, const char *)) {
    for (int i = 0; i < pages; i++) {
        char bytes[4096];
        if (copy(bytes, page(i)) != 4096) exit(8);
        for (int at = 0; at < 4096; at++) digest = (digest ^ (unsigned char)bytes[at]) * 1099511628211u;
    }
    printf("%lx\n", digest);
}

static int ends[2], memory;
static pid_t other;

static ssize_t copy_by_pipe(void *bytes, const char *from) {
    return write(ends[1], from, 4096) == 4096 ? read(ends[0], bytes, 4096) : -1;
}

static ssize_t copy_from_other(void *bytes, const char *from) {
    struct iovec here = {bytes, 4096}, there = {(char *)from, 4096};
    return process_vm_readv(other, &here, 1, &there, 1, 0);
}

static ssize_t copy_by_file(void *bytes, const char *from) { return pread(memory, bytes, 4096, (off_t)from); }

static void *call_sum(void *wrong) {
    *(bool *)wrong = sum(0, pages) != expected();
    return NULL;
}

/* Two threads with one signal stack, of which only the address is left. */
static void *on_stack_of_another(void *area) {
    stack_t stack = {.ss_sp = area, .ss_size = 65536};
    if (sigaltstack(&stack, NULL)) exit(4);
    return race((void *)(long)gettid());
}

static void with_signal_stacks(bool freed) {
    struct sigaction action = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGSEGV, &action, NULL);
    char *area = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (freed) munmap(area, 65536);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, on_stack_of_another, area);
    for (int i = 0; i < 2; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        if (wrong) exit(9);
    }
    for (int i = 0; !freed && i < 65536; i++)
        if (area[i]) exit(9);
}

static void *load_often(void *path) {
    unsigned seed = (unsigned)gettid();
    for (int i = 0; i < 200; i++) {
        void *own = dlopen(path, rand_r(&seed) % 2 ? RTLD_NOW : RTLD_LAZY);
        if (own == NULL) return "not loaded";
        long (*function)(int, int) = (long (*)(int, int))dlsym(own, "sum");
        int one = rand_r(&seed) % pages;
        if (function(one, one + 1) != one + 7) return "another sum";
        dlclose(own);
    }
    return NULL;
}

static volatile bool waiting;

static int wait_here(void) {
    waiting = true;
    return pause();
}

static void *call_within(void *unused) {
    within(wait_here, &left);
    return unused;
}

/* How many frames a function has that the library calls: it, the library's, and main's at least. */
static int count_frames(void) {
    void *frames[64];
    return backtrace(frames, 64);
}

typedef struct {
    const char *address;
    int objects;
} Found;

static int covers(struct dl_phdr_info *object, size_t size, void *found) {
    (void)size;
    Found *asked = found;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *row = &object->dlpi_phdr[i];
        if (row->p_type == PT_LOAD &&
            (ElfW(Addr))asked->address - object->dlpi_addr - row->p_vaddr < row->p_memsz)
            asked->objects++;
    }
    return 0;
}

static void find_object_of_pages(void) {
    int counts[4] = {0};
    for (int i = 0; i < pages; i++) {
        Found found = {page(i), 0};
        Dl_info info;
        dl_iterate_phdr(covers, &found);
        counts[0] += found.objects == 1;
        counts[1] += dladdr(page(i), &info) && strstr(info.dli_fname, "libpages.so");
    }
    counts[2] = within(count_frames, &left);
    /* The first symbol is that of a refusal, see stub.c. */
    struct link_map *map;
    static const ElfW(Sym) none;
    const ElfW(Sym) *symbols = NULL;
    dlinfo(library, RTLD_DI_LINKMAP, &map);
    for (const ElfW(Dyn) *row = map->l_ld; row->d_tag; row++)
        if (row->d_tag == DT_SYMTAB) symbols = (const ElfW(Sym) *)row->d_un.d_ptr;
    counts[3] = symbols == NULL ? -1 : memcmp(symbols, &none, sizeof none);
    printf("%d %d %d %d\n", counts[0], counts[1], counts[2], counts[3]);
}

/* Loads the library as soon as memory suffices for the last step. */
static void load_in_little_memory(const char *path) {
    struct rlimit limit = {0, RLIM_INFINITY};
    char last[4096] = "";
    unsigned long now;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%lu", &now) != 1) exit(4);
    fclose(file);
    dlopen("libstdc++.so.6", RTLD_NOW);
    for (limit.rlim_cur = now * 4096; library == NULL; limit.rlim_cur += 4096) {
        setrlimit(RLIMIT_AS, &limit);
        library = dlopen(path, RTLD_NOW);
        if (library == NULL) snprintf(last, sizeof last, "%s", dlerror());
    }
    puts(last);
    dlclose(library);
}

/* A sequence without an end, which goes on in the library when it is interrupted. */
static long run_restartable(void *on_abort) {
    extern char sequence_start[], sequence_end[];
    struct rseq_cs sequence = {
        .start_ip = (uintptr_t)sequence_start,
        .post_commit_offset = (uintptr_t)sequence_end - (uintptr_t)sequence_start,
        .abort_ip = (uintptr_t)on_abort,
    };
    struct rseq *own = (struct rseq *)((char *)__builtin_thread_pointer() + __rseq_offset);
    long result;
    __asm__ volatile(
        "call 1f\n"
        "jmp 2f\n"
        "1: mov %1, (%2)\n"
        ".globl sequence_start, sequence_end\n"
        "sequence_start: pause\n"
        "jmp sequence_start\n"
        "sequence_end: ud2\n"
        "2:\n"
        : "=&a"(result)
        : "r"(&sequence), "r"(&own->rseq_cs)
        : "memory", "cc");
    return result;
}

static bool by_kernel(const char *what, const char *path) {
    if (!strcmp(what, "pipe")) {
        if (pipe(ends)) exit(4);
        digest_pages(copy_by_pipe);
    } else if (!strcmp(what, "another-process")) {
        if ((other = fork()) == 0)
            for (;;) pause();
        digest_pages(copy_from_other);
        kill(other, SIGKILL);
        waitpid(other, NULL, 0);
    } else if (!strcmp(what, "memory-file")) {
        memory = open("/proc/self/mem", O_RDONLY);
        digest_pages(copy_by_file);
    } else if (!strcmp(what, "shared-signal-stack") || !strcmp(what, "freed-signal-stack")) {
        with_signal_stacks(*what == 'f');
    } else if (!strcmp(what, "spawn")) {
        char *const command[] = {"program", "plain", (char *)path, "5", NULL};
        pid_t child;
        int status;
        fflush(stdout);
        if (posix_spawn(&child, "/proc/self/exe", NULL, NULL, command, environ)) exit(4);
        waitpid(child, &status, 0);
        if (status) exit(4);
    } else if (!strcmp(what, "fork")) {
        if (!in_child("fork")) exit(0);
    } else if (!strcmp(what, "namespace")) {
        void *own = dlmopen(LM_ID_NEWLM, path, RTLD_NOW);
        long (*function)(int, int) = (long (*)(int, int))dlsym(own, "sum");
        printf("%d %ld\n", function != sum, function(0, pages));
    } else if (!strcmp(what, "often")) {
        pthread_t threads[16];
        /* It stays; the library goes. */
        dlopen("libstdc++.so.6", RTLD_NOW);
        dlclose(library);
        for (int i = 0; i < 16; i++) pthread_create(&threads[i], NULL, load_often, (void *)path);
        for (int i = 0; i < 16; i++) {
            void *problem;
            pthread_join(threads[i], &problem);
            if (problem) puts(problem);
        }
        load(path);
    } else if (!strcmp(what, "limited-memory")) {
        struct rlimit limit = {1 << 20, RLIM_INFINITY};
        FILE *file = fopen("/proc/self/statm", "r");
        unsigned long now;
        if (file == NULL || fscanf(file, "%lu", &now) != 1) exit(4);
        fclose(file);
        limit.rlim_cur += now * 4096;
        if (setrlimit(RLIMIT_AS, &limit)) exit(4);
    } else if (!strcmp(what, "smallest-stack")) {
        pthread_attr_t attributes;
        pthread_t thread;
        bool wrong = true;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, 16 << 10);
        if (pthread_create(&thread, &attributes, call_sum, &wrong)) exit(4);
        pthread_join(thread, NULL);
        if (wrong) exit(9);
    } else if (!strcmp(what, "cancelled")) {
        pthread_t thread;
        void *result;
        pthread_create(&thread, NULL, call_within, NULL);
        while (!waiting) sched_yield();
        pthread_cancel(thread);
        pthread_join(thread, &result);
        printf("%d %d\n", result == PTHREAD_CANCELED, left);
    } else if (!strcmp(what, "object")) {
        find_object_of_pages();
    } else if (!strcmp(what, "restartable")) {
        struct sigaction action = {.sa_handler = on_alarm};
        struct itimerval soon = {{0, 0}, {0, 1000}};
        sigaction(SIGALRM, &action, NULL);
        setitimer(ITIMER_REAL, &soon, NULL);
        printf("%ld\n", __rseq_size ? run_restartable(dlsym(library, "interrupted")) : 0);
    } else {
        return !strcmp(what, "locked") || !strcmp(what, "little-memory");
    }
    return true;
}

int main(int count, char **arguments) {
    const char *what = arguments[1], *path = arguments[2];
    if (count < 4) return 2;
    pages = atoi(arguments[3]);
    /* As systemd's MemoryDenyWriteExecute does it since Linux 6.3: PR_SET_MDWE. */
    if (!strcmp(what, "mdwe") && prctl(65, 1, 0, 0, 0)) puts("no MDWE");
    /* As FUSE with direct I/O. */
    if (!strcmp(what, "no-shared")) deny(3, MAP_SHARED, false, ENODEV);
    if (!strcmp(what, "handler-before") || !strcmp(what, "handler-lost")) set_handler();
    if (!strcmp(what, "pending")) {
        block_all();
        raise(SIGPIPE);
    }
    /* The load, too, then has all pages in memory. */
    if (!strcmp(what, "locked") && mlockall(MCL_CURRENT | MCL_FUTURE)) puts("no lock");
    if (!strcmp(what, "little-memory")) load_in_little_memory(path);
    load(path);
    if (by_kernel(what, path)) {
        use();
    } else if (!strcmp(what, "plain") || !strcmp(what, "mdwe") || !strcmp(what, "no-shared")) {
        use();
    } else if (!strcmp(what, "threads")) {
        if (raced()) return 1;
        use();
    } else if (!strcmp(what, "small-stack")) {
        in_thread(64 << 10);
    } else if (!strcmp(what, "alternate-stack")) {
        pthread_t thread;
        pthread_create(&thread, NULL, on_alternate_stack, NULL);
        pthread_join(thread, NULL);
    } else if (!strcmp(what, "alarms")) {
        struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
        struct itimerval often = {{0, 100}, {0, 100}}, never = {{0, 0}, {0, 0}};
        sigaction(SIGALRM, &action, NULL);
        setitimer(ITIMER_REAL, &often, NULL);
        if (raced()) return 1;
        /* Until some have come: the machine may be slow. */
        while (storms < 50) sum(0, pages);
        setitimer(ITIMER_REAL, &never, NULL);
        if (storms_wrong) return 7;
        use();
    } else if (!strcmp(what, "blocked")) {
        block_all();
        in_thread(0);
    } else if (!strcmp(what, "handler-before")) {
        use();
        crash();
    } else if (!strcmp(what, "handler-after")) {
        set_handler();
        use();
        crash();
        crash();
    } else if (!strcmp(what, "handler-needs-pages")) {
        set_handler();
        crash();
    } else if (!strcmp(what, "handler-crashes") || !strcmp(what, "handler-unblocks")) {
        unblocks = strcmp(what, "handler-crashes") ? 3 : 0;
        use();
        signal(SIGSEGV, on_segv_crash);
        *(volatile int *)24 = 1;
    } else if (!strcmp(what, "handler-of-another")) {
        struct sigaction action = {.sa_handler = on_usr1};
        sigfillset(&action.sa_mask);
        sigaction(SIGUSR1, &action, NULL);
        raise(SIGUSR1);
    } else if (!strcmp(what, "by-handle")) {
        /* As ctypes finds functions. */
        int (*set)(int, const struct sigaction *, struct sigaction *) =
            dlsym(dlopen("libc.so.6", RTLD_NOW), "sigaction");
        struct sigaction action = {.sa_handler = SIG_DFL};
        set(SIGSEGV, &action, NULL);
        use();
    } else if (!strncmp(what, "vfork", 5)) {
        set_handler();
        if (what[5] && !in_child(what + strlen("vfork-in-"))) return 0;
        pid_t child = vfork();
        if (child == 0) {
            struct sigaction standard = {.sa_handler = SIG_DFL};
            sigaction(SIGSEGV, &standard, NULL);
            _exit(sum(0, 1) != 7);
        }
        int status;
        waitpid(child, &status, 0);
        if (status) return 1;
        use();
        crash();
    } else if (!strcmp(what, "closed")) {
        close_range(3, ~0u, 0);
        use();
    } else if (!strcmp(what, "deleted")) {
        if (count > 4 && unlink(arguments[4])) return 7;
        use();
    } else if (!strcmp(what, "sealed")) {
        /* mseal, of Linux 6.10. */
        if (syscall(462, (long)page(0) & -4096L, pages * 4096L, 0L)) puts("no seal");
        use();
    } else if (!strcmp(what, "seccomp")) {
        deny_executable();
        use();
    } else if (!strcmp(what, "mappings")) {
        /* As many as a process may have: each second page gets another protection. */
        size_t size = (size_t)1 << 32;
        char *many = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (many == MAP_FAILED) return 7;
        for (size_t at = 0; at < size; at += 8192)
            if (mprotect(many + at, 4096, PROT_READ)) break;
        use();
    } else if (!strcmp(what, "reload")) {
        for (int i = 0; i < 20; i++) {
            if (sum(i, pages) < 0 || thrown(i) != i) return 1;
            const char *place = page(0);
            dlclose(library);
            /* Guards of others now lie where pages were. */
            void *guard = mmap((void *)((long)place & -4096L), 4096, PROT_NONE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
            if (guard != MAP_FAILED) {
                struct sigaction action = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO};
                sum = NULL;
                sigaction(SIGSEGV, &action, NULL);
                if (sigsetjmp(back, 1) == 0 && *(volatile char *)guard == 0) return 8;
                if (fault_address != guard) return 9;
                if (i % 2) munmap(guard, 4096);
            }
            load(path);
        }
        use();
    } else if (!strcmp(what, "write")) {
        set_handler();
        if (sigsetjmp(back, 1) == 0) *(volatile char *)page(1) = 1;
        printf("handled %d\n", fault_address == page(1));
    } else if (!strcmp(what, "patched")) {
        /* As tools do that hook functions: make the code writable, change it, put it back. */
        char *code = (char *)((long)page(pages - 1) & -4096L);
        if (mprotect(code, 4096, PROT_READ | PROT_WRITE)) return 7;
        code[2]++; /* what the function adds */
        printf("%02x %02x\n", (unsigned char)code[0], (unsigned char)code[4]);
        if (mprotect(code, 4096, PROT_READ | PROT_EXEC)) return 7;
        use();
    } else if (!strcmp(what, "killed")) {
        use();
        raise(SIGSEGV);
    } else if (!strcmp(what, "killed-first")) {
        /* The kernel kills no first process of a namespace so, unless it has a handler. */
        raise(SIGSEGV);
        raise(SIGSEGV);
        use();
    } else if (!strcmp(what, "paused")) {
        sigset_t others;
        sigfillset(&others);
        sigdelset(&others, SIGUSR1);
        signal(SIGUSR1, on_usr1);
        block_all();
        raise(SIGUSR1);
        sigsuspend(&others);
    } else if (!strcmp(what, "pending")) {
        sigset_t still;
        use();
        if (sigpending(&still) || !sigismember(&still, SIGPIPE)) return 7;
    } else if (!strcmp(what, "crashed")) {
        use();
        *(volatile int *)24 = 1;
    } else {
        return 2;
    }
    return 0;
}
