/* Functions that each lie on a page of their own: what touches the page called the function. */
#define ALONE __attribute__((aligned(4096), noinline, visibility("default")))

static volatile int sink;

ALONE void first_page(void) { sink = 1; }
ALONE void in_constructor(void) { sink = 2; }
ALONE void in_main(void) { sink = 3; }
ALONE void in_thread(void) { sink = 4; }
ALONE void in_child(void) { sink = 5; }
ALONE void in_handler(void) { sink = 6; }
ALONE void when_blocked(void) { sink = 7; }
ALONE void at_exit(void) { sink = 8; }
ALONE void in_grandchild(void) { sink = 9; }
ALONE void never(void) { sink = 10; }
ALONE void last_page(void) { sink = 11; }

__attribute__((constructor)) static void construct(void) { in_constructor(); }
