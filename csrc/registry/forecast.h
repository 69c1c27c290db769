/* forecast.h: how many workers a model is about to need, by how its calls came so far.
 *
 *   arrivals a second   an exponentially weighted count of calls: one that came MP_FORECAST_HALF_LIFE_NS ago counts
 *                       half of one that comes now. Divided by what a steady stream of one a second would count by
 *                       now, so that it is right on average from the first seconds on
 *   seconds of a call   a running mean, over answered calls, of their shares of the steps they were in: with batches,
 *                       what a call costs at the load that there is
 *   workers             the product, which is how many are busy on average (Little's law), over MP_FORECAST_BUSY, and
 *                       rounded up: queues grow long before workers are busy all the time
 *
 * It knows nothing of the time of day or of what calls are going to ask for: it is ahead of a queue that grows, not of
 * the first call. Caller's storage, zeroed; every function is called with its owner's lock held. */
#ifndef MP_REGISTRY_FORECAST_H
#define MP_REGISTRY_FORECAST_H

#include <stdint.h>

#define MP_FORECAST_HALF_LIFE_NS (10ull * 1000 * 1000 * 1000)
#define MP_FORECAST_LEAST_NS     (1000ull * 1000 * 1000) /* from the first call on; before that nothing is predicted */
#define MP_FORECAST_BUSY         0.7                     /* of its time a worker should be busy */

typedef struct mp_forecast {
    uint64_t first_ns, last_ns; /* when calls came */
    double weight;              /* of the calls so far, as of last_ns */
    double service_ns;          /* 0 = unknown */
} mp_forecast;

/* A call comes. */
void mp_forecast_arrive(mp_forecast *forecast, uint64_t now_ns);
/* One was answered, after so much of the workers' time. */
void mp_forecast_serve(mp_forecast *forecast, uint64_t busy_ns);
/* Calls a second; 0 = it is too early to say. */
double mp_forecast_rate(const mp_forecast *forecast, uint64_t now_ns);
/* Workers; 0 = it is too early to say. */
int mp_forecast_workers(const mp_forecast *forecast, uint64_t now_ns, int most);

#endif
