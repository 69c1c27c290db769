/* cgroup.c: see cgroup.h.
 *
 * /proc/self/cgroup names the group of the process in each hierarchy, as a path from the hierarchy's root.
 * /proc/self/mountinfo says where each hierarchy is mounted and which of its directories the mount shows. In a
 * container, the group's path may lie outside the mount: the mount's top directory then counts as the group. The
 * effective limit is the smallest one in all directories from the group up to the top of the mount. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/cgroup.h"

#include <stdio.h> /* snprintf only */
#include <string.h>
#include <sys/stat.h>

#include "base/alloc.h"
#include "base/sys.h"

enum { PATH_BYTES = 4096, SMALL_BYTES = 256, LISTING_BYTES = 1 << 20 };

static bool is_directory(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

/* Parse the digits at *text and move *text past them. Returns false when there are no digits, as in "max" and "-1", or
 * when the number overflows. */
static bool take_number(const char **text, uint64_t *value) {
    const char *at = *text;
    uint64_t parsed = 0;
    if (*at < '0' || *at > '9')
        return false;
    for (; *at >= '0' && *at <= '9'; at++)
        if (__builtin_mul_overflow(parsed, (uint64_t)10, &parsed) ||
            __builtin_add_overflow(parsed, (uint64_t)(*at - '0'), &parsed))
            return false;
    *text = at;
    *value = parsed;
    return true;
}

static bool read_number(const char *directory, const char *file, uint64_t *value) {
    char path[PATH_BYTES], text[SMALL_BYTES];
    if (snprintf(path, sizeof(path), "%s/%s", directory, file) >= (int)sizeof(path) ||
        !mp_sys_read_text(path, text, sizeof(text)))
        return false;
    const char *at = text;
    return take_number(&at, value);
}

static void limit_cpus(mp_cgroup *limits, uint64_t quota, uint64_t period) {
    if (quota == 0 || period == 0)
        return;
    double cpus = (double)quota / (double)period;
    if (limits->cpus == 0 || cpus < limits->cpus)
        limits->cpus = cpus;
}

/* Read the limits of one directory of a hierarchy. Files of the other cgroup version and of other controllers do not
 * exist there and are skipped. */
static void read_directory(const char *directory, mp_cgroup *limits) {
    uint64_t value, quota, period;
    if (read_number(directory, "memory.max", &value) && value < limits->memory_bytes)
        limits->memory_bytes = value;
    if (read_number(directory, "memory.limit_in_bytes", &value) && value < limits->memory_bytes)
        limits->memory_bytes = value; /* without a limit, v1 writes a number near 2^63, above any machine's memory */
    char path[PATH_BYTES], text[SMALL_BYTES];
    if (snprintf(path, sizeof(path), "%s/cpu.max", directory) < (int)sizeof(path) &&
        mp_sys_read_text(path, text, sizeof(text))) {
        const char *at = text;
        if (take_number(&at, &quota) && *at++ == ' ' && take_number(&at, &period))
            limit_cpus(limits, quota, period);
    }
    if (read_number(directory, "cpu.cfs_quota_us", &quota) && read_number(directory, "cpu.cfs_period_us", &period))
        limit_cpus(limits, quota, period);
}

/* Returns the next blank-separated field of a line, zero-terminated in place, or NULL at the end of the line. */
static char *next_field(char **line) {
    return *line ? strsep(line, " ") : NULL;
}

/* Decode a path of mountinfo, which writes blanks, tabs, newlines and backslashes as octal escapes such as \040. */
static void unescape(char *path) {
    char *to = path;
    for (const char *from = path; *from; to++) {
        if (from[0] == '\\' && from[1] >= '0' && from[1] <= '3' && from[2] >= '0' && from[2] <= '7' && from[3] >= '0' &&
            from[3] <= '7') {
            *to = (char)((from[1] - '0') * 64 + (from[2] - '0') * 8 + (from[3] - '0'));
            from += 4;
        } else {
            *to = *from++;
        }
    }
    *to = 0;
}

/* True when the comma-separated list contains `word`. */
static bool list_has(const char *list, const char *word) {
    size_t length = strlen(word);
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strncmp(at, word, length) == 0 && (at[length] == 0 || at[length] == ','))
            return true;
    return false;
}

/* Find the group of this process in the hierarchy with `controller` ("" = v2) in the text of /proc/self/cgroup:
 * "4:memory:/some/group". Returns false when the process is in no such group. */
static bool find_group(const char *listing, const char *controller, char *group, size_t size) {
    for (const char *line = listing; *line;) {
        const char *end = line + strcspn(line, "\n");
        const char *first = memchr(line, ':', (size_t)(end - line));
        const char *second = first ? memchr(first + 1, ':', (size_t)(end - first - 1)) : NULL;
        if (second) {
            char names[SMALL_BYTES];
            snprintf(names, sizeof(names), "%.*s", (int)(second - first - 1), first + 1);
            bool match = *controller ? list_has(names, controller) : !*names;
            if (match && snprintf(group, size, "%.*s", (int)(end - second - 1), second + 1) < (int)size)
                return true;
        }
        line = *end ? end + 1 : end;
    }
    return false;
}

/* Read the limits of the group's directory and of its parents in one mount of a hierarchy. */
static void read_mount(const char *root, const char *mount_root, const char *mount_point, const char *group,
                       mp_cgroup *limits) {
    size_t skip = strcmp(mount_root, "/") == 0 ? 0 : strlen(mount_root);
    const char *inside = "";
    if (strncmp(group, mount_root, skip) == 0 && (group[skip] == '/' || group[skip] == 0))
        inside = group + skip;
    char path[PATH_BYTES];
    if (snprintf(path, sizeof(path), "%s%s%s", root, mount_point, inside) >= (int)sizeof(path) || !is_directory(path))
        if (snprintf(path, sizeof(path), "%s%s", root, mount_point) >= (int)sizeof(path))
            return;
    size_t top = strlen(root) + strlen(mount_point);
    for (;;) {
        read_directory(path, limits);
        char *slash = strrchr(path, '/');
        if (!slash || (size_t)(slash - path) < top)
            return;
        *slash = 0;
    }
}

/* Parse a line of mountinfo: id parent device root point options [optional...] - type source super-options */
static void read_mount_line(const char *root, char *line, const char *groups, mp_cgroup *limits) {
    char *fields[6];
    for (int i = 0; i < 6; i++)
        if (!(fields[i] = next_field(&line)))
            return;
    char *field;
    do {
        field = next_field(&line);
    } while (field && strcmp(field, "-") != 0);
    char *type = next_field(&line), *source = next_field(&line), *super = next_field(&line);
    if (!type || !source || !super)
        return;
    char group[PATH_BYTES];
    unescape(fields[3]);
    unescape(fields[4]);
    if (strcmp(type, "cgroup2") == 0) {
        if (find_group(groups, "", group, sizeof(group)))
            read_mount(root, fields[3], fields[4], group, limits);
    } else if (strcmp(type, "cgroup") == 0) {
        static const char *const controllers[] = {"cpu", "memory"};
        for (int i = 0; i < 2; i++)
            if (list_has(super, controllers[i]) && find_group(groups, controllers[i], group, sizeof(group)))
                read_mount(root, fields[3], fields[4], group, limits);
    }
}

mp_cgroup mp_cgroup_read(const char *root) {
    mp_cgroup limits = {0, UINT64_MAX};
    char path[PATH_BYTES];
    char *groups = mp_alloc(LISTING_BYTES, MP_TAG_MISC), *mounts = mp_alloc(LISTING_BYTES, MP_TAG_MISC);
    if (groups && mounts && snprintf(path, sizeof(path), "%s/proc/self/cgroup", root) < (int)sizeof(path) &&
        mp_sys_read_text(path, groups, LISTING_BYTES) &&
        snprintf(path, sizeof(path), "%s/proc/self/mountinfo", root) < (int)sizeof(path) &&
        mp_sys_read_text(path, mounts, LISTING_BYTES)) {
        for (char *rest = mounts, *line; (line = strsep(&rest, "\n"));)
            read_mount_line(root, line, groups, &limits);
    }
    mp_free(groups);
    mp_free(mounts);
    return limits;
}
