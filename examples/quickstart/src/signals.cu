// Filters with a fixed number of taps.

namespace signals {

template <class T, int Taps>
__global__ void filter(const T *values, const T *taps, T *out, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    T sum = T(0);
#pragma unroll
    for (int tap = 0; tap < Taps; ++tap)
        if (i >= tap) sum += taps[tap] * values[i - tap];
    out[i] = sum;
}

#define INSTANTIATE(T) FILTER(T, 3) FILTER(T, 5) FILTER(T, 9) FILTER(T, 17) FILTER(T, 33)
#define FILTER(T, Taps) template __global__ void filter<T, Taps>(const T *, const T *, T *, int);
INSTANTIATE(float)
INSTANTIATE(double)

}  // namespace signals
