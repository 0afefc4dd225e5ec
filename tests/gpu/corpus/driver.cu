// The driver's calls: modules, their functions and variables by name, unloading and loading again.
#include "common.cuh"
#include "driver.h"

__global__ void idle_here(int *result) { *result = -1; }
__global__ void by_runtime(int *result) { *result = 1; }

extern "C" const unsigned char module_image[];

extern "C" int run() {
    OnDevice<int> result;
    by_runtime<<<1, 1>>>(result.at);
    EXPECT(result.get() == 1);
    for (int time = 0; time < 2; time++) {
        CUmodule module;
        CUfunction function;
        CUdeviceptr number;
        size_t size;
        EXPECT(DRIVER(cuModuleLoadData)(&module, module_image) == CUDA_SUCCESS);
        EXPECT(DRIVER(cuModuleGetFunction)(&function, module, "in_module") == CUDA_SUCCESS);
        EXPECT(DRIVER(cuModuleGetGlobal)(&number, &size, module, "number") == CUDA_SUCCESS);
        const int value = 50 + time;
        CHECK(cudaMemcpy(reinterpret_cast<void *>(number), &value, sizeof value, cudaMemcpyHostToDevice));
        void *arguments[] = {&result.at};
        EXPECT(DRIVER(cuLaunchKernel)(function, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr) == CUDA_SUCCESS);
        EXPECT(result.get() == value + 2);
        EXPECT(DRIVER(cuModuleGetFunction)(&function, module, "no_such_kernel") == CUDA_ERROR_NOT_FOUND);
        EXPECT(DRIVER(cuModuleUnload)(module) == CUDA_SUCCESS);
    }
    return 0;
}
