// A program that asks for all kernels of an image, so that it may use each of them.
#include "common.cuh"

__global__ void idle_here(int *result) { *result = -1; }

extern "C" const unsigned char module_image[];

extern "C" int run() {
    OnDevice<int> result;
    cudaLibrary_t library;
    CHECK(cudaLibraryLoadData(&library, module_image, nullptr, nullptr, 0, nullptr, nullptr, 0));
    unsigned count = 0;
    CHECK(cudaLibraryGetKernelCount(&count, library));
    EXPECT(count == 3);
    cudaKernel_t kernels[3];
    CHECK(cudaLibraryEnumerateKernels(kernels, 3, library));
    void *arguments[] = {&result.at};
    int sum = 0;
    for (const cudaKernel_t kernel : kernels) {
        CHECK(cudaLaunchKernel(reinterpret_cast<void *>(kernel), dim3(1), dim3(1), arguments, 0, nullptr));
        sum += result.get();
    }
    EXPECT(sum == 42 + 80 - 1);
    CHECK(cudaLibraryUnload(library));
    return 0;
}
