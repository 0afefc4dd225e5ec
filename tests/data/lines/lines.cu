// nvcc -lineinfo -cubin -arch=sm_90 lines.cu -o lines.sm_90.cubin, with nvcc 13.0.88 in
// /tmp/pytest-negativa-fixtures. tests/gpucode/test_source_lines.py knows the lines.
#include "lines.cuh"
namespace n {
template <int N>
__global__ void mul(float *a) {
  a[threadIdx.x] *= helper(a[N]);
}
__global__ void other(float *a)
{
  int i = threadIdx.x;
  a[i] = helper(helper(i));
}
}
template __global__ void n::mul<1>(float *);
template __global__ void n::mul<2>(float *);
extern "C" __global__ void plain(float *a) { a[0] = helper(a[1]); }
