// What all programs of the corpus share. Each has a function `run` that returns 0 if all it computed
// on the GPU is right, kernels that it needs, and a kernel `idle_here` beside them that it doesn't.
#pragma once

#include <cstdio>
#include <cuda_runtime.h>

#define EXPECT(condition)                                                        \
    do {                                                                         \
        if (!(condition)) {                                                      \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            return 1;                                                            \
        }                                                                        \
    } while (0)

#define CHECK(call)                                                               \
    do {                                                                          \
        const cudaError_t error_ = (call);                                        \
        if (error_ != cudaSuccess) {                                              \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_)); \
            return 1;                                                             \
        }                                                                         \
    } while (0)

// A value on the device, 0 at first. A failed call leaves `get` with a value that is no result.
template <typename T> class OnDevice {
  public:
    OnDevice() {
        cudaMalloc(&at, sizeof(T));
        cudaMemset(at, 0, sizeof(T));
    }
    ~OnDevice() { cudaFree(at); }
    T get() const {
        T value{};
        if (cudaMemcpy(&value, at, sizeof value, cudaMemcpyDeviceToHost) != cudaSuccess) value = T(-1);
        return value;
    }
    T *at = nullptr;
};
