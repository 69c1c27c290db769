/* trace.c: notes which basic blocks run, in a file that all processes of a test share. The compiler calls
 * __sanitizer_cov_trace_pc at the begin of every block (-fsanitize-coverage=trace-pc). Byte n of the file is set once
 * the call that returns to an offset of 4n to 4n + 3 in the program was made. A file, unlike the counters of gcov, also
 * keeps what processes ran that were killed. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BYTES = 1 << 23 };
extern const char __ehdr_start __attribute__((visibility("hidden")));
static unsigned char *blocks;

__attribute__((constructor(101))) static void open_trace(void) {
    const char *path = getenv("MPOOL_MUTATION_TRACE");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    blocks = memory == MAP_FAILED ? NULL : memory;
}

__attribute__((visibility("hidden"))) void __sanitizer_cov_trace_pc(void) {
    uintptr_t offset = ((uintptr_t)__builtin_return_address(0) - (uintptr_t)&__ehdr_start) / 4;
    if (blocks && offset < BYTES && !blocks[offset])
        blocks[offset] = 1;
}
