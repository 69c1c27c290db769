/* file_map.h: one read-only shared mapping of a regular file.
 *
 * A page that can no longer be read (the file was cut short under us) does not kill the process: the SIGBUS handler
 * maps a zero page there, marks the mapping poisoned and lets the thread go on; whoever computes with it asks
 * mp_file_map_poisoned afterwards and fails the step. The handler passes every other SIGBUS on to who was there before;
 * a handler that is installed after ours and does not pass SIGBUS on takes this protection away. Threads must not block
 * SIGBUS. */
#ifndef MP_FILES_FILE_MAP_H
#define MP_FILES_FILE_MAP_H

#include "base/sys.h"

typedef struct mp_file_map mp_file_map;

/* Opens, checks (regular file, size > 0) and maps. Callable from any thread. */
mp_status mp_file_map_open(const char *path, mp_file_map **map, mp_error *error);
void mp_file_map_close(mp_file_map *map); /* NULL is legal */
const uint8_t *mp_file_map_data(const mp_file_map *map);
uint64_t mp_file_map_size(const mp_file_map *map);
const char *mp_file_map_path(const mp_file_map *map);
const mp_file_id *mp_file_map_id(const mp_file_map *map);
bool mp_file_map_poisoned(const mp_file_map *map);
/* The path still names the file that was mapped, and nobody has written to it (mp_file_id_same). One system call. */
bool mp_file_map_unchanged(const mp_file_map *map);
/* Hand pages back to the system: they are read again from the file if needed. */
void mp_file_map_release(const mp_file_map *map, uint64_t offset, uint64_t bytes);
/* Installs the handler; called once when the module loads. */
void mp_file_map_init(void);

#endif
