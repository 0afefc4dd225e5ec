/* The devices and the driver, as records. */
#pragma once

#include "mappings.h"

#include <dlfcn.h>

static bool devices_known;

/* cuda.h; asked of the driver that the program has loaded */
static void record_devices(void) {
    devices_known = true;
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (cuda == NULL) return;
    int (*count_of)(int *) = (int (*)(int *))dlsym(cuda, "cuDeviceGetCount");
    int (*get)(int *, int) = (int (*)(int *, int))dlsym(cuda, "cuDeviceGet");
    int (*attribute)(int *, int, int) =
        (int (*)(int *, int, int))dlsym(cuda, "cuDeviceGetAttribute");
    int (*name_of)(char *, int, int) = (int (*)(char *, int, int))dlsym(cuda, "cuDeviceGetName");
    int (*uuid_of)(unsigned char *, int) =
        (int (*)(unsigned char *, int))dlsym(cuda, "cuDeviceGetUuid_v2");
    int (*version_of)(int *) = (int (*)(int *))dlsym(cuda, "cuDriverGetVersion");
    int (*mode_of)(int *) = (int (*)(int *))dlsym(cuda, "cuModuleGetLoadingMode");
    int count = 0, version = 0, mode = 0;
    if (!count_of || !get || !attribute || !name_of || !uuid_of || !version_of || count_of(&count))
        return;
    version_of(&version);
    char driver[64] = "";
    Text module = {0};
    if (text_read(&module, "/proc/driver/nvidia/version")) {
        char *at = strstr(module.data, "Kernel Module");
        while (at != NULL && *at && *at != '\n' && !(at[0] >= '0' && at[0] <= '9' && at[-1] == ' '))
            at++;
        if (at != NULL) sscanf(at, "%63[0-9.]", driver);
    }
    free(module.data);
    for (int i = 0; i < count; i++) {
        int device, major, minor;
        char name[256] = "";
        unsigned char uuid[16];
        /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR */
        if (get(&device, i) || attribute(&major, 75, device) || attribute(&minor, 76, device) ||
            name_of(name, sizeof name, device) || uuid_of(uuid, device)) {
            write_warning("devices-unknown", "the driver doesn't tell one of its devices", true);
            continue;
        }
        Text line = {0};
        text_string(&line, "{\"record\":\"device\",\"device\":{\"name\":");
        text_json(&line, name, strlen(name));
        text_format(&line, ",\"compute_capability\":\"%d.%d\",\"uuid\":\"GPU-", major, minor);
        for (int k = 0; k < 16 && !is_sample; k++)
            text_format(&line, "%s%02x", k == 4 || k == 6 || k == 8 || k == 10 ? "-" : "", uuid[k]);
        text_format(&line, "\",\"cuda_version\":%d", version);
        if (*driver) text_field(&line, "driver_version", driver);
        text_string(&line, "}}");
        write_line(&line);
    }
    if (mode_of != NULL && mode_of(&mode) == 0 && mode == 1)
        write_warning("eager-loading",
                      "CUDA_MODULE_LOADING=EAGER: every image of every library was loaded, used or "
                      "not, and counts as used; trace with lazy loading (the default)",
                      false);
}
