/* cpu_set.h: sets of CPU numbers (mp_cpu_set of sys.h), and lists such as "0-3,8" as Linux writes them. */
#ifndef MP_BASE_CPU_SET_H
#define MP_BASE_CPU_SET_H

#include "base/sys.h"

static inline bool mp_cpu_set_has(const mp_cpu_set *cpus, int cpu) { return cpus->words[cpu / 64] >> cpu % 64 & 1; }
static inline void mp_cpu_set_add(mp_cpu_set *cpus, int cpu) { cpus->words[cpu / 64] |= (uint64_t)1 << cpu % 64; }
static inline void mp_cpu_set_remove(mp_cpu_set *cpus, int cpu) {
    cpus->words[cpu / 64] &= ~((uint64_t)1 << cpu % 64);
}
int mp_cpu_set_count(const mp_cpu_set *cpus);
/* Returns the CPUs that are in both sets. */
mp_cpu_set mp_cpu_set_common(const mp_cpu_set *a, const mp_cpu_set *b);
/* Returns the smallest CPU that is `from` or more; -1 if there is none. */
int mp_cpu_set_next(const mp_cpu_set *cpus, int from);
/* Write "0-7,16", zero-terminated and truncated to `size`. */
void mp_cpu_set_text(const mp_cpu_set *cpus, char *to, size_t size);

/* Parse a list such as "0-3,8" at *text, move *text past the list and the blanks after it, and add its numbers to
 * `set`. Returns false for a malformed list or a number of MP_CPUS_MAX or more, and leaves *text at the error. */
bool mp_cpu_set_parse(const char **text, mp_cpu_set *set);
/* Read a file with one list into `set`. Returns false, with undefined contents of `set`, if the file cannot be read or
 * contains anything else. */
bool mp_cpu_set_read(const char *path, mp_cpu_set *set);

#endif
