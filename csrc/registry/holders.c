/* holders.c: the models that hold memory, for messages about a lack of it. See entry.h. */
#include <stdatomic.h>
#include <stdio.h> /* snprintf only */
#include <string.h>

#include "registry/entry.h"
#include "registry/upkeep.h"

/* Must hold the lock. Returns what keeps the model in memory. */
static const char *hold_of(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    bool loads = entry->starting > 0, used = entry->queue.count || mp_entry_running(entry);
    for (int i = 0; i < entry->worker_count; i++)
        loads |= entry->workers[i]->state == MP_WORKER_SPAWNING || entry->workers[i]->state == MP_WORKER_LOADING;
    if (entry->unload != MP_UNLOAD_NONE || entry->removal != MP_REMOVAL_NONE)
        return "being unloaded";
    if (loads && !entry->resident)
        return "loading";
    if (used)
        return entry->pinned ? "in use, pinned" : "in use";
    if (entry->pinned)
        return "pinned";
    return entry->abandoned ? "not responding" : entry->held ? "being replaced" : "idle";
}

typedef struct holder {
    const mp_entry *entry;
    uint64_t bytes;
    const char *hold;
} holder;

size_t mp_upkeep_holders(mp_entry **entries, int count, char *text, size_t size) {
    enum { MOST = 8 };
    holder holders[MOST + 1];
    int found = 0;
    size_t length = 0;
    for (int i = 0; i < count; i++) { /* the largest ones, by insertion */
        mp_entry *entry = entries[i];
        mp_mutex_lock(&entry->lock);
        holder next = {entry, atomic_load(&entry->account.used) + atomic_load(&entry->account.reserved) +
                       atomic_load(&entry->charged), hold_of(entry)};
        mp_mutex_unlock(&entry->lock);
        int at = next.bytes ? found : MOST;
        for (; at > 0 && at <= found && holders[at - 1].bytes < next.bytes; at--)
            holders[at] = holders[at - 1];
        if (at >= MOST)
            continue;
        holders[at] = next;
        found += found < MOST;
    }
    for (int i = 0; i < found; i++) {
        char bytes[MP_SIZE_TEXT];
        int more = snprintf(text + length, size - length, "%s%s %s (%s)", i ? ", " : "",
                            mp_entry_key(holders[i].entry), mp_size_text(bytes, holders[i].bytes), holders[i].hold);
        if (more < 0 || (size_t)more >= size - length) { /* name no model in part */
            text[length] = 0;
            break;
        }
        length += (size_t)more;
    }
    return length;
}
