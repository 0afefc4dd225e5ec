// Built as PTX alone: the driver compiles it for the device.
#include "common.cuh"

__device__ int factor = 6;

__global__ void idle_here(int *result) { *result = -factor; }
__global__ void compiled_by_driver(int *result) { *result = 7 * factor; }

extern "C" int run() {
    OnDevice<int> result;
    compiled_by_driver<<<1, 1>>>(result.at);
    EXPECT(result.get() == 42);
    return 0;
}
