/* test_registry_outputs.c: a call that fails sets its output to NULL, so that callers may destroy it. */
#include "base/alloc.h"
#include "base/team.h"
#include "base/topology.h"
#include "files/bpe.h"
#include "files/gguf.h"
#include "files/weights.h"
#include "isolation/spec_codec.h"
#include "models/capability.h"
#include "mp_test.h"
#include "registry/cpu_allocator.h"
#include "registry/entry.h"
#include "registry/governor.h"
#include "registry/notifier.h"
#include "registry/pool/pool.h"
#include "registry/registry.h"

#ifdef MP_SEAM

static mp_spec *spec; /* a vocabulary, and a file that does not exist */

#define CALL(name, call)                                     \
    static mp_status name(void *any, mp_error *error) {      \
        return call;                                         \
    }
static const int32_t ids[] = {1};
static const uint8_t pixels[3], header[24];
static const float zeros[2];
static mp_topology topology;

CALL(gguf_read, mp_gguf_read("/nowhere", any, error))
CALL(gguf_parse, mp_gguf_parse(header, sizeof header, "memory", any, error))
CALL(weights, mp_weights_open(spec, any, error))
CALL(map, mp_file_map_open("/nowhere", any, error))
CALL(bpe, mp_bpe_create(spec, any, error))
CALL(notifier, mp_notifier_create(any, error))
CALL(governor, mp_governor_open((uint64_t)1 << 30, any, error))
CALL(allocator, mp_cpu_allocator_open_on(1, &topology, any, error))
CALL(pool, mp_pool_create("pool", 1, false, any, error))
CALL(registry, mp_registry_create(&(mp_registry_config){0}, any, error))
CALL(entry, mp_entry_create(NULL, "a", &(mp_loader){0}, any, error))
CALL(worker, mp_worker_create(NULL, any, error))
CALL(ticket, mp_ticket_create(NULL, NULL, &(mp_submit_options){0}, any, error))
CALL(team, mp_team_create(1, any, error))
CALL(codec, mp_spec_decode(header, sizeof header, any, error))
CALL(embedding, mp_embedding_request_create(&(mp_embedding_args){.n_texts = 1, .n_tokens = 1, .ids = ids,
                                                                 .offsets = (int64_t[]){0, 1}}, any, error))
CALL(image, mp_image_embedding_request_create(&(mp_image_embedding_args){.n_images = 1, .n_bytes = 3, .pixels = pixels,
                                                                         .sizes = (int32_t[]){1, 1}}, any, error))
CALL(text, mp_text_request_create(&(mp_text_args){.n_prompt = 1, .prompt = ids, .n_choices = 1,
                                                  .sampling = {.repetition_penalty = 1, .max_tokens = 1}}, any, error))
CALL(generation, mp_image_generation_request_create(&(mp_image_generation_args){.width = 8, .height = 8, .n_steps = 1,
                                                                                .n_noise = 1, .n_texts = 1,
                                                                                .n_images = 1, .noise = zeros,
                                                                                .times = zeros, .sigmas = zeros},
                                                    any, error))

static mp_status encode(void *any, mp_error *error) {
    size_t size;
    return mp_spec_encode(spec, any, &size, error);
}

static void *refuse(size_t bytes, size_t alignment) {
    (void)bytes, (void)alignment;
    return NULL;
}
#endif

MP_TEST(registry_failed_calls_have_no_output) {
#ifdef MP_SEAM
    static const struct { const char *name; mp_status (*call)(void *any, mp_error *error); } calls[] = {
        {"mp_gguf_read", gguf_read}, {"mp_gguf_parse", gguf_parse}, {"mp_weights_open", weights},
        {"mp_file_map_open", map}, {"mp_bpe_create", bpe}, {"mp_notifier_create", notifier},
        {"mp_governor_open", governor}, {"mp_cpu_allocator_open_on", allocator}, {"mp_pool_create", pool},
        {"mp_registry_create", registry}, {"mp_entry_create", entry},
        {"mp_worker_create", worker}, {"mp_ticket_create", ticket}, {"mp_team_create", team}, {"mp_spec_decode", codec},
        {"mp_spec_encode", encode}, {"mp_embedding_request_create", embedding},
        {"mp_image_embedding_request_create", image}, {"mp_text_request_create", text},
        {"mp_image_generation_request_create", generation},
    };
    static const char *const keys[] = {"tokenizer.ggml.tokens", "tokenizer.ggml.merges"};
    const uint64_t offsets[] = {0, 1};
    mp_value value = {.type = MP_VALUE_STRINGS, .gguf_type = -1, .count = 1, .as.strings = {"a", offsets}};
    mp_error error;
    spec = mp_spec_create();
    for (int i = 0; i < 2; i++)
        MP_CHECK_OK(mp_spec_set(spec, keys[i], &value, &error), &error);
    MP_CHECK_OK(mp_spec_add_file(spec, "/nowhere", &error), &error);
    MP_CHECK_OK(mp_topology_read(&topology, &error), &error);
    mp_sys_table.alloc = refuse;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        int nothing;
        void *output = &nothing;
        if (calls[i].call(&output, &error) == MP_OK || output)
            MP_FAIL("%s without memory: %s", calls[i].name, output ? "it sets its output" : "it succeeds");
    }
    mp_sys_table = mp_sys_real;
    mp_spec_unpin(spec);
#else
    MP_SKIP("needs the seam build");
#endif
}
