/* test_files_ranges.c: properties over many inputs: UTF-8 against the table of the Unicode standard, ranges of pages
 * that are given back, sizes that overflow, biases of random layers, and locks that a fork waits for. */
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/forked.h"
#include "base/sys.h"
#include "files/bpe.h"
#include "files/file_map.h"
#include "files/spec_build.h"
#include "files/weights.h"
#include "released_fixture.h"
#include "test_files.h"

/* --- UTF-8 --- */

/* The rows of table 3-7 of the Unicode standard: ranges of the first bytes of a character, and of the others. */
static const struct { int bytes; uint8_t low[4], high[4]; } well_formed[] = {
    {1, {0x00}, {0x7f}},
    {2, {0xc2, 0x80}, {0xdf, 0xbf}},
    {3, {0xe0, 0xa0, 0x80}, {0xe0, 0xbf, 0xbf}},
    {3, {0xe1, 0x80, 0x80}, {0xec, 0xbf, 0xbf}},
    {3, {0xed, 0x80, 0x80}, {0xed, 0x9f, 0xbf}},
    {3, {0xee, 0x80, 0x80}, {0xef, 0xbf, 0xbf}},
    {4, {0xf0, 0x90, 0x80, 0x80}, {0xf0, 0xbf, 0xbf, 0xbf}},
    {4, {0xf1, 0x80, 0x80, 0x80}, {0xf3, 0xbf, 0xbf, 0xbf}},
    {4, {0xf4, 0x80, 0x80, 0x80}, {0xf4, 0x8f, 0xbf, 0xbf}},
};

static bool follows_the_table(const uint8_t *text, int length) {
    while (length > 0) {
        int taken = 0;
        for (size_t row = 0; row < sizeof well_formed / sizeof *well_formed && !taken; row++) {
            taken = well_formed[row].bytes <= length ? well_formed[row].bytes : 0;
            for (int i = 0; i < well_formed[row].bytes && taken; i++)
                if (text[i] < well_formed[row].low[i] || text[i] > well_formed[row].high[i])
                    taken = 0;
        }
        if (!taken)
            return false;
        text += taken;
        length -= taken;
    }
    return true;
}

/* Every text of up to six bytes that are bounds of the table. */
MP_TEST(files_utf8_follows_the_table) {
    static const uint8_t bounds[] = {0x00, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc1, 0xc2, 0xdf,
                                     0xe0, 0xe1, 0xec, 0xed, 0xee, 0xef, 0xf0, 0xf1, 0xf3, 0xf4, 0xf5, 0xff};
    enum { BOUNDS = sizeof bounds, TAIL = 4 }; /* bytes 5 and 6: four of the bounds */
    const int counts[] = {BOUNDS, BOUNDS, BOUNDS, BOUNDS, TAIL, TAIL};
    for (int length = 1; length <= 6; length++) {
        uint32_t total = 1;
        for (int i = 0; i < length; i++)
            total *= (uint32_t)counts[i];
        const uint32_t step = length < 5 ? 1 : 7; /* prime to the counts: each byte takes every value */
        for (uint32_t number = 0; number < total; number += step) {
            uint8_t text[6];
            uint32_t rest = number;
            for (int i = 0; i < length; i++) {
                text[i] = bounds[rest % (uint32_t)counts[i]];
                rest /= (uint32_t)counts[i];
            }
            if (mp_is_utf8((const char *)text, (uint64_t)length) != follows_the_table(text, length))
                MP_FAIL("%d bytes, text %u: %02x %02x %02x %02x", length, number, text[0], text[1], text[2], text[3]);
        }
    }
}

/* --- pages --- */

/* For every range, the whole pages inside it and inside the file, and no others. */
MP_TEST(files_map_release_gives_back_whole_pages) {
#ifdef MP_SEAM
    char path[400];
    mp_error error;
    mp_file_map *map;
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), size = 10 * page + 100;
    uint8_t *data = calloc(1, size);
    mp_file_map_init();
    mp_test_write_file(test_path(path, sizeof path, "a"), data, size);
    free(data);
    MP_CHECK_OK(mp_file_map_open(path, &map, &error), &error);
    mp_sys_table.madvise = record_advice;
    const uint64_t edges[] = {0,        1,        page - 1,     page,     page + 1,       3 * page - 1, 3 * page,
                              9 * page, size - 1, size - page,  size, 10 * page,      10 * page - 1, size + 1,
                              UINT64_MAX - 1, UINT64_MAX};
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++)
        for (size_t j = 0; j < sizeof edges / sizeof *edges; j++) {
            const uint64_t offset = edges[i], bytes = edges[j];
            const uint64_t end = offset > size ? offset : bytes > size - offset ? size : offset + bytes;
            const uint64_t from = offset > size ? offset : (offset + page - 1) / page * page, to = end / page * page;
            released_ranges = 0;
            mp_file_map_release(map, offset, bytes);
            const uint64_t got_from = released_from - (uintptr_t)mp_file_map_data(map);
            const uint64_t got_to = released_to - (uintptr_t)mp_file_map_data(map);
            const int expected = offset < size && from < to;
            if (released_ranges != expected || (released_ranges && (got_from != from || got_to != to)))
                MP_FAIL("%llu bytes at %llu: %d ranges, %llu to %llu", (unsigned long long)bytes,
                        (unsigned long long)offset, released_ranges, (unsigned long long)got_from,
                        (unsigned long long)got_to);
        }
    mp_sys_table = mp_sys_real;
    mp_file_map_close(map);
#else
    MP_SKIP("needs the seam build");
#endif
}

/* --- sizes that overflow --- */

/* A count whose bytes overflow is refused as too much memory before an element is read: the offsets would be refused,
 * too, with another error. */
MP_TEST(files_spec_counts_that_overflow) {
    static const uint64_t falling[] = {0, 1, 0, 0}, bad_first[] = {7, 7};
    static const struct { mp_value_type type; int bytes; } types[] = { /* bytes of an element */
        {MP_VALUE_STRING, 1}, {MP_VALUE_BOOLS, 1}, {MP_VALUE_INTS, 8}, {MP_VALUE_FLOATS, 8}, {MP_VALUE_STRINGS, 8}};
    mp_error error;
    mp_spec *spec = mp_spec_create();
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        const uint64_t most = UINT64_MAX / (uint64_t)types[i].bytes;
        const uint64_t counts[] = {most, most - 1, most / 2 + 2, UINT64_MAX, UINT64_MAX - 1, UINT64_MAX / 2 + 1};
        for (size_t j = 0; j < sizeof counts / sizeof *counts; j++) {
            mp_value value = {.type = types[i].type, .count = counts[j], .as.string = (const char *)falling};
            if (types[i].type == MP_VALUE_STRINGS) {
                if (counts[j] < most)
                    continue; /* the offsets are read */
                value.as.strings.bytes = "abc";
                value.as.strings.offsets = bad_first;
            }
            MP_CHECK_STATUS(mp_spec_set(spec, "k", &value, &error), MP_MEMORY_EXHAUSTED, &error);
        }
    }
    MP_CHECK_INT(mp_spec_value_count(spec), 0);
    mp_spec_unpin(spec);
}

/* --- the largest vocabulary --- */

/* A spec and a byte-pair vocabulary take 2^20 tokens. One more is too many for both. */
MP_TEST(files_most_tokens) {
    enum { MAX = 1 << 20, BYTES = 8 };
    static const char *const first[] = {"a", "b", "ab"};
    static const uint64_t merge_offsets[] = {0, 3};
    mp_error error;
    char *texts = malloc(BYTES * (MAX + 1) + BYTES);
    uint64_t *offsets = malloc((MAX + 2) * sizeof *offsets);
    uint8_t *control = calloc(1, MAX + 1);
    MP_CHECK(texts && offsets && control);
    offsets[0] = 0;
    for (unsigned i = 0; i <= MAX; i++) {
        char token[16];
        snprintf(token, sizeof token, "t%x", i);
        const char *text = i < 3 ? first[i] : token;
        memcpy(texts + offsets[i], text, strlen(text));
        offsets[i + 1] = offsets[i] + strlen(text);
    }
    for (int32_t count = MAX; count <= MAX + 1; count++) {
        const bool fits = count == MAX;
        const mp_token_table table = {.count = count, .bytes = (const uint8_t *)texts, .offsets = offsets,
                                      .control = control};
        mp_spec *spec = mp_spec_create();
        MP_CHECK_STATUS(mp_spec_set_tokens(spec, &table, &error), fits ? MP_OK : MP_LIMIT, &error);
        mp_value tokens = {.type = MP_VALUE_STRINGS, .count = (uint64_t)count, .as.strings = {texts, offsets}};
        mp_value merges = {.type = MP_VALUE_STRINGS, .count = 1, .as.strings = {"a b", merge_offsets}};
        MP_CHECK_OK(mp_spec_set(spec, "tokenizer.ggml.tokens", &tokens, &error), &error);
        MP_CHECK_OK(mp_spec_set(spec, "tokenizer.ggml.merges", &merges, &error), &error);
        mp_bpe *bpe;
        MP_CHECK_OK(mp_bpe_create(spec, &bpe, &error), &error);
        MP_CHECK_INT(bpe != NULL, fits);
        if (bpe)
            MP_CHECK_INT(mp_bpe_find(bpe, "tfffff", 6), MAX - 1);
        mp_bpe_destroy(bpe);
        mp_spec_unpin(spec);
    }
    free(texts), free(offsets), free(control);
}

/* --- biases of layers --- */

enum { LAYERS = 5, PARTS = 7 };
static const char *const parts[PARTS] = {"q", "k", "ffn_gate_inp", "ffn_down", "qq", "k_", "ffn_gate_exps"};

/* The bias that is missing, by the rule of weights.h: a loop finds the nearest layers before and after. */
static void expect_missing(const bool has[2][LAYERS][PARTS], const int *order, int count, char name[64]) {
    name[0] = 0;
    for (int i = 0; i < count; i++) {
        const int layer = order[i] / 2 / PARTS, part = order[i] / 2 % PARTS;
        if (order[i] % 2 == 0)
            continue;
        const bool of_experts = strncmp(parts[part], "ffn_", 4) == 0;
        const int owner = has[0][layer][part] ? part : of_experts && has[0][layer][2] ? 2 : -1;
        for (int step = -1; owner >= 0 && step <= 1; step += 2)
            for (int other = layer + step; other >= 0 && other < LAYERS; other += step) {
                if (!has[0][other][owner])
                    continue;
                if (!has[1][other][part]) {
                    snprintf(name, 64, "blk.%d.%s.bias", other, parts[part]);
                    return;
                }
                break;
            }
    }
}

/* Random layers, in random order. */
MP_TEST(files_weights_biases_of_random_layers) {
    char path[400], name[64];
    mp_error error;
    mp_test_random random = {5};
    int missing = 0, complete = 0;
    mp_file_map_init();
    mp_test_write_file(test_path(path, sizeof path, "w"), "1234", 4);
    for (int round = 0; round < mp_test_rounds(3000); round++) {
        bool has[2][LAYERS][PARTS] = {0};
        int order[2 * LAYERS * PARTS], count = 0;
        const uint64_t share = 2 + mp_test_random_u64(&random) % 8;
        for (int part = 0; part < PARTS; part++) { /* most layers are alike */
            const bool weight = mp_test_random_u64(&random) % 3, bias = mp_test_random_u64(&random) % 2;
            for (int layer = 0; layer < LAYERS; layer++) {
                has[0][layer][part] = weight ^ (mp_test_random_u64(&random) % (4 * share) == 0);
                has[1][layer][part] = bias ^ (mp_test_random_u64(&random) % (8 * share) == 0);
            }
        }
        for (int i = 0; i < 2 * LAYERS * PARTS; i++)
            if (has[i % 2][i / 2 / PARTS][i / 2 % PARTS])
                order[count++] = i;
        for (int i = count - 1; i > 0; i--) {
            const int j = (int)(mp_test_random_u64(&random) % (uint64_t)(i + 1)), kept = order[i];
            order[i] = order[j];
            order[j] = kept;
        }
        mp_spec *spec = mp_spec_create();
        mp_weights *weights;
        MP_CHECK_OK(mp_spec_add_file(spec, path, &error), &error);
        for (int i = 0; i < count; i++) {
            snprintf(name, sizeof name, "blk.%d.%s.%s", order[i] / 2 / PARTS, parts[order[i] / 2 % PARTS],
                     order[i] % 2 ? "bias" : "weight");
            const mp_tensor_entry entry = {.name = name, .dtype = MP_F32, .ndim = 1, .shape = {1}, .nbytes = 4};
            MP_CHECK_OK(mp_spec_add_tensor(spec, &entry, &error), &error);
        }
        MP_CHECK_OK(mp_weights_open(spec, &weights, &error), &error);
        expect_missing(has, order, count, name);
        const mp_status status = mp_weights_check_biases(weights, "blk.", LAYERS, &error);
        if (strcmp(status == MP_OK ? "" : error.field, name) != 0)
            MP_FAIL("round %d: %s, expected \"%s\"", round, status == MP_OK ? "none is missing" : error.message, name);
        name[0] ? missing++ : complete++;
        mp_weights_close(weights);
        mp_spec_unpin(spec);
    }
    MP_CHECK(missing > 50 && complete > 50);
}

/* --- the lock of identities --- */

static mp_spec *shared;
static _Atomic int begun, ended, started_by_fork;

static void use_identities(void *arg) {
    const bool stores = arg != NULL;
    const mp_file_id id = {.size = 3};
    mp_file_id known;
    while (!atomic_load(&started_by_fork))
        mp_sys_sleep_ns(100000);
    atomic_fetch_add(&begun, 1);
    MP_CHECK(stores ? mp_spec_same_file(shared, 0, &id) : mp_spec_file_identity(shared, 0, &known));
    atomic_fetch_add(&ended, 1);
}

/* Runs in the forking thread, after the handler of specs has taken the lock. */
static void while_locked(void) {
    atomic_store(&started_by_fork, 1);
    while (atomic_load(&begun) < 2)
        mp_sys_sleep_ns(100000);
    mp_sys_sleep_ns(20000000);
    MP_CHECK_INT(atomic_load(&ended), 0);
}

/* Each function that reads or stores an identity waits for a fork that holds the lock. The child has a new lock. */
MP_TEST(files_spec_identities_wait_for_a_fork) {
    static const mp_fork_handlers handlers = {.before = while_locked};
    const mp_file_id id = {.size = 3};
    mp_error error;
    mp_thread threads[2];
    int status;
    shared = mp_spec_create();
    MP_CHECK_OK(mp_spec_add_file(shared, "/a", &error), &error);
    MP_CHECK(mp_spec_same_file(shared, 0, &id));
    MP_CHECK_OK(mp_fork_register(MP_FORK_EVENTS, &handlers, &error), &error); /* a rank after that of specs */
    for (int i = 0; i < 2; i++)
        MP_CHECK_OK(mp_thread_start(&threads[i], "identities", use_identities, i ? &threads : NULL, &error), &error);
    const pid_t child = fork();
    if (child == 0)
        _exit(mp_spec_same_file(shared, 0, &id) ? 0 : 1);
    for (int i = 0; i < 2; i++)
        mp_thread_join(&threads[i]);
    MP_CHECK_INT(atomic_load(&ended), 2);
    MP_CHECK_INT(waitpid(child, &status, 0), child);
    MP_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    mp_spec_unpin(shared);
}
