/* crowding.c: see crowding.h. */
#include "base/crowding.h"

#include "base/intervals.h"
#include "base/sys.h"

double mp_crowding_rate(void) {
    static _Thread_local uint64_t since_ns, switches_before;
    static _Thread_local double rate = -1;
    uint64_t now_ns = mp_sys_now_ns(), passed_ns = now_ns - since_ns;
    if (passed_ns >= MP_CROWDING_NS) {
        uint64_t switches = mp_sys_involuntary_switches();
        if (since_ns)
            rate = (double)(switches - switches_before) / ((double)passed_ns * 1e-9);
        since_ns = now_ns;
        switches_before = switches;
    }
    return rate;
}
