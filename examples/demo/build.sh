#!/usr/bin/env bash
# Builds build/libdemo.so and build/main, which finds the library beside itself. Needs nvcc and a C++ compiler.
#   NVCC    the compiler, when it isn't on PATH under this name
#   ARCHS   compute capabilities to build for, as in "80 90"
set -euo pipefail

cd "$(dirname "$0")"
NVCC=${NVCC:-nvcc}
codes=()
for arch in ${ARCHS:-75 80 86 90 100 120}; do codes+=(-gencode "arch=compute_$arch,code=sm_$arch"); done
# PTX of the last one, for what comes after it.
codes+=(-gencode "arch=compute_$arch,code=compute_$arch")

mkdir -p build
"$NVCC" -shared -Xcompiler -fPIC "${codes[@]}" src/matmul.cu src/set_scalar_items.cu -o build/libdemo.so
"$NVCC" -cudart none src/main.cpp -Lbuild -ldemo -Xlinker -rpath,'$ORIGIN' -o build/main
