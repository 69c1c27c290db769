/* test_registry_scene.h: one entry with fake models, workers and requests in states that the test chooses, without a
 * registry and without threads. Tests of one function of the registry set the fields that it reads and compare every
 * result exactly. */
#ifndef TEST_REGISTRY_SCENE_H
#define TEST_REGISTRY_SCENE_H

#include "mp_test.h"
#include "registry/entry.h"
#include "test_registry_fake.h"

enum { SCENE_WORKERS = 4, SCENE_TICKETS = 32 };

typedef struct scene {
    fake fake;
    mp_services *services; /* without a thread pool: maintenance is announced for time 0, so no thread starts */
    mp_entry *entry;       /* its key is the one given to scene_open */
    mp_worker *workers[SCENE_WORKERS];
    mp_ticket *tickets[SCENE_TICKETS];
    int worker_count, ticket_count;
    mp_loader_ops loader_ops; /* see scene_hook_loader */
} scene;

/* `services`: shared with another scene; NULL: new ones, with 4 compute threads and a budget of `memory` bytes. */
void scene_open(scene *scene, const char *key, mp_services *services, uint64_t memory);
/* Frees everything, whatever states the test has set. */
void scene_close(scene *scene);
/* Makes the entry's loader use the scene's `loader_ops`, a copy of its functions, which the test may change. Returns
 * the original functions. */
const mp_loader_ops *scene_hook_loader(scene *scene);
void scene_load(scene *scene); /* loads the model of the entry */
/* Creates a worker and lists it. Ids are 1, 2, ... in each scene. */
mp_worker *scene_worker(scene *scene, mp_worker_state state);
/* Creates a worker that is READY, with a model and an engine. Tests may call mp_worker_serve for it. */
mp_worker *scene_ready(scene *scene);
/* Serves all queued requests on the calling thread, as a worker of a removed model does: it then stops. */
void scene_serve(scene *scene, mp_worker *worker);
mp_ticket *scene_ticket(scene *scene, uint32_t units, mp_submit_options options);
void scene_queue(scene *scene, mp_ticket *ticket);
void scene_activate(mp_worker *worker, mp_ticket *ticket, mp_ticket_state state);

#endif
