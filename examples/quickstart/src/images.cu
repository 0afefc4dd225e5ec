// Greyscale images, one byte a pixel.

namespace images {

typedef unsigned char Pixel;

__device__ int column() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ int row() { return blockIdx.y * blockDim.y + threadIdx.y; }

// The pixel there, or the nearest at the edge.
__device__ float near(const Pixel *pixels, int x, int y, int width, int height) {
    return pixels[min(max(y, 0), height - 1) * width + min(max(x, 0), width - 1)];
}

__global__ void threshold(const Pixel *pixels, Pixel *out, int limit, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = pixels[i] >= limit ? 255 : 0;
}

__global__ void flip(const Pixel *pixels, Pixel *out, int width, int height) {
    int x = column(), y = row();
    if (x < width && y < height) out[y * width + width - 1 - x] = pixels[y * width + x];
}

__global__ void rotate(const Pixel *pixels, Pixel *out, int width, int height) {
    int x = column(), y = row();
    if (x < width && y < height) out[x * height + height - 1 - y] = pixels[y * width + x];
}

template <int Radius>
__global__ void blur(const Pixel *pixels, Pixel *out, int width, int height) {
    int x = column(), y = row();
    if (x >= width || y >= height) return;
    float sum = 0.0f;
#pragma unroll
    for (int dy = -Radius; dy <= Radius; ++dy)
#pragma unroll
        for (int dx = -Radius; dx <= Radius; ++dx) sum += near(pixels, x + dx, y + dy, width, height);
    out[y * width + x] = Pixel(sum / float((2 * Radius + 1) * (2 * Radius + 1)));
}

// The median of the neighbourhood, by a network of comparisons.
template <int Radius>
__global__ void median(const Pixel *pixels, Pixel *out, int width, int height) {
    constexpr int Side = 2 * Radius + 1, Count = Side * Side;
    int x = column(), y = row();
    if (x >= width || y >= height) return;
    float values[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) values[i] = near(pixels, x + i % Side - Radius, y + i / Side - Radius, width, height);
#pragma unroll
    for (int end = Count - 1; end >= Count / 2; --end)
#pragma unroll
        for (int i = 0; i < end; ++i) {
            float low = fminf(values[i], values[i + 1]);
            values[i + 1] = fmaxf(values[i], values[i + 1]);
            values[i] = low;
        }
    out[y * width + x] = Pixel(values[Count / 2]);
}

__global__ void edges(const Pixel *pixels, Pixel *out, int width, int height) {
    int x = column(), y = row();
    if (x >= width || y >= height) return;
    float gx = 0.0f, gy = 0.0f;
#pragma unroll
    for (int i = -1; i <= 1; ++i) {
        float weight = i == 0 ? 2.0f : 1.0f;
        gx += weight * (near(pixels, x + 1, y + i, width, height) - near(pixels, x - 1, y + i, width, height));
        gy += weight * (near(pixels, x + i, y + 1, width, height) - near(pixels, x + i, y - 1, width, height));
    }
    out[y * width + x] = Pixel(fminf(fabsf(gx) + fabsf(gy), 255.0f));
}

#define INSTANTIATE(Radius) \
    template __global__ void blur<Radius>(const Pixel *, Pixel *, int, int);
INSTANTIATE(1) INSTANTIATE(2) INSTANTIATE(3) INSTANTIATE(4) INSTANTIATE(5)
template __global__ void median<1>(const Pixel *, Pixel *, int, int);
template __global__ void median<2>(const Pixel *, Pixel *, int, int);

}  // namespace images
