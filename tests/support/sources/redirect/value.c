int SYMBOL(void) { return VALUE; }
