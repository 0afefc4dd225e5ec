// Row-major matrices. `multiply` exists for two tile sizes, from which the host code chooses.

namespace matrices {

template <int Tile>
__global__ void multiply(const float *a, const float *b, float *out, int rows, int inner, int columns) {
    __shared__ float tile_a[Tile][Tile];
    __shared__ float tile_b[Tile][Tile];
    int row = blockIdx.y * Tile + threadIdx.y;
    int column = blockIdx.x * Tile + threadIdx.x;
    float sum = 0.0f;
    for (int start = 0; start < inner; start += Tile) {
        int along_a = start + threadIdx.x;
        int along_b = start + threadIdx.y;
        tile_a[threadIdx.y][threadIdx.x] = row < rows && along_a < inner ? a[row * inner + along_a] : 0.0f;
        tile_b[threadIdx.y][threadIdx.x] = column < columns && along_b < inner ? b[along_b * columns + column] : 0.0f;
        __syncthreads();
        for (int i = 0; i < Tile; ++i) sum += tile_a[threadIdx.y][i] * tile_b[i][threadIdx.x];
        __syncthreads();
    }
    if (row < rows && column < columns) out[row * columns + column] = sum;
}

template __global__ void multiply<16>(const float *, const float *, float *, int, int, int);
template __global__ void multiply<32>(const float *, const float *, float *, int, int, int);

__global__ void transpose(const float *values, float *out, int rows, int columns) {
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows && column < columns) out[column * rows + row] = values[row * columns + column];
}

}  // namespace matrices
