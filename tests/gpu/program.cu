// A program that uses one of its two kernels and one variable; with an argument it never ends.
#include <cstdio>
__device__ int table[4] = {1, 2, 3, 4};
__global__ void used(int *x) { *x = table[1]; }
__global__ void unused(int *x) { *x = 8; }
int main(int argc, char **) {
    int *d, h = 0, values[4] = {5, 6, 7, 8};
    if (cudaMalloc(&d, sizeof h)) return 3;
    cudaMemcpyToSymbol(table, values, sizeof values);
    used<<<1, 1>>>(d);
    cudaMemcpy(&h, d, sizeof h, cudaMemcpyDeviceToHost);
    printf("%d\n", h);
    fflush(stdout);
    while (argc > 1) {}
    return h != 6;
}
