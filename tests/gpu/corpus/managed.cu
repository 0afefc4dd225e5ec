// Managed variables and managed memory.
#include "common.cuh"

__managed__ int shared_counter = 5;

__global__ void idle_here(int *result) { *result = -shared_counter; }
__global__ void add_to_variable(int value) { shared_counter += value; }
__global__ void add(int *to, int value) { *to += value; }

extern "C" int run() {
    shared_counter = 5;
    add_to_variable<<<1, 1>>>(2);
    CHECK(cudaDeviceSynchronize());
    EXPECT(shared_counter == 7);

    int *both;
    CHECK(cudaMallocManaged(&both, sizeof *both));
    *both = 1;
    add<<<1, 1>>>(both, 2);
    CHECK(cudaDeviceSynchronize());
    *both += 4;
    add<<<1, 1>>>(both, 8);
    CHECK(cudaDeviceSynchronize());
    EXPECT(*both == 15);
    CHECK(cudaFree(both));
    return 0;
}
