/* file_map.h: one read-only shared mapping of a regular file.
 *
 * The mapping and its descriptor belong to the file that the path named when it was opened. Both stay valid when the
 * path is renamed over or unlinked, or when a link in it is switched.
 *
 * A page that can no longer be read (the file was truncated while mapped) does not kill the process. The SIGBUS handler
 * maps a zero page in its place, marks the mapping poisoned and resumes the thread. Code that computes with the mapping
 * must check mp_file_map_poisoned afterwards and fail the step. The handler forwards every other SIGBUS to the
 * previously installed handler. A handler installed later that does not forward SIGBUS disables this protection.
 * Threads must not block SIGBUS. */
#ifndef MP_FILES_FILE_MAP_H
#define MP_FILES_FILE_MAP_H

#include "base/sys.h"

typedef struct mp_file_map mp_file_map;

/* Open, check (regular file, size > 0) and map. Thread-safe. Close the result with mp_file_map_close. */
mp_status mp_file_map_open(const char *path, mp_file_map **map, mp_error *error);
/* mp_file_map_open for a file that is opened at another place than the path that errors name. */
mp_status mp_file_map_open_at(const char *place, const char *path, mp_file_map **map, mp_error *error);
void mp_file_map_close(mp_file_map *map); /* NULL is legal */
/* Properties of the mapping. Returned pointers are borrowed and valid until mp_file_map_close. */
const uint8_t *mp_file_map_data(const mp_file_map *map);
uint64_t mp_file_map_size(const mp_file_map *map);
const char *mp_file_map_path(const mp_file_map *map);
const mp_file_id *mp_file_map_id(const mp_file_map *map);
bool mp_file_map_poisoned(const mp_file_map *map);
/* True if the mapped file was not written to (mp_file_id_same), whatever its path names by now. One system call. If the
 * descriptor was closed by other code, the path must still name the file. */
bool mp_file_map_unchanged(const mp_file_map *map);
/* Give pages back to the system. The next access reads them from the file again. */
void mp_file_map_release(const mp_file_map *map, uint64_t offset, uint64_t bytes);
/* Install the SIGBUS handler. Called once when the module loads. */
void mp_file_map_init(void);

#endif
