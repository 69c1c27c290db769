/* test_models_model.c: the table of architectures, the error for an unknown one, and speed estimates that are copied
 * between processes. */
#include <stdatomic.h>

#include "base/alloc.h"
#include "mp_test.h"
#include "models/arch.h"
#include "models/model.h"

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
