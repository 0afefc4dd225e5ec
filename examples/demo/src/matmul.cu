#include "demo.h"

__global__ void matmul(const float *a, const float *b, float *out, int size) {
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= size || column >= size) return;
    float sum = 0.0f;
    for (int i = 0; i < size; ++i) sum += a[row * size + i] * b[i * size + column];
    out[row * size + column] = sum;
}

int demo_matmul(const float *a, const float *b, float *out, int size) {
    size_t bytes = sizeof(float) * size * size;
    float *device = nullptr;
    cudaError_t status = cudaMalloc(&device, 3 * bytes);
    if (status != cudaSuccess) return status;
    float *da = device, *db = da + size * size, *dout = db + size * size;
    cudaMemcpy(da, a, bytes, cudaMemcpyHostToDevice);
    cudaMemcpy(db, b, bytes, cudaMemcpyHostToDevice);
    dim3 threads(16, 16), blocks((size + 15) / 16, (size + 15) / 16);
    matmul<<<blocks, threads>>>(da, db, dout, size);
    status = cudaGetLastError();
    if (status == cudaSuccess) status = cudaMemcpy(out, dout, bytes, cudaMemcpyDeviceToHost);
    cudaFree(device);
    return status;
}
