/* cpu_set.c: see cpu_set.h. */
#include "base/cpu_set.h"

#include <stdio.h> /* snprintf only */
#include <string.h>

enum { TEXT_BYTES = 8192 };

int mp_cpu_set_count(const mp_cpu_set *cpus) {
    int count = 0;
    for (int i = 0; i < MP_CPUS_MAX / 64; i++)
        count += __builtin_popcountll(cpus->words[i]);
    return count;
}

mp_cpu_set mp_cpu_set_common(const mp_cpu_set *a, const mp_cpu_set *b) {
    mp_cpu_set both;
    for (int i = 0; i < MP_CPUS_MAX / 64; i++)
        both.words[i] = a->words[i] & b->words[i];
    return both;
}

int mp_cpu_set_next(const mp_cpu_set *cpus, int from) {
    for (int cpu = from; cpu < MP_CPUS_MAX; cpu++) {
        if (!cpus->words[cpu / 64])
            cpu |= 63; /* skip the whole word */
        else if (mp_cpu_set_has(cpus, cpu))
            return cpu;
    }
    return -1;
}

void mp_cpu_set_text(const mp_cpu_set *cpus, char *to, size_t size) {
    size_t used = 0;
    to[0] = 0;
    for (int cpu = 0; cpu < MP_CPUS_MAX && used < size; cpu++) {
        if (!mp_cpu_set_has(cpus, cpu))
            continue;
        int last = cpu;
        while (last + 1 < MP_CPUS_MAX && mp_cpu_set_has(cpus, last + 1))
            last++;
        used += (size_t)snprintf(to + used, size - used, last > cpu ? "%s%d-%d" : "%s%d", used ? "," : "", cpu, last);
        cpu = last;
    }
}

/* --- lists as the kernel writes them --- */

static const char *skip_blanks(const char *at) { return at + strspn(at, " \t\n"); }

/* Parse a number below MP_CPUS_MAX at *text; move *text past the number and the blanks after it. */
static bool take_number(const char **text, int *value) {
    const char *at = skip_blanks(*text);
    if (*at < '0' || *at > '9')
        return false;
    for (*value = 0; *at >= '0' && *at <= '9'; at++)
        if ((*value = *value * 10 + (*at - '0')) >= MP_CPUS_MAX)
            return false;
    *text = skip_blanks(at);
    return true;
}

bool mp_cpu_set_parse(const char **text, mp_cpu_set *set) {
    for (;; ++*text) {
        int first, last;
        if (!take_number(text, &first))
            return false;
        last = first;
        if (**text == '-') {
            ++*text;
            if (!take_number(text, &last) || last < first)
                return false;
        }
        for (int i = first; i <= last; i++)
            mp_cpu_set_add(set, i);
        if (**text != ',')
            return true;
    }
}

bool mp_cpu_set_read(const char *path, mp_cpu_set *set) {
    char text[TEXT_BYTES];
    const char *at = text;
    memset(set, 0, sizeof(*set));
    return mp_sys_read_text(path, text, sizeof(text)) && mp_cpu_set_parse(&at, set) && !*at;
}
