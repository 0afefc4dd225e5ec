// A fatbin that driver.cu and library.cu load themselves.
extern "C" {
__device__ int number = 40;
__constant__ int offset = 2;
__global__ void in_module(int *result) { *result = number + offset; }
__global__ void also_in_module(int *result) { *result = number * offset; }
__global__ void idle_in_module(int *result) { *result = -1; }
}
