// Uses a library that may be cut, from the start.
#include <stdio.h>
int call_result(void);
int main(void) {
    printf("%d\n", call_result());
    return 0;
}
