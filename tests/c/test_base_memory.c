/* test_base_memory.c: base/alloc.h and base/arena.h. */
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/sys.h"
#include "mp_test.h"

MP_TEST(base_alloc_aligns_counts_and_frees) {
    static const size_t sizes[] = {0, 1, 63, 64, 65, 4096, 255 * 1024, 256 * 1024, 5000001, 9 << 20};
    enum { COUNT = sizeof(sizes) / sizeof(sizes[0]) };
    void *blocks[COUNT];
    uint64_t before = mp_alloc_bytes(MP_TAG_KV), sum = 0;
    for (int i = 0; i < COUNT; i++) {
        blocks[i] = mp_alloc(sizes[i], MP_TAG_KV);
        MP_CHECK(blocks[i]);
        MP_CHECK_INT((uintptr_t)blocks[i] % 64, 0);
        memset(blocks[i], 0xA5, sizes[i]);
        sum += sizes[i];
        MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV) - before, sum);
    }
    for (int i = 0; i < COUNT; i++)
        mp_free(blocks[i]);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), before);
    mp_free(NULL);
}

MP_TEST(base_alloc_refuses_sizes_that_overflow) {
    MP_CHECK(!mp_alloc(SIZE_MAX, MP_TAG_MISC));
    MP_CHECK(!mp_alloc(SIZE_MAX - 63, MP_TAG_MISC));
    MP_CHECK(!mp_alloc(PTRDIFF_MAX, MP_TAG_MISC));
    MP_CHECK(!mp_alloc_zeroed(SIZE_MAX - 64, MP_TAG_MISC));
    MP_CHECK(!mp_alloc_array(SIZE_MAX / 2, 3, MP_TAG_MISC));
    MP_CHECK(!mp_alloc_array((size_t)1 << 62, 4, MP_TAG_MISC));
    MP_CHECK(!mp_alloc((size_t)1 << 60, MP_TAG_MISC));
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_MISC), 0);
    uint32_t *array = mp_alloc_array(1000, sizeof(*array), MP_TAG_MISC);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_MISC), 4000);
    mp_free(array);
}

MP_TEST(base_alloc_realloc_keeps_contents) {
    uint8_t *block = mp_realloc(NULL, 100, MP_TAG_SPEC);
    for (int i = 0; i < 100; i++)
        block[i] = (uint8_t)i;
    static const size_t sizes[] = {1 << 20, 100, 50, 4096};
    for (int s = 0; s < 4; s++) {
        block = mp_realloc(block, sizes[s], MP_TAG_SPEC);
        MP_CHECK(block);
        MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC), sizes[s]);
        for (int i = 0; i < 50; i++)
            MP_CHECK_INT(block[i], i);
    }
    MP_CHECK(!mp_realloc(block, SIZE_MAX, MP_TAG_SPEC)); /* the old block stays valid */
    MP_CHECK_INT(block[49], 49);
    mp_free(block);
    char *copy = mp_strdup("text", MP_TAG_SPEC);
    MP_CHECK_STR(copy, "text");
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC), 5);
    mp_free(copy);
    for (int tag = 0; tag < MP_TAG_COUNT; tag++)
        MP_CHECK(mp_tag_name((mp_tag)tag)[0]);
}

static mp_status allocate_three(void *arg, mp_error *error) {
    (void)arg;
    mp_status status = MP_OK;
    char *name = NULL;
    int *numbers = NULL;
    mp_arena arena = {0};
    if (!(name = mp_strdup("name", MP_TAG_MISC))) {
        status = mp_fail_memory(error, 5, "a name");
        goto cleanup;
    }
    if (!(numbers = mp_alloc_array(100000, sizeof(int), MP_TAG_MISC))) {
        status = mp_fail_memory(error, 400000, "numbers");
        goto cleanup;
    }
    MP_TRY_GOTO(mp_arena_reserve(&arena, 1000, error));
cleanup:
    mp_arena_deinit(&arena);
    mp_free(numbers);
    mp_free(name);
    return status;
}

MP_TEST(base_alloc_sweep_fails_each_allocation) {
    MP_CHECK_INT(mp_test_fault_sweep(MP_FAULT_ALLOC, allocate_three, NULL), 3);
    mp_test_alloc_sweep(allocate_three, NULL);
}

/* --- arena --- */

MP_TEST(base_arena_blocks_are_aligned_and_do_not_overlap) {
    mp_arena arena = {0};
    mp_error error;
    static const size_t sizes[] = {1, 64, 65, 0, 200, 4096};
    size_t need = 0;
    for (int i = 0; i < 6; i++)
        need += mp_arena_cost(sizes[i]);
    MP_CHECK_OK(mp_arena_reserve(&arena, need, &error), &error);
    uint8_t *part_count[6];
    for (int i = 0; i < 6; i++) {
        part_count[i] = mp_arena_take(&arena, sizes[i]);
        MP_CHECK(part_count[i] && (uintptr_t)part_count[i] % 64 == 0);
        memset(part_count[i], i + 1, sizes[i]);
    }
    for (int i = 0; i < 6; i++)
        for (size_t k = 0; k < sizes[i]; k++)
            MP_CHECK_INT(part_count[i][k], i + 1);
    MP_CHECK_INT(arena.used, need);
    mp_arena_deinit(&arena);
    MP_CHECK(!arena.memory && !arena.size && !arena.used);
}

MP_TEST(base_arena_reset_and_peak) {
    mp_arena arena = {0};
    mp_error error;
    MP_CHECK_OK(mp_arena_reserve(&arena, 1024, &error), &error);
    mp_arena_take(&arena, 100);
    mp_arena_take(&arena, 300);
    mp_arena_reset(&arena);
    MP_CHECK_INT(arena.used, 0);
    MP_CHECK(mp_arena_take(&arena, 10) == arena.memory);
    MP_CHECK_INT(arena.peak, 128 + 320);
    uint8_t *memory = arena.memory;
    MP_CHECK_OK(mp_arena_reserve(&arena, 512, &error), &error); /* smaller: the same block is reused */
    MP_CHECK(arena.memory == memory && arena.size == 1024);
    MP_CHECK_OK(mp_arena_reserve(&arena, 100000, &error), &error);
    MP_CHECK(arena.size >= 100000 && arena.used == 0);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SCRATCH), arena.size);
    MP_CHECK_STATUS(mp_arena_reserve(&arena, SIZE_MAX - 10, &error), MP_MEMORY_EXHAUSTED, &error);
    MP_CHECK(!arena.memory && !arena.size); /* the arena is empty, and can be reserved again */
    MP_CHECK_OK(mp_arena_reserve(&arena, 64, &error), &error);
    mp_arena_deinit(&arena);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SCRATCH), 0);
}

MP_TEST(base_arena_overflow_stops_the_process) {
    static const size_t too_many[] = {129, SIZE_MAX, SIZE_MAX - 63};
    for (int i = 0; i < 3; i++) {
        pid_t child = fork();
        if (child == 0) {
            if (!freopen("/dev/null", "w", stderr))
                _exit(3);
            mp_arena arena = {0};
            if (mp_arena_reserve(&arena, 128, NULL) != MP_OK)
                _exit(2);
            mp_arena_take(&arena, too_many[i]);
            _exit(0);
        }
        int status;
        MP_CHECK(waitpid(child, &status, 0) == child);
        MP_CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    }
}

/* --- budget --- */

MP_TEST(base_budget_takes_up_to_the_limit) {
    mp_budget budget = {.limit = 100};
    MP_CHECK(mp_budget_take(&budget, 60));
    MP_CHECK(!mp_budget_take(&budget, 41));
    MP_CHECK(!mp_budget_take(&budget, UINT64_MAX));
    MP_CHECK(mp_budget_take(&budget, 40));
    MP_CHECK(mp_budget_take(&budget, 0));
    MP_CHECK(!mp_budget_take(&budget, 1));
    atomic_store(&budget.limit, 50); /* the new limit is below the bytes in use */
    MP_CHECK(!mp_budget_take(&budget, 1));
    mp_budget_give(&budget, 60);
    MP_CHECK(mp_budget_take(&budget, 10));
    MP_CHECK(!mp_budget_take(&budget, 1));
    mp_budget_give(&budget, 50);
    MP_CHECK_INT(atomic_load(&budget.used), 0);
    atomic_store(&budget.limit, UINT64_MAX);
    MP_CHECK(mp_budget_take(&budget, UINT64_MAX));
    MP_CHECK(!mp_budget_take(&budget, 1));
}

/* A budget below another one: 30 bytes of it are free. */
static bool cover_30(mp_budget *budget, uint64_t used) {
    MP_CHECK(atomic_load(&budget->used) == used);
    return used <= 30;
}

MP_TEST(base_budget_takes_nothing_that_the_budget_above_refuses) {
    mp_budget budget = {.limit = 100, .cover = cover_30};
    MP_CHECK(mp_budget_take(&budget, 20));
    MP_CHECK(!mp_budget_take(&budget, 11));
    MP_CHECK_INT(atomic_load(&budget.used), 20);
    MP_CHECK(mp_budget_take(&budget, 10));
    MP_CHECK(!mp_budget_take(&budget, 101));
    MP_CHECK_INT(atomic_load(&budget.used), 30);
}

typedef struct budget_user {
    mp_thread thread;
    mp_budget *budget;
    uint64_t seed;
    _Atomic uint64_t *highest;
    int taken, refused;
} budget_user;

static void use_budget(void *arg) {
    budget_user *user = arg;
    mp_test_random random = {user->seed};
    for (int i = 0; i < 20000; i++) {
        uint64_t bytes = mp_test_random_u64(&random) % 50 + 1;
        if (!mp_budget_take(user->budget, bytes)) {
            user->refused++;
            continue;
        }
        user->taken++;
        uint64_t used = atomic_load(&user->budget->used), highest = atomic_load(user->highest);
        while (used > highest && !atomic_compare_exchange_weak(user->highest, &highest, used)) {
        }
        if (i % 64 == 0)
            mp_sys_sleep_ns(1000);
        mp_budget_give(user->budget, bytes);
    }
}

MP_TEST(base_budget_holds_under_threads) {
    mp_budget budget = {.limit = 100};
    _Atomic uint64_t highest = 0;
    budget_user users[4];
    for (int i = 0; i < 4; i++) {
        users[i] = (budget_user){.budget = &budget, .seed = (uint64_t)i, .highest = &highest};
        mp_error error;
        MP_CHECK_OK(mp_thread_start(&users[i].thread, "budget", use_budget, &users[i], &error), &error);
    }
    int refused = 0;
    for (int i = 0; i < 4; i++) {
        mp_thread_join(&users[i].thread);
        MP_CHECK(users[i].taken > 0);
        MP_CHECK_INT(users[i].taken + users[i].refused, 20000);
        refused += users[i].refused;
    }
    (void)refused; /* the number of refusals depends on the machine */
    MP_CHECK_INT(atomic_load(&budget.used), 0);
    MP_CHECK(atomic_load(&highest) <= 100 && atomic_load(&highest) > 0);
}

static _Atomic bool ended;

static void reserve_too_much(void *arg) {
    while (!atomic_load(&ended))
        MP_CHECK(!mp_budget_reserve(arg, 60));
}

/* A load that waits for memory asks again and again; a request takes what is free meanwhile. */
MP_TEST(base_budget_refused_reservations_disturb_no_take) {
    mp_budget budget = {.limit = 100};
    mp_thread thread;
    mp_error error;
    atomic_store(&ended, false);
    MP_CHECK(mp_budget_take(&budget, 50));
    MP_CHECK_OK(mp_thread_start(&thread, "reserves", reserve_too_much, &budget, &error), &error);
    for (int i = 0; i < 2000000; i++) {
        MP_CHECK(mp_budget_take(&budget, 50));
        mp_budget_give(&budget, 50);
    }
    atomic_store(&ended, true);
    mp_thread_join(&thread);
}
