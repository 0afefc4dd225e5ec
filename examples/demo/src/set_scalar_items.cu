#include "demo.h"

__global__ void set_scalar_items(float *items, int count, int every, float value) {
    int i = (blockIdx.x * blockDim.x + threadIdx.x) * every;
    if (i < count) items[i] = value;
}

int demo_set_scalar_items(float *items, int count, int every, float value) {
    size_t bytes = sizeof(float) * count;
    float *device = nullptr;
    cudaError_t status = cudaMalloc(&device, bytes);
    if (status != cudaSuccess) return status;
    cudaMemcpy(device, items, bytes, cudaMemcpyHostToDevice);
    set_scalar_items<<<(count / every + 256) / 256, 256>>>(device, count, every, value);
    status = cudaGetLastError();
    if (status == cudaSuccess) status = cudaMemcpy(items, device, bytes, cudaMemcpyDeviceToHost);
    cudaFree(device);
    return status;
}
