/* test_models_latents.c: multi-head latent attention with the matrices and numbers of heads that DeepSeek's files have:
 * projections that are stored in separate halves, queries without a latent, and several groups of heads. */
#include "model_fixture.h"
#include "models/decoder/decoder.h"
#include "models/decoder/mla.h"

enum { LAYERS = 2, WIDTH = 64, FFN = 96, RANK = 64, PLAIN = 32, ROTATED = 16, VALUE = 96, PROMPT = 70, GREEDY = 5 };
enum { THREADS = 2 };

typedef struct latents {
    int heads;
    bool reversed; /* the heads in reverse order: an equal model */
    bool halves;   /* attn_k_b and attn_v_b instead of attn_kv_b */
    mp_dtype type; /* type of the halves. Without `halves`, kv_b has the same values as floats */
} latents;

static mp_test_random random_of(const char *name, int part) {
    mp_test_random random = {(uint64_t)part};
    for (; *name; name++)
        random.state = random.state * 31 + (uint64_t)*name;
    return random;
}

static void add(tiny_file *file, const char *name, mp_dtype type, int ndim, const int64_t *shape, const void *data,
                size_t bytes) {
    mp_error error;
    mp_tensor_entry entry = {.name = name, .dtype = type, .ndim = ndim, .offset = file->used, .nbytes = bytes};
    memcpy(entry.shape, shape, (size_t)ndim * sizeof *shape);
    MP_CHECK_INT(file->used % 64, 0);
    file->bytes = realloc(file->bytes, file->used + bytes + 64);
    MP_CHECK(file->bytes);
    memcpy(file->bytes + file->used, data, bytes);
    MP_CHECK_OK(mp_spec_add_tensor(file->spec, &entry, &error), &error);
    file->used = (file->used + bytes + 63) & ~(size_t)63;
}

/* Row r of part `part` of a tensor: in float32, and if `stored` is not NULL as stored. Depends only on the names. */
static void make_row(const char *name, int part, int r, mp_dtype type, int n, float *row, uint8_t *stored) {
    uint8_t own[16 * WIDTH];
    mp_test_random random = random_of(name, part * 100000 + r);
    uint8_t *to = stored ? stored : own;
    if (type == MP_BF16) { /* the upper halves of floats */
        for (int i = 0; i < n; i++) {
            const float x = mp_test_random_float(&random, -0.3f, 0.3f);
            memcpy(to + 2 * i, (const uint8_t *)&x + 2, 2);
        }
    } else {
        tiny_row(&random, type, to, n, 0.3f);
    }
    mp_dequantize_row(type, to, n, row);
}

/* A matrix of `parts` blocks of `rows` rows, in float32: the blocks are in the order of the heads. columns: the blocks
 * lie side by side instead. */
static void matrix(tiny_file *file, const char *name, const latents *of, int parts, int rows, int n, bool columns) {
    float *all = malloc((size_t)parts * (size_t)rows * (size_t)n * sizeof *all), row[4 * WIDTH];
    MP_CHECK(all && n <= 4 * WIDTH);
    for (int p = 0; p < parts; p++)
        for (int r = 0; r < rows; r++) {
            const int at = of->reversed && parts > 1 ? parts - 1 - p : p;
            make_row(name, p, r, MP_F32, n, row, NULL);
            memcpy(all + (columns ? (r * parts + at) * n : (at * rows + r) * n), row, (size_t)n * sizeof *row);
        }
    const int64_t shape[2] = {columns ? rows : parts * rows, columns ? parts * n : n};
    add(file, name, MP_F32, 2, shape, all, (size_t)parts * (size_t)rows * (size_t)n * sizeof *all);
    free(all);
}

static void norm(tiny_file *file, const char *name, int n) {
    float all[WIDTH];
    mp_test_random random = random_of(name, 0);
    for (int i = 0; i < n; i++)
        all[i] = mp_test_random_float(&random, 0.7f, 1.3f);
    add(file, name, MP_F32, 1, &(int64_t){n}, all, (size_t)n * sizeof *all);
}

/* The up-projections of keys, [heads, RANK, PLAIN], and of values, [heads, VALUE, RANK]; or both as kv_b,
 * [heads * (PLAIN + VALUE), RANK], where the keys' part is transposed. */
static void projections(tiny_file *file, const latents *of, int layer) {
    char k_name[64], v_name[64], name[64];
    uint64_t k_bytes, v_bytes;
    snprintf(k_name, sizeof k_name, "blk.%d.attn_k_b.weight", layer);
    snprintf(v_name, sizeof v_name, "blk.%d.attn_v_b.weight", layer);
    snprintf(name, sizeof name, "blk.%d.attn_kv_b.weight", layer);
    MP_CHECK(mp_dtype_row_bytes(of->type, PLAIN, &k_bytes) && mp_dtype_row_bytes(of->type, RANK, &v_bytes));
    const size_t heads = (size_t)of->heads, stride = PLAIN + VALUE;
    float *both = malloc(heads * stride * RANK * sizeof *both), row[RANK];
    uint8_t *k = malloc(heads * RANK * k_bytes), *v = malloc(heads * VALUE * v_bytes);
    MP_CHECK(both && k && v);
    for (size_t h = 0; h < heads; h++) {
        const size_t at = of->reversed ? heads - 1 - h : h;
        float *own = both + at * stride * RANK;
        for (size_t r = 0; r < RANK; r++) {
            make_row(k_name, (int)h, (int)r, of->type, PLAIN, row, k + (at * RANK + r) * k_bytes);
            for (size_t p = 0; p < PLAIN; p++)
                own[p * RANK + r] = row[p];
        }
        for (size_t r = 0; r < VALUE; r++) {
            make_row(v_name, (int)h, (int)r, of->type, RANK, row, v + (at * VALUE + r) * v_bytes);
            memcpy(own + (PLAIN + r) * RANK, row, RANK * sizeof *row);
        }
    }
    if (of->halves) {
        add(file, k_name, of->type, 3, (int64_t[]){of->heads, RANK, PLAIN}, k, heads * RANK * k_bytes);
        add(file, v_name, of->type, 3, (int64_t[]){of->heads, VALUE, RANK}, v, heads * VALUE * v_bytes);
    } else {
        add(file, name, MP_F32, 2, (int64_t[]){(int64_t)(heads * stride), RANK}, both,
            heads * stride * RANK * sizeof *both);
    }
    free(both);
    free(k);
    free(v);
}

static mp_spec *make_spec(const latents *of) {
    mp_error error;
    char path[512], name[64];
    snprintf(path, sizeof path, "%s/latents.bin", mp_test_directory());
    tiny_file file = {.spec = mp_spec_create()};
    MP_CHECK_OK(mp_spec_set_architecture(file.spec, "deepseek2", &error), &error);
    MP_CHECK_OK(mp_spec_add_file(file.spec, path, &error), &error);
    const struct {
        const char *key;
        int value;
    } numbers[] = {{"block_count", LAYERS},
                   {"embedding_length", WIDTH},
                   {"feed_forward_length", FFN},
                   {"context_length", TINY_CONTEXT},
                   {"attention.head_count", of->heads},
                   {"attention.kv_lora_rank", RANK},
                   {"attention.key_length_mla", PLAIN + ROTATED},
                   {"attention.value_length_mla", VALUE},
                   {"rope.dimension_count", ROTATED}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        tiny_arch_int(file.spec, "deepseek2", numbers[i].key, numbers[i].value);
    tiny_arch_float(file.spec, "deepseek2", "attention.layer_norm_rms_epsilon", 1e-5);
    matrix(&file, "token_embd.weight", of, 1, TINY_VOCAB, WIDTH, false);
    norm(&file, "output_norm.weight", WIDTH);
    for (int l = 0; l < LAYERS; l++) {
        const struct {
            const char *name;
            int parts, rows, n;
            bool columns;
        } matrices[] = {{"attn_q", of->heads, PLAIN + ROTATED, WIDTH, false},
                        {"attn_kv_a_mqa", 1, RANK + ROTATED, WIDTH, false},
                        {"attn_output", of->heads, WIDTH, VALUE, true},
                        {"ffn_gate", 1, FFN, WIDTH, false},
                        {"ffn_up", 1, FFN, WIDTH, false},
                        {"ffn_down", 1, WIDTH, FFN, false}};
        const struct {
            const char *name;
            int n;
        } norms[] = {{"attn_norm", WIDTH}, {"ffn_norm", WIDTH}, {"attn_kv_a_norm", RANK}};
        for (size_t m = 0; m < sizeof matrices / sizeof *matrices; m++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", l, matrices[m].name);
            matrix(&file, name, of, matrices[m].parts, matrices[m].rows, matrices[m].n, matrices[m].columns);
        }
        for (size_t n = 0; n < sizeof norms / sizeof *norms; n++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", l, norms[n].name);
            norm(&file, name, norms[n].n);
        }
        projections(&file, of, l);
    }
    tiny_tokens(file.spec);
    mp_spec_freeze(file.spec);
    mp_test_write_file(path, file.bytes, file.used);
    free(file.bytes);
    return file.spec;
}

typedef struct seen {
    float logits[PROMPT * TINY_VOCAB];
    int32_t ids[GREEDY];
} seen;

/* The logits of a prompt, and greedy tokens. groups: expected groups of heads. */
static void run(const latents *of, int threads, int groups, seen *out) {
    int32_t prompt[PROMPT];
    tiny_model tiny;
    tiny_job job;
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = i * 37 % TINY_VOCAB;
    const mp_text_args args = {.n_prompt = PROMPT,
                               .prompt = prompt,
                               .n_choices = 1,
                               .want_prompt_logits = true,
                               .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = GREEDY,
                                            .ignore_eos = true}};
    tiny_load(&tiny, make_spec(of), MP_COMPUTE_F32, threads);
    MP_CHECK_INT(((const mp_decoder *)tiny.model)->shapes[0].groups, groups);
    tiny_job_make(&tiny, &job, &args, 0);
    tiny_job_admit(&tiny, &job);
    tiny_job_finish(&tiny, &job);
    memcpy(out->logits, job.call->prompt_logits, sizeof out->logits);
    for (int t = 0; t < GREEDY; t++)
        out->ids[t] = job.call->choices[0].tokens[t].id;
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* A file with separate halves gives the bits of a file with kv_b of the same values. */
MP_TEST(models_latents_in_halves) {
    static const mp_dtype types[] = {MP_F32, MP_BF16, MP_Q8_0};
    static seen joined, halves;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        run(&(latents){.heads = 3, .type = types[i]}, 1, 1, &joined);
        run(&(latents){.heads = 3, .type = types[i], .halves = true}, 1, 1, &halves);
        if (memcmp(&joined, &halves, sizeof joined) != 0)
            MP_FAIL("halves of type %s give other logits", mp_dtype_get(types[i])->name);
    }
}

/* An attention tile has at most 64 query rows, so 75 heads make three groups. The order of the heads has no influence
 * on the result, and with it which heads share a group. */
MP_TEST(models_latents_in_groups_of_heads) {
    static seen forward, reversed, shared;
    run(&(latents){.heads = 75}, 1, 3, &forward);
    run(&(latents){.heads = 75, .reversed = true}, 1, 3, &reversed);
    double most = 0, largest = 0;
    for (int i = 0; i < PROMPT * TINY_VOCAB; i++) {
        most = fmax(most, fabs((double)forward.logits[i] - (double)reversed.logits[i]));
        largest = fmax(largest, fabs((double)forward.logits[i]));
    }
    MP_CHECK(most <= 1e-4 * largest);
    run(&(latents){.heads = 75}, 3, 3, &shared);
    MP_CHECK(memcmp(&forward, &shared, sizeof shared) == 0);
}
