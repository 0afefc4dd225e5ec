/* Opens the file that its argument names, as a program does that no redirect reaches. */
#include <fcntl.h>

int main(int count, char **words) { return count < 2 || open(words[1], O_RDONLY) < 0; }
