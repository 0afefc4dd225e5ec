#include "units.cuh"

__device__ int across = 5;
__device__ int double_it(int value) { return 2 * value; }
__device__ __noinline__ int only_for_idle(int value) { return value * across; }
__global__ void elsewhere(int *result) { *result += 100; }
__global__ void idle_in_other_unit(int *result) { *result = only_for_idle(-2); }
void mention_idle_here(int *result) { idle_in_other_unit<<<1, 1>>>(result); }
