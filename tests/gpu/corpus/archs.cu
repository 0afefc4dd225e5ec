// Code that differs by arch, an instruction of the arch, half precision and tensor cores.
#include "common.cuh"
#include <cuda_fp16.h>
#include <mma.h>

__global__ void idle_here(int *result) { *result = -1; }
__global__ void compiled_for(int *result) {
#ifdef __CUDA_ARCH__
    *result = __CUDA_ARCH__;
#endif
}
__global__ void lane(unsigned *result) {
    unsigned mask;
    asm volatile("activemask.b32 %0;" : "=r"(mask));
    if (threadIdx.x == 0) *result = mask;
}
__global__ void product(const half *a, const half *b, float *c) {
    using namespace nvcuda;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> left;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> right;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
    wmma::fill_fragment(sum, 0.0f);
    wmma::load_matrix_sync(left, a, 16);
    wmma::load_matrix_sync(right, b, 16);
    wmma::mma_sync(sum, left, right, sum);
    wmma::store_matrix_sync(c, sum, 16, wmma::mem_row_major);
}
__global__ void ones(half *values) { values[threadIdx.x] = __float2half(1.0f); }

extern "C" int run() {
    OnDevice<int> arch;
    OnDevice<unsigned> mask;
    compiled_for<<<1, 1>>>(arch.at);
    EXPECT(arch.get() >= 800);
    lane<<<1, 32>>>(mask.at);
    EXPECT(mask.get() == 0xffffffff);
    half *values;
    float *sums, sum;
    CHECK(cudaMalloc(&values, 256 * sizeof *values));
    CHECK(cudaMalloc(&sums, 256 * sizeof *sums));
    ones<<<1, 256>>>(values);
    product<<<1, 32>>>(values, values, sums);
    CHECK(cudaMemcpy(&sum, sums + 255, sizeof sum, cudaMemcpyDeviceToHost));
    EXPECT(sum == 16.0f);
    CHECK(cudaFree(values));
    CHECK(cudaFree(sums));
    return 0;
}
