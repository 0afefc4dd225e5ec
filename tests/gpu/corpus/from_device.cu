// Dynamic parallelism: kernels that only the device launches, one of them by a kernel so launched.
#include "common.cuh"

__global__ void idle_here(int *result) { *result = -1; }
__global__ void grandchild(int *result) { atomicAdd(result, 100); }
__global__ void child(int *result) {
    atomicAdd(result, 10);
    if (threadIdx.x == 0) grandchild<<<1, 2>>>(result);
}
__global__ void parent(int *result) {
    *result += 1;
    child<<<1, 4>>>(result);
}

void mention_idle(int *result) { idle_here<<<1, 1>>>(result); }

extern "C" int run() {
    OnDevice<int> result;
    parent<<<1, 1>>>(result.at);
    CHECK(cudaDeviceSynchronize());
    EXPECT(result.get() == 1 + 40 + 200);
    return 0;
}
