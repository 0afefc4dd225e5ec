#!/usr/bin/env bash
# Builds quickstart/libquickstart.so from src/ and writes MANIFEST. Needs CUDA 13.0's nvcc and gcc.
# With the tools that MANIFEST names it gives the same bytes again, in whatever folder it runs.
#   NVCC   the compiler, when it isn't on PATH under this name
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
NVCC=${NVCC:-nvcc}
# nvcc may be a wrapper; only its dry run tells where its headers are.
toolkit=$("$NVCC" --dryrun -E "$here/src/vectors.cu" 2>&1 | sed -n 's/^#\$ TOP=//p')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here"/src/* "$work"
cd "$work"
mkdir keep

commands=()
# run PROGRAM NAME ARGUMENT...: the manifest gets the program's name, not where it lies here.
run() {
    commands+=("$2 ${*:3}")
    "$1" "${@:3}"
}

archs=()
for arch in 75 80 86 90 100; do archs+=(-gencode "arch=compute_$arch,code=sm_$arch"); done
archs+=(-gencode "arch=compute_120,code=[sm_120,compute_120]")

for region in vectors matrices statistics images; do
    # --keep: without it intermediate files, whose names can get into the code, are named by process id.
    run "$NVCC" nvcc --keep --keep-dir keep -fatbin --compress-mode=size -Xfatbin -compress-all "${archs[@]}" "$region.cu" -o "$region.fatbin"
done
# Only cuda.h is needed of the toolkit, for types.
export C_INCLUDE_PATH=$(cd "$toolkit/include" && pwd)
run gcc gcc -shared -fPIC -O2 -Wall -Wextra -Wno-missing-field-initializers -fvisibility=hidden -s -Wl,--build-id=sha1,-soname,libquickstart.so,-z,defs \
    quickstart.c regions.S -o libquickstart.so
# In place of the old file, which a running process may have mapped.
cp libquickstart.so "$here/quickstart/libquickstart.so.new"
mv "$here/quickstart/libquickstart.so.new" "$here/quickstart/libquickstart.so"

cd "$here"
{
    echo "# Written by build.sh; check with: sha256sum -c MANIFEST"
    echo "# nvcc: $("$NVCC" --version | grep release)"
    echo "# gcc: $(gcc --version | head -1), $(ld --version | head -1)"
    printf '# %s\n' "${commands[@]}"
    sha256sum quickstart/libquickstart.so src/*
} >MANIFEST
