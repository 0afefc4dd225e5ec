// A unit with variables and no kernel that anybody launches: only its data is needed.
#include "common.cuh"

__device__ int values[2] = {11, 22};
__global__ void idle_here(int *result) { *result = -values[0]; }

extern "C" int run() {
    int value = 0;
    CHECK(cudaMemcpyFromSymbol(&value, values, sizeof value, sizeof value));
    EXPECT(value == 22);
    return 0;
}
