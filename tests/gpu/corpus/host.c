// host TIMES LIBRARY...: so many times, load each library, call its `run`, and unload it.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    for (int time = 0; time < atoi(argv[1]); time++)
        for (int i = 2; i < argc; i++) {
            void *library = dlopen(argv[i], RTLD_NOW);
            int (*run)(void) = library ? (int (*)(void))dlsym(library, "run") : NULL;
            if (run == NULL) {
                fprintf(stderr, "%s\n", dlerror());
                return 2;
            }
            const int status = run();
            if (status != 0) return status;
            dlclose(library);
        }
    return 0;
}
