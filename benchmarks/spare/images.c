/* Loads images of GPU code whose pages are unreadable, and tells how the driver read them.
 *
 * Arguments: files made from kernels.cu. Each is put into memory of its own, once readable and once
 * with PROT_NONE. A handler of SIGSEGV makes a page readable when user code touches it. A read by
 * the kernel (ioctl, pageable copies) does not reach the handler and fails. Prints a line for each:
 *
 *   image  call  error  result  faults  faults in other threads
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096 };
static char *start;
static size_t size;
static atomic_int faults, others;
static pid_t main_thread;

static void on_fault(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    uintptr_t page = (uintptr_t)info->si_addr & -(uintptr_t)PAGE;
    if (page - (uintptr_t)start >= size) {
        signal(SIGSEGV, SIG_DFL);
        return;
    }
    syscall(SYS_mprotect, page, PAGE, PROT_READ);
    atomic_fetch_add(&faults, 1);
    if (syscall(SYS_gettid) != main_thread) atomic_fetch_add(&others, 1);
}

#define DRIVER(name, ...) static int (*name)(__VA_ARGS__)
DRIVER(cuInit, unsigned);
DRIVER(cuDevicePrimaryCtxRetain, void **, int);
DRIVER(cuCtxSetCurrent, void *);
DRIVER(cuModuleLoadData, void **, const void *);
DRIVER(cuModuleLoadFatBinary, void **, const void *);
DRIVER(cuModuleGetFunction, void **, void *, const char *);
DRIVER(cuModuleUnload, void *);
DRIVER(cuLibraryLoadData, void **, const void *, void *, void *, unsigned, void *, void *, unsigned);
DRIVER(cuLibraryGetKernel, void **, void *, const char *);
DRIVER(cuLibraryUnload, void *);
DRIVER(cuLaunchKernel, void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
       void *, void **, void **);
DRIVER(cuMemAlloc_v2, uint64_t *, size_t);
DRIVER(cuMemcpyDtoH_v2, void *, uint64_t, size_t);
DRIVER(cuMemcpyHtoD_v2, uint64_t, const void *, size_t);

static void find(void *driver, const char *name, void *place) {
    *(void **)place = dlsym(driver, name);
    if (*(void **)place == NULL) exit((fprintf(stderr, "no %s\n", name), 3));
}
#define FIND(name) find(driver, #name, &name)

static uint64_t memory;

/* What the kernel wrote. */
static int launch(void *kernel, unsigned *result) {
    void *arguments[] = {&memory};
    int error = cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, arguments, NULL);
    return error ? error : cuMemcpyDtoH_v2(result, memory, sizeof *result);
}

static int by_module(const void *image, unsigned *result, bool fatbin) {
    void *module, *kernel;
    int error = (fatbin ? cuModuleLoadFatBinary : cuModuleLoadData)(&module, image);
    if (!error) error = cuModuleGetFunction(&kernel, module, "add_up");
    if (!error) error = launch(kernel, result);
    if (!error) cuModuleUnload(module);
    return error;
}

static int by_library(const void *image, unsigned *result) {
    void *library, *kernel;
    int error = cuLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0);
    if (!error) error = cuLibraryGetKernel(&kernel, library, "add_up");
    if (!error) error = launch(kernel, result);
    if (!error) cuLibraryUnload(library);
    return error;
}

static int copied(const void *image, unsigned *result) {
    int error = cuMemcpyHtoD_v2(memory, image, 64);
    return error ? error : cuMemcpyDtoH_v2(result, memory, sizeof *result);
}

int main(int count, char **files) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    if (driver == NULL) exit((fprintf(stderr, "%s\n", dlerror()), 3));
    FIND(cuInit), FIND(cuDevicePrimaryCtxRetain), FIND(cuCtxSetCurrent), FIND(cuModuleLoadData);
    FIND(cuModuleLoadFatBinary), FIND(cuModuleGetFunction), FIND(cuModuleUnload);
    FIND(cuLibraryLoadData), FIND(cuLibraryGetKernel), FIND(cuLibraryUnload), FIND(cuLaunchKernel);
    FIND(cuMemAlloc_v2), FIND(cuMemcpyDtoH_v2), FIND(cuMemcpyHtoD_v2);
    main_thread = (pid_t)syscall(SYS_gettid);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGSEGV, &action, NULL);
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 4;
    if (cuMemAlloc_v2(&memory, PAGE)) return 5;
    struct sigaction now;
    sigaction(SIGSEGV, NULL, &now);
    printf("handler after cuInit: %s\n", now.sa_sigaction == on_fault ? "ours" : "the driver's");
    static const char *calls[] = {"cuModuleLoadData", "cuModuleLoadFatBinary", "cuLibraryLoadData",
                                  "cuMemcpyHtoD"};
    for (int i = 1; i < count; i++)
        for (int call = 0; call < 4; call++)
            for (int missing = 0; missing < 2; missing++) {
                int fd = open(files[i], O_RDONLY);
                struct stat status;
                if (fd < 0 || fstat(fd, &status)) return 6;
                size = ((size_t)status.st_size + 2 * PAGE) / PAGE * PAGE;
                start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                if (read(fd, start, (size_t)status.st_size) != status.st_size) return 7;
                close(fd);
                mprotect(start, size, missing ? PROT_NONE : PROT_READ);
                faults = others = 0;
                unsigned result = 0;
                int error = call == 3   ? copied(start, &result)
                            : call == 2 ? by_library(start, &result)
                                        : by_module(start, &result, call == 1);
                printf("%-24s %-22s %-8s error %4d result %08x faults %3d, in other threads %d\n",
                       strrchr(files[i], '/') ? strrchr(files[i], '/') + 1 : files[i], calls[call],
                       missing ? "missing" : "there", error, result, faults, others);
                fflush(stdout);
                munmap(start, size);
                /* The context is gone after some errors. */
                if (error == 700 || error == 702 || error == 719) return 8;
            }
    return 0;
}
