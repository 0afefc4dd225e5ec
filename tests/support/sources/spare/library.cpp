// A library with PAGES functions of a page each, and some that throw. Built by support/cutting.py.
__asm__(
    ".text\n"
    ".balign 4096\n"
    "first_page:\n"
    ".set number, 0\n"
    ".rept " PAGES "\n"
    ".balign 4096\n"
    "lea number(%rdi), %eax\n"
    "ret\n"
    ".set number, number + 1\n"
    ".endr\n"
    ".balign 4096\n");
extern "C" __attribute__((visibility("hidden"))) char first_page[];

// The sum over the pages [from, to).
extern "C" long sum(int from, int to) {
    long total = 0;
    for (int i = from; i < to; i++)
        total += reinterpret_cast<int (*)(int)>(first_page + 4096L * i)(7);
    return total;
}

// Address of a page, for whoever reads it.
extern "C" const char *page(int i) { return first_page + 4096L * i; }

__attribute__((noinline)) static void leave(int *depth) { __asm__ volatile("" : : "r"(depth)); }

template <int N> __attribute__((noinline, aligned(512))) void thrower(int depth) {
    struct Guard {
        int &depth;
        ~Guard() { leave(&depth); }
    } guard{depth};
    if (depth == N) throw N;
    if constexpr (N > 0) thrower<N - 1>(depth);
}

extern "C" int thrown(int depth) {
    try {
        thrower<150>(depth);
    } catch (int number) {
        return number;
    }
    return -1;
}

// Calls a function and counts its own way out, also if a thread is cancelled there.
extern "C" __attribute__((aligned(4096))) int within(int (*call)(void), int *left) {
    struct Guard {
        int *left;
        ~Guard() { ++*left; }
    } guard{left};
    return call() + 1;
}

// Where a restartable sequence goes when it is interrupted, behind the kernel's signature.
__asm__(
    ".balign 4096\n"
    ".long 0x53053053\n"
    ".globl interrupted\n"
    ".type interrupted, @function\n"
    "interrupted:\n"
    "mov $77, %eax\n"
    "ret\n"
    ".size interrupted, . - interrupted\n"
    ".balign 4096\n");

#ifdef RESTARTABLE
// The library lists a sequence, as tcmalloc and librseq do.
__asm__(
    ".section __rseq_cs, \"aw\"\n"
    ".balign 32\n"
    ".long 0, 0\n"
    ".quad interrupted, 0, interrupted\n"
    ".text\n");
#endif

__attribute__((noinline, aligned(4096))) static int initial() { return 42; }
static int initialised = initial();
extern "C" int constructed() { return initialised; }

#ifdef DATA
char data[16 * 4096] = {1};
#endif
