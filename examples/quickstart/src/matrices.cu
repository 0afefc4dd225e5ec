// Row-major matrices. `multiply` exists for three tile sizes, from which the host code chooses.

namespace matrices {

template <class T, int Tile>
__global__ void multiply(const T *a, const T *b, T *out, int rows, int inner, int columns) {
    __shared__ T tile_a[Tile][Tile];
    __shared__ T tile_b[Tile][Tile];
    int row = blockIdx.y * Tile + threadIdx.y;
    int column = blockIdx.x * Tile + threadIdx.x;
    T sum = T(0);
    for (int start = 0; start < inner; start += Tile) {
        int along_a = start + threadIdx.x;
        int along_b = start + threadIdx.y;
        tile_a[threadIdx.y][threadIdx.x] = row < rows && along_a < inner ? a[row * inner + along_a] : T(0);
        tile_b[threadIdx.y][threadIdx.x] = column < columns && along_b < inner ? b[along_b * columns + column] : T(0);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < Tile; ++i) sum += tile_a[threadIdx.y][i] * tile_b[i][threadIdx.x];
        __syncthreads();
    }
    if (row < rows && column < columns) out[row * columns + column] = sum;
}

template <class T>
__global__ void transpose(const T *values, T *out, int rows, int columns) {
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows && column < columns) out[column * rows + row] = values[row * columns + column];
}

// Adds a value to each column.
template <class T>
__global__ void add_to_columns(const T *values, const T *added, T *out, int rows, int columns) {
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows && column < columns) out[row * columns + column] = values[row * columns + column] + added[column];
}

// Each thread solves a system of its own, of a fixed size, by Gaussian elimination without pivoting.
template <class T, int Size>
__global__ void solve(const T *systems, const T *right, T *out, int count) {
    int system = blockIdx.x * blockDim.x + threadIdx.x;
    if (system >= count) return;
    T a[Size][Size], b[Size];
#pragma unroll
    for (int row = 0; row < Size; ++row) {
        b[row] = right[system * Size + row];
#pragma unroll
        for (int column = 0; column < Size; ++column) a[row][column] = systems[(system * Size + row) * Size + column];
    }
#pragma unroll
    for (int pivot = 0; pivot < Size; ++pivot)
#pragma unroll
        for (int row = pivot + 1; row < Size; ++row) {
            T factor = a[row][pivot] / a[pivot][pivot];
#pragma unroll
            for (int column = pivot; column < Size; ++column) a[row][column] -= factor * a[pivot][column];
            b[row] -= factor * b[pivot];
        }
#pragma unroll
    for (int row = Size - 1; row >= 0; --row) {
#pragma unroll
        for (int column = row + 1; column < Size; ++column) b[row] -= a[row][column] * b[column];
        b[row] /= a[row][row];
        out[system * Size + row] = b[row];
    }
}

#define MULTIPLY(T, Tile) template __global__ void multiply<T, Tile>(const T *, const T *, T *, int, int, int);
#define SOLVE(T, Size) template __global__ void solve<T, Size>(const T *, const T *, T *, int);
#define INSTANTIATE(T) \
    MULTIPLY(T, 8) MULTIPLY(T, 16) MULTIPLY(T, 32) \
    template __global__ void transpose<T>(const T *, T *, int, int); \
    template __global__ void add_to_columns<T>(const T *, const T *, T *, int, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(int)
SOLVE(float, 2) SOLVE(float, 3) SOLVE(float, 4)
SOLVE(double, 2) SOLVE(double, 3) SOLVE(double, 4)

}  // namespace matrices
