// A library that is cut: its function has pages of its own, and its name is another library's, too.
#ifdef FIRST
__attribute__((weak)) int shared(int x) { return x; }
int before = 0;
__attribute__((constructor)) static void start(void) { before = shared(1); }
int result(void) { return before; }
#else
/* A program has its own copy. */
int copied[8] = {[7] = 42};
int result(void);
__attribute__((weak, aligned(4096))) int shared(int x) { return x + 41; }
__attribute__((aligned(4096))) int call_result(void) { return result() + 0 * shared(1); }
#endif
