/* What Host.java calls. */
long sum(int from, int to);
int thrown(int depth);

long Java_Host_sum(void *machine, void *class, int from, int to) {
    (void)machine, (void)class;
    return sum(from, to);
}

int Java_Host_thrown(void *machine, void *class, int depth) {
    (void)machine, (void)class;
    return thrown(depth);
}
