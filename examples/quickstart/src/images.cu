// Greyscale images, one byte a pixel.

extern "C" __global__ void image_threshold(const unsigned char *pixels, unsigned char *out, unsigned char limit, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = pixels[i] >= limit ? 255 : 0;
}

extern "C" __global__ void image_flip(const unsigned char *pixels, unsigned char *out, int width, int height) {
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    int y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x < width && y < height) out[y * width + width - 1 - x] = pixels[y * width + x];
}

extern "C" __global__ void image_blur(const unsigned char *pixels, unsigned char *out, int width, int height) {
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    int y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= height) return;
    int sum = 0, seen = 0;
    for (int row = max(y - 1, 0); row <= min(y + 1, height - 1); ++row)
        for (int column = max(x - 1, 0); column <= min(x + 1, width - 1); ++column, ++seen) sum += pixels[row * width + column];
    out[y * width + x] = sum / seen;
}
