// Element by element, and the scalar product.

extern "C" __global__ void vector_add(const float *a, const float *b, float *out, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = a[i] + b[i];
}

extern "C" __global__ void vector_scale(const float *values, float factor, float *out, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = values[i] * factor;
}

extern "C" __global__ void vector_clamp(const float *values, float low, float high, float *out, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = fminf(fmaxf(values[i], low), high);
}

// One block; a grid would have to add its blocks' sums in an order that changes.
extern "C" __global__ void vector_dot(const float *a, const float *b, float *out, int count) {
    __shared__ float sums[256];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += a[i] * b[i];
    sums[threadIdx.x] = sum;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *out = sums[0];
}
