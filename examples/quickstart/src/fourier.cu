// Fourier transforms of a fixed length, one a thread.

namespace fourier {

// Complex numbers are pairs of values. Decimation in frequency; the indices are known at compile time.
template <class T, int Length>
__global__ void transform(const T *values, T *out, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    T re[Length], im[Length];
#pragma unroll
    for (int k = 0; k < Length; ++k) {
        re[k] = values[2 * (i * Length + k)];
        im[k] = values[2 * (i * Length + k) + 1];
    }
#pragma unroll
    for (int half = Length / 2; half > 0; half /= 2)
#pragma unroll
        for (int k = 0; k < Length; ++k) {
            if (k & half) continue;
            T angle = T(-3.14159265358979324) * T(k % half) / T(half);
            T sine = sin(angle), cosine = cos(angle);
            T dre = re[k] - re[k + half], dim = im[k] - im[k + half];
            re[k] += re[k + half];
            im[k] += im[k + half];
            re[k + half] = dre * cosine - dim * sine;
            im[k + half] = dre * sine + dim * cosine;
        }
#pragma unroll
    for (int k = 0; k < Length; ++k) {
        int reversed = 0;
#pragma unroll
        for (int bit = 1; bit < Length; bit *= 2) reversed = 2 * reversed + (k & bit ? 1 : 0);
        out[2 * (i * Length + reversed)] = re[k];
        out[2 * (i * Length + reversed) + 1] = im[k];
    }
}

#define INSTANTIATE(T) TRANSFORM(T, 4) TRANSFORM(T, 8) TRANSFORM(T, 16) TRANSFORM(T, 32)
#define TRANSFORM(T, Length) template __global__ void transform<T, Length>(const T *, T *, int);
INSTANTIATE(float)
INSTANTIATE(double)

}  // namespace fourier
