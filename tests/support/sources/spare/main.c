// Uses a library that may be cut, from the start.
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
int call_result(void);
extern int copied[8];
int main(void) {
    if (copied[7] != 42) return 1;
    printf("%d %s of %s\n", call_result(), getenv("SETTING"), program_invocation_short_name);
    return 0;
}
