/* forecast.c: a running prediction of arrivals and service time. See forecast.h. */
#include "registry/forecast.h"

#include <math.h>

enum { SERVED = 16 }; /* length of the running mean of service time, in requests */

/* Returns the factor by which a weight has decayed after `ns`. */
static double left_after(uint64_t ns) { return exp2(-(double)ns / (double)MP_FORECAST_HALF_LIFE_NS); }

static uint64_t forecast_since(uint64_t then_ns, uint64_t now_ns) { return now_ns > then_ns ? now_ns - then_ns : 0; }

void mp_forecast_arrive(mp_forecast *forecast, uint64_t now_ns) {
    if (!forecast->first_ns)
        forecast->first_ns = forecast->last_ns = now_ns;
    forecast->weight = forecast->weight * left_after(forecast_since(forecast->last_ns, now_ns)) + 1;
    if (now_ns > forecast->last_ns)
        forecast->last_ns = now_ns;
}

void mp_forecast_serve(mp_forecast *forecast, uint64_t busy_ns) {
    double sample = (double)busy_ns, mean = forecast->service_ns;
    if (mean > 0 && sample > 4 * mean) /* a single request that was delayed is not representative */
        sample = 4 * mean;
    forecast->service_ns = mean > 0 ? mean + (sample - mean) / SERVED : sample;
}

double mp_forecast_rate(const mp_forecast *forecast, uint64_t now_ns) {
    uint64_t known_ns = forecast_since(forecast->first_ns, now_ns);
    if (!forecast->first_ns || known_ns < MP_FORECAST_MIN_NS)
        return 0;
    double weight = forecast->weight * left_after(forecast_since(forecast->last_ns, now_ns));
    /* The weight that one request per second reaches in `known_ns`: the integral of the decayed weights. */
    double steady = (double)MP_FORECAST_HALF_LIFE_NS * 1e-9 / log(2) * (1 - left_after(known_ns));
    return weight / steady;
}

int mp_forecast_workers(const mp_forecast *forecast, uint64_t now_ns, int most) {
    double busy = mp_forecast_rate(forecast, now_ns) * forecast->service_ns * 1e-9,
           needed = ceil(busy / MP_FORECAST_BUSY);
    return (int)fmin(needed, most);
}
