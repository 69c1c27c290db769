/* Predictive scaling: the estimate (registry/forecast.h), and scaling by a registry that uses the estimate. */
#include <math.h>

#include "base/sys.h"
#include "mp_test.h"
#include "registry/forecast.h"
#include "test_registry_fake.h"

static const uint64_t SECOND = 1000ull * 1000 * 1000;

/* Adds arrivals at `rate` per second for `seconds`. Returns the time of the end. */
static uint64_t stream(mp_forecast *forecast, uint64_t now, double rate, double seconds) {
    uint64_t every = (uint64_t)(1e9 / rate), end = now + (uint64_t)(seconds * 1e9);
    for (; now < end; now += every)
        mp_forecast_arrive(forecast, now);
    return now;
}

MP_TEST(forecast_rate_of_a_steady_stream_is_right_from_the_start) {
    static const double rates[] = {1, 7, 100, 2500};
    for (int i = 0; i < 4; i++) {
        mp_forecast forecast = {0};
        uint64_t now = 5 * SECOND;
        MP_CHECK(mp_forecast_rate(&forecast, now) == 0);
        now = stream(&forecast, now, rates[i], 0.5);
        MP_CHECK(i == 0 || mp_forecast_rate(&forecast, now) == 0); /* too little history for a rate */
        for (int j = 0; j < 6; j++) {
            now = stream(&forecast, now, rates[i], j < 3 ? 2 : 30);
            double error = mp_forecast_rate(&forecast, now) / rates[i] - 1;
            MP_CHECK(fabs(error) < (rates[i] < 5 ? 0.6 / (1 + j) : 0.06));
        }
    }
}

MP_TEST(forecast_halves_in_a_half_life) {
    mp_forecast forecast = {0};
    uint64_t now = stream(&forecast, SECOND, 50, 120);
    double before = mp_forecast_rate(&forecast, now);
    MP_CHECK_NEAR(mp_forecast_rate(&forecast, now + MP_FORECAST_HALF_LIFE_NS), before / 2, before * 0.01);
    MP_CHECK_NEAR(mp_forecast_rate(&forecast, now + 3 * MP_FORECAST_HALF_LIFE_NS), before / 8, before * 0.01);
    MP_CHECK(mp_forecast_rate(&forecast, now + 1000 * SECOND) < before * 1e-9);
    now = stream(&forecast, now, 200, 10); /* half-way to the new rate */
    MP_CHECK_NEAR(mp_forecast_rate(&forecast, now), 125, 3);
    mp_forecast_arrive(&forecast, now - SECOND); /* earlier than the previous arrival */
    MP_CHECK(isfinite(mp_forecast_rate(&forecast, now)));
}

MP_TEST(forecast_workers_are_rate_times_service) {
    static const struct {
        double rate, service_ms;
        int workers;
    } rows[] = {{10, 10, 1}, {10, 65, 1}, {10, 75, 2}, {10, 130, 2}, {10, 150, 3}, {100, 20, 3}, {1000, 20, 16}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        mp_forecast forecast = {0};
        uint64_t now = stream(&forecast, SECOND, rows[i].rate, 60);
        MP_CHECK_INT(mp_forecast_workers(&forecast, now, 16), 0); /* no request has completed yet */
        for (int j = 0; j < 50; j++)
            mp_forecast_serve(&forecast, (uint64_t)(rows[i].service_ms * 1e6));
        MP_CHECK_INT(mp_forecast_workers(&forecast, now, 16), rows[i].workers);
        MP_CHECK_INT(mp_forecast_workers(&forecast, now, 1), 1);
    }
    mp_forecast forecast = {0};
    for (int j = 0; j < 50; j++)
        mp_forecast_serve(&forecast, 1000 * 1000);
    mp_forecast_serve(&forecast, 60 * SECOND); /* one outlier hardly changes the mean */
    MP_CHECK(forecast.service_ns < 1.3e6);
}

/* --- a registry --- */

static mp_registry *open_with(mp_registry_config config, fake *fake) {
    config.threads = 4;
    config.max_workers = 4;
    mp_registry *registry = fake_registry_of(config);
    fake_init(fake);
    fake->workers = 4;
    fake_add(registry, "a", fake, false);
    return registry;
}

typedef struct caller {
    mp_registry *registry;
    int phase, spawned; /* it ends early if the registry has started so many workers */
} caller;

static void send_periodically(void *arg) {
    caller *caller = arg;
    mp_sys_sleep_ns(FAKE_MS(10) * (uint64_t)caller->phase);
    uint64_t end = fake_in_ms(caller->spawned ? 20000 : 3000);
    for (; mp_sys_now_ns() < end; mp_sys_sleep_ns(FAKE_MS(6))) {
        if (caller->spawned && (int)fake_stats(caller->registry).workers_spawned >= caller->spawned)
            break;
        MP_CHECK_INT(fake_finish(fake_submit(caller->registry, "a", fake_call_create(1), NULL)), MP_OK);
    }
}

/* Two callers have at most two requests in flight, so no queue forms. A third worker starts nevertheless. */
MP_TEST_SECONDS(forecast_starts_a_worker_before_a_queue_forms, 60) {
    for (int predictive = 0; predictive < 2; predictive++) {
        fake fake;
        mp_registry_stats stats;
        mp_error error;
        mp_thread threads[2];
        mp_registry_config config = {.predictive_scaling = predictive};
        config.policy[MP_TEXT_EMBEDDING] = MP_POLICY_SEQUENTIAL;
        mp_registry *registry = open_with(config, &fake);
        atomic_store(&fake.step_ns, FAKE_MS(40));
        MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
        fake_until(&fake.engines, 2);
        mp_sys_sleep_ns(FAKE_MS(50));
        caller callers[2];
        for (int i = 0; i < 2; i++) {
            callers[i] = (caller){registry, i, predictive ? 3 : 0};
            MP_CHECK_OK(mp_thread_start(&threads[i], "caller", send_periodically, &callers[i], &error), &error);
        }
        for (int i = 0; i < 2; i++)
            mp_thread_join(&threads[i]);
        mp_registry_get_stats(registry, &stats);
        MP_CHECK_INT(stats.workers_spawned, predictive ? 3 : 2);
        fake_end(registry);
    }
}
