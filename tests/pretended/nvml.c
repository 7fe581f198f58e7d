/* A library that answers as NVIDIA's NVML does, for a node whose state is in the environment:
 * NVML_GPUS (their number), NVML_THROTTLED, NVML_ECC, NVML_REMAP, NVML_SLOW (the index of a GPU with
 * that fault), NVML_LOST (the index of a GPU that is counted, but has fallen off the bus), NVML_MIG (of one that is
 * divided), NVML_OLD=1 (a driver that knows little). Signatures and numbers are those of nvml.h. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned index; } Device;
typedef struct { unsigned gpu, memory; } Utilization;
enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, LOST = 15 };

static Device devices[16];

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

static int is(const char *fault, const Device *device) {
    return number(fault, -1) == (int)device->index;
}

static int old(void) { return number("NVML_OLD", 0); }

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int result) { return "an error"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = number("NVML_GPUS", 2);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if ((int)index >= number("NVML_GPUS", 2)) return INVALID;
    if ((int)index == number("NVML_LOST", -1)) return LOST;
    devices[index].index = index;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    unsigned index;
    if (sscanf(uuid, "GPU-0000000%u", &index) != 1) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

int nvmlDeviceGetMigMode(Device *device, unsigned *now, unsigned *later) {
    if (old()) return NOT_SUPPORTED;
    *now = *later = is("NVML_MIG", device);
    return SUCCESS;
}

int nvmlDeviceGetName(Device *device, char *name, unsigned length) {
    snprintf(name, length, "Pretended H%u", 100 + device->index);
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Device *device, int type, int counter, unsigned long long *count) {
    if (old()) return NOT_SUPPORTED;
    /* corrected errors, and those of the whole life, are none of the driver's present ones */
    *count = type == 1 && counter == 0 ? (is("NVML_ECC", device) ? 3 : 0) : 1000;
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(Device *device, unsigned *correctable, unsigned *uncorrectable,
                              unsigned *pending, unsigned *failed) {
    if (old()) return NOT_SUPPORTED;
    *correctable = 5;
    *uncorrectable = 7;
    *pending = is("NVML_REMAP", device);
    *failed = 0;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons) {
    /* 0x40: hardware thermal slowdown, with 0x8; 0x4: the power cap, usual under load; 0x1: idle */
    *reasons = is("NVML_THROTTLED", device) ? 0x48 : is("NVML_SLOW", device) ? 0x4 : 0x1;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(Device *device, int type, unsigned *mhz) {
    if (type != 1) return INVALID;
    *mhz = is("NVML_SLOW", device) ? 600 : 345;
    return SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(Device *device, int type, unsigned *mhz) {
    if (type != 1) return INVALID;
    *mhz = 1980;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *utilization) {
    utilization->gpu = is("NVML_SLOW", device) ? 97 : 0;
    utilization->memory = 11;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) {
    if (old()) return NOT_SUPPORTED;
    *milliwatts = 71500 + device->index;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *celsius) {
    if (sensor != 0) return INVALID;
    *celsius = is("NVML_THROTTLED", device) ? 91 : 34;
    return SUCCESS;
}
