// Usage: main matmul | set_scalar_items. Computes on the GPU, checks on the CPU: 0 means that they agree.

#include "demo.h"

#include <cstdio>
#include <string>
#include <vector>

static int failed(const char *what, int status) {
    std::fprintf(stderr, "%s: CUDA error %d\n", what, status);
    return 1;
}

static int check(const char *what, const std::vector<float> &found, const std::vector<float> &expected) {
    for (size_t i = 0; i < found.size(); ++i)
        if (found[i] != expected[i]) {
            std::fprintf(stderr, "%s: item %zu is %g, expected %g\n", what, i, found[i], expected[i]);
            return 1;
        }
    std::printf("%s: %zu items as expected\n", what, found.size());
    return 0;
}

static int run_matmul() {
    const int size = 100;
    std::vector<float> a(size * size), b(size * size), found(size * size), expected(size * size);
    // Small whole numbers: sums are exact in whatever order they are taken.
    for (int i = 0; i < size * size; ++i) a[i] = float(i * 7 % 13 - 6), b[i] = float(i * 5 % 11 - 5);
    for (int row = 0; row < size; ++row)
        for (int column = 0; column < size; ++column)
            for (int i = 0; i < size; ++i) expected[row * size + column] += a[row * size + i] * b[i * size + column];
    if (int status = demo_matmul(a.data(), b.data(), found.data(), size)) return failed("matmul", status);
    return check("matmul", found, expected);
}

static int run_set_scalar_items() {
    std::vector<float> found(1000, 1.0f), expected(1000, 1.0f);
    for (size_t i = 0; i < expected.size(); i += 3) expected[i] = 42.0f;
    if (int status = demo_set_scalar_items(found.data(), int(found.size()), 3, 42.0f)) return failed("set_scalar_items", status);
    return check("set_scalar_items", found, expected);
}

int main(int count, char **arguments) {
    const std::string job = count == 2 ? arguments[1] : "";
    if (job == "matmul") return run_matmul();
    if (job == "set_scalar_items") return run_set_scalar_items();
    std::fprintf(stderr, "usage: main matmul | set_scalar_items\n");
    return 2;
}
