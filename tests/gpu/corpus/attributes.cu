// Kernels that the host asks about and never launches; one with an attribute set, one found by a pointer.
#include "common.cuh"

__global__ void idle_here(int *result) { *result = -1; }
__global__ void asked_about(int *result) { *result = 1; }
__global__ void asked_for_occupancy(int *result) { *result = 2; }
__global__ void much_shared_memory(int *result) {
    extern __shared__ int memory[];
    memory[20000] = 3;
    *result = memory[20000];
}

extern "C" int run() {
    OnDevice<int> result;
    cudaFuncAttributes attributes;
    CHECK(cudaFuncGetAttributes(&attributes, asked_about));
    EXPECT(attributes.maxThreadsPerBlock > 0 && attributes.binaryVersion >= 80);
    int blocks;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, asked_for_occupancy, 32, 0));
    EXPECT(blocks > 0);
    CHECK(cudaFuncSetAttribute(much_shared_memory, cudaFuncAttributeMaxDynamicSharedMemorySize, 96 * 1024));
    much_shared_memory<<<1, 1, 96 * 1024>>>(result.at);
    EXPECT(result.get() == 3);
    return 0;
}
