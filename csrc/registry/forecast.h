/* forecast.h: predicts how many workers a model is about to need from its recent requests.
 *
 *   arrivals per second   an exponentially weighted count of requests: one that arrived MP_FORECAST_HALF_LIFE_NS ago
 *                         counts half. Divided by the count that a steady stream of one request per second would
 *                         have reached since the first arrival, so that the rate is unbiased from the start
 *   seconds per request   a running mean over completed requests of the step time charged to each: the cost of a
 *                         request at the present load, with batching
 *   workers               the product, which is the mean number of busy workers (Little's law), divided by
 *                         MP_FORECAST_BUSY and rounded up: queues grow long before workers are always busy
 *
 * The forecast reacts before a queue grows long, but cannot predict the first request: it knows neither the time of day
 * nor the content of requests. Caller's storage, zeroed. Must hold the owner's lock in every function. */
#ifndef MP_REGISTRY_FORECAST_H
#define MP_REGISTRY_FORECAST_H

#include <stdint.h>

#define MP_FORECAST_HALF_LIFE_NS (10ull * 1000 * 1000 * 1000)
/* no prediction until this long after the first request */
#define MP_FORECAST_MIN_NS     (1000ull * 1000 * 1000)
#define MP_FORECAST_BUSY         0.7 /* target share of a worker's time in steps */

typedef struct mp_forecast {
    uint64_t first_ns, last_ns; /* first and last arrival */
    double weight;              /* exponentially weighted arrivals, as of last_ns */
    double service_ns;          /* 0 = unknown */
} mp_forecast;

/* A request arrived. */
void mp_forecast_arrive(mp_forecast *forecast, uint64_t now_ns);
/* A request completed after `busy_ns` of workers' time. */
void mp_forecast_serve(mp_forecast *forecast, uint64_t busy_ns);
/* Returns requests per second; 0 = too early to say. */
double mp_forecast_rate(const mp_forecast *forecast, uint64_t now_ns);
/* Returns a number of workers, at most `most`; 0 = too early to say. */
int mp_forecast_workers(const mp_forecast *forecast, uint64_t now_ns, int most);

#endif
