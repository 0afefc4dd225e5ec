// Memory shared with a child process, which has a context, and a kernel, of its own.
#include "common.cuh"
#include <cstdlib>
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

__global__ void idle_here(int *result) { *result = -1; }
__global__ void of_parent(int *shared) { *shared = 20; }
__global__ void of_child(int *shared) { *shared += 3; }

static int child(int end) {
    cudaIpcMemHandle_t handle;
    int *shared;
    EXPECT(read(end, &handle, sizeof handle) == sizeof handle);
    CHECK(cudaIpcOpenMemHandle(reinterpret_cast<void **>(&shared), handle, cudaIpcMemLazyEnablePeerAccess));
    of_child<<<1, 1>>>(shared);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaIpcCloseMemHandle(shared));
    return 0;
}

extern "C" int run() {
    // Before CUDA starts: a child that is forked later can't use it.
    int ends[2];
    EXPECT(pipe(ends) == 0);
    const pid_t forked = fork();
    if (forked == 0) exit(child(ends[0]));
    OnDevice<int> shared;
    of_parent<<<1, 1>>>(shared.at);
    EXPECT(shared.get() == 20);
    cudaIpcMemHandle_t handle;
    CHECK(cudaIpcGetMemHandle(&handle, shared.at));
    EXPECT(write(ends[1], &handle, sizeof handle) == sizeof handle);
    int status;
    EXPECT(waitpid(forked, &status, 0) == forked && status == 0);
    EXPECT(shared.get() == 23);
    close(ends[0]);
    close(ends[1]);
    return 0;
}
