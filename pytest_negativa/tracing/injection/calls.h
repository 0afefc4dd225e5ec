/* The driver calls. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum Action {
    LOAD,
    LOAD_FILE,
    UNLOAD,
    KERNEL,
    DATA,
    ENUMERATE,
    MODULE_OF_LIBRARY,
    LINK_DATA,
    LINK_FILE,
    LINK_COMPLETE
};

typedef struct {
    uint32_t cbid;
    const char *name;
    enum Action action;
    int handle, subject;
    const char *kind;
} DriverCall;

#define CALL(cbid, name, action, handle, subject, kind) \
    {cbid, #name, action, handle, subject, kind},
static const DriverCall CALLS[] = {
#include "../driver_calls.h"
};
#undef CALL
enum { CALL_COUNT = sizeof CALLS / sizeof *CALLS, LINK_SIZE_SLOT = 3 };

static const DriverCall *find_call(uint32_t cbid) {
    for (int i = 0; i < CALL_COUNT; i++)
        if (CALLS[i].cbid == cbid) return &CALLS[i];
    return NULL;
}
