/* mixer_fixture.h: the tensors and keys of mixers other than attention. */
#ifndef MIXER_FIXTURE_H
#define MIXER_FIXTURE_H

#include "weights_fixture.h"

/* Taps of short convolutions; heads of keys (groups of Mamba-2), heads, components of keys and of values. */
enum { TINY_TAPS = 3, TINY_KEYS = 2, TINY_VALUES = 4, TINY_DK = 7, TINY_DV = 21, TINY_INNER = TINY_VALUES * TINY_DV,
       TINY_CHANNELS = 2 * TINY_KEYS * TINY_DK + TINY_INNER };

typedef struct tiny_mixer_tensor {
    const char *name;
    int rows, columns; /* rows 0: the file has no such tensor */
    float size, centre;
} tiny_mixer_tensor;

/* Add the tensors of a mixer. The first `typed` ones cycle through `types`, the others are F32. */
static inline void tiny_mixer(tiny_file *file, const mp_dtype *types, int type_count, int layer, int typed,
                              const tiny_mixer_tensor *tensors, size_t count) {
    char name[64];
    for (size_t i = 0; i < count; i++) {
        const tiny_mixer_tensor *t = &tensors[i];
        snprintf(name, sizeof name, "blk.%d.%s", layer, t->name);
        if (t->rows > 0)
            tiny_tensor(file, name, (int)i < typed ? types[(layer + (int)i) % type_count] : MP_F32, t->rows,
                        t->columns, t->size, t->centre);
    }
}

static inline void tiny_short_conv(tiny_file *file, const mp_dtype *types, int type_count, int layer) {
    const tiny_mixer_tensor tensors[] = {{"shortconv.in_proj.weight", 3 * TINY_HIDDEN, TINY_HIDDEN, 0.1f, 0},
                                   {"shortconv.out_proj.weight", TINY_HIDDEN, TINY_HIDDEN, 0.1f, 0},
                                   {"shortconv.conv.weight", TINY_HIDDEN, TINY_TAPS, 1, 0}};
    tiny_mixer(file, types, type_count, layer, 2, tensors, sizeof tensors / sizeof *tensors);
}

static inline void tiny_gated_delta_keys(mp_spec *spec, const char *arch) {
    tiny_arch_int(spec, arch, "ssm.conv_kernel", TINY_TAPS);
    tiny_arch_int(spec, arch, "ssm.state_size", TINY_DK);
    tiny_arch_int(spec, arch, "ssm.group_count", TINY_KEYS);
    tiny_arch_int(spec, arch, "ssm.time_step_rank", TINY_VALUES);
    tiny_arch_int(spec, arch, "ssm.inner_size", TINY_INNER);
}

/* joined: with the joined projections of Qwen3-Next. */
static inline void tiny_gated_delta(tiny_file *file, const mp_dtype *types, int type_count, int layer, bool joined) {
    const tiny_mixer_tensor tensors[] = {
        {joined ? "ssm_in.weight" : "attn_qkv.weight", TINY_CHANNELS + joined * TINY_INNER, TINY_HIDDEN, 0.1f, 0},
        {"attn_gate.weight", joined ? 0 : TINY_INNER, TINY_HIDDEN, 0.1f, 0},
        {joined ? "ssm_ba.weight" : "ssm_beta.weight", TINY_VALUES * (joined ? 2 : 1), TINY_HIDDEN, 0.3f, 0},
        {"ssm_alpha.weight", joined ? 0 : TINY_VALUES, TINY_HIDDEN, 0.3f, 0},
        {"ssm_conv1d.weight", TINY_CHANNELS, TINY_TAPS, 1, 0}, {"ssm_a_log", 1, TINY_VALUES, 1, -1.5f},
        {"ssm_dt.bias", 1, TINY_VALUES, 1, 0}, {"ssm_norm.weight", 1, TINY_DV, 0.3f, 1},
        {"ssm_out.weight", TINY_HIDDEN, TINY_INNER, 0.1f, 0}};
    tiny_mixer(file, types, type_count, layer, 4, tensors, sizeof tensors / sizeof *tensors);
}

static inline void tiny_mamba2(tiny_file *file, const mp_dtype *types, int type_count, int layer) {
    const tiny_mixer_tensor tensors[] = {
        {"ssm_in.weight", TINY_INNER + TINY_CHANNELS + TINY_VALUES, TINY_HIDDEN, 0.1f, 0},
        {"ssm_conv1d.weight", TINY_CHANNELS, TINY_TAPS, 1, 0}, {"ssm_conv1d.bias", 1, TINY_CHANNELS, 0.3f, 0},
        {"ssm_a_log", 1, TINY_VALUES, 1, -1.5f}, {"ssm_d", 1, TINY_VALUES, 1, 0},
        {"ssm_dt.bias", 1, TINY_VALUES, 1, 0}, {"ssm_norm.weight", 1, TINY_INNER, 0.3f, 1},
        {"ssm_out.weight", TINY_HIDDEN, TINY_INNER, 0.1f, 0}};
    tiny_mixer(file, types, type_count, layer, 1, tensors, sizeof tensors / sizeof *tensors);
}

#endif
