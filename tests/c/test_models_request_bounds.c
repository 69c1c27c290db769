/* test_models_request_bounds.c: the bounds of every number of a request. The least and the largest value are accepted,
 * their neighbours are refused, and the error names both bounds. */
#include <stddef.h>

#include "mp_test.h"
#include "models/capability.h"

typedef enum kind { I32, I64, F32 } kind;

typedef struct bound {
    const char *name;
    kind kind;
    size_t at; /* offset in the arguments */
    long double low, high; /* exact for every int64 */
    bool refused_only; /* the largest value needs more memory, or other arguments */
} bound;

static void set(void *args, const bound *b, long double value) {
    uint8_t *at = (uint8_t *)args + b->at;
    switch (b->kind) {
    case I32: memcpy(at, &(int32_t){(int32_t)value}, sizeof(int32_t)); break;
    case I64: memcpy(at, &(int64_t){(int64_t)value}, sizeof(int64_t)); break;
    case F32: memcpy(at, &(float){(float)value}, sizeof(float)); break;
    }
}

typedef mp_status (*create)(const void *args, mp_request **request, mp_error *error);

/* Check each bound alone: `usual` are arguments of `size` bytes that are accepted. */
static void check_bounds(create create, const void *usual, size_t size, const bound *bounds, size_t count) {
    static _Alignas(16) uint8_t args[1024];
    mp_error error;
    mp_request *request;
    MP_CHECK(size <= sizeof args);
    for (size_t i = 0; i < count; i++) {
        const bound *b = &bounds[i];
        char range[96];
        snprintf(range, sizeof range, b->kind == F32 ? " must be %Lg to %Lg, got" : " must be %.0Lf to %.0Lf, got",
                 b->low, b->high);
        for (int end = 0; end < 2; end++) {
            const long double inside = end ? b->high : b->low;
            const long double step = b->kind == F32 ? fabsl(inside) * 1e-6L + 1e-6L : 1;
            const long double outside = end ? inside + step : inside - step;
            memcpy(args, usual, size);
            set(args, b, inside);
            if (!b->refused_only) {
                MP_CHECK_OK(create(args, &request, &error), &error);
                mp_request_destroy(request);
            }
            if (b->kind == I32 && (outside > INT32_MAX || outside < INT32_MIN))
                continue;
            set(args, b, outside);
            MP_CHECK_STATUS(create(args, &request, &error), MP_INVALID_ARGUMENT, &error);
            if (strncmp(error.message, b->name, strlen(b->name)) != 0 || !strstr(error.message, range))
                MP_FAIL("%s: %s", b->name, error.message);
        }
    }
}

#define TEXT(field) offsetof(mp_text_args, field)
#define SAMPLING(field) (offsetof(mp_text_args, sampling) + offsetof(mp_sampling, field))
#define IMAGES(field) (offsetof(mp_text_args, images) + offsetof(mp_text_image_args, field))
#define COUNT(list) (sizeof(list) / sizeof *(list))

static mp_status create_text(const void *args, mp_request **request, mp_error *error) {
    mp_text_request *made = NULL;
    const mp_status status = mp_text_request_create(args, &made, error);
    *request = status == MP_OK ? &made->base : NULL;
    return status;
}

MP_TEST(models_request_bounds_of_texts) {
    static const bound bounds[] = {
        {"`temperature`", F32, SAMPLING(temperature), 0, 100, false},
        {"`top_p`", F32, SAMPLING(top_p), 0, 1, false},
        {"`min_p`", F32, SAMPLING(min_p), 0, 1, false},
        {"`repetition_penalty`", F32, SAMPLING(repetition_penalty), 1e-3, 1e3, true}, /* not exact in float */
        {"`presence_penalty`", F32, SAMPLING(presence_penalty), -100, 100, false},
        {"`frequency_penalty`", F32, SAMPLING(frequency_penalty), -100, 100, false},
        {"`top_k`", I32, SAMPLING(top_k), 0, INT32_MAX, false},
        {"`max_tokens`", I32, SAMPLING(max_tokens), 1, 268435455, false},
        {"`min_tokens`", I32, SAMPLING(min_tokens), 0, 268435455, true},
        {"`logprobs`", I32, SAMPLING(logprobs), -1, 20, false},
        {"`n`", I32, TEXT(n_choices), 1, 128, false},
        {"the number of prompt tokens", I32, TEXT(n_prompt), 1, 268435455, true},
        {"the number of stop strings", I32, TEXT(n_stop), 0, 64, true},
        {"the number of stop ids", I32, TEXT(n_stop_ids), 0, 4096, true},
        {"the number of logit biases", I32, TEXT(n_bias), 0, 4096, true},
        {"`capture_values`", I32, TEXT(capture_values), 0, MP_CAPTURE_MAX_VALUES, true},
        {"`capture_records`", I32, TEXT(capture_records), 0, INT32_MAX, false},
        {"the bytes of a mask", I64, TEXT(mask_bytes), 0, 1048576, true},
        {"the number of tiles", I32, IMAGES(n_tiles), 0, 4096, true},
        {"the number of runs", I32, IMAGES(n_runs), 0, 4096, true},
        {"the number of sources", I64, IMAGES(n_sources), 0, 268435455, true},
    };
    static const int32_t prompt[] = {5};
    const mp_text_args args = {
        .n_prompt = 1, .prompt = prompt, .n_choices = 1,
        .sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .max_tokens = 1, .logprobs = -1}};
    check_bounds(create_text, &args, sizeof args, bounds, COUNT(bounds));
}

/* Items of lists, at their bounds. */
MP_TEST(models_request_bounds_of_lists_of_texts) {
    static const int32_t prompt[] = {5};
    static char stop[2000];
    const char *stops[] = {stop, stop};
    static const struct { int32_t id; float bias; int32_t stop_bytes; const char *refusal; } rows[] = {
        {0, -1e6f, 1, NULL},
        {INT32_MAX, 1e6f, 1024, NULL},
        {0, 0, 0, "the length of a stop string in bytes must be 1 to 1024, got 0"},
        {0, 0, 1025, "the length of a stop string in bytes must be 1 to 1024, got 1025"},
        {-1, 0, 1, "[1] must be 0 to 2147483647, got -1"},
        {0, 1000001, 1, "bias[1] must be -1e+06 to 1e+06, got 1e+06"},
        {0, -1000001, 1, "bias[1] must be -1e+06 to 1e+06, got -1e+06"},
        {0, NAN, 1, "bias[1] must be -1e+06 to 1e+06, got nan"},
    };
    for (size_t i = 0; i < COUNT(rows); i++)
        for (int list = 0; list < 2; list++) { /* the id is a stop id, then that of a bias */
            const int32_t ids[] = {7, rows[i].id}, usual[] = {7, 8}, bytes[] = {3, rows[i].stop_bytes};
            const float bias[] = {1, rows[i].bias};
            mp_text_args args = {.n_prompt = 1, .prompt = prompt, .n_choices = 1, .n_stop = 2, .stop = stops,
                                 .stop_bytes = bytes, .n_stop_ids = 2, .stop_ids = list ? usual : ids, .n_bias = 2,
                                 .bias_ids = list ? ids : usual, .bias = bias,
                                 .sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .max_tokens = 1}};
            mp_error error;
            mp_request *request;
            memset(stop, 's', sizeof stop);
            const mp_status expected = rows[i].refusal ? MP_INVALID_ARGUMENT : MP_OK;
            MP_CHECK_STATUS(create_text(&args, &request, &error), expected, &error);
            if (rows[i].refusal)
                MP_CHECK_HAS(error.message, rows[i].refusal);
            else
                mp_request_destroy(request);
        }
}

#define EMBED(field) offsetof(mp_embedding_args, field)

static mp_status create_embedding(const void *args, mp_request **request, mp_error *error) {
    mp_embedding_request *made = NULL;
    const mp_status status = mp_embedding_request_create(args, &made, error);
    *request = status == MP_OK ? &made->base : NULL;
    return status;
}

MP_TEST(models_request_bounds_of_embeddings) {
    static const bound bounds[] = {
        {"the number of texts", I32, EMBED(n_texts), 1, 16777216, true},
        {"the number of tokens", I64, EMBED(n_tokens), 0, 576460752303423487.0L, true},
        {"`dimensions`", I32, EMBED(dimensions), 0, INT32_MAX, false},
        {"`normalize`", I32, EMBED(normalize), -1, 1, false},
        {"`outputs`", I32, EMBED(outputs), 0, 15, false},
    };
    static const int32_t ids[] = {5};
    static const int64_t offsets[] = {0, 1};
    const mp_embedding_args args = {.n_texts = 1, .n_tokens = 1, .ids = ids, .offsets = offsets};
    check_bounds(create_embedding, &args, sizeof args, bounds, COUNT(bounds));
}

#define IMAGE(field) offsetof(mp_image_embedding_args, field)

static mp_status create_image(const void *args, mp_request **request, mp_error *error) {
    mp_image_embedding_request *made = NULL;
    const mp_status status = mp_image_embedding_request_create(args, &made, error);
    *request = status == MP_OK ? &made->base : NULL;
    return status;
}

MP_TEST(models_request_bounds_of_image_embeddings) {
    static const bound bounds[] = {
        {"the number of images", I32, IMAGE(n_images), 1, 1048576, true},
        {"the number of bytes of pixels", I64, IMAGE(n_bytes), 1, 576460752303423487.0L, true},
        {"`dimensions`", I32, IMAGE(dimensions), 0, INT32_MAX, false},
        {"`normalize`", I32, IMAGE(normalize), -1, 1, false},
        {"`output`", I32, IMAGE(output), 0, 1, false},
    };
    static uint8_t pixels[3 * 16384];
    static const struct { int32_t high, wide; bool good; } sizes[] = {
        {1, 1, true}, {16384, 1, true}, {1, 16384, true}, {16385, 1, false}, {1, 16385, false}, {0, 1, false}};
    mp_image_embedding_args args = {.n_images = 1, .n_bytes = 3, .sizes = (int32_t[]){1, 1}, .pixels = pixels};
    mp_error error;
    mp_request *request;
    check_bounds(create_image, &args, sizeof args, bounds, COUNT(bounds));
    for (size_t i = 0; i < COUNT(sizes); i++) {
        const int32_t size[] = {sizes[i].high, sizes[i].wide};
        args.sizes = size;
        args.n_bytes = 3 * (int64_t)size[0] * size[1];
        if (args.n_bytes < 1 || args.n_bytes > (int64_t)sizeof pixels)
            args.n_bytes = 1;
        MP_CHECK_STATUS(create_image(&args, &request, &error), sizes[i].good ? MP_OK : MP_INVALID_ARGUMENT, &error);
        if (sizes[i].good)
            mp_request_destroy(request);
        else
            MP_CHECK_HAS(error.message, "must be 1 to 16384, got");
    }
}

#define GENERATE(field) offsetof(mp_image_generation_args, field)

static mp_status create_generation(const void *args, mp_request **request, mp_error *error) {
    mp_image_generation_request *made = NULL;
    const mp_status status = mp_image_generation_request_create(args, &made, error);
    *request = status == MP_OK ? &made->base : NULL;
    return status;
}

MP_TEST(models_request_bounds_of_image_generation) {
    static const bound bounds[] = {
        {"`width`", I32, GENERATE(width), 1, 8192, false},
        {"`height`", I32, GENERATE(height), 1, 8192, false},
        {"the number of steps", I32, GENERATE(n_steps), 1, 1000, false},
        {"the number of latents", I64, GENERATE(n_noise), 1, INT32_MAX, true},
        {"the number of texts", I32, GENERATE(n_texts), 1, 2, false},
        {"the number of tokens", I32, GENERATE(n_ids[0]), 0, 4096, false},
        {"the number of tokens", I32, GENERATE(n_ids[2]), 0, 4096, false},
        {"`n`", I32, GENERATE(n_images), 1, 64, false},
        {"`guidance_scale`", F32, GENERATE(guidance), 0, 1000, false},
        {"`preview_every`", I32, GENERATE(preview_every), 0, 1000, false},
    };
    static const int32_t ids[4096];
    static const float noise[1], times[1000], sigmas[1001];
    mp_image_generation_args args = {.width = 8, .height = 8, .n_steps = 1, .n_noise = 1, .n_texts = 1, .noise = noise,
                                     .times = times, .sigmas = sigmas, .n_images = 1};
    for (int t = 0; t < 2; t++)
        for (int e = 0; e < 3; e++)
            args.ids[t][e] = ids;
    check_bounds(create_generation, &args, sizeof args, bounds, COUNT(bounds));
}
