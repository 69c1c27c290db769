/* dedup.c: the hash table of a step's inputs. */
#include "models/dedup.h"

#include <string.h>

enum { FIRST_SLOTS = 64 };

mp_status mp_dedup_table_begin(mp_dedup_table *table, int count, const char *name, mp_error *error) {
    uint32_t slot_count = table->slot_count ? table->slot_count : FIRST_SLOTS;
    while (slot_count < 2 * (uint32_t)count)
        slot_count *= 2;
    if (slot_count > table->slot_count) {
        mp_dedup_slot *slots = mp_realloc(table->slots, slot_count * sizeof *slots, MP_TAG_SCRATCH);
        if (!slots)
            return mp_fail_memory(error, slot_count * sizeof *slots, name);
        table->slots = slots;
        table->slot_count = slot_count;
    }
    memset(table->slots, 0, table->slot_count * sizeof *table->slots);
    return MP_OK;
}

int mp_dedup_table_find(mp_dedup_table *table, const void *inputs, int index, uint64_t key,
                        mp_dedup_identical identical) {
    for (uint64_t at = key;; at++) { /* ends: the table is at most half full */
        mp_dedup_slot *slot = &table->slots[at & (table->slot_count - 1)];
        if (slot->input && !identical(inputs, slot->input - 1, index))
            continue;
        if (slot->input && slot->served < MP_DEDUP_SHARED) {
            slot->served++;
            return slot->input - 1;
        }
        *slot = (mp_dedup_slot){.input = index + 1, .served = 1};
        return -1;
    }
}

void mp_dedup_table_deinit(mp_dedup_table *table) {
    mp_free(table->slots);
    *table = (mp_dedup_table){0};
}
