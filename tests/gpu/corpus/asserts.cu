// An assertion fails on the device, and the program expects that. Printing from the device.
#include "common.cuh"
#include <cassert>

__global__ void idle_here(int *result) { *result = -1; }
__global__ void says(int value) { printf("value %d\n", value); }
__global__ void holds(int value) { assert(value > 0); }
__global__ void fails(int value) { assert(value < 0); }

extern "C" int run() {
    says<<<1, 1>>>(3);
    holds<<<1, 1>>>(3);
    CHECK(cudaDeviceSynchronize());
    fails<<<1, 1>>>(3);
    EXPECT(cudaDeviceSynchronize() == cudaErrorAssert);
    return 0;
}
