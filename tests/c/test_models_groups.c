/* Groups of sequences that a thread computes at a time: their limit of rows, and the sizes of the largest ones. */
#include "base/spread.h"
#include "models/groups.h"
#include "mp_test.h"

enum { MAX_SEQUENCES = 8 };

MP_TEST(models_groups_of_sequences) {
    static const struct {
        int sequences, rows[MAX_SEQUENCES], threads, most; /* the division */
        int count, firsts[MAX_SEQUENCES], most_rows, most_sequences;
    } cases[] = {
        {1, {5}, 2, 256, 1, {0}, 5, 1},                            /* a sequence is not divided */
        {4, {5, 5, 5, 5}, 2, 256, 2, {0, 2}, 10, 2},               /* half of the rows for each of two threads */
        {4, {5, 5, 5, 5}, 1, 9, 4, {0, 1, 2, 3}, 5, 1},            /* at most 9 rows */
        {4, {5, 5, 5, 5}, 1, 10, 2, {0, 2}, 10, 2},                /* at most 10 rows */
        {6, {1, 1, 1, 9, 1, 1}, 1, 3, 3, {0, 3, 4}, 9, 3},         /* the largest one is between two others */
        {6, {9, 1, 1, 1, 1, 1}, 1, 9, 2, {0, 1}, 9, 5},            /* most rows and most sequences are in two groups */
        {3, {2, 2, 3}, 3, 256, 3, {0, 1, 2}, 3, 1},                /* a third of 7 rows is 3 */
        {8, {4, 4, 4, 4, 4, 4, 4, 4}, 2, 8, 7, {0, 2, 3, 4, 5, 6, 7}, 8, 2}, /* a quarter of 24 rows is 6 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mp_groups groups = {0};
        mp_error error;
        int64_t all = 0;
        MP_CHECK_OK(mp_groups_reserve(&groups, cases[i].sequences, &error), &error);
        for (int s = 0; s < cases[i].sequences; s++)
            all += groups.rows[s] = cases[i].rows[s];
        mp_groups_make(&groups, cases[i].sequences, all, cases[i].threads, cases[i].most);
        MP_CHECK_INT(groups.count, cases[i].count);
        MP_CHECK_INT(groups.most_rows, cases[i].most_rows);
        MP_CHECK_INT(groups.most_sequences, cases[i].most_sequences);
        for (int g = 0; g < groups.count; g++) {
            const int end = g + 1 < groups.count ? cases[i].firsts[g + 1] : cases[i].sequences;
            int64_t rows = 0;
            MP_CHECK_INT(groups.groups[g].first, cases[i].firsts[g]);
            MP_CHECK_INT(groups.groups[g].count, end - cases[i].firsts[g]);
            for (int s = cases[i].firsts[g]; s < end; s++) {
                MP_CHECK_INT(groups.row0[s], rows);
                rows += cases[i].rows[s];
            }
            MP_CHECK_INT(groups.groups[g].rows, rows);
        }
        mp_groups_deinit(&groups);
    }
}

#ifdef MP_SEAM

static int second_cpu(void) { return 1; }
static bool no_affinity(mp_cpu_set *cpus) {
    (void)cpus;
    return false;
}
static void begin(void *cpu) { *(int *)cpu = mp_spread_begin(); }

static int begin_on_another_thread(void) {
    int cpu;
    mp_thread thread = {0};
    mp_error error;
    MP_CHECK_OK(mp_thread_start(&thread, "mpool-test", begin, &cpu, &error), &error);
    mp_thread_join(&thread);
    return cpu;
}

static void look(void *arg, const mp_team_thread *thread, const mp_group *group, int slot, void *scratch) {
    (void)thread, (void)group, (void)slot, (void)scratch;
    *(int *)arg = begin_on_another_thread();
}

MP_TEST(models_groups_occupy_a_cpu_until_their_end) {
    mp_group group = {.count = 1, .rows = 1};
    mp_groups groups = {.groups = &group, .count = 1};
    int during = 0;
    mp_lease lease;
    mp_group_step step = {.groups = &groups, .lease = &lease, .run = look, .arg = &during};
    mp_team_lease(NULL, 1, &lease);
    mp_sys_table.cpu = second_cpu;
    mp_sys_table.get_affinity = no_affinity; /* the other thread cannot move */
    mp_group_step_run(&step);
    MP_CHECK_INT(during, -1);
    MP_CHECK_INT(begin_on_another_thread(), 1);
    mp_sys_table = mp_sys_real;
    mp_team_return(&lease);
}

#endif
