/* test_base_mpsc_ring.c: base/mpsc_ring.h. The tests of its users, the log and events, cover threads and order. */
#include "base/mpsc_ring.h"
#include "mp_test.h"

static MP_MPSC_SLOT(uint32_t) slots[4];
static mp_mpsc_ring ring = MP_MPSC_RING(slots);

static bool put(uint32_t value) {
    uint64_t position;
    uint32_t *item = mp_mpsc_claim(&ring, &position);
    if (!item)
        return false;
    *item = value;
    mp_mpsc_publish(&ring, position);
    return true;
}

static uint32_t take(void) {
    uint32_t value;
    return mp_mpsc_take(&ring, &value) ? value : UINT32_MAX;
}

MP_TEST(base_mpsc_ring_is_first_in_first_out_and_bounded) {
    MP_CHECK_INT(take(), UINT32_MAX);
    for (uint32_t round = 0; round < 100; round++) {
        for (uint32_t i = 0; i < 4; i++)
            MP_CHECK(put(round + i));
        MP_CHECK(!put(0));
        MP_CHECK_INT(mp_mpsc_dropped(&ring), round + 1);
        for (uint32_t i = 0; i < 4; i++)
            MP_CHECK_INT(take(), round + i);
        MP_CHECK_INT(take(), UINT32_MAX);
        MP_CHECK(put(7)); /* the next round begins at another slot */
        MP_CHECK_INT(take(), 7);
    }
}

MP_TEST(base_mpsc_ring_waits_at_a_claimed_slot_until_it_is_reset) {
    uint64_t claimed;
    MP_CHECK(put(1));
    MP_CHECK(mp_mpsc_claim(&ring, &claimed) != NULL);
    MP_CHECK(put(2));
    MP_CHECK_INT(take(), 1);
    MP_CHECK_INT(take(), UINT32_MAX);
    mp_mpsc_reset(&ring); /* as in the child of a fork */
    MP_CHECK_INT(take(), UINT32_MAX);
    for (uint32_t i = 0; i < 4; i++)
        MP_CHECK(put(i));
    MP_CHECK(!put(4));
    for (uint32_t i = 0; i < 4; i++)
        MP_CHECK_INT(take(), i);
}
