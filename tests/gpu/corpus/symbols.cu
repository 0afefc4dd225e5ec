// Variables of the device: with initialisers, constant, pointing to each other, copied by the host.
#include "common.cuh"

__device__ int table[4] = {1, 2, 3, 4};
__device__ int *pointer = &table[2];
__device__ const int fixed = 7;
__constant__ int factors[2] = {10, 20};
__constant__ int written_by_host;
__device__ int counter;
static __device__ int hidden = 5;
extern __shared__ int scratch[];

__global__ void idle_here(int *result) { *result = -table[0]; }

__global__ void read_all(int *result) {
    scratch[0] = *pointer + fixed + factors[0] + written_by_host + hidden;
    *result = scratch[0];
}

__global__ void count() { atomicAdd(&counter, 1); }

extern "C" int run() {
    OnDevice<int> result;
    const int three = 3;
    CHECK(cudaMemcpyToSymbol(written_by_host, &three, sizeof three));
    read_all<<<1, 1, sizeof(int)>>>(result.at);
    EXPECT(result.get() == 3 + 7 + 10 + 3 + 5);

    // A variable whose kernels read it from now on: by address and by size.
    void *address;
    size_t size;
    CHECK(cudaGetSymbolAddress(&address, table));
    CHECK(cudaGetSymbolSize(&size, table));
    EXPECT(size == sizeof table);
    const int other[4] = {5, 6, 100, 8};
    CHECK(cudaMemcpy(address, other, sizeof other, cudaMemcpyHostToDevice));
    read_all<<<1, 1, sizeof(int)>>>(result.at);
    EXPECT(result.get() == 100 + 7 + 10 + 3 + 5);
    CHECK(cudaMemcpy(address, (const int[4]){1, 2, 3, 4}, sizeof other, cudaMemcpyHostToDevice));

    const int zero = 0;
    CHECK(cudaMemcpyToSymbol(counter, &zero, sizeof zero));
    count<<<2, 32>>>();
    int counted;
    CHECK(cudaMemcpyFromSymbol(&counted, counter, sizeof counted));
    EXPECT(counted == 64);
    return 0;
}
