// Sorts rows of a fixed length, each in the registers of one thread, and whole series in one block.

namespace sorting {

// Batcher's network: which values are compared is known at compile time.
template <class T, int Length>
__global__ void rows(const T *values, T *out, int count) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= count) return;
    T sorted[Length];
#pragma unroll
    for (int i = 0; i < Length; ++i) sorted[i] = values[row * Length + i];
#pragma unroll
    for (int size = 2; size <= Length; size *= 2)
#pragma unroll
        for (int step = size / 2; step > 0; step /= 2)
#pragma unroll
            for (int i = 0; i < Length; ++i) {
                int other = i ^ step;
                if (other < i) continue;
                bool upwards = (i & size) == 0;
                T low = sorted[i] < sorted[other] ? sorted[i] : sorted[other];
                T high = sorted[i] < sorted[other] ? sorted[other] : sorted[i];
                sorted[i] = upwards ? low : high;
                sorted[other] = upwards ? high : low;
            }
#pragma unroll
    for (int i = 0; i < Length; ++i) out[row * Length + i] = sorted[i];
}

// By rank: counts the smaller values.
template <class T>
__global__ void series(const T *values, T *out, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    int rank = 0;
    for (int k = 0; k < count; ++k) rank += values[k] < values[i] || (values[k] == values[i] && k < i);
    out[rank] = values[i];
}

#define ROWS(T, Length) template __global__ void rows<T, Length>(const T *, T *, int);
#define INSTANTIATE(T) \
    ROWS(T, 4) ROWS(T, 8) ROWS(T, 16) ROWS(T, 32) \
    template __global__ void series<T>(const T *, T *, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(int)

}  // namespace sorting
