/* A library with data that programs write to, as cuFFT has its GPU code in. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

/* After 2,000 misses more pages come back at once. */
enum { PAGE = 4096, PAGES = 2600, POINTERS = 1 << 15, THREADS = 8, ROUNDS = 3 };

static char zeros[3 * PAGE];
/* ld.so writes these. */
__attribute__((used)) static char *pointers[POINTERS] = {zeros, [POINTERS / 2] = zeros};
/* A symbol that other libraries may use. */
char exported[16 * PAGE] = {'E'};
/* The last bytes of the file; behind them are zeros that the file does not have. */
__attribute__((aligned(PAGE), section(".data.last"))) static char code[PAGES * PAGE] = {'G'};

static void *hammer_some(void *own) {
    unsigned seed = (unsigned)(uintptr_t)own;
    for (int i = 0; i < ROUNDS * PAGES; i++) {
        /* All threads are at the same page, else there is no race. The pages beside it may be
         * there, and written to. */
        char *page = code + (size_t)(i * 1021 % PAGES) * PAGE;
        if (rand_r(&seed) % 4 == 0 && page[PAGE - 1] != 0) return "a byte changed";
        page[(uintptr_t)own]++;
        atomic_fetch_add((_Atomic int *)(page + 64), 1);
    }
    return NULL;
}

/* All threads count in all pages; NULL: no count is lost. */
const char *hammer(void) {
    pthread_t threads[THREADS];
    void *wrong = NULL;
    for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, hammer_some, (void *)(i + 8));
    for (int i = 0; i < THREADS; i++) {
        void *result;
        pthread_join(threads[i], &result);
        if (result) wrong = result;
    }
    if (wrong) return wrong;
    for (int i = 0; i < PAGES; i++) {
        const char *page = code + (size_t)i * PAGE;
        for (int k = 8; k < 8 + THREADS; k++)
            if (page[k] != ROUNDS) return "a thread's count is lost";
        if (*(const int *)(page + 64) != THREADS * ROUNDS) return "a common count is lost";
        if (*page != (i == 0 ? 'G' : 0)) return "a byte changed";
    }
    for (size_t i = 0; i < sizeof zeros; i++)
        if (zeros[i]++) return "a zero changed";
    return NULL;
}
