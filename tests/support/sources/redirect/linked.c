/* A program that is linked with the library. */
#include <stdio.h>

const char *which(void);

int main(void) { return puts(which()) < 0; }
