/* Stands in for NVML with two devices: 1 GiB and 2 GiB in use, of which the process named in
 * NVML_PID has 256 MiB on the second. Structures as in nvml.h. */
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } Process;
enum { INSUFFICIENT_SIZE = 7 };

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return (int)flags; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(index + 1L);
    return 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    strncpy(name, device == (void *)1L ? "first" : "second", length);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    *memory = (Memory){4ULL << 30, 0, (unsigned long long)(long)device << 30};
    return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *energy) {
    static unsigned long long calls;
    *energy = 1000 * (unsigned long long)(long)device + 10 * calls++;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *processes) {
    const char *pid = getenv("NVML_PID");
    if (device == (void *)1L || pid == NULL) {
        *count = 0;
        return 0;
    }
    if (*count < 1) {
        *count = 1;
        return INSUFFICIENT_SIZE;
    }
    *count = 1;
    processes[0] = (Process){(unsigned)atoi(pid), 256ULL << 20, 0, 0};
    return 0;
}
const char *nvmlErrorString(int code) { return code == 0 ? "fine" : "an error"; }
