// Sums over a series; all in one block, so that results don't depend on the order of blocks.

namespace statistics {

#define REDUCTION(Name, start, expression) \
    struct Name { \
        template <class T> static __device__ T of(T a, T b) { return expression; } \
        template <class T> static __device__ T first(T value) { return start; } \
    };
REDUCTION(Sum, T(0), a + b)
REDUCTION(Product, T(1), a *b)
REDUCTION(Minimum, value, a < b ? a : b)
REDUCTION(Maximum, value, a < b ? b : a)

constexpr int THREADS = 256;

template <class Operation, class T>
__device__ T over_block(T value) {
    __shared__ T values[THREADS];
    values[threadIdx.x] = value;
#pragma unroll
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) values[threadIdx.x] = Operation::of(values[threadIdx.x], values[threadIdx.x + half]);
    }
    __syncthreads();
    T result = values[0];
    __syncthreads();
    return result;
}

template <class Operation, class T>
__global__ void reduce(const T *values, T *out, int count) {
    T result = Operation::first(values[0]);
    for (int i = threadIdx.x; i < count; i += THREADS) result = Operation::of(result, values[i]);
    result = over_block<Operation>(result);
    if (threadIdx.x == 0) *out = result;
}

template <class T>
__global__ void variance(const T *values, T *out, int count) {
    T sum = T(0), squares = T(0);
    for (int i = threadIdx.x; i < count; i += THREADS) sum += values[i];
    T mean = over_block<Sum>(sum) / T(count);
    for (int i = threadIdx.x; i < count; i += THREADS) squares += (values[i] - mean) * (values[i] - mean);
    squares = over_block<Sum>(squares);
    if (threadIdx.x == 0) *out = squares / T(count);
}

// Sums up to each value.
template <class T>
__global__ void running_sum(const T *values, T *out, int count) {
    __shared__ T sums[THREADS];
    T before = T(0);
    for (int start = 0; start < count; start += THREADS) {
        int i = start + threadIdx.x;
        sums[threadIdx.x] = i < count ? values[i] : T(0);
#pragma unroll
        for (int step = 1; step < THREADS; step *= 2) {
            __syncthreads();
            T left = threadIdx.x >= step ? sums[threadIdx.x - step] : T(0);
            __syncthreads();
            sums[threadIdx.x] += left;
        }
        __syncthreads();
        if (i < count) out[i] = before + sums[threadIdx.x];
        before += sums[THREADS - 1];
        __syncthreads();
    }
}

// Each thread counts for bins of its own.
template <class T>
__global__ void histogram(const T *values, int *bins, int bin_count, int count) {
    for (int bin = threadIdx.x; bin < bin_count; bin += THREADS) {
        bins[bin] = 0;
        for (int i = 0; i < count; ++i) bins[bin] += values[i] >= T(0) && values[i] < T(1) && int(values[i] * T(bin_count)) == bin;
    }
}

#define REDUCE(Name, T) template __global__ void reduce<Name, T>(const T *, T *, int);
#define INSTANTIATE(T) \
    REDUCE(Sum, T) REDUCE(Product, T) REDUCE(Minimum, T) REDUCE(Maximum, T) \
    template __global__ void running_sum<T>(const T *, T *, int);
#define INSTANTIATE_REAL(T) \
    INSTANTIATE(T) \
    template __global__ void variance<T>(const T *, T *, int); \
    template __global__ void histogram<T>(const T *, int *, int, int);
INSTANTIATE_REAL(float)
INSTANTIATE_REAL(double)
INSTANTIATE(int)

}  // namespace statistics
