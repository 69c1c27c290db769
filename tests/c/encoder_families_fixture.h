/* encoder_families_fixture.h: a tiny model of every family of encoders. */
#ifndef ENCODER_FAMILIES_FIXTURE_H
#define ENCODER_FAMILIES_FIXTURE_H

#include "encoder_fixture.h"

typedef struct family {
    const char *arch;
    bool pre_norm, gated, biased, positions, relative, rope, rms, head_norms, output_norms, causal, latents;
    bool query_norms, input_twice, experts;
    int embedding; /* size of the embeddings if they are projected; 0: they are not */
    bool disentangled;
    int depth;     /* layers that a pass computes if layers share weights; 0: each layer once */
    int kv_heads, window; /* every second layer has the window */
    bool causal_unset, quantised_latents;
    float latent_epsilon; /* 0: 1e-5 */
} family;

enum { EXPERTS = 5 };

static const family families[] = {
    {.arch = "nomic_bert", .gated = true, .rope = true, .kv_heads = 4},
    {.arch = "mpnet", .biased = true, .positions = true, .relative = true, .kv_heads = 4},
    {.arch = "modern_bert", .pre_norm = true, .gated = true, .rope = true, .kv_heads = 4, .window = 10},
    {.arch = "llama_embedding", .pre_norm = true, .gated = true, .rope = true, .rms = true, .kv_heads = 2},
    {.arch = "qwen3_embedding",
     .pre_norm = true,
     .gated = true,
     .rope = true,
     .rms = true,
     .head_norms = true,
     .causal = true,
     .kv_heads = 1},
    {.arch = "gemma_embedding",
     .pre_norm = true,
     .gated = true,
     .rope = true,
     .rms = true,
     .head_norms = true,
     .output_norms = true,
     .kv_heads = 1,
     .window = 10},
    {.arch = "nv_embed", .pre_norm = true, .gated = true, .rope = true, .rms = true, .latents = true, .kv_heads = 2},
    {.arch = "jina_bert_v2", .gated = true, .biased = true, .kv_heads = 4},
    {.arch = "jina_bert_v2_code",
     .gated = true,
     .biased = true,
     .query_norms = true,
     .input_twice = true,
     .kv_heads = 4},
    {.arch = "nomic_bert_moe", .biased = true, .rope = true, .experts = true, .kv_heads = 4},
    {.arch = "bert", .biased = true, .positions = true, .embedding = 24, .depth = 5, .kv_heads = 4},
    {.arch = "deberta_v2", .biased = true, .disentangled = true, .kv_heads = 4},
    {.arch = "jina_bert_v3", .biased = true, .rope = true, .kv_heads = 4},
};

static inline void key(char *out, const family *f, const char *name) { snprintf(out, 128, "%s.%s", f->arch, name); }

static bool norms_projection; /* specs made next have a norm of the projected embeddings */

static inline void make_norm(tiny_file *file, const char *name, int n, bool biased) {
    char full[96];
    snprintf(full, sizeof full, "%s.weight", name);
    tiny_tensor(file, full, MP_F32, 1, n, 0.3f, 1);
    snprintf(full, sizeof full, "%s.bias", name);
    if (biased)
        tiny_tensor(file, full, MP_F32, 1, n, 0.3f, 0);
}

static inline void make_layer(tiny_file *file, const family *f, int l) {
    const int head = TINY_WIDTH / 4, kv = f->kv_heads * head;
    const struct {
        const char *name;
        int rows, columns;
    } matrices[] = {{"attn_q", TINY_WIDTH, TINY_WIDTH},
                    {"attn_k", kv, TINY_WIDTH},
                    {"attn_v", kv, TINY_WIDTH},
                    {"attn_output", TINY_WIDTH, TINY_WIDTH},
                    {"ffn_up", TINY_ENCODER_FFN, TINY_WIDTH},
                    {"ffn_down", TINY_WIDTH, TINY_ENCODER_FFN},
                    {"ffn_gate", TINY_ENCODER_FFN, TINY_WIDTH}};
    for (int m = 0; f->disentangled && m < 2; m++) {
        char full[64];
        snprintf(full, sizeof full, "blk.%d.attn_pos_%c.weight", l, "kq"[m]);
        tiny_tensor(file, full, MP_F32, TINY_WIDTH, TINY_WIDTH, 0.2f, 0);
        snprintf(full, sizeof full, "blk.%d.attn_pos_%c.bias", l, "kq"[m]);
        tiny_tensor(file, full, MP_F32, 1, TINY_WIDTH, 0.2f, 0);
    }
    const bool mixed = f->experts && l % 2;
    char name[64];
    for (size_t m = 0; m < sizeof matrices / sizeof *matrices - !f->gated; m++) {
        if (mixed && m >= 4)
            continue;
        snprintf(name, sizeof name, "blk.%d.%s.weight", l, matrices[m].name);
        tiny_tensor(file, name, MP_F32, matrices[m].rows, matrices[m].columns, 0.2f, 0);
        snprintf(name, sizeof name, "blk.%d.%s.bias", l, matrices[m].name);
        if (f->biased)
            tiny_tensor(file, name, MP_F32, 1, matrices[m].rows, 0.2f, 0);
    }
    const struct {
        const char *name;
        bool there;
        int n;
    } norms[] = {{"attn_output_norm", !f->pre_norm, TINY_WIDTH},
                 {"layer_output_norm", !f->pre_norm, TINY_WIDTH},
                 {"attn_norm", f->pre_norm && (l > 0 || f->rms), TINY_WIDTH},
                 {"ffn_norm", f->pre_norm, TINY_WIDTH},
                 {"attn_q_norm", f->head_norms, head},
                 {"attn_k_norm", f->head_norms, head},
                 {"attn_q_norm", f->query_norms, TINY_WIDTH},
                 {"attn_k_norm", f->query_norms, TINY_WIDTH},
                 {"attn_norm_2", f->input_twice, TINY_WIDTH},
                 {"post_attention_norm", f->output_norms, TINY_WIDTH},
                 {"post_ffw_norm", f->output_norms, TINY_WIDTH}};
    for (size_t n = 0; n < sizeof norms / sizeof *norms; n++) {
        snprintf(name, sizeof name, "blk.%d.%s", l, norms[n].name);
        if (norms[n].there)
            make_norm(file, name, norms[n].n, !f->rms);
    }
    if (!mixed)
        return;
    snprintf(name, sizeof name, "blk.%d.ffn_gate_inp.weight", l);
    tiny_tensor(file, name, MP_F32, EXPERTS, TINY_WIDTH, 0.3f, 0);
    snprintf(name, sizeof name, "blk.%d.ffn_exps.bias", l);
    tiny_tensor(file, name, MP_F32, 1, TINY_WIDTH, 0.2f, 0);
    for (int e = 0; e < EXPERTS; e++) {
        snprintf(name, sizeof name, "blk.%d.ffn_up.%d.weight", l, e);
        tiny_tensor(file, name, MP_F32, TINY_ENCODER_FFN, TINY_WIDTH, 0.2f, 0);
        snprintf(name, sizeof name, "blk.%d.ffn_down.%d.columns", l, e);
        tiny_tensor(file, name, MP_F32, TINY_ENCODER_FFN, TINY_WIDTH, 0.2f, 0);
    }
}

/* Latent attention pooling: 7 latents, 3 heads of size 10. */
static inline void make_latents(tiny_file *file, const family *f) {
    enum { COUNT = 7, INNER = 30, FFN = 4 * TINY_WIDTH };
    static const char *const norms[] = {"latent.norm", "latent.norm_context", "latent.ffn_norm"};
    tiny_int(file->spec, "mpool.latent_heads", 3);
    tiny_int(file->spec, "mpool.latent_count", COUNT);
    tiny_int(file->spec, "mpool.latent_head_size", INNER / 3);
    tiny_int(file->spec, "mpool.latent_feed_forward", FFN);
    tiny_float(file->spec, "mpool.latent_epsilon", f->latent_epsilon > 0 ? (double)f->latent_epsilon : 1e-5);
    tiny_tensor(file, "latent.latents", MP_F32, COUNT, TINY_WIDTH, 1, 0);
    for (int n = 0; n < 3; n++)
        make_norm(file, norms[n], TINY_WIDTH, true);
    tiny_tensor(file, "latent.to_q.weight", MP_F32, INNER, TINY_WIDTH, 0.2f, 0);
    tiny_tensor(file, "latent.to_kv.weight", f->quantised_latents ? MP_Q8_0 : MP_F32, 2 * INNER, TINY_WIDTH, 0.2f, 0);
    tiny_tensor(file, "latent.to_out.weight", MP_F32, TINY_WIDTH, INNER, 0.2f, 0);
    tiny_tensor(file, "latent.ffn_gate.weight", MP_F32, FFN, TINY_WIDTH, 0.2f, 0);
    tiny_tensor(file, "latent.ffn_gate.bias", MP_F32, 1, FFN, 0.2f, 0);
    tiny_tensor(file, "latent.ffn_up.weight", MP_F32, FFN, TINY_WIDTH, 0.2f, 0);
    tiny_tensor(file, "latent.ffn_up.bias", MP_F32, 1, FFN, 0.2f, 0);
    tiny_tensor(file, "latent.ffn_down.weight", MP_F32, TINY_WIDTH, FFN, 0.2f, 0);
    tiny_tensor(file, "latent.ffn_down.bias", MP_F32, 1, TINY_WIDTH, 0.2f, 0);
}

/* Eight buckets per direction; the last one begins at a distance of 30. */
static inline void make_distances(tiny_file *file) {
    static const char *const on[] = {"mpool.relative_keys", "mpool.relative_queries", "mpool.relative_normed"};
    const mp_value yes = {.type = MP_VALUE_BOOL, .gguf_type = -1, .count = 1, .as.integer = 1};
    mp_error error;
    tiny_int(file->spec, "mpool.relative_span", 8);
    tiny_int(file->spec, "mpool.relative_buckets", 8);
    tiny_int(file->spec, "mpool.relative_farthest", 30);
    for (size_t i = 0; i < sizeof on / sizeof *on; i++)
        MP_CHECK_OK(mp_spec_set(file->spec, on[i], &yes, &error), &error);
    tiny_tensor(file, "rel_embd.weight", MP_F32, 16, TINY_WIDTH, 0.5f, 0);
    make_norm(file, "rel_embd_norm", TINY_WIDTH, true);
}

/* Compute the layers last to first, over and over. */
static inline void set_order(mp_spec *spec, int depth) {
    int64_t order[16];
    mp_error error;
    for (int l = 0; l < depth; l++)
        order[l] = TINY_ENCODER_LAYERS - 1 - l % TINY_ENCODER_LAYERS;
    mp_value list = {.type = MP_VALUE_INTS, .gguf_type = -1, .count = (uint64_t)depth, .as.integers = order};
    MP_CHECK_OK(mp_spec_set(spec, "mpool.layer_order", &list, &error), &error);
}

static inline mp_spec *make_spec(const void *arg) {
    const family *f = arg;
    mp_error error;
    char path[512], name[128];
    snprintf(path, sizeof path, "%s/%s.bin", mp_test_directory(), f->arch);
    tiny_file file = {.spec = mp_spec_create(), .random = {17}};
    MP_CHECK_OK(mp_spec_set_architecture(file.spec, f->arch, &error), &error);
    MP_CHECK_OK(mp_spec_add_file(file.spec, path, &error), &error);
    const struct {
        const char *name;
        int value;
    } sizes[] = {{"block_count", TINY_ENCODER_LAYERS},      {"embedding_length", TINY_WIDTH},
                 {"feed_forward_length", TINY_ENCODER_FFN}, {"attention.head_count", 4},
                 {"attention.head_count_kv", f->kv_heads},  {"context_length", TINY_POSITIONS}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        key(name, f, sizes[i].name);
        tiny_int(file.spec, name, sizes[i].value);
    }
    key(name, f, f->rms ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon");
    tiny_float(file.spec, name, 1e-6);
    mp_value causal = {.type = MP_VALUE_BOOL, .gguf_type = -1, .count = 1, .as.integer = f->causal};
    key(name, f, "attention.causal");
    if (!f->causal_unset)
        MP_CHECK_OK(mp_spec_set(file.spec, name, &causal, &error), &error);
    int64_t windows[TINY_ENCODER_LAYERS] = {0};
    for (int l = 1; l < TINY_ENCODER_LAYERS; l += 2)
        windows[l] = f->window;
    mp_value list = {.type = MP_VALUE_INTS, .gguf_type = -1, .count = TINY_ENCODER_LAYERS, .as.integers = windows};
    MP_CHECK_OK(mp_spec_set(file.spec, "mpool.layer_windows", &list, &error), &error);
    if (f->experts) {
        mp_value no = {.type = MP_VALUE_BOOL, .gguf_type = -1, .count = 1};
        key(name, f, "expert_count");
        tiny_int(file.spec, name, EXPERTS);
        key(name, f, "expert_used_count");
        tiny_int(file.spec, name, 2);
        key(name, f, "moe_every_n_layers");
        tiny_int(file.spec, name, 2);
        MP_CHECK_OK(mp_spec_set(file.spec, "mpool.expert_normalise", &no, &error), &error);
    }
    if (f->window)
        tiny_float(file.spec, "mpool.rope_local_base", 300);
    if (f->embedding)
        tiny_int(file.spec, "mpool.embedding_size", f->embedding);
    if (f->depth)
        set_order(file.spec, f->depth);
    const int width = f->embedding ? f->embedding : TINY_WIDTH;
    tiny_tensor(&file, "token_embd.weight", MP_F32, TINY_VOCAB, width, 1, 0);
    if (f->positions)
        tiny_tensor(&file, "position_embd.weight", MP_F32, TINY_POSITIONS, width, 0.3f, 0);
    if (f->embedding) {
        tiny_tensor(&file, "token_embd_proj.weight", MP_F32, TINY_WIDTH, width, 0.3f, 0);
        tiny_tensor(&file, "token_embd_proj.bias", MP_F32, 1, TINY_WIDTH, 0.3f, 0);
    }
    if (norms_projection)
        make_norm(&file, "token_embd_proj_norm", TINY_WIDTH, true);
    if (f->relative)
        tiny_tensor(&file, "attn_rel_b.weight", MP_F32, 32, 4, 2, 0);
    if (!f->rms)
        make_norm(&file, "token_embd_norm", width, true);
    if (f->pre_norm)
        make_norm(&file, "output_norm", TINY_WIDTH, false);
    for (int l = 0; l < TINY_ENCODER_LAYERS; l++)
        make_layer(&file, f, l);
    if (f->latents)
        make_latents(&file, f);
    if (f->disentangled)
        make_distances(&file);
    mp_spec_freeze(file.spec);
    mp_test_write_file(path, file.bytes, file.used);
    free(file.bytes);
    return file.spec;
}

#endif
