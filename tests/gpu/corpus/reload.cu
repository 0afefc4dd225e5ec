// Loaded and unloaded again and again, beside another build of the same source: compiled with VALUE set.
#include "common.cuh"

__device__ int value = VALUE;
__global__ void idle_here(int *result) { *result = -1; }
__global__ void give(int *result) { *result = value++; }
__global__ void only_of_one(int *result) { *result = 1000 + VALUE; }

extern "C" int run() {
    OnDevice<int> result;
    // Each load begins with the initialiser.
    give<<<1, 1>>>(result.at);
    EXPECT(result.get() == VALUE);
    if (VALUE % 2) {
        only_of_one<<<1, 1>>>(result.at);
        EXPECT(result.get() == 1000 + VALUE);
    }
    return 0;
}
