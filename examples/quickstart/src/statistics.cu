// Sums over a series; all in one block, so that results don't depend on the order of blocks.

// The host code writes here, by name.
__constant__ float statistics_weights[4] = {1.0f, 1.0f, 1.0f, 1.0f};

__device__ float block_sum(float value) {
    __shared__ float sums[256];
    sums[threadIdx.x] = value;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    float sum = sums[0];
    __syncthreads();
    return sum;
}

extern "C" __global__ void statistics_weighted_sum(const float *values, float *out, int count) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += statistics_weights[i % 4] * values[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *out = sum;
}

extern "C" __global__ void statistics_variance(const float *values, float *out, int count) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += values[i];
    float mean = block_sum(sum) / count;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < count; i += blockDim.x) squares += (values[i] - mean) * (values[i] - mean);
    squares = block_sum(squares);
    if (threadIdx.x == 0) *out = squares / count;
}

extern "C" __global__ void statistics_histogram(const float *values, unsigned *bins, int bin_count, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && values[i] >= 0.0f && values[i] < 1.0f) atomicAdd(&bins[(int)(values[i] * bin_count)], 1u);
}
