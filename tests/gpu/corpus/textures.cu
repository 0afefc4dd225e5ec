// Texture and surface objects, of linear memory, an array and layers.
#include "common.cuh"

__global__ void idle_here(int *result) { *result = -1; }

__global__ void fill(cudaSurfaceObject_t surface) {
    surf2Dwrite(float(threadIdx.x + 10 * threadIdx.y), surface, threadIdx.x * sizeof(float), threadIdx.y);
}

__global__ void sample(cudaTextureObject_t texture, float *result) {
    // Between four texels, filtered by the hardware.
    *result = tex2D<float>(texture, 2.0f, 2.0f);
}

__global__ void fetch(cudaTextureObject_t texture, float *result) { *result = tex1Dfetch<float>(texture, 3); }

__global__ void sample_layer(cudaTextureObject_t texture, float *result) {
    *result = tex2DLayered<float>(texture, 0.5f, 0.5f, 1);
}

extern "C" int run() {
    OnDevice<float> result;
    const cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    cudaArray_t array;
    CHECK(cudaMallocArray(&array, &format, 4, 4, cudaArraySurfaceLoadStore));
    cudaResourceDesc resource{};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    cudaTextureDesc how{};
    how.filterMode = cudaFilterModeLinear;
    cudaSurfaceObject_t surface;
    cudaTextureObject_t texture;
    CHECK(cudaCreateSurfaceObject(&surface, &resource));
    CHECK(cudaCreateTextureObject(&texture, &resource, &how, nullptr));
    fill<<<1, dim3(4, 4)>>>(surface);
    sample<<<1, 1>>>(texture, result.at);
    EXPECT(result.get() == (11.0f + 12.0f + 21.0f + 22.0f) / 4);
    CHECK(cudaDestroyTextureObject(texture));
    CHECK(cudaDestroySurfaceObject(surface));
    CHECK(cudaFreeArray(array));

    OnDevice<float4> linear;
    const float values[4] = {1, 2, 3, 4};
    CHECK(cudaMemcpy(linear.at, values, sizeof values, cudaMemcpyHostToDevice));
    resource = {};
    resource.resType = cudaResourceTypeLinear;
    resource.res.linear.devPtr = linear.at;
    resource.res.linear.desc = format;
    resource.res.linear.sizeInBytes = sizeof values;
    how = {};
    CHECK(cudaCreateTextureObject(&texture, &resource, &how, nullptr));
    fetch<<<1, 1>>>(texture, result.at);
    EXPECT(result.get() == 4);
    CHECK(cudaDestroyTextureObject(texture));

    CHECK(cudaMalloc3DArray(&array, &format, make_cudaExtent(1, 1, 2), cudaArrayLayered));
    cudaMemcpy3DParms copy{};
    copy.srcPtr = make_cudaPitchedPtr(const_cast<float *>(values), sizeof(float), 1, 1);
    copy.dstArray = array;
    copy.extent = make_cudaExtent(1, 1, 2);
    copy.kind = cudaMemcpyHostToDevice;
    CHECK(cudaMemcpy3D(&copy));
    resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    CHECK(cudaCreateTextureObject(&texture, &resource, &how, nullptr));
    sample_layer<<<1, 1>>>(texture, result.at);
    EXPECT(result.get() == 2);
    CHECK(cudaDestroyTextureObject(texture));
    CHECK(cudaFreeArray(array));
    return 0;
}
