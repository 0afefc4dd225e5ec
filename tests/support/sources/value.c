/* A library that says which one it is, of a size that can be chosen. */
__attribute__((used, visibility("default"))) char padding[SIZE] = {1};
__attribute__((visibility("default"))) int value(void) { return VALUE; }
