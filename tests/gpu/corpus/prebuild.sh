#!/usr/bin/env bash
# Builds the programs of prebuilt.tar.xz, with older compilers than a machine of today has: prebuild.sh NVCC_11 NVCC_12.
# Each is an nvcc with its toolkit around it. Those of the archive were 11.8.89 and 12.4.131 of Debian (nvidia-cuda-toolkit), with
# gcc 12.2. libsymbols_static.so holds libcudart_static.a, which NVIDIA's licence lets programs carry (EULA, Attachment A).
set -euo pipefail

cd "$(dirname "$0")"
target=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
archs=(-gencode=arch=compute_80,code=sm_80 "-gencode=arch=compute_90,code=[sm_90,compute_90]")

for nvcc in "$@"; do
    version=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
    mkdir "$work/$version"
    cp ./*.cu ./*.cuh ./*.h module.S "$work"
    cd "$work"
    "$nvcc" -fatbin -allow-unsupported-compiler -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90 module.cu -o module.fatbin
    cc -c module.S -o module.o
    build() {
        "$nvcc" -std=c++17 -allow-unsupported-compiler -shared -Xcompiler -fPIC --extended-lambda "${archs[@]}" \
            -Xlinker -s,--build-id=sha1,--as-needed "${@:3}" "$1.cu" idle.cu -o "$version/lib$2.so"
    }
    for program in graphs managed pointers streams symbols templates textures; do build $program $program -cudart shared; done
    build driver driver -cudart shared module.o
    build units units -cudart shared -rdc=true units_other.cu
    # With the runtime inside; one is enough, since it has the size of twenty others.
    build symbols symbols_static -cudart static
    cd "$target"
done
(cd "$work" && tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -cf - [0-9]*/) | xz -9e >prebuilt.tar.xz
