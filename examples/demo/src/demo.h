#pragma once

// Each returns 0, or a cudaError_t. All pointers are to host memory.
extern "C" int demo_matmul(const float *a, const float *b, float *out, int size);
extern "C" int demo_set_scalar_items(float *items, int count, int every, float value);
