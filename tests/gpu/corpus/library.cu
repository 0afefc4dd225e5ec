// Libraries of the runtime (CUDA 12.8): loaded by the program, kernels by name, unloaded.
#include "common.cuh"

__global__ void idle_here(int *result) { *result = -1; }
__global__ void by_launch(int *result) { *result = 1; }

extern "C" const unsigned char module_image[];

extern "C" int run() {
    OnDevice<int> result;
    by_launch<<<1, 1>>>(result.at);
    EXPECT(result.get() == 1);
    cudaLibrary_t library;
    cudaKernel_t kernel;
    CHECK(cudaLibraryLoadData(&library, module_image, nullptr, nullptr, 0, nullptr, nullptr, 0));
    CHECK(cudaLibraryGetKernel(&kernel, library, "also_in_module"));
    void *arguments[] = {&result.at};
    CHECK(cudaLaunchKernel(reinterpret_cast<void *>(kernel), dim3(1), dim3(1), arguments, 0, nullptr));
    EXPECT(result.get() == 80);
    void *number;
    size_t size;
    CHECK(cudaLibraryGetGlobal(&number, &size, library, "number"));
    EXPECT(size == sizeof(int));
    CHECK(cudaLibraryUnload(library));
    return 0;
}
