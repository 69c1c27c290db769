/* test_files_map.c: which files may be mapped, files truncated or rewritten while mapped, the SIGBUS handler. */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/sys.h"
#include "files/cursor.h"
#include "files/file_map.h"
#include "test_files.h"

static size_t page;

static mp_file_map *map_of(char *path, size_t size, const char *name, size_t bytes) {
    mp_error error;
    mp_file_map *map;
    page = (size_t)sysconf(_SC_PAGESIZE);
    mp_file_map_init();
    mp_file_map_init(); /* the second call must change nothing */
    uint8_t *data = malloc(bytes);
    memset(data, 0xA5, bytes);
    mp_test_write_file(test_path(path, size, name), data, bytes);
    free(data);
    MP_CHECK_OK(mp_file_map_open(path, &map, &error), &error);
    return map;
}

static uint64_t sum_of(const mp_file_map *map, uint64_t from, uint64_t to) {
    const volatile uint8_t *data = mp_file_map_data(map);
    uint64_t sum = 0;
    for (uint64_t i = from; i < to; i++)
        sum += data[i];
    return sum;
}

/* Number of mappings of a file in this process. */
static int mappings(const char *path) {
    char line[1024];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    MP_CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps))
        count += strstr(line, path) != NULL;
    fclose(maps);
    return count;
}

MP_TEST(files_map_opens_regular_files_only) {
    char path[400], fifo[400], link_path[400], empty[400];
    mp_error error;
    mp_file_map *map = map_of(path, sizeof path, "a", 100), *other;
    MP_CHECK_INT(mp_file_map_size(map), 100);
    MP_CHECK_STR(mp_file_map_path(map), path);
    MP_CHECK_INT(sum_of(map, 0, 100), 100 * 0xA5);
    MP_CHECK_INT(mkfifo(test_path(fifo, sizeof fifo, "fifo"), 0600), 0);
    mp_test_write_file(test_path(empty, sizeof empty, "empty"), "", 0);
    const char *bad[] = {fifo, mp_test_directory(), "/dev/null", "/dev/zero", empty};
    for (int i = 0; i < 5; i++) {
        MP_CHECK_STATUS(mp_file_map_open(bad[i], &other, &error), MP_FORMAT, &error);
        MP_CHECK(other == NULL);
        check_error(&error, bad[i]);
    }
    MP_CHECK_STATUS(mp_file_map_open("/nowhere", &other, &error), MP_IO, &error);
    /* links are followed: callers that know the folder check links; here only the target must be a regular file */
    MP_CHECK_INT(symlink(path, test_path(link_path, sizeof link_path, "link")), 0);
    MP_CHECK_OK(mp_file_map_open(link_path, &other, &error), &error);
    MP_CHECK_INT(mappings(path), 2);
    mp_file_map_close(other);
    mp_file_map_close(map);
    MP_CHECK_INT(mappings(path), 0);
    mp_file_map_close(NULL);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC), 0);
}

/* Reads of a mapped file that was truncated yield zeros and poison the mapping. */
MP_TEST(files_map_shrinks) {
    char path[400], other_path[400];
    mp_file_map *map = map_of(path, sizeof path, "a", 300000);
    mp_file_map *other = map_of(other_path, sizeof other_path, "b", 5000);
    MP_CHECK_INT(truncate(path, 10), 0);
    MP_CHECK(!mp_file_map_poisoned(map));
    MP_CHECK_INT(sum_of(map, 10, 300000), 0); /* zeros in the rest of the last page and in the truncated pages */
    MP_CHECK_INT(sum_of(map, 0, 10), 10 * 0xA5);
    MP_CHECK(mp_file_map_poisoned(map));
    MP_CHECK(!mp_file_map_poisoned(other));
    MP_CHECK_INT(sum_of(other, 0, 5000), 5000 * 0xA5);
    errno = 77;
    MP_CHECK_INT(truncate(other_path, 0), 0);
    MP_CHECK_INT(sum_of(other, 0, 5000), 0);
    MP_CHECK_INT(errno, 77); /* the handler must preserve errno for the code that it interrupts */
    MP_CHECK(mp_file_map_poisoned(other));
    mp_file_map_close(map);
    mp_file_map_close(other);
    /* a new mapping in the slot of a poisoned one is not poisoned */
    map = map_of(path, sizeof path, "c", 100);
    MP_CHECK(!mp_file_map_poisoned(map));
    mp_file_map_close(map);
}

typedef struct reader {
    const mp_file_map *map;
    uint64_t sum;
} reader;

static void read_in_thread(void *arg) {
    reader *r = arg;
    r->sum = sum_of(r->map, 0, mp_file_map_size(r->map));
}

/* Compute threads block signals, but SIGBUS must reach them. */
MP_TEST(files_map_shrinks_under_threads) {
#ifdef __SANITIZE_THREAD__
    MP_SKIP("the sanitizer reports the zero page, mapped while threads read it, as a race");
#endif
    char path[400];
    mp_error error;
    mp_file_map *map = map_of(path, sizeof path, "a", 2000000);
    reader readers[4];
    mp_thread threads[4];
    MP_CHECK_INT(truncate(path, 4096), 0);
    for (int i = 0; i < 4; i++) {
        readers[i] = (reader){map, 0};
        MP_CHECK_OK(mp_thread_start(&threads[i], "reader", read_in_thread, &readers[i], &error), &error);
    }
    for (int i = 0; i < 4; i++) {
        mp_thread_join(&threads[i]);
        MP_CHECK_INT(readers[i].sum, 4096 * 0xA5);
    }
    MP_CHECK(mp_file_map_poisoned(map));
    mp_file_map_close(map);
}

/* --- SIGBUS handlers of other code --- */

static sigjmp_buf back;
static void jump(int number) {
    (void)number;
    siglongjmp(back, 1);
}

/* Map an empty file without mpool, so that reads fault outside every mpool mapping. */
static volatile uint8_t *foreign(void) {
    char path[400];
    mp_test_write_file(test_path(path, sizeof path, "foreign"), "", 0);
    int fd = open(path, O_RDONLY);
    volatile uint8_t *data = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    MP_CHECK(data != MAP_FAILED);
    close(fd);
    return data;
}

MP_TEST(files_map_forwards_foreign_faults) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = jump;
    sigaction(SIGBUS, &action, NULL);
    volatile uint8_t *data = foreign();
    char path[400];
    mp_file_map *map = map_of(path, sizeof path, "a", 5000); /* installs mpool's handler over the test's */
    volatile int jumped = sigsetjmp(back, 1);
    if (!jumped)
        (void)data[0];
    MP_CHECK_INT(jumped, 1);
    MP_CHECK(!mp_file_map_poisoned(map));
    MP_CHECK_INT(truncate(path, 0), 0); /* mpool's handler still works */
    MP_CHECK_INT(sum_of(map, 0, 5000), 0);
    mp_file_map_close(map);
}

static int end_of_child(void (*body)(void)) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGBUS, SIG_DFL); /* replace the handler of a sanitizer */
        mp_file_map_init();
        body();
        _exit(0);
    }
    int status = 0;
    MP_CHECK_INT(waitpid(child, &status, 0), child);
    return status;
}

static void touch_foreign(void) { (void)foreign()[0]; }
static void raise_it(void) { raise(SIGBUS); }

MP_TEST(files_map_default_action_stays) {
    int status = end_of_child(touch_foreign);
    MP_CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
    status = end_of_child(raise_it);
    MP_CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
}

/* --- a file that changes under its name --- */

MP_TEST(files_map_unchanged) {
    char path[400], other[400];
    struct timespec times[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    mp_file_map *map = map_of(path, sizeof path, "a", 5000);
    MP_CHECK(mp_file_map_unchanged(map));
    /* rewritten in place, same size */
    mp_sys_sleep_ns(20 * 1000 * 1000); /* longer than the resolution of file times */
    FILE *file = fopen(path, "r+b");
    MP_CHECK(file && fwrite("changed", 1, 7, file) == 7 && fclose(file) == 0);
    MP_CHECK(!mp_file_map_unchanged(map));
    mp_file_map_close(map);
    map = map_of(path, sizeof path, "a", 5000);
    MP_CHECK_INT(utimensat(AT_FDCWD, path, times, 0), 0);
    MP_CHECK(!mp_file_map_unchanged(map));
    mp_file_map_close(map);
    /* a change of the metadata, with or without an effect, does not change the content */
    struct stat info;
    map = map_of(path, sizeof path, "a", 5000);
    mp_sys_sleep_ns(20 * 1000 * 1000);
    MP_CHECK_INT(stat(path, &info), 0);
    MP_CHECK_INT(chmod(path, info.st_mode & 0777), 0); /* Kubernetes (fsGroup) does so on every mount */
    MP_CHECK(mp_file_map_unchanged(map));
    MP_CHECK_INT(chown(path, info.st_uid, info.st_gid), 0);
    MP_CHECK(mp_file_map_unchanged(map));
    MP_CHECK_INT(chmod(path, (info.st_mode & 0777) ^ 0040), 0);
    MP_CHECK(mp_file_map_unchanged(map));
    MP_CHECK_INT(chmod(path, info.st_mode & 0777), 0);
    snprintf(other, sizeof other, "%.300s/a-link", mp_test_directory());
    MP_CHECK_INT(link(path, other), 0);
    MP_CHECK(mp_file_map_unchanged(map));
    MP_CHECK_INT(unlink(other), 0);
    mp_file_map_close(map);
    /* replaced by another file, then written to: the path names the other file, the mapping is that of the first */
    map = map_of(path, sizeof path, "b", 5000);
    mp_file_map *twin = map_of(other, sizeof other, "c", 6000);
    MP_CHECK_INT(rename(other, path), 0);
    MP_CHECK(mp_file_map_unchanged(map) && mp_file_map_unchanged(twin));
    MP_CHECK_INT(sum_of(map, 0, 5000), 5000 * 0xA5); /* the mapping keeps the old content */
    MP_CHECK_INT(truncate(path, 6001), 0);
    MP_CHECK(mp_file_map_unchanged(map) && !mp_file_map_unchanged(twin));
    mp_file_map_close(map);
    mp_file_map_close(twin);
    /* another size */
    map = map_of(path, sizeof path, "d", 5000);
    MP_CHECK_INT(truncate(path, 6000), 0);
    MP_CHECK(!mp_file_map_unchanged(map));
    MP_CHECK_INT(unlink(path), 0);
    MP_CHECK(!mp_file_map_unchanged(map));
    mp_file_map_close(map);
    map = map_of(path, sizeof path, "e", 5000);
    MP_CHECK_INT(unlink(path), 0);
    MP_CHECK(mp_file_map_unchanged(map));
    mp_file_map_close(map);
}

/* Number of the descriptor that the next file gets. */
static int next_descriptor(void) {
    const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    MP_CHECK(fd >= 0 && close(fd) == 0);
    return fd;
}

/* A daemon closes all descriptors after its fork, and its next files get their numbers. */
MP_TEST(files_map_whose_descriptor_others_closed) {
    char path[400], other[400];
    const int fd = next_descriptor();
    mp_file_map *map = map_of(path, sizeof path, "a", 5000);
    MP_CHECK_INT(next_descriptor(), fd + 1); /* a mapping holds one descriptor */
    MP_CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    MP_CHECK_INT(close(fd), 0);
    MP_CHECK(mp_file_map_unchanged(map));
    mp_test_write_file(test_path(other, sizeof other, "b"), "other", 5);
    MP_CHECK_INT(open(other, O_RDONLY | O_CLOEXEC), fd);
    MP_CHECK(mp_file_map_unchanged(map));
    MP_CHECK_INT(truncate(path, 6000), 0);
    MP_CHECK(!mp_file_map_unchanged(map));
    mp_file_map_close(map);
    MP_CHECK_INT(close(fd), 0); /* the descriptor of the other file is still open */
    map = map_of(path, sizeof path, "a", 5000);
    mp_file_map_close(map);
    MP_CHECK_INT(next_descriptor(), fd); /* a closed mapping holds none */
}

MP_TEST(files_map_release) {
    char path[400];
    mp_file_map *map = map_of(path, sizeof path, "a", 100000);
    static const uint64_t ranges[][2] = {{0, 100000},  {5000, 20000}, {99999, 1},          {0, UINT64_MAX},
                                         {100000, 10}, {1, 1},        {50000, UINT64_MAX}, {UINT64_MAX, UINT64_MAX}};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        mp_file_map_release(map, ranges[i][0], ranges[i][1]);
        MP_CHECK_INT(sum_of(map, 0, 100000), 100000 * 0xA5);
    }
    sum_of(map, 0, 100000);
    mp_file_map_release(map, 0, 100000);
    /* mincore reports the page cache, so read this process's page tables instead */
    FILE *smaps = fopen("/proc/self/smaps", "r");
    MP_CHECK(smaps != NULL);
    char line[512], start[32];
    unsigned long kb = 0;
    bool inside = false, found = false;
    snprintf(start, sizeof start, "%lx-", (unsigned long)(uintptr_t)mp_file_map_data(map));
    while (fgets(line, sizeof line, smaps)) {
        if (strncmp(line, start, strlen(start)) == 0)
            inside = true;
        if (inside && sscanf(line, "Rss: %lu kB", &kb) == 1) {
            found = true;
            break;
        }
    }
    fclose(smaps);
    MP_CHECK(found && kb <= page / 1024); /* the last, partial page may stay */
    mp_file_map_close(map);
}

/* A file that is opened after another one was closed does not take the protection of a file that is still open. */
MP_TEST(files_map_keeps_its_slot) {
    char paths[3][400];
    mp_file_map *first = map_of(paths[0], sizeof paths[0], "first", 5000);
    mp_file_map_close(map_of(paths[1], sizeof paths[1], "second", 5000));
    mp_file_map *third = map_of(paths[2], sizeof paths[2], "third", 5000);
    MP_CHECK_INT(truncate(paths[0], 0), 0);
    MP_CHECK_INT(sum_of(first, 0, 5000), 0);
    MP_CHECK(mp_file_map_poisoned(first) && !mp_file_map_poisoned(third));
    mp_file_map_close(first);
    mp_file_map_close(third);
}

MP_TEST(files_map_limit) {
    enum { MAX = 4096 };
    static mp_file_map *maps[MAX];
    char path[400];
    mp_error error;
    mp_file_map *more;
    maps[0] = map_of(path, sizeof path, "a", 10);
    for (int i = 1; i < MAX; i++)
        MP_CHECK_OK(mp_file_map_open(path, &maps[i], &error), &error);
    const int mapped = mappings(path);
    MP_CHECK_STATUS(mp_file_map_open(path, &more, &error), MP_LIMIT, &error);
    MP_CHECK_INT(mappings(path), mapped);
    mp_file_map_close(maps[100]);
    MP_CHECK_OK(mp_file_map_open(path, &maps[100], &error), &error);
    MP_CHECK_INT(truncate(path, 0), 0);
    MP_CHECK_INT(sum_of(maps[MAX - 1], 0, 10), 0);
    MP_CHECK(mp_file_map_poisoned(maps[MAX - 1]) && !mp_file_map_poisoned(maps[0]));
    for (int i = 0; i < MAX; i++)
        mp_file_map_close(maps[i]);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC), 0);
}

static mp_status open_one(void *arg, mp_error *error) {
    mp_file_map *map;
    mp_status status = mp_file_map_open(arg, &map, error);
    mp_file_map_close(map);
    return status;
}

/* Allocation, open and mmap fail in turn. */
MP_TEST(files_map_faults) {
    char path[400];
    mp_file_map *map = map_of(path, sizeof path, "a", 100000);
    mp_test_alloc_sweep(open_one, path);
    MP_CHECK_INT(mp_test_fault_sweep(MP_FAULT_OPEN, open_one, path), 1);
    MP_CHECK_INT(mp_test_fault_sweep(MP_FAULT_MAP, open_one, path), 1);
    mp_file_map_close(map);
}

/* --- the cursor --- */

MP_TEST(files_cursor) {
    static const uint8_t bytes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0xaa};
    mp_cursor c = {.data = bytes, .size = sizeof bytes, .file = "here"};
    mp_error error;
    uint32_t u32;
    uint64_t u64;
    const uint8_t *data = NULL;
    MP_CHECK_OK(mp_cursor_u32(&c, "a", &u32, &error), &error);
    MP_CHECK_OK(mp_cursor_u64(&c, "b", &u64, &error), &error);
    MP_CHECK(u32 == 0x04030201 && u64 == 0x0c0b0a0908070605);
    MP_CHECK_INT(mp_cursor_left(&c), 1);
    MP_CHECK_STATUS(mp_cursor_u32(&c, "tail", &u32, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.field, "tail");
    MP_CHECK_STR(error.file, "here");
    MP_CHECK_INT(error.offset, sizeof bytes - 1);
    MP_CHECK_STATUS(mp_cursor_take(&c, UINT64_MAX, "tail", &data, &error), MP_FORMAT, &error);
    MP_CHECK_INT(mp_cursor_left(&c), 1); /* a failed read does not move the cursor */
    MP_CHECK_OK(mp_cursor_take(&c, 1, "tail", &data, &error), &error);
    MP_CHECK(data == bytes + sizeof bytes - 1);
    MP_CHECK_OK(mp_cursor_take(&c, 0, "nothing", &data, &error), &error);
    MP_CHECK_STATUS(mp_cursor_u64(&c, "end", &u64, &error), MP_FORMAT, &error);
}
