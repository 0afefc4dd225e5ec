/** Threads of a Java machine call a library, while the machine's own faults arrive. */
public class Host {
    static native long sum(int from, int to);

    static native int thrown(int depth);

    static int deep(int depth) {
        return deep(depth + 1) + 1;
    }

    static long use(int start, int pages) {
        long total = 0;
        for (int i = 0; i < pages; i++) {
            int page = (start + i) % pages;
            total += sum(page, page + 1);
        }
        return total;
    }

    static int faults(Object[] nothing) {
        int found = 0;
        for (int i = 0; i < 20_000; i++) {
            try {
                found += nothing[i % nothing.length].hashCode();
            } catch (NullPointerException e) {
                found++;
            }
        }
        try {
            deep(0);
        } catch (StackOverflowError e) {
            found++;
        }
        return found;
    }

    public static void main(String[] words) throws Exception {
        int pages = Integer.parseInt(words[1]);
        System.load(words[0]);
        String[] seen = new String[8];
        Thread[] threads = new Thread[seen.length];
        for (int n = 0; n < threads.length; n++) {
            int number = n;
            threads[n] = new Thread(() -> {
                int found = faults(new Object[2]);
                seen[number] = use(number * pages / 8, pages) + " " + thrown(30) + " " + found;
            });
            threads[n].start();
        }
        System.gc();
        for (Thread thread : threads) thread.join();
        System.out.println(String.join(", ", seen));
    }
}
