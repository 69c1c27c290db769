/* Models of an adversary whose files pass the checks of a header: seeded changes of hyper-parameters and weights. A
 * model is refused with a typed error, or its requests give finite results or MP_NUMERIC. The changes that
 * tests/fuzz/fuzz_model.c found are in tests/fuzz/corpus/model. */
#include <dirent.h>

#include "base/options.h"
#include "hostile_fixture.h"
#include "missing_fixture.h"

static void begin(void) {
    mp_error error;
    MP_CHECK_OK(mp_options_init(&error), &error);
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
}

/* The base models work, or the test would see only one refusal. */
MP_TEST(models_hostile_bases_are_valid) {
    mp_error error;
    begin();
    for (uint8_t kind = 0; kind < HOSTILE_KINDS; kind++)
        MP_CHECK_OK(hostile_run(&kind, 1, &error), &error);
    hostile_free();
}

MP_TEST_SECONDS(models_hostile_values, 120) {
    mp_error error;
    int finished = 0, refused = 0, numeric = 0;
    mp_test_random random = {20};
    begin();
    for (int round = 0; round < mp_test_rounds(300); round++) {
        uint8_t data[1 + 4 * 3];
        for (size_t i = 0; i < sizeof data; i++)
            data[i] = (uint8_t)mp_test_random_u64(&random);
        const mp_status status = hostile_run(data, sizeof data - 4 * (size_t)(round % 3), &error);
        finished += status == MP_OK;
        numeric += status == MP_NUMERIC;
        refused += status != MP_OK && status != MP_NUMERIC;
    }
    /* the changes reach the arithmetic: each of the three results is frequent */
    MP_CHECK(finished >= mp_test_rounds(30) && numeric >= mp_test_rounds(30) && refused >= mp_test_rounds(30));
    hostile_free();
}

MP_TEST_SECONDS(models_hostile_corpus, 120) {
    mp_error error;
    char path[1024];
    int count = 0;
    begin();
    snprintf(path, sizeof path, "%s/fuzz/corpus/model", mp_test_root());
    DIR *folder = opendir(path);
    MP_CHECK(folder);
    for (const struct dirent *entry; (entry = readdir(folder));) {
        uint8_t data[1 + 4 * HOSTILE_CHANGES];
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/fuzz/corpus/model/%s", mp_test_root(), entry->d_name);
        FILE *file = fopen(path, "rb");
        MP_CHECK(file);
        const size_t size = fread(data, 1, sizeof data, file);
        fclose(file);
        (void)hostile_run(data, size, &error);
        count++;
    }
    closedir(folder);
    MP_CHECK(count > 0);
    hostile_free();
}

/* Tensors without which a model is complete: the second token type, and biases outside layers. */
static bool is_optional(const mp_spec *spec, const char *name) {
    return strcmp(name, "padding") == 0 ||
           (strcmp(mp_spec_architecture(spec), "bert") == 0 &&
            (strcmp(name, "token_types.weight") == 0 || strcmp(name, "token_embd_norm.bias") == 0 ||
             strcmp(name, "dense.0.bias") == 0));
}

/* A model without one of its tensors, or with a tensor that lacks a row, is refused with a typed error. The error
 * names this tensor, or another one whose shape then does not fit. */
MP_TEST_SECONDS(models_hostile_missing_tensors, 60) {
    mp_error error;
    int tried = 0, named = 0;
    begin();
    for (int kind = 0; kind < HOSTILE_KINDS; kind++) {
        const mp_spec *base = hostile_base_of(kind)->spec;
        for (int t = 0; t < mp_spec_tensor_count(base); t++) {
            const char *name = mp_spec_tensor_at(base, t)->name;
            if ((strncmp(name, "blk.", 4) == 0 && strncmp(name, "blk.1.", 6) != 0) || is_optional(base, name))
                continue;
            for (int fewer = 0; fewer < 2; fewer++) {
                const bool is_bert = strcmp(mp_spec_architecture(base), "bert") == 0;
                if (fewer && is_bert && strcmp(name, "token_embd.weight") == 0)
                    continue; /* a smaller vocabulary */
                const mp_status status = load_only(spec_without(base, t, fewer), MP_COMPUTE_AUTO, &error);
                if (status != MP_FORMAT && status != MP_UNSUPPORTED)
                    MP_FAIL("%s %s %s: status %d", mp_spec_architecture(base), fewer ? "with a shorter" : "without",
                            name, status);
                tried++;
                named += strcmp(error.field, name) == 0;
            }
        }
    }
    MP_CHECK(tried > 200 && named >= tried - 12);
    hostile_free();
}
