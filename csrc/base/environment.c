/* environment.c: see environment.h. */
#include "base/environment.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/sys.h"

#if defined(__APPLE__)
#include <crt_externs.h>
#define environ (*_NSGetEnviron()) /* a library has no `environ` there */
#else
extern char **environ;
#endif

/* An array that is or was `environ`. It is never freed, and written again only if another thread calls setenv during
 * the override. */
typedef struct mp_environment_array {
    struct mp_environment_array *next;
    size_t count;    /* entries, the final NULL included */
    char *entries[]; /* [2 * count]: the environment, then a copy that detects changes */
} environment_array;

/* no lock: only one override is active at a time */
static environment_array *unused;
static environment_array *changed; /* arrays that setenv of another thread changed during an override; never reused */

static size_t name_bytes(const char *variable) { return (size_t)(strchr(variable, '=') - variable) + 1; }

static bool equals(const environment_array *array, char *const *entries) {
    return memcmp(array->entries, entries, array->count * sizeof(*entries)) == 0;
}

/* Returns an unused array with the same content and frees `made`, or returns `made` if no such array exists. */
static environment_array *unique(environment_array *made, size_t bytes) {
    for (environment_array **link = &unused; *link; link = &(*link)->next)
        if ((*link)->count == made->count && equals(*link, made->entries)) {
            environment_array *found = *link;
            *link = found->next;
            mp_sys_free(made, bytes);
            return found;
        }
    return made;
}

static void swap_to(char **entries) { __atomic_store_n(&environ, entries, __ATOMIC_RELEASE); }

mp_status mp_environment_override_begin(mp_environment_override *self, const char *const *variables, int count,
                                        mp_error *error) {
    assert(count <= MP_ENVIRONMENT_MAX);
    *self = (mp_environment_override){.before = environ, .variable_count = count};
    size_t old_count = 0, made = 0;
    while (self->before && self->before[old_count])
        old_count++;
    size_t bytes = sizeof(environment_array) + 2 * (old_count + (size_t)count + 1) * sizeof(char *);
    environment_array *array = mp_sys_alloc(bytes, 64);
    if (!array)
        return mp_fail_memory(error, bytes, "a copy of the environment");
    for (int i = 0; i < count; i++) {
        self->variables[i] = variables[i];
        array->entries[made++] = (char *)(uintptr_t)variables[i];
    }
    for (size_t at = 0; at < old_count; at++) {
        char *entry = self->before[at];
        int same = 0;
        while (same < count && strncmp(entry, variables[same], name_bytes(variables[same])) != 0)
            same++;
        if (same == count)
            array->entries[made++] = entry;
        else if (!self->old[same])
            self->old[same] = entry;
    }
    array->entries[made++] = NULL;
    array->count = made;
    memcpy(array->entries + made, array->entries, made * sizeof(char *));
    self->array = unique(array, bytes);
    swap_to(self->array->entries);
    return MP_OK;
}

/* Undo the override with setenv and unsetenv. Needed when another thread called setenv during the override: swapping
 * `environ` back would lose that thread's change. */
static void undo_by_setenv(const mp_environment_override *self) {
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

void mp_environment_override_fork_child(mp_environment_override *self) {
    if (self->array && environ == self->array->entries)
        swap_to(self->before);
}

void mp_environment_override_end(mp_environment_override *self) {
    environment_array *array = self->array, **list = &unused;
    if (environ == array->entries && equals(array, array->entries + array->count)) {
        swap_to(self->before);
    } else {
        undo_by_setenv(self);
        list = &changed;
    }
    array->next = *list;
    *list = array;
}
