// Several translation units, linked on the device: functions, variables and kernels of another unit.
#include "common.cuh"
#include "units.cuh"

__global__ void idle_here(int *result) { *result = only_for_idle(-1); }
__global__ void calls_other_unit(int *result) { *result = double_it(*result) + across; }

void mention_idle(int *result) { idle_here<<<1, 1>>>(result); }

extern "C" int run() {
    OnDevice<int> result;
    calls_other_unit<<<1, 1>>>(result.at);
    elsewhere<<<1, 1>>>(result.at);
    EXPECT(result.get() == 5 + 100);
    const int seven = 7, five = 5;
    CHECK(cudaMemcpyToSymbol(across, &seven, sizeof seven));
    calls_other_unit<<<1, 1>>>(result.at);
    EXPECT(result.get() == 210 + 7);
    CHECK(cudaMemcpyToSymbol(across, &five, sizeof five));
    return 0;
}
