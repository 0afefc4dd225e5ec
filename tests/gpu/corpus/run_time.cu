// Code compiled by NVRTC and linked by nvJitLink, beside kernels of the library.
// CORPUS_NVRTC and CORPUS_NVJITLINK name the two libraries.
#include "common.cuh"
#include "driver.h"
#include <cstdlib>
#include <string>
#include <vector>

__global__ void idle_here(int *result) { *result = -1; }
__global__ void compiled_before(int *result) { *result = 1; }

// nvrtc.h and nvJitLink.h, which not all toolkits have.
typedef struct Opaque *Handle;
static void *nvrtc, *nvjitlink;
template <typename... Arguments> static int call(void *library, const char *name, Arguments... arguments) {
    auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
    const int status = function ? function(arguments...) : -1;
    if (status) fprintf(stderr, "%s: %d\n", name, status);
    return status;
}

static int compile(const char *source, const char *option, const char *output, std::string &code) {
    Handle program;
    int device, major, minor;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    const std::string arch = "--gpu-architecture=sm_" + std::to_string(10 * major + minor);
    const char *options[] = {arch.c_str(), option};
    const char **none = nullptr;
    EXPECT(!call(nvrtc, "nvrtcCreateProgram", &program, source, "run_time.cu", 0, none, none));
    EXPECT(!call(nvrtc, "nvrtcCompileProgram", program, 2, options));
    size_t size;
    EXPECT(!call(nvrtc, (std::string("nvrtcGet") + output + "Size").c_str(), program, &size));
    code.resize(size);
    EXPECT(!call(nvrtc, (std::string("nvrtcGet") + output).c_str(), program, &code[0]));
    EXPECT(!call(nvrtc, "nvrtcDestroyProgram", &program));
    return 0;
}

static int launch(const void *image, const char *name, int expected) {
    OnDevice<int> result;
    CUmodule module;
    CUfunction function;
    EXPECT(DRIVER(cuModuleLoadData)(&module, image) == CUDA_SUCCESS);
    EXPECT(DRIVER(cuModuleGetFunction)(&function, module, name) == CUDA_SUCCESS);
    void *arguments[] = {&result.at};
    EXPECT(DRIVER(cuLaunchKernel)(function, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr) == CUDA_SUCCESS);
    EXPECT(result.get() == expected);
    EXPECT(DRIVER(cuModuleUnload)(module) == CUDA_SUCCESS);
    return 0;
}

extern "C" int run() {
    nvrtc = dlopen(getenv("CORPUS_NVRTC"), RTLD_NOW);
    nvjitlink = dlopen(getenv("CORPUS_NVJITLINK"), RTLD_NOW);
    EXPECT(nvrtc && nvjitlink);
    OnDevice<int> result;
    compiled_before<<<1, 1>>>(result.at);
    EXPECT(result.get() == 1);

    std::string cubin, ptx, caller, callee;
    const char *const whole = "extern \"C\" __global__ void by_nvrtc(int *result) { *result = 2; }";
    EXPECT(!compile(whole, "-lineinfo", "CUBIN", cubin));
    EXPECT(!launch(cubin.data(), "by_nvrtc", 2));
    EXPECT(!compile(whole, "-lineinfo", "PTX", ptx));
    EXPECT(!launch(ptx.data(), "by_nvrtc", 2));

    EXPECT(!compile("__device__ int three();"
                    "extern \"C\" __global__ void by_linker(int *result) { *result = three(); }",
                    "-dlto", "LTOIR", caller));
    EXPECT(!compile("__device__ int three() { return 3; }", "-dlto", "LTOIR", callee));
    Handle linker;
    int device, major, minor;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    const std::string arch = "-arch=sm_" + std::to_string(10 * major + minor);
    const char *options[] = {"-lto", arch.c_str()};
    const int ltoir = 3;  // NVJITLINK_INPUT_LTOIR; 1 is a cubin, 2 PTX
    EXPECT(!call(nvjitlink, "__nvJitLinkCreate_13_0", &linker, 2u, options));
    EXPECT(!call(nvjitlink, "__nvJitLinkAddData_13_0", linker, ltoir, caller.data(), caller.size(), "caller"));
    EXPECT(!call(nvjitlink, "__nvJitLinkAddData_13_0", linker, ltoir, callee.data(), callee.size(), "callee"));
    EXPECT(!call(nvjitlink, "__nvJitLinkComplete_13_0", linker));
    size_t size;
    EXPECT(!call(nvjitlink, "__nvJitLinkGetLinkedCubinSize_13_0", linker, &size));
    std::vector<char> linked(size);
    EXPECT(!call(nvjitlink, "__nvJitLinkGetLinkedCubin_13_0", linker, linked.data()));
    EXPECT(!call(nvjitlink, "__nvJitLinkDestroy_13_0", &linker));
    EXPECT(!launch(linked.data(), "by_linker", 3));
    return 0;
}
