/* mp_cores_together: how many compute threads of a lease are worth using when they wait for each other. */
#include "base/options.h"
#include "mp_test.h"
#include "registry/cores.h"

static mp_error error;

/* Leases up to `want` CPUs, watched for `watched_ms`, of which `lost_ms` were lost. */
static int lend_as(mp_cores *cores, int want, uint64_t watched_ms, uint64_t lost_ms, bool together) {
    mp_lease lease;
    mp_lanes lanes;
    int home = mp_cores_settle(cores);
    MP_CHECK(mp_cores_lease(cores, home, want, &lease, &lanes, NULL, NULL));
    int got = lease.lanes;
    lease.together = together;
    lease.watched_ns = watched_ms * 1000 * 1000;
    lease.lost_ns = lost_ms * 1000 * 1000;
    mp_cores_return(cores, &lease, &lanes, false);
    mp_cores_unsettle(cores, home);
    return got;
}

static void lend(mp_cores *cores, int want, uint64_t watched_ms, uint64_t lost_ms) {
    MP_CHECK_INT(lend_as(cores, want, watched_ms, lost_ms, true), want);
}

static mp_cores *four(void) {
    mp_cores *cores;
    MP_CHECK_OK(mp_options_init(&error), &error);
    MP_CHECK_OK(mp_cores_open(4, &cores, &error), &error);
    MP_CHECK_INT(mp_cores_together(cores), 4);
    return cores;
}

MP_TEST(registry_cores_together_falls_with_lost_time) {
    mp_cores *cores = four();
    lend(cores, 4, 20, 3); /* 15 %: all four are still better than three */
    MP_CHECK_INT(mp_cores_together(cores), 4);
    lend_as(cores, 4, 20, 20, false); /* its threads do not wait for each other */
    MP_CHECK_INT(mp_cores_together(cores), 4);
    lend(cores, 4, 5, 2); /* too short to be conclusive */
    MP_CHECK_INT(mp_cores_together(cores), 4);
    lend(cores, 1, 50, 50); /* a single thread waits for no other */
    MP_CHECK_INT(mp_cores_together(cores), 4);
    lend(cores, 4, 5, 2);
    MP_CHECK_INT(mp_cores_together(cores), 3);
    lend(cores, 4, 20, 6); /* four threads: decided by what is known */
    MP_CHECK_INT(mp_cores_together(cores), 3);
    lend(cores, 3, 20, 15); /* most of the time: half as many */
    MP_CHECK_INT(mp_cores_together(cores), 1);
    lend(cores, 1, 20, 20);
    MP_CHECK_INT(mp_cores_together(cores), 1);
    mp_cores_close(cores);
}

MP_TEST(registry_cores_together_rises_without_lost_time) {
    mp_cores *cores = four();
    lend(cores, 2, 20, 18);
    MP_CHECK_INT(mp_cores_together(cores), 1);
    lend(cores, 1, 20, 0); /* not at once */
    MP_CHECK_INT(mp_cores_together(cores), 1);
    mp_sys_sleep_ns(110u * 1000 * 1000);
    lend(cores, 1, 20, 10); /* not while one loses much */
    MP_CHECK_INT(mp_cores_together(cores), 1);
    lend(cores, 1, 20, 1);
    MP_CHECK_INT(mp_cores_together(cores), 2);
    lend(cores, 2, 20, 18); /* it fails: the next attempt comes later */
    MP_CHECK_INT(mp_cores_together(cores), 1);
    mp_sys_sleep_ns(110u * 1000 * 1000);
    lend(cores, 1, 20, 0);
    MP_CHECK_INT(mp_cores_together(cores), 1);
    mp_sys_sleep_ns(110u * 1000 * 1000);
    for (int lanes = 2; lanes <= 4; lanes++) {
        lend(cores, lanes - 1, 20, 0);
        MP_CHECK_INT(mp_cores_together(cores), lanes);
    }
    lend(cores, 4, 20, 0);
    MP_CHECK_INT(mp_cores_together(cores), 4);
    mp_cores_close(cores);
}
