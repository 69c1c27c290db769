/* state_machine.c: see state_machine.h. */
#include "registry/state_machine.h"

#include <assert.h>

#include "base/log.h"
#include "registry/services.h"

bool mp_state_may_enter(const mp_state_machine *machine, mp_services *services, const char *key, uint32_t id, int from,
                        int to) {
    if (mp_state_is_legal(machine, from, to))
        return true;
    assert(!"the transition between these two states is legal");
    mp_count(services, MP_METRIC_illegal_transitions, 1);
    mp_log(MP_LOG_ERROR, "%s: the state `%s` (id %u) must not change from %s to %s and stays as it is; this is a bug "
           "in mpool", key, machine->name, id, machine->states[from], machine->states[to]);
    return false;
}
