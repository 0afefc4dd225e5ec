// A region of code that no program of the corpus needs.
__global__ void idle_elsewhere(int *result) { *result = -1; }
__global__ void idle_as_well(int *result) { *result = -2; }
