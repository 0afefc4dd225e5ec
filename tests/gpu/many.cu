// One region of a library with a kernel that nothing else has, and one that nobody calls: compiled
// with NAME and VALUE set.

#include <cuda_runtime.h>

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

__global__ void JOIN(kernel_, NAME)(int *result) { *result = VALUE; }

__global__ void JOIN(idle_, NAME)(int *result) { *result = -VALUE; }

// What the kernel wrote, or the negative CUDA error. With `bad`, it writes where nothing may.
extern "C" int JOIN(run_, NAME)(int bad) {
    int *result = nullptr;
    int value = 0;
    cudaError_t error = cudaMalloc(&result, sizeof *result);
    if (error == cudaSuccess) {
        JOIN(kernel_, NAME)<<<1, 1>>>(bad ? reinterpret_cast<int *>(16) : result);
        error = cudaGetLastError();
    }
    if (error == cudaSuccess)
        error = cudaMemcpy(&value, result, sizeof value, cudaMemcpyDeviceToHost);
    if (result != nullptr)
        cudaFree(result);
    return error == cudaSuccess ? value : -static_cast<int>(error);
}

// The CUDA error of looking up the kernel that nobody calls; forgotten at once.
extern "C" int JOIN(find_idle_, NAME)() {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, JOIN(idle_, NAME));
    cudaGetLastError();
    return static_cast<int>(error);
}
