/* Models of an adversary whose files pass the checks of a header: seeded changes of hyper-parameters and weights. A
 * model is refused with a typed error, or its requests give finite results or MP_NUMERIC. The changes that
 * tests/fuzz/fuzz_model.c found are in tests/fuzz/corpus/model. */
#include <dirent.h>

#include "base/options.h"
#include "hostile_fixture.h"

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
}
