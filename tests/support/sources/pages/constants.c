/* Blocks of constants, and the ways in which a process that has read one may end. */
#define _GNU_SOURCE
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BLOCK = 256 << 10 };
#ifndef BLOCKS
#define BLOCKS "12"
#endif
#ifndef SECTION
#define SECTION ".rodata"
#endif

/* Each is wider than what the kernel maps around a page (16 pages). */
__asm__(".pushsection " SECTION "\n"
        ".balign 4096\n"
        ".globl blocks\n"
        "blocks: .fill " BLOCKS " * 262144, 1, 7\n"
        ".popsection\n");
extern const unsigned char blocks[];

int read_block(int block) { return blocks[block * BLOCK + BLOCK / 2]; }

void write_to_block(int block) { *(volatile char *)&blocks[block * BLOCK + BLOCK / 2] = 8; }

int write_of_block(int block, int file) {
    return (int)write(file, &blocks[block * BLOCK + BLOCK / 2], 1);
}

/* A forked child that reads a block, and ends in a way. */
int in_child(int block, int way, char **arguments, char **environ) {
    pid_t pid = way == 'v' ? vfork() : fork();
    if (pid == 0) {
        if (way != 'v' && read_block(block) != 7) _exit(1);
        if (way == 'k') raise(SIGKILL);
        if (way == 's') syscall(SYS_exit_group, 0);
        if (way == 'e' || way == 'v') execve(arguments[0], arguments, environ);
        if (way == 'f') execve("/no/such/program", arguments, environ);
        _exit(0);
    }
    int status;
    return waitpid(pid, &status, 0) == pid;
}

int spawn(char **arguments, char **environ) {
    pid_t pid;
    int status;
    return posix_spawn(&pid, arguments[0], NULL, NULL, arguments, environ) == 0 &&
           waitpid(pid, &status, 0) == pid;
}
