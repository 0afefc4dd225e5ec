#pragma once
// Defined in units_other.cu.
extern __device__ int across;
__device__ int double_it(int value);
__device__ __noinline__ int only_for_idle(int value);
__global__ void elsewhere(int *result);
