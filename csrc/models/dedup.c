/* dedup.c: see dedup.h. */
#include "models/dedup.h"

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "base/siphash.h"

enum { FIRST_SLOTS = 64 };

bool mp_dedup_alike(const mp_dedup_input *a, const mp_dedup_input *b) {
    return mp_cache_key_equal(a->key, b->key) && a->bytes == b->bytes && a->dimensions == b->dimensions &&
           memcmp(a->options, b->options, sizeof a->options) == 0;
}

static bool dedup_equal(const mp_dedup_input *a, const mp_dedup_input *b) {
    return mp_dedup_alike(a, b) && memcmp(a->content, b->content, a->bytes) == 0;
}

/* ---- the inputs of a step ---------------------------------------------------------------------------------------- */

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

int mp_dedup_table_find(mp_dedup_table *table, const mp_dedup_input *inputs, int index) {
    for (uint64_t at = inputs[index].key.hash;; at++) { /* ends: the table is at most half full */
        mp_dedup_slot *slot = &table->slots[at & (table->slot_count - 1)];
        if (slot->input && !dedup_equal(&inputs[slot->input - 1], &inputs[index]))
            continue;
        if (slot->input && slot->served < MP_DEDUP_SHARED) {
            slot->served++;
            table->shared++;
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

/* ---- recent vectors ---------------------------------------------------------------------------------------------- */

/* Runs in the child of a fork. If another thread was allocating or freeing the table, its bytes may stay charged and
 * unused. */
static void forget_recent(mp_forked *self) {
    mp_recent *recent = (mp_recent *)((char *)self - offsetof(mp_recent, forked));
    mp_mutex_init(&recent->lock);
    recent->count = 0;
}

mp_status mp_recent_init(mp_recent *recent, mp_budget *budget, mp_error *error) {
    *recent = (mp_recent){.keep_ns = MP_DEDUP_KEEP_NS, .most_bytes = MP_DEDUP_BYTES};
    MP_TRY(mp_forked_add(&recent->forked, forget_recent, error));
    mp_siphash_key(recent->secret);
    mp_mutex_init(&recent->lock);
    recent->budget = budget;
    return MP_OK;
}

void mp_recent_deinit(mp_recent *recent) {
    if (!recent->budget)
        return;
    mp_forked_remove(&recent->forked);
    mp_recent_trim(recent);
    mp_mutex_deinit(&recent->lock);
    *recent = (mp_recent){0};
}

mp_cache_key mp_recent_key(const mp_recent *recent, mp_cache_scope scope, const void *content, size_t bytes) {
    return mp_cache_key_of(recent->secret, scope, 0, content, bytes);
}

/* Must hold the lock. */
static uint64_t dedup_release(mp_recent *recent) {
    const uint64_t bytes = atomic_exchange_explicit(&recent->charged, 0, memory_order_relaxed);
    void *entries = recent->entries, *store = recent->store;
    recent->entries = NULL;
    recent->store = NULL;
    recent->count = 0;
    mp_free(entries);
    mp_free(store);
    mp_budget_give(recent->budget, bytes);
    return bytes;
}

uint64_t mp_recent_trim(mp_recent *recent) {
    mp_mutex_lock(&recent->lock);
    const uint64_t bytes = dedup_release(recent);
    mp_mutex_unlock(&recent->lock);
    return bytes;
}

/* back: 1 = the newest entry. */
static mp_recent_entry *entry_at(const mp_recent *recent, uint32_t back) {
    return &recent->entries[(recent->next + MP_DEDUP_RECENT - back) % MP_DEDUP_RECENT];
}

bool mp_recent_find(mp_recent *recent, const mp_dedup_input *input, uint64_t now_ns) {
    bool found = false;
    mp_mutex_lock(&recent->lock);
    for (uint32_t back = 1; back <= recent->count && !found; back++) {
        const mp_recent_entry *entry = entry_at(recent, back);
        if (now_ns > entry->at_ns && now_ns - entry->at_ns > recent->keep_ns)
            break; /* the remaining entries are older */
        found = dedup_equal(&entry->input, input);
        if (found)
            memcpy(input->out, entry->input.out, (size_t)input->dimensions * sizeof(float));
    }
    mp_mutex_unlock(&recent->lock);
    if (found)
        atomic_fetch_add_explicit(&recent->hits, 1, memory_order_relaxed);
    return found;
}

/* Must hold the lock. */
static bool make_store(mp_recent *recent) {
    if (recent->store)
        return true;
    const uint64_t bytes = recent->most_bytes + MP_DEDUP_RECENT * sizeof *recent->entries;
    if (!mp_budget_take(recent->budget, bytes))
        return false;
    atomic_store_explicit(&recent->charged, bytes, memory_order_relaxed);
    recent->entries = mp_alloc_array(MP_DEDUP_RECENT, sizeof *recent->entries, MP_TAG_SCRATCH);
    recent->store = mp_alloc(recent->most_bytes, MP_TAG_SCRATCH);
    if (recent->entries && recent->store)
        return true;
    dedup_release(recent);
    return false;
}

/* Return the place of `bytes` free bytes in the store, at most most_bytes; the oldest entries make room. */
static size_t make_room(mp_recent *recent, size_t bytes) {
    if (recent->count == MP_DEDUP_RECENT)
        recent->count--;
    for (; recent->count > 0; recent->count--) {
        const size_t oldest = entry_at(recent, recent->count)->at;
        const size_t limit = recent->end > oldest ? recent->most_bytes : oldest;
        if (limit - recent->end >= bytes)
            return recent->end;
        if (recent->end > oldest && oldest >= bytes)
            return 0;
    }
    return 0;
}

void mp_recent_keep(mp_recent *recent, const mp_dedup_input *input, uint64_t now_ns) {
    /* rows of whole floats, so that each vector is aligned */
    const size_t vector = (size_t)input->dimensions * sizeof(float);
    const size_t bytes = vector + (input->bytes + sizeof(float) - 1) / sizeof(float) * sizeof(float);
    if (bytes > recent->most_bytes)
        return;
    mp_mutex_lock(&recent->lock);
    if (make_store(recent)) {
        const size_t at = make_room(recent, bytes);
        mp_recent_entry *entry = &recent->entries[recent->next];
        *entry = (mp_recent_entry){.input = *input, .at_ns = now_ns, .at = at};
        entry->input.out = memcpy(recent->store + at, input->out, vector);
        entry->input.content = memcpy(recent->store + at + vector, input->content, input->bytes);
        recent->end = at + bytes;
        recent->next = (recent->next + 1) % MP_DEDUP_RECENT;
        recent->count++;
    }
    mp_mutex_unlock(&recent->lock);
}
