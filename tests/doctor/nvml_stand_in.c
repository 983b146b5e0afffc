/* A driver library for machines without a driver: what pynvml calls, answered from FAKE_NVML_* variables.
   It shows the whole way from the real binding to the printed line; it says nothing about a real driver. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned pid; u64 used; unsigned gpu, compute; } Process;

static const char *text(const char *name, const char *usual) { const char *v = getenv(name); return v ? v : usual; }
static long number(const char *name, long usual) { const char *v = getenv(name); return v ? atol(v) : usual; }
static const u64 GIB = 1ull << 30;

/* A handle is 1 + the device's index; a MIG instance's is 100 + its index. */
int nvmlInitWithFlags(unsigned flags) { (void)flags; return (int)number("FAKE_NVML_INIT", 0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "an error"; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = (int)number("FAKE_NVML_CUDA", 13000); return 0; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "%s", text("FAKE_NVML_DRIVER", "580.65.06")); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)number("FAKE_NVML_DEVICES", 1); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetName(void *handle, char *out, unsigned size) { (void)handle; snprintf(out, size, "Stand-in H200"); return 0; }
int nvmlDeviceGetUUID(void *handle, char *out, unsigned size) {
    long number = (long)handle;
    snprintf(out, size, number >= 100 ? "MIG-0000000%ld" : "GPU-0000000%ld", number % 100);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    (void)handle;
    memory->total = 141 * GIB;
    memory->used = (u64)number("FAKE_NVML_USED_GIB", 0) * GIB;
    memory->free = memory->total - memory->used;
    return 0;
}
int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    (void)handle;
    *current = *pending = getenv("FAKE_NVML_MIG") != NULL;
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) { (void)handle; *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **instance) {
    (void)handle;
    *instance = (void *)(long)(100 + index);
    return index < number("FAKE_NVML_MIG", 0) ? 0 : 6; /* not found */
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *processes) {
    long pid = number("FAKE_NVML_PID", 0);
    (void)handle;
    if (pid == 0) { *count = 0; return 0; }
    if (processes == NULL) { *count = 1; return 7; } /* insufficient size */
    *count = 1;
    processes[0].pid = (unsigned)pid;
    processes[0].used = (u64)number("FAKE_NVML_USED_GIB", 0) * GIB;
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) { (void)handle; *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetComputeMode(void *handle, unsigned *mode) { (void)handle; *mode = (unsigned)number("FAKE_NVML_MODE", 0); return 0; }
int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, u64 *count) {
    (void)handle; (void)type; (void)counter;
    *count = (u64)number("FAKE_NVML_ECC", 0);
    return 0;
}
