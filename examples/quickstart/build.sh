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

# One PTX gives the code for all archs. Its line information names files by their path here,
# which becomes one below this folder.
# --keep: without it intermediate files, whose names can get into the code, are named by process id.
for module in vectors matrices statistics images signals fourier sorting; do
    run "$NVCC" nvcc --keep --keep-dir keep -lineinfo -arch=compute_80 -ptx "$module.cu" -o "$module.ptx"
    sed -i -E '/^\s*\.file/{s#"/.*/([^/"]+\.cu)"#"src/\1"#; s#"/.*/#"include/#}' "$module.ptx"
    run "$NVCC" nvcc --keep --keep-dir keep -lineinfo -fatbin --compress-mode=size -Xfatbin -compress-all \
        -gencode "arch=compute_80,code=[compute_80,sm_80,sm_90,sm_100,sm_120]" "$module.ptx" -o "$module.fatbin"
done
# Of the toolkit, only headers are needed.
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
