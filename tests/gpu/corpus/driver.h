// Functions of the driver, without linking to it.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
// cuda.h renames some functions to their newest version: the name in the library is the new one.
#define DRIVER(name) (reinterpret_cast<decltype(&name)>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), TEXT(name))))
