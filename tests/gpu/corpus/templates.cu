// Templates, lambdas, overloads, namespaces, static kernels; a kernel reached by its address alone.
#include "common.cuh"

namespace {
__global__ void nameless(int *result) { *result += 1; }
}
static __global__ void internal(int *result) { *result += 2; }
__global__ void idle_here(int *result) { *result = -1; }
__global__ void overloaded(int *result, int value) { *result += value; }
__global__ void overloaded(int *result, double value) { *result += int(value) * 10; }

template <typename T, int N> struct Adder {
    __device__ T operator()(T value) const { return value + N; }
};
template <typename Operation, typename... Values> __global__ void apply(int *result, Operation operation, Values... values) {
    *result = operation(*result) + (0 + ... + int(values));
}
template <typename T> __global__ void never_instantiated_for(T *result) { *result = T(1); }

extern "C" int run() {
    OnDevice<int> result;
    nameless<<<1, 1>>>(result.at);
    internal<<<1, 1>>>(result.at);
    overloaded<<<1, 1>>>(result.at, 4);
    overloaded<<<1, 1>>>(result.at, 5.0);
    EXPECT(result.get() == 1 + 2 + 4 + 50);
    apply<<<1, 1>>>(result.at, Adder<int, 100>());
    apply<<<1, 1>>>(result.at, Adder<int, 100>(), 1, 2.0, 3.0f);
    EXPECT(result.get() == 57 + 200 + 6);
    const int captured = 1000;
    apply<<<1, 1>>>(result.at, [=] __device__(int value) { return value + captured; });
    apply<<<1, 1>>>(result.at, [=] __host__ __device__(int value) { return value - captured; }, 7);
    EXPECT(result.get() == 263 + 7);
    void (*const by_address)(int *, int) = overloaded;
    int value = 30;
    void *arguments[] = {&result.at, &value};
    CHECK(cudaLaunchKernel(reinterpret_cast<void *>(by_address), dim3(1), dim3(1), arguments, 0, nullptr));
    EXPECT(result.get() == 300);
    return 0;
}
