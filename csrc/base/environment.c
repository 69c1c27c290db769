/* environment.c: see environment.h. */
#include "base/environment.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/sys.h"

extern char **environ;

typedef struct mp_environment_array {
    struct mp_environment_array *next;
    size_t capacity; /* of entries */
    char *entries[]; /* [2 * capacity]: the environment, then a copy to compare with */
} environment_array;

static environment_array *unused; /* guarded by: one override at a time */

static size_t name_bytes(const char *variable) { return (size_t)(strchr(variable, '=') - variable) + 1; }

static environment_array *take_array(size_t count) {
    enum { SPARE = 64 };
    for (environment_array **link = &unused; *link; link = &(*link)->next)
        if ((*link)->capacity >= count) {
            environment_array *found = *link;
            *link = found->next;
            return found;
        }
    environment_array *made = mp_sys_alloc(sizeof(*made) + 2 * (count + SPARE) * sizeof(char *), 64);
    if (made)
        made->capacity = count + SPARE;
    return made;
}

static void swap_to(char **entries) { __atomic_store_n(&environ, entries, __ATOMIC_RELEASE); }

mp_status mp_environment_override_begin(mp_environment_override *self, const char *const *variables, int count,
                                        mp_error *error) {
    assert(count <= MP_ENVIRONMENT_MOST);
    *self = (mp_environment_override){.before = environ, .variable_count = count};
    size_t old_count = 0;
    while (self->before && self->before[old_count])
        old_count++;
    size_t most = old_count + (size_t)count + 1;
    self->array = take_array(most);
    if (!self->array)
        return mp_fail_memory(error, 2 * most * sizeof(char *), "a copy of the environment");
    char **entries = self->array->entries;
    for (int i = 0; i < count; i++) {
        self->variables[i] = variables[i];
        entries[self->count++] = (char *)(uintptr_t)variables[i];
    }
    for (size_t at = 0; at < old_count; at++) {
        char *entry = self->before[at];
        int same = 0;
        while (same < count && strncmp(entry, variables[same], name_bytes(variables[same])) != 0)
            same++;
        if (same == count)
            entries[self->count++] = entry;
        else if (!self->old[same])
            self->old[same] = entry;
    }
    entries[self->count++] = NULL;
    memcpy(entries + self->array->capacity, entries, self->count * sizeof(*entries));
    swap_to(entries);
    return MP_OK;
}

/* Another thread called setenv during the override, so the process's array holds its change and ours: take ours out the
 * ordinary way. */
static void take_out(const mp_environment_override *self) {
    for (int i = 0; i < self->variable_count; i++) {
        char name[64];
        size_t bytes = name_bytes(self->variables[i]);
        assert(bytes <= sizeof(name));
        memcpy(name, self->variables[i], bytes);
        name[bytes - 1] = 0;
        if (self->old[i])
            setenv(name, self->old[i] + bytes, 1);
        else
            unsetenv(name);
    }
}

void mp_environment_override_end(mp_environment_override *self) {
    char **entries = self->array->entries;
    bool unchanged = environ == entries &&
                     memcmp(entries, entries + self->array->capacity, self->count * sizeof(*entries)) == 0;
    if (!unchanged) {
        take_out(self);
        return; /* the array is the process's environment from now on, or setenv made another from it */
    }
    swap_to(self->before);
    self->array->next = unused;
    unused = self->array;
}
