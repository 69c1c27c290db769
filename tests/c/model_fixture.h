/* model_fixture.h: tiny models that a test generates: the spec of a file of seeded random weights, a loaded model. */
#ifndef MODEL_FIXTURE_H
#define MODEL_FIXTURE_H

#include <math.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/cpu.h"
#include "kernels/scaled.h"
#include "mixer_fixture.h"
#include "models/arch.h"
#include "models/model.h"
#include "models/nn/weight_store.h"

static const char *tiny_weights; /* value of `mpool.weights` in the specs made next; NULL: none */

/* The layers of the encoders made next; NULL: F32 matrices, and one seed for the file. */
typedef struct tiny_layer {
    mp_dtype dtype; /* type of all matrices */
    uint64_t seed;
} tiny_layer;
static const tiny_layer *tiny_layers;

static inline void tiny_use(mp_spec *spec) {
    mp_error error;
    if (tiny_weights) /* else the default */
        MP_CHECK_OK(mp_spec_set(spec, "mpool.weights",
                                &(mp_value){.type = MP_VALUE_STRING,
                                            .gguf_type = -1,
                                            .count = strlen(tiny_weights),
                                            .as.string = tiny_weights},
                                &error),
                    &error);
}

/* Decoder architecture and optional features. The file has the tensors that the flags ask for. */
typedef struct tiny_kind {
    const char *arch; /* a row of archs.def */
    uint32_t flags;   /* MP_DECODER_* besides those of the row: tests must load the model with them */
    int window;       /* window of all layers except the second; 0 = none */
    bool uneven;   /* the second layer has one KV head */
    bool layer_norms, plain_ffn, one_norm; /* layer norms with biases; no gates; one norm for both blocks of a layer */
    const int64_t *blocks; /* [TINY_LAYERS] `mpool.layer_blocks`, or NULL */
    const int64_t *mixers; /* [TINY_LAYERS] `mpool.layer_mixers`, or NULL */
    bool scaled;   /* scale factors, softcaps, a separate rotary base for windows, a layer without rotation */
    int long_from; /* LongRoPE from this position; 0 = none */
    int context;   /* 0 = TINY_CONTEXT */
    int experts;   /* number of experts, two used per row; 0 = none. The last expert is never chosen, because its router
                    * row is NaN; its weights are on pages of their own at the end of the file */
    bool biased;   /* biases, attention sinks and clamped gates; requires experts */
    size_t *rest;  /* out: offset of the last expert's weights in the file, or NULL */
    void (*more)(tiny_file *file); /* adds further keys and tensors, or NULL */
} tiny_kind;

/* The flags of the decoder. A vision row has those of its image network; its decoder has none that concern tensors. */
static inline uint32_t tiny_flags(const tiny_kind *kind) {
    const mp_arch *arch = mp_arch_find(kind->arch);
    return (arch->capability == MP_TEXT_TO_TEXT ? arch->flags : 0) | kind->flags;
}

static inline void tiny_expert(tiny_file *file, const mp_dtype *types, int type_count, int layer, int expert) {
    static const char *const parts[] = {"gate", "up", "down"};
    char name[64];
    for (int p = 0; p < 3; p++) {
        snprintf(name, sizeof name, "blk.%d.ffn_%s.%d.weight", layer, parts[p], expert);
        tiny_tensor(file, name, types[(p == 2 ? 1 : 0) % type_count], p == 2 ? TINY_HIDDEN : TINY_EXPERT,
                    p == 2 ? TINY_EXPERT : TINY_HIDDEN, 0.1f, 0);
    }
}

/* Set the keys of multi-head latent attention, and of DeepSeek's grouped routing and shared expert. */
static inline void tiny_latent_keys(mp_spec *spec, const tiny_kind *kind) {
    mp_error error;
    mp_value sigmoid = {.type = MP_VALUE_STRING, .gguf_type = -1, .count = 7, .as.string = "sigmoid"};
    mp_value yes = {.type = MP_VALUE_BOOL, .gguf_type = -1, .count = 1, .as.integer = 1};
    tiny_arch_int(spec, kind->arch, "attention.kv_lora_rank", TINY_RANK);
    tiny_arch_int(spec, kind->arch, "attention.q_lora_rank", TINY_RANK);
    tiny_arch_int(spec, kind->arch, "attention.key_length_mla", 2 * TINY_PART);
    tiny_arch_int(spec, kind->arch, "attention.value_length_mla", TINY_PART);
    tiny_arch_int(spec, kind->arch, "rope.dimension_count", TINY_PART);
    tiny_arch_int(spec, kind->arch, "expert_shared_feed_forward_length", TINY_EXPERT);
    tiny_int(spec, "mpool.expert_groups", kind->experts / 2);
    tiny_int(spec, "mpool.expert_groups_used", 2);
    tiny_float(spec, "mpool.expert_scale", 1.5);
    MP_CHECK_OK(mp_spec_set(spec, "mpool.expert_gate", &sigmoid, &error), &error);
    MP_CHECK_OK(mp_spec_set(spec, "mpool.expert_corrected", &yes, &error), &error);
}

/* Make a vector [experts], the tensor added last, exclude the last expert. */
static inline void tiny_exclude_last(tiny_file *file) {
    memcpy(file->bytes + file->used - sizeof(float), &(float){-1e30f}, sizeof(float));
}

static inline void tiny_latent_vectors(tiny_file *file, const tiny_kind *kind, int layer) {
    static const char *const norms[] = {"attn_q_a_norm", "attn_kv_a_norm"};
    char name[64];
    for (int i = 0; i < 2; i++) {
        snprintf(name, sizeof name, "blk.%d.%s.weight", layer, norms[i]);
        tiny_tensor(file, name, MP_F32, 1, TINY_RANK, 0.3f, 1);
    }
    snprintf(name, sizeof name, "blk.%d.exp_probs_b.bias", layer);
    tiny_tensor(file, name, MP_F32, 1, kind->experts, 0.2f, 0);
    tiny_exclude_last(file);
}

/* Change the router [experts, TINY_HIDDEN], the tensor added last, so that the last expert is never among the best two:
 * it loses every tie with experts 0 and 1, unless its bias or correction excludes it. */
static inline void tiny_forbid_last(tiny_file *file, const tiny_kind *kind) {
    float *router = (float *)(void *)(file->bytes + file->used) - (ptrdiff_t)kind->experts * TINY_HIDDEN;
    const bool latents = tiny_flags(kind) & MP_DECODER_LATENT_ATTENTION;
    for (int e = 1; e < kind->experts && !latents && !kind->biased; e += kind->experts - 2)
        memcpy(router + e * TINY_HIDDEN, router, TINY_HIDDEN * sizeof(float));
}

/* Gemma 4: layer 1 has full attention, wide heads and no projection of values; layer 2 reads layer 0's keys and values,
 * and its network is wide. */
enum { TINY_INPUTS = 32 };
static inline bool tiny_is_gemma4(const tiny_kind *kind) { return strcmp(kind->arch, "gemma4") == 0; }
static inline int tiny_head(const tiny_kind *kind, int layer) {
    return TINY_HIDDEN / TINY_HEADS * (tiny_is_gemma4(kind) && layer == 1 ? 2 : 1);
}
static inline bool tiny_lacks(const tiny_kind *kind, int layer, const char *name) {
    const bool v = strcmp(name, "attn_v") == 0, k = strncmp(name, "attn_k", 6) == 0;
    return tiny_is_gemma4(kind) && ((layer == 2 && (k || v)) || (layer == 1 && v));
}

/* Set its keys and add its tensors, those of the layers' inputs too, or those of experts. */
static inline void tiny_gemma4(tiny_file *file, const tiny_kind *kind) {
    static const int64_t ropes[TINY_LAYERS] = {1, 0, 1}, widths[TINY_LAYERS] = {TINY_FFN, TINY_FFN, 2 * TINY_FFN};
    static const char *const norms[] = {"post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"};
    char name[64];
    tiny_arch_int(file->spec, "gemma4", "attention.key_length", tiny_head(kind, 1));
    tiny_arch_int(file->spec, "gemma4", "attention.key_length_swa", tiny_head(kind, 0));
    tiny_arch_int(file->spec, "gemma4", "attention.shared_kv_layers", 1);
    tiny_arch_int(file->spec, "gemma4", "embedding_length_per_layer_input", kind->experts ? 0 : TINY_INPUTS);
    tiny_ints(file->spec, "gemma4.feed_forward_length", widths, TINY_LAYERS);
    tiny_ints(file->spec, "mpool.rope_layers", ropes, TINY_LAYERS);
    tiny_float(file->spec, "mpool.rope_local_base", 500);
    tiny_float(file->spec, "mpool.attention_scale", 0.2);
    tiny_flag(file->spec, "mpool.key_values", true);
    tiny_flag(file->spec, "mpool.value_norms", true);
    tiny_flag(file->spec, "mpool.experts_beside", true);
    if (!kind->experts) {
        tiny_tensor(file, "per_layer_token_embd.weight", MP_Q8_0, TINY_VOCAB, TINY_LAYERS * TINY_INPUTS, 0.5f, 0);
        tiny_tensor(file, "per_layer_model_proj.weight", MP_Q8_0, TINY_LAYERS * TINY_INPUTS, TINY_HIDDEN, 0.5f, 0);
        tiny_tensor(file, "per_layer_proj_norm.weight", MP_F32, 1, TINY_INPUTS, 0.3f, 1);
    }
    for (int l = 0; l < TINY_LAYERS; l++) {
        const struct {
            const char *name;
            mp_dtype dtype;
            int rows, columns;
            float offset;
        } inputs[] = {{"inp_gate.weight", MP_Q8_0, TINY_INPUTS, TINY_HIDDEN, 0},
                      {"proj.weight", MP_Q8_0, TINY_HIDDEN, TINY_INPUTS, 0},
                      {"post_norm.weight", MP_F32, 1, TINY_HIDDEN, 1}},
          experts[] = {{"ffn_gate_inp.scale", MP_F32, 1, TINY_HIDDEN, 1},
                       {"ffn_down_exps.scale", MP_F32, 1, kind->experts, 1}};
        for (size_t i = 0; !kind->experts && i < sizeof inputs / sizeof *inputs; i++) {
            snprintf(name, sizeof name, "blk.%d.%s", l, inputs[i].name);
            tiny_tensor(file, name, inputs[i].dtype, inputs[i].rows, inputs[i].columns, 0.3f, inputs[i].offset);
        }
        for (size_t i = 0; kind->experts && i < sizeof experts / sizeof *experts; i++) {
            snprintf(name, sizeof name, "blk.%d.%s", l, experts[i].name);
            tiny_tensor(file, name, MP_F32, 1, experts[i].columns, 0.3f, 1);
        }
        for (size_t i = 0; kind->experts && i < sizeof norms / sizeof *norms; i++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", l, norms[i]);
            tiny_tensor(file, name, MP_F32, 1, TINY_HIDDEN, 0.3f, 1);
        }
        snprintf(name, sizeof name, "blk.%d.layer_output_scale.weight", l);
        tiny_tensor(file, name, MP_F32, 1, 1, 0.2f, 0.7f);
    }
}

/* Make the spec of a decoder whose matrices cycle through `types`. infinite: -1, or a token whose embedding row (F32,
 * Q8_0) is infinite; the output matrix is then separate, and each query head has a KV head of its own, so that rows
 * share attention tiles. */
static inline mp_spec *tiny_decoder_spec_as(const tiny_kind *kind, const mp_dtype *types, int type_count, uint64_t seed,
                                            int32_t infinite) {
    mp_error error;
    char path[512], name[64];
    const uint32_t flags = tiny_flags(kind);
    const bool latent = flags & MP_DECODER_LATENT_ATTENTION;
    snprintf(path, sizeof path, "%s/tiny-%llu.bin", mp_test_directory(), (unsigned long long)seed);
    tiny_file file = {.spec = mp_spec_create(), .random = {seed}};
    MP_CHECK(file.spec);
    MP_CHECK_OK(mp_spec_set_architecture(file.spec, kind->arch, &error), &error);
    MP_CHECK_OK(mp_spec_add_file(file.spec, path, &error), &error);
    tiny_arch_int(file.spec, kind->arch, "block_count", TINY_LAYERS);
    tiny_arch_int(file.spec, kind->arch, "embedding_length", TINY_HIDDEN);
    if (!tiny_is_gemma4(kind))
        tiny_arch_int(file.spec, kind->arch, "feed_forward_length", TINY_FFN);
    tiny_arch_int(file.spec, kind->arch, "attention.head_count", TINY_HEADS);
    int kv_heads = infinite < 0 ? TINY_KV_HEADS : TINY_HEADS;
    int64_t kv_counts[TINY_LAYERS] = {kv_heads, kind->uneven ? 1 : kv_heads, kv_heads};
    snprintf(name, sizeof name, "%s.attention.head_count_kv", kind->arch);
    if (kind->uneven)
        tiny_ints(file.spec, name, kv_counts, TINY_LAYERS);
    else
        tiny_int(file.spec, name, kv_heads);
    tiny_arch_int(file.spec, kind->arch, "context_length", kind->context ? kind->context : TINY_CONTEXT);
    tiny_arch_float(file.spec, kind->arch, "attention.layer_norm_rms_epsilon", 1e-5);
    tiny_arch_float(file.spec, kind->arch, "rope.freq_base", 10000);
    if (kind->window) {
        int64_t windowed[TINY_LAYERS] = {1, 0, 1};
        tiny_arch_int(file.spec, kind->arch, "attention.sliding_window", kind->window);
        tiny_ints(file.spec, "mpool.window_layers", windowed, TINY_LAYERS);
    }
    if (kind->experts) {
        tiny_arch_int(file.spec, kind->arch, "expert_count", kind->experts);
        tiny_arch_int(file.spec, kind->arch, "expert_used_count", 2);
        tiny_arch_int(file.spec, kind->arch, "expert_feed_forward_length", TINY_EXPERT);
    }
    if (kind->biased)
        tiny_float(file.spec, "mpool.expert_clamp", 0.5);
    if (kind->layer_norms) {
        tiny_flag(file.spec, "mpool.root_norms", false);
        tiny_arch_float(file.spec, kind->arch, "attention.layer_norm_epsilon", 1e-3);
    }
    if (kind->plain_ffn)
        tiny_flag(file.spec, "mpool.gated_ffn", false);
    if (kind->one_norm)
        tiny_flag(file.spec, "mpool.one_norm", true);
    if (kind->blocks)
        tiny_ints(file.spec, "mpool.layer_blocks", kind->blocks, TINY_LAYERS);
    if (kind->mixers) {
        tiny_ints(file.spec, "mpool.layer_mixers", kind->mixers, TINY_LAYERS);
        tiny_arch_int(file.spec, kind->arch, "shortconv.l_cache", TINY_TAPS);
        tiny_gated_delta_keys(file.spec, kind->arch);
    }
    if (latent)
        tiny_latent_keys(file.spec, kind);
    if (kind->scaled) {
        int64_t ropes[TINY_LAYERS] = {1, 0, -1};
        static const struct {
            const char *key;
            double value;
        } scales[] = {{"mpool.embedding_scale", 3},     {"mpool.residual_scale", 0.7}, {"mpool.output_scale", 0.5},
                      {"mpool.attention_softcap", 2},   {"mpool.output_softcap", 9},   {"mpool.attention_scale", 0.2},
                      {"mpool.rope_local_base", 500.0}, {"mpool.norm_offset", 0.25}};
        tiny_ints(file.spec, "mpool.rope_layers", ropes, TINY_LAYERS);
        for (size_t i = 0; i < sizeof scales / sizeof *scales; i++)
            tiny_float(file.spec, scales[i].key, scales[i].value);
    }
    if (kind->long_from) {
        double factors[TINY_HIDDEN / TINY_HEADS / 2];
        mp_value list = {.type = MP_VALUE_FLOATS, .gguf_type = -1, .count = sizeof factors / sizeof *factors,
                         .as.reals = factors};
        tiny_int(file.spec, "mpool.rope_long_from", kind->long_from);
        for (int l = 0; l < 2; l++) {
            for (uint64_t i = 0; i < list.count; i++)
                factors[i] = 1 + 0.3 * (double)i * l;
            MP_CHECK_OK(mp_spec_set(file.spec, l ? "mpool.rope_long_factors" : "mpool.rope_short_factors", &list,
                                    &error), &error);
        }
    }
    int kv = TINY_HIDDEN / TINY_HEADS * kv_heads, at = 0;
    const struct {
        const char *name;
        int rows, columns;
    } matrices[] = {{"attn_q", flags & MP_DECODER_GATED_HEADS ? 2 * TINY_HIDDEN : TINY_HIDDEN, TINY_HIDDEN},
                    {"attn_k", kv, TINY_HIDDEN}, {"attn_v", kv, TINY_HIDDEN},
                    {"attn_head_gate", strcmp(kind->arch, "lfm3") == 0 ? TINY_HEADS : 0, TINY_HIDDEN},
                    {"attn_output", TINY_HIDDEN, TINY_HIDDEN}, {"ffn_gate", TINY_FFN, TINY_HIDDEN},
                    {"ffn_up", TINY_FFN, TINY_HIDDEN}, {"ffn_down", TINY_HIDDEN, TINY_FFN}};
    const int parts = TINY_HEADS * 2 * TINY_PART;
    const struct {
        const char *name;
        int rows, columns;
    } latents[] = {{"attn_q_a", TINY_RANK, TINY_HIDDEN}, {"attn_q_b", parts, TINY_RANK},
                   {"attn_kv_a_mqa", TINY_RANK + TINY_PART, TINY_HIDDEN}, {"attn_kv_b", parts, TINY_RANK},
                   {"attn_output", TINY_HIDDEN, TINY_HEADS * TINY_PART}, {"ffn_gate_shexp", TINY_EXPERT, TINY_HIDDEN},
                   {"ffn_up_shexp", TINY_EXPERT, TINY_HIDDEN}, {"ffn_down_shexp", TINY_HIDDEN, TINY_EXPERT}};
    tiny_tensor(&file, "token_embd.weight", types[0], TINY_VOCAB, TINY_HIDDEN, 0.5f, 0);
    if (infinite >= 0) {
        static const uint16_t scale = 0x7C00;
        const mp_dtype_row *type = mp_dtype_get(types[0]);
        size_t row_bytes = (size_t)(TINY_HIDDEN / type->items * type->bytes);
        uint8_t *row = file.bytes + file.used - (size_t)(TINY_VOCAB - infinite) * row_bytes;
        MP_CHECK(types[0] == MP_F32 || types[0] == MP_Q8_0);
        for (uint8_t *block = row; block < row + row_bytes; block += type->bytes)
            memcpy(block, types[0] == MP_F32 ? (const void *)&(float){INFINITY} : &scale, types[0] == MP_F32 ? 4 : 2);
        tiny_tensor(&file, "output.weight", types[0], TINY_VOCAB, TINY_HIDDEN, 0.5f, 0);
    }
    tiny_tensor(&file, "output_norm.weight", MP_F32, 1, TINY_HIDDEN, 0.3f, 1);
    for (int l = 0; l < TINY_LAYERS; l++) {
        for (size_t m = 0; latent && m < sizeof latents / sizeof *latents; m++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", l, latents[m].name);
            tiny_tensor(&file, name, types[at++ % type_count], latents[m].rows, latents[m].columns, 0.1f, 0);
        }
        if (latent)
            tiny_latent_vectors(&file, kind, l);
        for (size_t m = 0; !latent && m < sizeof matrices / sizeof *matrices; m++) {
            const bool ffn = strncmp(matrices[m].name, "ffn", 3) == 0;
            const bool experts = kind->experts && !tiny_is_gemma4(kind);
            if (matrices[m].rows == 0 || (experts && ffn) || (!ffn && kind->mixers && kind->mixers[l] > 0) ||
                (kind->plain_ffn && strcmp(matrices[m].name, "ffn_gate") == 0) ||
                (kind->blocks && kind->blocks[l] == (ffn ? 1 : 2)) || tiny_lacks(kind, l, matrices[m].name))
                continue;
            snprintf(name, sizeof name, "blk.%d.%s.weight", l, matrices[m].name);
            const bool is_kv = m == 1 || m == 2, wide = ffn && l == 2 && tiny_is_gemma4(kind);
            int rows = is_kv ? tiny_head(kind, l) * (int)kv_counts[l] : matrices[m].rows, columns = matrices[m].columns;
            const bool last = strcmp(matrices[m].name, "attn_output") == 0 || strcmp(matrices[m].name, "ffn_down") == 0;
            *(last ? &columns : &rows) *= wide ? 2 : is_kv ? 1 : ffn ? 1 : tiny_head(kind, l) / tiny_head(kind, 0);
            tiny_tensor(&file, name, types[at++ % type_count], rows, columns, 0.1f, 0);
        }
        if (kind->mixers && kind->mixers[l] == 1)
            tiny_short_conv(&file, types, type_count, l);
        if (kind->mixers && kind->mixers[l] == 2)
            tiny_gated_delta(&file, types, type_count, l, strcmp(kind->arch, "qwen3next") == 0);
        if (kind->mixers && kind->mixers[l] == 3)
            tiny_mamba2(&file, types, type_count, l);
        for (int e = 0; e + 1 < kind->experts; e++)
            tiny_expert(&file, types, type_count, l, e);
        const struct {
            const char *name;
            int rows, columns;
        } biases[] = {{"attn_q.bias", 1, TINY_HIDDEN}, {"attn_k.bias", 1, kv}, {"attn_v.bias", 1, kv},
                      {"attn_output.bias", 1, TINY_HIDDEN}, {"ffn_gate_inp.bias", 1, kind->experts},
                      {"attn_sinks.weight", 1, TINY_HEADS}, {"ffn_gate_exps.bias", kind->experts, TINY_EXPERT},
                      {"ffn_up_exps.bias", kind->experts, TINY_EXPERT},
                      {"ffn_down_exps.bias", kind->experts, TINY_HIDDEN}};
        for (size_t i = 0; kind->biased && i < sizeof biases / sizeof *biases; i++) {
            snprintf(name, sizeof name, "blk.%d.%s", l, biases[i].name);
            tiny_tensor(&file, name, MP_F32, biases[i].rows, biases[i].columns, 0.4f, 0);
            if (strcmp(biases[i].name, "ffn_gate_inp.bias") == 0)
                tiny_exclude_last(&file);
        }
        if (kind->experts) {
            snprintf(name, sizeof name, "blk.%d.ffn_gate_inp.weight", l);
            tiny_tensor(&file, name, MP_F32, kind->experts, TINY_HIDDEN, 0.3f, 0);
            tiny_forbid_last(&file, kind);
        }
        const bool mixes = kind->mixers && kind->mixers[l] > 0; /* the mixer is not attention */
        const int head = flags & MP_DECODER_HEAD_NORMS ? tiny_head(kind, l) : 0;
        const bool wide = flags & MP_DECODER_QUERY_NORMS, one = kind->one_norm || (kind->blocks && kind->blocks[l]);
        const struct {
            const char *name;
            int items; /* 0: the file has no such norm */
        } norms[] = {{"attn_norm", flags & MP_DECODER_NO_INPUT_NORMS ? 0 : TINY_HIDDEN},
                     {"ffn_norm", flags & MP_DECODER_NO_INPUT_NORMS || one ? 0 : TINY_HIDDEN},
                     {"post_attention_norm", flags & MP_DECODER_OUTPUT_NORMS ? TINY_HIDDEN : 0},
                     {"post_ffw_norm", flags & MP_DECODER_OUTPUT_NORMS ? TINY_HIDDEN : 0},
                     {"attn_q_norm", mixes ? 0 : wide ? TINY_HIDDEN : head},
                     {"attn_k_norm", mixes || tiny_lacks(kind, l, "attn_k_norm") ? 0 : wide ? kv : head}};
        for (size_t i = 0; i < sizeof norms / sizeof *norms; i++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", l, norms[i].name);
            if (norms[i].items > 0)
                tiny_tensor(&file, name, MP_F32, 1, norms[i].items, 0.3f, 1);
            snprintf(name, sizeof name, "blk.%d.%s.bias", l, norms[i].name);
            if (norms[i].items > 0 && kind->layer_norms)
                tiny_tensor(&file, name, MP_F32, 1, norms[i].items, 0.3f, 0);
        }
    }
    size_t rest = file.used;
    for (int l = 0; l < TINY_LAYERS && kind->experts; l++) {
        if (l == 0)
            tiny_tensor(&file, "padding", MP_F32, 1, TINY_PADDING, 0.1f, 0);
        tiny_expert(&file, types, type_count, l, kind->experts - 1);
    }
    if (kind->rest)
        *kind->rest = rest;
    if (tiny_is_gemma4(kind))
        tiny_gemma4(&file, kind);
    if (kind->more)
        kind->more(&file);
    tiny_tokens(file.spec);
    tiny_use(file.spec);
    mp_spec_freeze(file.spec);
    mp_test_write_file(path, file.bytes, file.used);
    free(file.bytes);
    return file.spec;
}

static inline mp_spec *tiny_decoder_spec_with(const mp_dtype *types, int type_count, uint64_t seed, int32_t infinite) {
    return tiny_decoder_spec_as(&(tiny_kind){.arch = "llama"}, types, type_count, seed, infinite);
}

static inline mp_spec *tiny_decoder_spec(const mp_dtype *types, int type_count, uint64_t seed) {
    return tiny_decoder_spec_with(types, type_count, seed, -1);
}

enum { TINY_WIDTH = 64, TINY_ENCODER_LAYERS = 2, TINY_ENCODER_FFN = 128, TINY_POSITIONS = 96 };

static int tiny_encoder_heads = 4; /* heads in the specs made next */

/* Make the spec of an fp32 encoder. poison: make the embedding of token 7 NaN. dense: add a dense layer after pooling,
 * with as many outputs as inputs. more: adds further keys and tensors, or NULL. */
static inline mp_spec *tiny_encoder_spec_with(bool poison, bool dense, void (*more)(tiny_file *file)) {
    mp_error error;
    char path[512], name[64];
    static int made; /* models with and without heads may exist at the same time */
    snprintf(path, sizeof path, "%s/encoder%d-%d.bin", mp_test_directory(), dense, more ? ++made : 0);
    tiny_file file = {.spec = mp_spec_create(), .random = {11}};
    MP_CHECK_OK(mp_spec_set_architecture(file.spec, "bert", &error), &error);
    MP_CHECK_OK(mp_spec_add_file(file.spec, path, &error), &error);
    tiny_int(file.spec, "bert.block_count", TINY_ENCODER_LAYERS);
    tiny_int(file.spec, "bert.embedding_length", TINY_WIDTH);
    tiny_int(file.spec, "bert.feed_forward_length", TINY_ENCODER_FFN);
    tiny_int(file.spec, "bert.attention.head_count", tiny_encoder_heads);
    tiny_int(file.spec, "bert.context_length", TINY_POSITIONS);
    tiny_float(file.spec, "bert.attention.layer_norm_epsilon", 1e-12);
    tiny_tensor(&file, "token_embd.weight", MP_F32, TINY_VOCAB, TINY_WIDTH, 1, 0);
    if (poison) /* the embedding of token 7 */
        memset(file.bytes + file.used - (size_t)(TINY_VOCAB - 7) * TINY_WIDTH * 4, 0xFF, 4);
    tiny_tensor(&file, "position_embd.weight", MP_F32, TINY_POSITIONS, TINY_WIDTH, 0.3f, 0);
    tiny_tensor(&file, "token_types.weight", MP_F32, 2, TINY_WIDTH, 0.3f, 0);
    tiny_tensor(&file, "token_embd_norm.weight", MP_F32, 1, TINY_WIDTH, 0.3f, 1);
    tiny_tensor(&file, "token_embd_norm.bias", MP_F32, 1, TINY_WIDTH, 0.3f, 0);
    for (int l = 0; l < TINY_ENCODER_LAYERS; l++) {
        if (tiny_layers)
            file.random = (mp_test_random){tiny_layers[l].seed};
        const struct {
            const char *name;
            int rows, columns;
        } matrices[] = {{"attn_q", TINY_WIDTH, TINY_WIDTH},
                        {"attn_k", TINY_WIDTH, TINY_WIDTH},
                        {"attn_v", TINY_WIDTH, TINY_WIDTH},
                        {"attn_output", TINY_WIDTH, TINY_WIDTH},
                        {"ffn_up", TINY_ENCODER_FFN, TINY_WIDTH},
                        {"ffn_down", TINY_WIDTH, TINY_ENCODER_FFN}};
        for (size_t m = 0; m < sizeof matrices / sizeof *matrices; m++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", l, matrices[m].name);
            const mp_dtype dtype = tiny_layers ? tiny_layers[l].dtype : MP_F32;
            tiny_tensor(&file, name, dtype, matrices[m].rows, matrices[m].columns, 0.2f, 0);
            snprintf(name, sizeof name, "blk.%d.%s.scales", l, matrices[m].name);
            if (mp_dtype_is_scaled(dtype))
                tiny_tensor(&file, name, MP_F32, matrices[m].rows, 1, 0.05f, 0.1f);
            snprintf(name, sizeof name, "blk.%d.%s.bias", l, matrices[m].name);
            tiny_tensor(&file, name, MP_F32, 1, matrices[m].rows, 0.2f, 0);
        }
        static const char *const norms[] = {"attn_output_norm", "layer_output_norm"};
        for (int n = 0; n < 2; n++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", l, norms[n]);
            tiny_tensor(&file, name, MP_F32, 1, TINY_WIDTH, 0.3f, 1);
            snprintf(name, sizeof name, "blk.%d.%s.bias", l, norms[n]);
            tiny_tensor(&file, name, MP_F32, 1, TINY_WIDTH, 0.3f, 0);
        }
    }
    if (dense) {
        tiny_int(file.spec, "mpool.dense_count", 1);
        tiny_tensor(&file, "dense.0.weight", MP_F32, TINY_WIDTH, TINY_WIDTH, 0.3f, 0);
        tiny_tensor(&file, "dense.0.bias", MP_F32, 1, TINY_WIDTH, 0.3f, 0);
    }
    if (more)
        more(&file);
    tiny_use(file.spec);
    mp_spec_freeze(file.spec);
    mp_test_write_file(path, file.bytes, file.used);
    free(file.bytes);
    return file.spec;
}

static inline mp_spec *tiny_encoder_spec_of(bool poison, bool dense) {
    return tiny_encoder_spec_with(poison, dense, NULL);
}

static inline mp_spec *tiny_encoder_spec(bool poison) { return tiny_encoder_spec_of(poison, false); }

typedef struct tiny_model {
    mp_spec *spec;
    mp_team *team;
    mp_lease lease;
    mp_budget budget;
    mp_loader loader;
    mp_model *model;
    mp_engine *engine;
} tiny_model;

/* Every load charges the budget with the memory of its weights, all but small structs. The use of the weights is
 * predicted without a load. */
static inline void tiny_load(tiny_model *tiny, mp_spec *spec, mp_compute compute, int threads) {
    enum { STRUCTS = 40 << 10 };
    const uint64_t before = mp_alloc_bytes(MP_TAG_WEIGHTS);
    mp_error error;
    *tiny = (tiny_model){.spec = spec};
    tiny->budget.limit = UINT64_MAX;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    MP_CHECK_OK(mp_team_create(threads - 1, &tiny->team, &error), &error);
    mp_team_lease(tiny->team, threads, &tiny->lease);
    MP_CHECK_INT(tiny->lease.threads, threads);
    MP_CHECK_OK(mp_model_loader(spec, compute, &tiny->loader, &error), &error);
    MP_CHECK_OK(tiny->loader.ops->load(tiny->loader.self, &tiny->lease, &tiny->budget, NULL, &tiny->model, &error),
                &error);
    const uint64_t made = mp_alloc_bytes(MP_TAG_WEIGHTS) - before;
    MP_CHECK_INT(tiny->budget.used, tiny->model->ops->bytes(tiny->model));
    MP_CHECK(made >= tiny->budget.used && made - tiny->budget.used < STRUCTS);
    mp_model_facts facts;
    mp_model_get_facts(tiny->model, &facts);
    MP_CHECK_INT(mp_model_predict_weights(spec, compute), facts.weights);
    MP_CHECK_OK(tiny->model->ops->engine(tiny->model, &tiny->budget, &tiny->engine, &error), &error);
}

/* Waits until the thread that a load has started has read the matrices that stay in the file. */
static inline void tiny_wait_until_fetched(const mp_weight_store *store) {
    while (atomic_load(&store->fetching))
        usleep(100);
}

static inline void tiny_unload(tiny_model *tiny) {
    tiny->engine->ops->destroy(tiny->engine);
    tiny->model->ops->destroy(tiny->model);
    tiny->loader.ops->destroy(tiny->loader.self);
    mp_team_return(&tiny->lease);
    mp_team_destroy(tiny->team);
    mp_spec_unpin(tiny->spec);
    MP_CHECK_INT(tiny->budget.used, 0);
}

/* Frees what the engine can spare. Returns the freed bytes, which the budget has, too. */
static inline uint64_t tiny_trim(tiny_model *tiny) {
    const uint64_t used = tiny->budget.used, freed = tiny->engine->ops->trim(tiny->engine);
    MP_CHECK_INT(freed, used - tiny->budget.used);
    return freed;
}

/* Two models with shared packed weights, as in two processes. */
typedef struct tiny_shared {
    mp_shm weights;
    tiny_model first, second;
} tiny_shared;

/* Load a loaded model twice more with shared weights: the first load fills the memory, the second one packs and charges
 * nothing. Both borrow everything but model and engine from `tiny`. */
static inline void tiny_share(tiny_model *tiny, mp_compute compute, tiny_shared *shared) {
    mp_error error;
    *shared = (tiny_shared){.weights = {.fd = -1}, .first = *tiny, .second = *tiny};
    uint64_t used = tiny->budget.used;
    MP_CHECK_OK(mp_model_load_shared(tiny->spec, compute, &shared->weights, &tiny->lease, &tiny->budget, NULL,
                                     &shared->first.model, &error),
                &error);
    MP_CHECK(shared->weights.data != NULL);
    MP_CHECK_INT(tiny->budget.used - used, shared->weights.bytes);
    used = tiny->budget.used;
    const uint64_t before = mp_alloc_bytes(MP_TAG_WEIGHTS);
    MP_CHECK_OK(mp_model_load_shared(tiny->spec, compute, &shared->weights, &tiny->lease, &tiny->budget, NULL,
                                     &shared->second.model, &error),
                &error);
    MP_CHECK_INT(tiny->budget.used, used);
    MP_CHECK(mp_alloc_bytes(MP_TAG_WEIGHTS) - before < shared->weights.bytes / 4); /* layer structs and the like */
    MP_CHECK_OK(shared->second.model->ops->engine(shared->second.model, &tiny->budget, &shared->second.engine, &error),
                &error);
}

static inline void tiny_unshare(tiny_shared *shared) {
    shared->second.engine->ops->destroy(shared->second.engine);
    shared->second.model->ops->destroy(shared->second.model);
    shared->first.model->ops->destroy(shared->first.model);
    mp_shm_free(&shared->weights);
}

/* ---- the life of a model, for sweeps that fail each allocation in turn ------------------------------------------- */

typedef struct tiny_life {
    mp_spec *spec;
    mp_compute compute;
    mp_status (*make)(mp_request **call, mp_error *error);
    void (*compare)(const mp_request *first, const mp_request *second); /* compares the results of two equal requests */
    uint64_t budget_ns;                                           /* time budget of a step; 0 = unlimited */
} tiny_life;

/* Load a model, make an engine, run two equal requests one after the other, and free everything. Returns a typed error,
 * or MP_OK if both requests have the same result. */
static inline mp_status tiny_live(void *arg, mp_error *error) {
    const tiny_life *life = arg;
    mp_status status;
    mp_team *team = NULL;
    mp_loader loader = {0};
    mp_model *model = NULL;
    mp_engine *engine = NULL;
    mp_request *calls[2] = {NULL};
    mp_budget budget = {.limit = UINT64_MAX};
    mp_item items[2] = {0};
    mp_lease lease;
    MP_TRY(mp_team_create(0, &team, error));
    mp_team_lease(team, 1, &lease);
    MP_TRY_GOTO(mp_model_loader(life->spec, life->compute, &loader, error));
    MP_TRY_GOTO(loader.ops->load(loader.self, &lease, &budget, NULL, &model, error));
    MP_TRY_GOTO(model->ops->engine(model, &budget, &engine, error));
    for (int i = 0; i < 2; i++) {
        MP_TRY_GOTO(life->make(&calls[i], error));
        uint64_t cost;
        items[i].request = calls[i];
        MP_TRY_GOTO(model->ops->check(model, items[i].request, &cost, &items[i].total, error));
        MP_TRY_GOTO(engine->ops->admit(engine, &items[i], error));
        mp_item *planned[1] = {&items[i]};
        mp_plan plan = {0};
        mp_outcome outcomes[MP_PLAN_MAX];
        do {
            engine->ops->plan(engine, planned, 1, life->budget_ns ? life->budget_ns : UINT64_MAX, &plan);
            engine->ops->step(engine, &lease, &plan, outcomes);
        } while (outcomes[0] == MP_OUTCOME_MORE);
        if (outcomes[0] != MP_OUTCOME_DONE) { /* an item that waits for memory holds an error too */
            *error = items[i].error;
            status = items[i].error.code;
            MP_CHECK(status != MP_OK);
            goto cleanup;
        }
    }
    life->compare(calls[0], calls[1]);
cleanup:
    if (engine) {
        engine->ops->retire(engine, &items[0]);
        engine->ops->retire(engine, &items[1]);
        engine->ops->destroy(engine);
    }
    if (model)
        model->ops->destroy(model);
    if (loader.ops)
        loader.ops->destroy(loader.self);
    for (int i = 0; i < 2; i++)
        mp_request_destroy(calls[i]);
    mp_team_return(&lease);
    mp_team_destroy(team);
    MP_CHECK_INT(budget.used, 0);
    return status;
}

/* ---- requests to a decoder --------------------------------------------------------------------------------------- */

typedef struct tiny_job {
    mp_text_request *call;
    mp_item item;
    bool admitted, done;
} tiny_job;

static inline size_t tiny_capture_bytes(const mp_text_request *call) {
    return (size_t)call->capture.tokens * mp_capture_floats(&call->capture) * sizeof(float);
}

static inline void tiny_job_make(const tiny_model *tiny, tiny_job *job, const mp_text_args *args, uint64_t tenant) {
    mp_error error;
    uint64_t cost;
    *job = (tiny_job){0};
    MP_CHECK_OK(mp_text_request_create(args, &job->call, &error), &error);
    job->item.request = &job->call->base;
    job->item.tenant = tenant;
    MP_CHECK_OK(tiny->model->ops->check(tiny->model, job->item.request, &cost, &job->item.total, &error), &error);
    if (job->call->capture.data) /* fill with NaN, which no record contains */
        memset(job->call->capture.data, 0xFF, tiny_capture_bytes(job->call));
}

static inline uint64_t tiny_hash_bytes(uint64_t hash, const void *data, size_t bytes) { /* FNV-1a */
    const uint8_t *at = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * 1099511628211u;
    return hash;
}

/* Hash everything in a finished request: tokens, log probabilities, alternatives, prompt logits, capture records. */
static inline uint64_t tiny_job_hash(const tiny_job *job) {
    const mp_text_request *call = job->call;
    size_t answer = (size_t)call->sampling.max_tokens, tops = answer * (size_t)call->sampling.logprobs;
    uint64_t hash = 14695981039346656037u;
    if (call->want_prompt_logits)
        hash = tiny_hash_bytes(hash, call->prompt_logits, (size_t)call->n_prompt * TINY_VOCAB * sizeof(float));
    if (call->capture.values > 0) {
        size_t bytes = tiny_capture_bytes(call);
        MP_CHECK_INT(call->capture.sampled, answer);
        for (size_t i = 0; i < bytes / sizeof(float); i++)
            MP_CHECK(isfinite(call->capture.data[i]));
        hash = tiny_hash_bytes(hash, call->capture.data, bytes);
    }
    for (int c = 0; c < call->n_choices; c++) {
        const mp_choice *choice = &call->choices[c];
        MP_CHECK_INT(choice->token_count, answer);
        MP_CHECK_INT(choice->finish, MP_FINISH_LENGTH);
        MP_CHECK_INT(choice->text_bytes, answer);
        for (size_t t = 0; t < answer; t++) {
            hash = tiny_hash_bytes(hash, &choice->tokens[t].id, sizeof(int32_t));
            hash = tiny_hash_bytes(hash, &choice->tokens[t].logprob, sizeof(float));
        }
        hash = tiny_hash_bytes(hash, choice->top_ids, tops * sizeof(int32_t));
        hash = tiny_hash_bytes(hash, choice->top_logprobs, tops * sizeof(float));
    }
    return hash;
}

static inline void tiny_job_admit(tiny_model *tiny, tiny_job *job) {
    mp_error error;
    MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &job->item, &error), &error);
    job->admitted = true;
}

/* Run one step of one job; retire the job if the step completes it. */
static inline mp_outcome tiny_job_step(tiny_model *tiny, tiny_job *job, int amount) {
    mp_plan plan = {.count = 1, .items = {&job->item}, .amount = {(uint32_t)amount}};
    mp_outcome outcomes[MP_PLAN_MAX];
    tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
    if (outcomes[0] == MP_OUTCOME_DONE) {
        job->done = true;
        tiny->engine->ops->retire(tiny->engine, &job->item);
    }
    return outcomes[0];
}

static inline void tiny_job_finish(tiny_model *tiny, tiny_job *job) {
    while (tiny_job_step(tiny, job, 512) == MP_OUTCOME_MORE) {
    }
    MP_CHECK(job->done);
}

#endif
