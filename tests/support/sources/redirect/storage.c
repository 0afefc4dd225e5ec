/* A library with thread-local storage of the fast kind, more than glibc keeps free by default. */
static _Thread_local volatile char data[3000] __attribute__((tls_model("initial-exec")));

__attribute__((constructor)) static void touch(void) { data[sizeof data - 1] = 1; }
