/* sim_shares.c: worlds of tenants that share one model. See sim_state.h. */
#include "sim_state.h"

#ifdef MP_SIM

static const uint64_t MS = 1000 * 1000, SECOND = 1000ull * 1000 * 1000;

/* --- tenants: tenants with chosen numbers queue the same number of requests each --- */

enum { TENANTS_MAX = 10000, EACH_MAX = 6 };

static struct {
    int count, each, ended;
    uint32_t stride;
    int16_t had[TENANTS_MAX];
    mp_ticket *tickets[TENANTS_MAX * 2];
} crowd;

/* Every tenant has the same number of requests. Shares are equal in measured time, so a tenant whose steps were not
 * delayed by other threads may be one request ahead. */
static void check_share(const sim_call *call) {
    if (!call->tenant)
        return;
    int round = crowd.ended++ / crowd.count, apart = crowd.had[call->tenant - 1]++ - round;
    if (apart > 1 || apart < -1)
        sim_fail("a tenant of %d got its request %d in round %d", crowd.count, crowd.had[call->tenant - 1], round + 1);
}

static void tenants_tune(mp_registry_config *config) {
    static const int counts[] = {17, 20, 33, 64};
    static const uint32_t strides[] = {1, 16, 64, 4096, 65536};
    crowd.count = w.kind->crowd ? TENANTS_MAX : counts[of(4)];
    crowd.each = crowd.count > 1000 ? 2 : EACH_MAX - of(2);
    crowd.stride = strides[of(5)];
    crowd.ended = 0;
    for (int i = 0; i < crowd.count; i++)
        crowd.had[i] = 0;
    config->max_workers = 1; /* several workers may complete requests in another order than that of their start */
    config->keep_alive_ns = MP_FOREVER;
    config->load_timeout_ns = config->load_ceiling_ns = 1000 * SECOND;
    for (int i = 0; i < MP_SERVICE_COUNT; i++)
        config->queue_capacity[MP_TEXT_EMBEDDING][i] = crowd.count * crowd.each;
    w.plain = true;
    fakes.ended = check_share;
}

static void tenants_script(sim_model *model) {
    model->load_ns = crowd.count > 1000 ? 500 * SECOND : 5 * SECOND; /* every request is queued before the first step */
    model->step_ns = MS;
    model->step_units = 1;
    model->plan_items = 1;
    model->threads = 1;
    model->uneven = false;
}

/* Submits all requests of the first tenant, then all of the second, and so on. */
static void tenants_begin(void) {
    mp_error error;
    int all = crowd.count * crowd.each;
    mp_submit_options options = {.priority = (uint8_t)of(5), .service_class = (uint8_t)of(MP_SERVICE_COUNT),
                                 .policy = (mp_policy)of(MP_POLICY_COUNT)};
    for (int i = 0; i < all; i++) {
        sim_call *call = sim_fakes_call(1);
        SIM_CHECK(call != NULL);
        call->tenant = i / crowd.each + 1;
        options.tenant = (uint32_t)(i / crowd.each) * crowd.stride;
        SIM_CHECK(mp_registry_submit(w.registry, sim_keys[0], &call->base, &options, &crowd.tickets[i], &error) ==
                  MP_OK);
    }
    for (int i = 0; i < all; i++) {
        SIM_CHECK(mp_ticket_wait(crowd.tickets[i], UINT64_MAX, 0, NULL));
        SIM_CHECK(mp_ticket_status(crowd.tickets[i], &error) == MP_OK);
        mp_ticket_release(crowd.tickets[i]);
    }
    SIM_CHECK(crowd.ended == all);
}

const sim_special sim_tenants = {.tune = tenants_tune, .script = tenants_script, .begin = tenants_begin};

/* --- batches: an idle worker waits for more requests, but no request waits longer than the limit --- */

static const uint64_t BATCH_WAIT_NS = 2 * 1000 * 1000;

static void batches_tune(mp_registry_config *config) {
    config->batch_wait_ns = BATCH_WAIT_NS;
    w.gathers = true;
    w.capacity = config->queue_capacity[MP_TEXT_EMBEDDING][MP_SERVICE_INTERACTIVE] =
        config->queue_capacity[MP_TEXT_EMBEDDING][MP_SERVICE_BULK] = 4;
    config->max_workers = 1;
    config->keep_alive_ns = MP_FOREVER;
}

static void batches_script(sim_model *model) {
    model->load_ns = 0;
    model->step_ns = BATCH_WAIT_NS;
    model->uneven = false;
    model->plan_items = model->step_units = 0;
}

static void batches_finish(void) {
    const sim_model *model = &fakes.models[0];
    mp_submit_options options = {.priority = 2, .policy = MP_POLICY_SHARED};
    mp_ticket *tickets[3];
    mp_error error;
    SIM_CHECK(mp_registry_load(w.registry, sim_keys[0], false, 0, &error) == MP_OK);
    mp_sys_sleep_ns(10 * SECOND); /* until requests that callers have released are gone */
    for (int round = 0; round < 10; round++) {
        int steps = model->steps, count = 1 + of(3);
        for (int i = 0; i < count; i++) {
            if (i)
                mp_sys_sleep_ns(1 + sim_below(BATCH_WAIT_NS / 4));
            SIM_CHECK(mp_registry_submit(w.registry, sim_keys[0], &sim_fakes_call(1)->base, &options, &tickets[i],
                                         &error) == MP_OK);
        }
        for (int i = 0; i < count; i++) {
            uint64_t submitted, started, finished;
            SIM_CHECK(mp_ticket_wait(tickets[i], UINT64_MAX, 0, NULL) && mp_ticket_status(tickets[i], &error) == MP_OK);
            mp_ticket_times(tickets[i], &submitted, &started, &finished);
            uint64_t waited = started - submitted;
            bool late = waited > BATCH_WAIT_NS + BATCH_WAIT_NS / 10;
            if (late || (i == 0 && waited + BATCH_WAIT_NS / 10 < BATCH_WAIT_NS))
                sim_fail("request %d of %d waited %.3f ms for others", i, count, (double)waited * 1e-6);
            mp_ticket_release(tickets[i]);
        }
        SIM_CHECK(model->steps == steps + 1);
        mp_sys_sleep_ns(1 + sim_below(2 * BATCH_WAIT_NS));
    }
}

const sim_special sim_batches = {.tune = batches_tune, .script = batches_script, .finish = batches_finish};

#endif
