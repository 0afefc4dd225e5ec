// Goroutines call a library, while Go's own faults and signals arrive.
package main

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>

static void *library;
static int load(const char *path) { return (library = dlopen(path, RTLD_NOW)) != 0; }
static long sum(int from, int to) { return ((long (*)(int, int))dlsym(library, "sum"))(from, to); }
static int thrown(int depth) { return ((int (*)(int))dlsym(library, "thrown"))(depth); }
*/
import "C"

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
)

func use(start int, pages int) (total C.long) {
	for i := 0; i < pages; i++ {
		page := C.int((start + i) % pages)
		total += C.sum(page, page+1)
	}
	return
}

func fault(nothing *int) (found int) {
	defer func() {
		if recover() != nil {
			found = 1
		}
	}()
	return *nothing
}

func main() {
	pages, _ := strconv.Atoi(os.Args[2])
	if C.load(C.CString(os.Args[1])) == 0 {
		os.Exit(3)
	}
	var group sync.WaitGroup
	seen := make([]string, 16)
	for n := range seen {
		group.Add(1)
		go func(n int) {
			defer group.Done()
			total, found := use(n*pages/16, pages), 0
			for i := 0; i < 100; i++ {
				found += fault(nil)
			}
			runtime.GC()
			seen[n] = fmt.Sprint(total, C.thrown(30), found)
		}(n)
	}
	group.Wait()
	fmt.Println(seen)
}
