// Uses a library that may be cut, from the start.
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
int call_result(void);
int main(void) {
    printf("%d %s of %s\n", call_result(), getenv("SETTING"), program_invocation_short_name);
    return 0;
}
