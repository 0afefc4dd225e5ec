// Kernels with tables that no compression shrinks, so that a container has whole pages. Compiled to
// images for images.c, and with LIBRARY to a library whose containers are cut out.
#define ROW(n) (n) * 2654435761u ^ (n) << 7, (n) * 40503u ^ (n) << 21,
#define ROWS4(n) ROW(n) ROW(n + 1) ROW(n + 2) ROW(n + 3)
#define ROWS16(n) ROWS4(n) ROWS4(n + 4) ROWS4(n + 8) ROWS4(n + 12)
#define ROWS64(n) ROWS16(n) ROWS16(n + 16) ROWS16(n + 32) ROWS16(n + 48)
#define ROWS256(n) ROWS64(n) ROWS64(n + 64) ROWS64(n + 128) ROWS64(n + 192)
#define ROWS1024(n) ROWS256(n) ROWS256(n + 256) ROWS256(n + 512) ROWS256(n + 768)

__device__ unsigned table[8192] = {ROWS1024(1u) ROWS1024(1025u) ROWS1024(2049u) ROWS1024(3073u)};

// The sum over the table, so that a byte that is missing or zero changes it.
extern "C" __global__ void add_up(unsigned *result) {
    unsigned sum = 0;
    for (int i = 0; i < 8192; i++) sum += table[i];
    *result = sum;
}

#ifdef LIBRARY
// What the kernel wrote; 1 + the CUDA error if there is one.
extern "C" unsigned run() {
    unsigned *result = nullptr, value = 0;
    cudaError_t error = cudaMalloc(&result, sizeof *result);
    if (error == cudaSuccess) {
        add_up<<<1, 1>>>(result);
        error = cudaGetLastError();
    }
    if (error == cudaSuccess) error = cudaMemcpy(&value, result, sizeof value, cudaMemcpyDeviceToHost);
    if (result != nullptr) cudaFree(result);
    return error == cudaSuccess ? value : 1 + static_cast<unsigned>(error);
}
#endif
