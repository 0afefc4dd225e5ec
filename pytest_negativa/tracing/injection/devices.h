/* The devices and the driver, as records. */
#pragma once

#include "contexts.h"

#include <dlfcn.h>

static bool devices_known;

/* Fills a struct of pointers to functions by their names; false: a library lacks one. */
static bool find_functions(void *library, const char *const *names, size_t count, void **found) {
    bool all = true;
    for (size_t i = 0; i < count; i++) all &= (found[i] = dlsym(library, names[i])) != NULL;
    return all;
}

/* cuda.h; asked of the driver that the program has loaded */
static void record_devices(void) {
    devices_known = true;
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (cuda == NULL) return;
    static const char *const names[] = {"cuDeviceGetCount",     "cuDeviceGet",
                                        "cuDeviceGetAttribute", "cuDeviceGetName",
                                        "cuDeviceGetUuid_v2",   "cuDriverGetVersion"};
    struct {
        int (*count)(int *);
        int (*get)(int *, int);
        int (*attribute)(int *, int, int);
        int (*name)(char *, int, int);
        int (*uuid)(unsigned char *, int);
        int (*version)(int *);
    } driver;
    int (*mode_of)(int *) = (int (*)(int *))dlsym(cuda, "cuModuleGetLoadingMode");
    int count = 0, version = 0, mode = 0;
    if (!find_functions(cuda, names, 6, (void **)&driver) || driver.count(&count)) return;
    driver.version(&version);
    char release[64] = "";
    Text module = {0};
    if (text_read(&module, "/proc/driver/nvidia/version")) {
        const char *at = strstr(module.data, "Kernel Module");
        if (at != NULL && sscanf(at, "Kernel Module for %*s %63[0-9.]", release) != 1)
            sscanf(at, "Kernel Module %63[0-9.]", release);
    }
    free(module.data);
    for (int i = 0; i < count; i++) {
        int device, major, minor;
        char name[256] = "";
        unsigned char uuid[16];
        /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR */
        if (driver.get(&device, i) || driver.attribute(&major, 75, device) ||
            driver.attribute(&minor, 76, device) || driver.name(name, sizeof name, device) ||
            driver.uuid(uuid, device)) {
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
        if (*release) text_field(&line, "driver_version", release);
        text_string(&line, "}");
        write_line(&line);
    }
    if (mode_of != NULL && mode_of(&mode) == 0 && mode == 1)
        write_warning("eager-loading",
                      "CUDA_MODULE_LOADING=EAGER: every image of every library was loaded, used or "
                      "not, and counts as used; trace with lazy loading (the default)",
                      false);
}
