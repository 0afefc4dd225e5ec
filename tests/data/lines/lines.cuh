#pragma once


__device__ inline float helper(float x) {
  return x > 0 ? sinf(x) : x * 2;
}
