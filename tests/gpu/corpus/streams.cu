// Streams, events, callbacks on the host, threads with a stream each, memory from a pool.
#include "common.cuh"
#include <atomic>
#include <thread>
#include <vector>

__global__ void idle_here(int *result) { *result = -1; }
__global__ void first(int *to) { *to = 1; }
__global__ void second(int *to) { *to += 10; }
__global__ void in_thread(int *to, int value) { *to = value; }
__global__ void in_pool(int *to) { *to = 77; }

static void called(void *count) { ++*static_cast<std::atomic<int> *>(count); }

static int in_its_stream(int number) {
    OnDevice<int> result;
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaDeviceSynchronize());
    in_thread<<<1, 1, 0, stream>>>(result.at, number);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamDestroy(stream));
    EXPECT(result.get() == number);
    return 0;
}

extern "C" int run() {
    OnDevice<int> result;
    std::atomic<int> calls{0};
    cudaStream_t a, b;
    cudaEvent_t done;
    CHECK(cudaStreamCreate(&a));
    CHECK(cudaStreamCreateWithPriority(&b, cudaStreamNonBlocking, 0));
    CHECK(cudaEventCreate(&done));
    first<<<1, 1, 0, a>>>(result.at);
    CHECK(cudaLaunchHostFunc(a, called, &calls));
    CHECK(cudaEventRecord(done, a));
    CHECK(cudaStreamWaitEvent(b, done, 0));
    second<<<1, 1, 0, b>>>(result.at);
    CHECK(cudaLaunchHostFunc(b, called, &calls));
    CHECK(cudaStreamSynchronize(b));
    EXPECT(result.get() == 11 && calls == 2);

    std::vector<std::thread> threads;
    std::atomic<int> failed{0};
    for (int i = 1; i <= 8; i++) threads.emplace_back([&failed, i] { failed += in_its_stream(i); });
    for (auto &thread : threads) thread.join();
    EXPECT(failed == 0);

    int *pooled, value;
    CHECK(cudaMallocAsync(&pooled, sizeof *pooled, a));
    in_pool<<<1, 1, 0, a>>>(pooled);
    CHECK(cudaMemcpyAsync(&value, pooled, sizeof value, cudaMemcpyDeviceToHost, a));
    CHECK(cudaFreeAsync(pooled, a));
    CHECK(cudaStreamSynchronize(a));
    EXPECT(value == 77);
    CHECK(cudaEventDestroy(done));
    CHECK(cudaStreamDestroy(a));
    CHECK(cudaStreamDestroy(b));
    return 0;
}
