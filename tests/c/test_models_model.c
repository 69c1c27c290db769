/* test_models_model.c: the table of architectures, the error for an unknown one, and speed estimates that are copied
 * between processes. */
#include <stdatomic.h>

#include "base/alloc.h"
#include "mp_test.h"
#include "models/arch.h"
#include "models/model.h"

MP_TEST(models_model_lists_all_architectures) {
    static const char *const names[] = {
#define MP_ARCH(name, CAPABILITY, family, flags) #name,
#include "models/archs.def"
#undef MP_ARCH
    };
    const int count = sizeof names / sizeof *names;
    MP_CHECK_INT(mp_arch_count(), count);
    MP_CHECK(!mp_arch_at(-1) && !mp_arch_at(count));
    for (int i = 0; i < count; i++) {
        MP_CHECK_STR(mp_arch_at(i)->name, names[i]);
        MP_CHECK_STR(mp_arch_find(names[i])->name, names[i]);
    }
    MP_CHECK(!mp_arch_find("") && !mp_arch_find("llam"));
}

/* Append names to a list of at most 95 characters that leaves room for ", ...". Returns false if the list is full. */
static bool list_names(char *list, const char *name, bool alike) {
    for (int i = 0; i < mp_arch_count(); i++) {
        const char *arch = mp_arch_at(i)->name;
        if ((strncmp(arch, name, 3) == 0) != alike)
            continue;
        if (strlen(list) + strlen(", ") + strlen(arch) + strlen(", ...") > 95) {
            strcat(list, ", ...");
            return false;
        }
        strcat(list, *list ? ", " : "");
        strcat(list, arch);
    }
    return true;
}

/* The error names the architectures that are spelled alike first. */
MP_TEST(models_model_suggests_architectures) {
    static const char *const names[] = {"qwen9", "gemma", "bert_x", "xyz", "l", ""};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char list[128] = "";
        mp_spec *spec = mp_spec_create();
        mp_loader loader;
        mp_error error;
        if (*names[i])
            MP_CHECK_OK(mp_spec_set_architecture(spec, names[i], &error), &error);
        mp_spec_freeze(spec);
        if (list_names(list, names[i], true))
            list_names(list, names[i], false);
        MP_CHECK_STATUS(mp_model_loader(spec, MP_COMPUTE_AUTO, &loader, &error), MP_FORMAT, &error);
        MP_CHECK_STR(error.allowed, list);
        MP_CHECK_STR(error.got, *names[i] ? names[i] : "missing");
        mp_spec_unpin(spec);
    }
}

/* Estimates go to the same places of the other model. An unknown estimate (0) leaves that of the model alone. */
MP_TEST(models_model_copies_speed_estimates) {
    for (int unused = 0; unused < MP_MODEL_SPEEDS; unused++) {
        _Atomic uint64_t values[MP_MODEL_SPEEDS];
        uint64_t speed[MP_MODEL_SPEEDS], got[MP_MODEL_SPEEDS];
        mp_model_base base = {0};
        for (int i = 0; i < MP_MODEL_SPEEDS; i++) {
            atomic_init(&values[i], 10 + (uint64_t)i);
            speed[i] = 20 + (uint64_t)i;
            base.speed[i] = i == unused ? NULL : &values[i];
        }
        mp_model_set_speed(&base.base, speed);
        mp_model_get_speed(&base.base, got);
        for (int i = 0; i < MP_MODEL_SPEEDS; i++)
            MP_CHECK_INT(got[i], i == unused ? 0 : speed[i]);
        MP_CHECK_INT(atomic_load(&values[unused]), 10 + unused);
        memset(speed, 0, sizeof speed);
        mp_model_set_speed(&base.base, speed);
        mp_model_get_speed(&base.base, got);
        for (int i = 0; i < MP_MODEL_SPEEDS; i++)
            MP_CHECK_INT(got[i], i == unused ? 0 : 20 + i);
    }
}
