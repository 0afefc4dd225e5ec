// Cooperative groups: tiles of a warp, the whole grid, clusters of blocks where the device has them.
#include "common.cuh"
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

namespace cg = cooperative_groups;

__global__ void idle_here(int *result) { *result = -1; }

__global__ void reduce_tiles(int *result) {
    const auto tile = cg::tiled_partition<8>(cg::this_thread_block());
    const int sum = cg::reduce(tile, int(threadIdx.x), cg::plus<int>());
    if (threadIdx.x == 8) *result = sum;
}

__global__ void whole_grid(int *count, int *result) {
    atomicAdd(count, 1);
    cg::this_grid().sync();
    if (blockIdx.x == 1 && threadIdx.x == 0) *result = *count;
}

__global__ void cluster(int *result) {
#if __CUDA_ARCH__ >= 900
    __shared__ int mine;
    const auto blocks = cg::this_cluster();
    mine = 10 + blocks.block_rank();
    blocks.sync();
    if (blocks.block_rank() == 0) *result = *blocks.map_shared_rank(&mine, 1);
    blocks.sync();
#else
    *result = 11;
#endif
}

extern "C" int run() {
    OnDevice<int> count, result;
    reduce_tiles<<<1, 32>>>(result.at);
    EXPECT(result.get() == 8 + 9 + 10 + 11 + 12 + 13 + 14 + 15);

    void *arguments[] = {&count.at, &result.at};
    CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<void *>(whole_grid), dim3(4), dim3(16), arguments, 0, nullptr));
    EXPECT(result.get() == 64);

    int device, major;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute attribute{};
    config.gridDim = dim3(2);
    config.blockDim = dim3(1);
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {2, 1, 1};
    config.attrs = &attribute;
    config.numAttrs = major >= 9 ? 1 : 0;
    CHECK(cudaLaunchKernelEx(&config, cluster, result.at));
    EXPECT(result.get() == 11);
    return 0;
}
