// A region of code that no program of the corpus needs.
__global__ void idle_elsewhere(int *result) { *result = -1; }
__global__ void idle_as_well(int *result) { *result = -2; }

// A linker of device code drops kernels that no host code mentions.
void launch_idle(int *result) {
    idle_elsewhere<<<1, 1>>>(result);
    idle_as_well<<<1, 1>>>(result);
}
