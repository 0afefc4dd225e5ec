// Graphs: captured from streams, built by hand, updated, with a kernel that runs in a graph alone.
#include "common.cuh"

__global__ void idle_here(int *result) { *result = -1; }
__global__ void captured(int *to) { *to += 1; }
__global__ void captured_aside(int *to) { atomicAdd(to, 10); }
__global__ void node(int *to, int value) { *to += value; }
__global__ void replacement(int *to, int value) { *to += 2 * value; }

extern "C" int run() {
    OnDevice<int> result;
    OnDevice<int> aside;
    cudaStream_t stream, other;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamCreate(&other));
    cudaEvent_t fork, join;
    CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));

    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    captured<<<1, 1, 0, stream>>>(result.at);
    CHECK(cudaEventRecord(fork, stream));
    CHECK(cudaStreamWaitEvent(other, fork));
    captured_aside<<<1, 1, 0, other>>>(aside.at);
    CHECK(cudaEventRecord(join, other));
    CHECK(cudaStreamWaitEvent(stream, join));
    CHECK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    for (int i = 0; i < 3; i++) CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(result.get() == 3 && aside.get() == 30);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));

    CHECK(cudaGraphCreate(&graph, 0));
    int value = 100;
    void *arguments[] = {&result.at, &value};
    cudaKernelNodeParams parameters{};
    parameters.func = reinterpret_cast<void *>(node);
    parameters.gridDim = parameters.blockDim = dim3(1);
    parameters.kernelParams = arguments;
    cudaGraphNode_t added;
    CHECK(cudaGraphAddKernelNode(&added, graph, nullptr, 0, &parameters));
    CHECK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    // The same node with another function.
    parameters.func = reinterpret_cast<void *>(replacement);
    CHECK(cudaGraphExecKernelNodeSetParams(exec, added, &parameters));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(result.get() == 3 + 100 + 200);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventDestroy(fork));
    CHECK(cudaEventDestroy(join));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaStreamDestroy(other));
    return 0;
}
