// Virtual functions, tables of function pointers, a pointer that the host fetches, recursion.
#include "common.cuh"
#include <new>

struct Shape {
    __device__ virtual ~Shape() {}
    __device__ virtual int area() const = 0;
};
struct Square : Shape {
    __device__ explicit Square(int side) : side(side) {}
    __device__ int area() const override { return side * side; }
    int side;
};
struct Strip : Shape {
    __device__ explicit Strip(int length) : length(length) {}
    __device__ int area() const override { return length; }
    int length;
};

typedef int (*Function)(int);
__device__ __noinline__ int triple(int value) { return 3 * value; }
__device__ __noinline__ int negate(int value) { return -value; }
__device__ __noinline__ int for_idle(int value) { return value ^ 12345; }
__device__ __noinline__ int factorial(int value) { return value < 2 ? 1 : value * factorial(value - 1); }
__device__ Function table[] = {triple, negate};
__device__ Function idle_table[] = {for_idle};
__device__ Function fetched = triple;

__global__ void idle_here(int *result) { *result = idle_table[*result](1); }

__global__ void make(Shape **shapes) {
    shapes[0] = new Square(3);
    shapes[1] = new Strip(4);
}
__global__ void measure(Shape **shapes, int *result) { *result = shapes[0]->area() + 100 * shapes[1]->area(); }
__global__ void destroy(Shape **shapes) {
    delete shapes[0];
    delete shapes[1];
}
__global__ void by_table(int *result, int number) { *result = table[number](*result); }
__global__ void by_pointer(int *result, Function function) { *result = function(*result); }
__global__ void recurse(int *result, int value) { *result = factorial(value); }

extern "C" int run() {
    OnDevice<int> result;
    Shape **shapes;
    CHECK(cudaMalloc(&shapes, 2 * sizeof *shapes));
    make<<<1, 1>>>(shapes);
    measure<<<1, 1>>>(shapes, result.at);
    EXPECT(result.get() == 409);
    destroy<<<1, 1>>>(shapes);
    CHECK(cudaFree(shapes));
    by_table<<<1, 1>>>(result.at, 0);
    by_table<<<1, 1>>>(result.at, 1);
    EXPECT(result.get() == -1227);
    Function function;
    CHECK(cudaMemcpyFromSymbol(&function, fetched, sizeof function));
    by_pointer<<<1, 1>>>(result.at, function);
    EXPECT(result.get() == -3681);
    recurse<<<1, 1>>>(result.at, 6);
    EXPECT(result.get() == 720);
    return 0;
}
