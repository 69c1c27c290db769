/* Building blocks of models: sampling, text streams, pooling, rotary tables. */
#include <stdatomic.h>

#include "mp_test.h"
#include "models/engine.h"
#include "models/generation/kv_cache.h"
#include "models/nn/pooling.h"
#include "models/nn/rope.h"
#include "models/generation/sampler.h"
#include "models/generation/stop_strings.h"

/* ---- sampling ---------------------------------------------------------------------------------------------------- */

enum { VOCAB = 1000 };
static float logits[VOCAB];
static mp_candidate candidates[VOCAB];
static const mp_sampling plain = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};

static void fill_logits(void) {
    mp_test_random random = {9};
    for (int i = 0; i < VOCAB; i++)
        logits[i] = mp_test_random_float(&random, -4, 4);
}

static int32_t sample(const mp_sampling *sampling, const mp_history *history, uint32_t position) {
    mp_sample_args sample = {.sampling = sampling, .history = history, .position = position};
    return mp_sample(&sample, logits, VOCAB, candidates);
}

static double softmax_at(int id, float temperature) {
    double sum = 0;
    for (int i = 0; i < VOCAB; i++)
        sum += exp((double)logits[i] / temperature);
    return exp((double)logits[id] / temperature) / sum;
}

MP_TEST(models_sample_greedy_takes_the_lowest_of_equals) {
    mp_kernels_init();
    fill_logits();
    logits[700] = logits[300] = 9;
    mp_sampling greedy = plain;
    greedy.temperature = 0;
    MP_CHECK_INT(sample(&greedy, NULL, 0), 300);
}

MP_TEST(models_sample_bias_and_banned_tokens) {
    mp_kernels_init();
    mp_sampling greedy = plain;
    greedy.temperature = 0;
    int32_t ids[] = {5}, barred[] = {7, 8};
    float bias[] = {100};
    fill_logits();
    logits[7] = 50;
    mp_sample_args sample = {.sampling = &greedy, .n_bias = 1, .bias_ids = ids, .bias = bias};
    MP_CHECK_INT(mp_sample(&sample, logits, VOCAB, candidates), 5);
    fill_logits();
    logits[7] = 50;
    sample = (mp_sample_args){.sampling = &greedy, .n_barred = 2, .barred = barred};
    MP_CHECK(mp_sample(&sample, logits, VOCAB, candidates) != 7);
    const int32_t borders[] = {0, VOCAB - 1};
    for (int i = 0; i < 2; i++) {
        fill_logits();
        logits[borders[i]] = 50;
        sample = (mp_sample_args){.sampling = &greedy, .n_barred = 1, .barred = &borders[i]};
        MP_CHECK(mp_sample(&sample, logits, VOCAB, candidates) != borders[i]);
        fill_logits();
        sample = (mp_sample_args){.sampling = &greedy, .n_bias = 1, .bias_ids = &borders[i], .bias = bias};
        MP_CHECK_INT(mp_sample(&sample, logits, VOCAB, candidates), borders[i]);
    }
    for (int i = 0; i < VOCAB; i++)
        logits[i] = -INFINITY;
    MP_CHECK_INT(mp_sample(&sample, logits, VOCAB, candidates), -1);
}

MP_TEST(models_logprobs) {
    mp_kernels_init();
    fill_logits();
    float logprob, top[4];
    int32_t top_ids[4];
    mp_logprobs(logits, VOCAB, 17, 4, &logprob, top_ids, top, candidates);
    MP_CHECK_NEAR(logprob, log(softmax_at(17, 1)), 1e-5);
    for (int i = 0; i < 4; i++) {
        MP_CHECK_NEAR(top[i], log(softmax_at(top_ids[i], 1)), 1e-5);
        int above = 0;
        for (int k = 0; k < VOCAB; k++)
            above += logits[k] > logits[top_ids[i]];
        MP_CHECK_INT(above, i);
    }
    mp_candidate few[4] = {0}; /* two tokens leave two places empty */
    mp_logprobs(logits, 2, 0, 4, &logprob, top_ids, top, few);
    for (int i = 0; i < 4; i++)
        MP_CHECK(i < 2 ? top_ids[i] >= 0 && top_ids[i] < 2 && isfinite(top[i])
                       : top_ids[i] == -1 && top[i] == -INFINITY);
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

static char text[4096];

static uint32_t decided(const mp_choice *choice) { return atomic_load(&choice->text_bytes); }

/* Append the chunks, separated by |, to a stream; return the index of the matched stop string, or -1. */
static int feed_request(mp_choice *choice, mp_stream *stream, const char *chunks, const mp_text_request *request) {
    *choice = (mp_choice){.text = text, .text_capacity = sizeof text};
    mp_stream_init(stream, choice);
    uint32_t last = 0;
    while (*chunks) {
        size_t n = strcspn(chunks, "|");
        int found = mp_stream_append(stream, request, (const uint8_t *)chunks, n);
        MP_CHECK_INT(decided(choice), last); /* the token is published before its text */
        mp_stream_publish(stream);
        MP_CHECK(decided(choice) >= last); /* published text is never taken back */
        last = decided(choice);
        if (found >= 0)
            return found;
        chunks += n + (chunks[n] == '|');
    }
    return -1;
}

static int feed(mp_choice *choice, mp_stream *stream, const char *chunks, int n_stop, char **stop) {
    int32_t lengths[8];
    for (int i = 0; i < n_stop; i++)
        lengths[i] = (int32_t)strlen(stop[i]);
    const mp_text_request request = {.n_stop = n_stop, .stop = stop, .stop_bytes = lengths};
    return feed_request(choice, stream, chunks, &request);
}

MP_TEST(models_stream_never_shows_half_a_character) {
    mp_choice choice;
    mp_stream stream;
    feed(&choice, &stream, "a\xF0\x9F|\x98", 0, NULL);
    MP_CHECK_INT(decided(&choice), 1);
    feed(&choice, &stream, "a\xF0\x9F|\x98|\x80" "b", 0, NULL);
    MP_CHECK_INT(decided(&choice), 6);
    MP_CHECK(memcmp(text, "a\xF0\x9F\x98\x80" "b", 6) == 0);
}

/* Return true if `a` and `b` begin a character, according to the code points that UTF-8 can encode: no surrogates, no
 * code points that need fewer bytes, none above 10FFFF. */
static bool begins_character(int a, int b) {
    if (b < 0x80 || b > 0xBF)
        return false;
    const int length = a >= 0xF0 ? 4 : a >= 0xE0 ? 3 : 2;
    const long least[] = {0x80, 0x800, 0x10000};
    long low = a & (0x7F >> length), high;
    low = low << 6 | (b & 0x3F);
    high = low;
    for (int i = 2; i < length; i++) {
        low <<= 6;
        high = high << 6 | 0x3F;
    }
    return low >= least[length - 2] && high <= 0x10FFFF && !(low >= 0xD800 && high <= 0xDFFF);
}

/* A second byte either continues the character of the first one, or U+FFFD replaces the first one. */
MP_TEST(models_stream_knows_all_second_bytes) {
    for (int a = 0xC2; a <= 0xF4; a++)
        for (int b = 0x80; b <= 0xFF; b++) {
            const uint8_t bytes[] = {(uint8_t)a, (uint8_t)b};
            mp_choice choice = {.text = text, .text_capacity = sizeof text};
            mp_stream stream;
            mp_stream_init(&stream, &choice);
            mp_stream_append(&stream, &(mp_text_request){0}, bytes, 2);
            mp_stream_publish(&stream);
            const bool fits = begins_character(a, b), lead = b >= 0xC2 && b <= 0xF4;
            const uint32_t expected = fits ? (a < 0xE0 ? 2 : 0) : lead ? 3 : 6; /* U+FFFD has 3 bytes */
            if (decided(&choice) != expected)
                MP_FAIL("bytes %02X %02X: %u bytes of text, expected %u", a, b, decided(&choice), expected);
        }
}

/* Stop strings end the response and not the reasoning, however the text is cut into chunks. */
MP_TEST(models_stream_stops_no_reasoning) {
    char *stop[] = {"stop", "\n", "<t", "\n\nUser:"}, *starts[] = {"<think>"}, *ends[] = {"</think>", "</t>", "<r>"};
    char *calls[] = {"<tool>", "<r>"};
    static const struct {
        const char *text, *expected;
        bool in_reasoning;
        int found;
    } rows[] = {{"Hm stop </think>Yes stop", "Hm stop </think>Yes ", true, 0},
                {"a\nb</think>\n\nYes\nNo", "a\nb</think>\n\nYes", true, 1},
                {"a</t>stop</think>", "a</t>", true, 0},
                {"a</think> \n\n", "a</think> \n\n", true, -1},
                {"a</think>\n\nUser:", "a</think>", true, 3},
                {"stop, never closed\n", "stop, never closed\n", true, -1},
                {" <think>stop\n</think>\nYes\n", " <think>stop\n</think>\nYes", false, 1},
                {"<thinstop", "", false, 2},
                {"<b>stop", "<b>", false, 0},
                {"Yes\n</think>stop", "Yes", false, 1},
                {"Yes<tool>stop\n</t>\n<tool>\n</t>No stop", "Yes<tool>stop\n</t>\n<tool>\n</t>No ", false, 0},
                {"<think>\n<tool>\n</t>No\n", "<think>\n<tool>\n</t>No", false, 1},
                {"Ye<tool>stop", "Ye<tool>stop", false, -1},
                {"Ye<toad stop", "Ye", false, 2},
                {"stop<tool>", "", false, 0},
                {"a</think>\n<r>\nYes\n<r>", "a</think>\n<r>\nYes", true, 1}, /* `<r>` is a whole part */
                {"a</think>Yes<t", "a</think>Yes", true, 2}, /* it might have begun a part */
                {"a</think>Yes<", "a</think>Yes<", true, -1},
                {"<t", "", false, 2}};
    const int32_t lengths[] = {4, 1, 2, 7}, start_bytes[] = {7}, end_bytes[] = {8, 4, 3}, call_bytes[] = {6, 3};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const mp_text_request request = {.n_stop = 4, .stop = stop, .stop_bytes = (int32_t *)lengths,
                                         .n_reasoning_starts = 1, .reasoning_starts = starts,
                                         .reasoning_start_bytes = (int32_t *)start_bytes, .n_reasoning_ends = 3,
                                         .reasoning_ends = ends, .reasoning_end_bytes = (int32_t *)end_bytes,
                                         .n_call_starts = 2, .call_starts = calls,
                                         .call_start_bytes = (int32_t *)call_bytes,
                                         .in_reasoning = rows[i].in_reasoning};
        for (size_t chunk = 1; chunk <= strlen(rows[i].text); chunk++) {
            char cut[128];
            size_t at = 0;
            for (size_t from = 0; from < strlen(rows[i].text); from += chunk)
                at += (size_t)snprintf(cut + at, sizeof cut - at, "%s%.*s", from ? "|" : "", (int)chunk,
                                       rows[i].text + from);
            mp_choice choice;
            mp_stream stream;
            int found = feed_request(&choice, &stream, cut, &request);
            if (found < 0)
                found = mp_stream_finish(&stream, &request);
            MP_CHECK_INT(found, rows[i].found);
            MP_CHECK_INT(decided(&choice), strlen(rows[i].expected));
            MP_CHECK(memcmp(text, rows[i].expected, strlen(rows[i].expected)) == 0);
        }
    }
}

/* However the text is cut into chunks, the result is the text before the earliest stop string. */
MP_TEST(models_stream_any_cut_gives_the_same_text) {
    char *stop[] = {"abab", "bb"};
    static const char letters[] = "ab";
    mp_test_random random = {4};
    for (int round = 0; round < 3000; round++) {
        char whole[24], cut[64];
        int length = 1 + (int)(mp_test_random_u64(&random) % 16), at = 0;
        for (int i = 0; i < length; i++) {
            whole[i] = letters[mp_test_random_u64(&random) % 2];
            cut[at++] = whole[i];
            if (mp_test_random_u64(&random) % 2)
                cut[at++] = '|';
        }
        whole[length] = cut[at] = 0;
        char *first = strstr(whole, stop[0]), *second = strstr(whole, stop[1]);
        (void)second;
        mp_choice choice;
        mp_stream stream;
        int found = feed(&choice, &stream, cut, 2, stop);
        if (found < 0) {
            mp_stream_finish(&stream, &(mp_text_request){0});
            MP_CHECK(!first && !second);
            MP_CHECK_INT(decided(&choice), length);
        } else {
            const char *expected = found == 0 ? first : second;
            MP_CHECK(expected != NULL);
            /* this match completes in an earlier chunk than any other, or starts earlier in the same chunk */
            MP_CHECK_INT(decided(&choice), expected - whole);
        }
    }
}

/* ---- pooling ----------------------------------------------------------------------------------------------------- */

MP_TEST(models_pooling_modes) {
    mp_kernels_init();
    static const float tokens[] = {1, -2, 3, 4, 5, -6}; /* [3, 2] */
    static const float expected[MP_POOL_COUNT][2] = {
        {1, -2},                                                /* cls */
        {5, 4},                                                 /* max */
        {3, -4.0f / 3},                                         /* mean */
        {9 / 1.7320508f, -4 / 1.7320508f},                      /* mean_sqrt_len */
        {(1 + 6 + 15) / 6.0f, (-2 + 8 - 18) / 6.0f},            /* weightedmean */
        {5, -6},                                                /* lasttoken */
    };
    float scratch[64], out[2 * MP_POOL_COUNT];
    mp_head head = {.hidden = 2, .modes = MP_POOL_COUNT, .pooled = 2 * MP_POOL_COUNT, .width = 2 * MP_POOL_COUNT};
    for (int m = 0; m < MP_POOL_COUNT; m++)
        head.mode[m] = (mp_pooling_mode)m;
    MP_CHECK(mp_head_scratch(&head) <= 64);
    mp_head_apply(&head, tokens, 3, 0, head.width, false, scratch, out);
    for (int m = 0; m < MP_POOL_COUNT; m++)
        for (int i = 0; i < 2; i++)
            MP_CHECK_NEAR(out[2 * m + i], expected[m][i], 1e-6);
    /* leave the one token of the instruction prompt out of pooling */
    static const float skipped[MP_POOL_COUNT][2] = {{3, 4}, {5, 4}, {4, -1}, {8 / 1.4142135f, -2 / 1.4142135f},
                                                    {(6 + 15) / 5.0f, (8 - 18) / 5.0f}, {5, -6}};
    mp_head_apply(&head, tokens, 3, 1, head.width, false, scratch, out);
    for (int m = 0; m < MP_POOL_COUNT; m++)
        for (int i = 0; i < 2; i++)
            MP_CHECK_NEAR(out[2 * m + i], skipped[m][i], 1e-6);
}

MP_TEST(models_pooling_truncates_and_normalises) {
    mp_kernels_init();
    static const float tokens[] = {3, 4, 12, 84};
    float scratch[64], out[4];
    mp_head head = {.hidden = 4, .modes = 1, .mode = {MP_POOL_MEAN}, .pooled = 4, .width = 4};
    mp_head_apply(&head, tokens, 1, 0, 2, true, scratch, out);
    MP_CHECK_NEAR(out[0], 0.6, 1e-7);
    MP_CHECK_NEAR(out[1], 0.8, 1e-7);
    static const float zero[] = {0, 0, 0, 0};
    mp_head_apply(&head, zero, 1, 0, 4, true, scratch, out);
    MP_CHECK(out[0] == 0);
}

/* Dense layers after pooling, against their formula: tanh(weight x - minus x + bias), then a layer norm; a layer for
 * particular dimensions replaces the only one. */
MP_TEST(models_pooling_dense_layers) {
    enum { IN = 3, OUT = 4, SMALL = 2 };
    static float weight[] = {1, 0.5f, -1, 0.25f, 2, 0, -0.5f, 0, 1, 0.75f, 1, 1}, bias[] = {0.1f, -0.2f, 0.3f, 0};
    static float minus[] = {0.5f, 0, 0, 0, 1, 0, 0, 0, -0.25f, 0, 0.5f, 0}, norm[] = {1, 2, 0.5f, 1.5f};
    static float norm_bias[] = {0.5f, 0, -1, 0}, small[] = {2, 0, 1, -1, 1, 0};
    static const float token[] = {0.3f, -0.4f, 0.9f};
    mp_kernels_init();
    mp_head head = {.hidden = IN, .modes = 1, .mode = {MP_POOL_MEAN}, .pooled = IN, .width = OUT,
                    .dense = {.count = 1, .in = IN, .out = OUT,
                              .dense = {{.in = IN, .out = OUT, .weight = weight, .bias = bias, .minus = minus,
                                         .act = MP_ACT_TANH, .norm = norm, .norm_bias = norm_bias, .eps = 1e-5f}}},
                    .size_count = 1, .sizes = {{.in = IN, .out = SMALL, .weight = small, .act = MP_ACT_NONE}}};
    float scratch[64], out[OUT];
    double y[OUT], mean = 0, square = 0;
    MP_CHECK(mp_head_scratch(&head) <= sizeof scratch / sizeof *scratch);
    mp_head_apply(&head, token, 1, 0, OUT, false, scratch, out);
    for (int i = 0; i < OUT; i++) {
        double sum = (double)bias[i];
        for (int k = 0; k < IN; k++)
            sum += (double)(weight[i * IN + k] - minus[i * IN + k]) * (double)token[k];
        y[i] = tanh(sum);
        mean += y[i] / OUT;
    }
    for (int i = 0; i < OUT; i++)
        square += (y[i] - mean) * (y[i] - mean) / OUT;
    for (int i = 0; i < OUT; i++)
        MP_CHECK_NEAR(out[i], (y[i] - mean) / sqrt(square + 1e-5) * (double)norm[i] + (double)norm_bias[i], 1e-5);
    mp_head_apply(&head, token, 1, 0, SMALL, false, scratch, out);
    for (int i = 0; i < SMALL; i++)
        MP_CHECK_NEAR(out[i], small[i * IN] * token[0] + small[i * IN + 1] * token[1] + small[i * IN + 2] * token[2],
                      1e-6);
}

/* ---- rotary tables ----------------------------------------------------------------------------------------------- */

static void set_string(mp_spec *spec, const char *key, const char *value) {
    mp_error error;
    mp_value v = {.type = MP_VALUE_STRING, .gguf_type = -1, .count = strlen(value), .as.string = value};
    MP_CHECK_OK(mp_spec_set(spec, key, &v, &error), &error);
}

static void set_real(mp_spec *spec, const char *key, double value) {
    mp_error error;
    mp_value v = {.type = MP_VALUE_FLOAT, .gguf_type = -1, .count = 1, .as.real = value};
    MP_CHECK_OK(mp_spec_set(spec, key, &v, &error), &error);
}

MP_TEST(models_rope_scaling) {
    mp_error error;
    mp_rope rope;
    float row[8];
    mp_spec *spec = mp_spec_create();
    MP_CHECK_OK(mp_spec_set_architecture(spec, "llama", &error), &error);
    set_real(spec, "llama.rope.freq_base", 10000);
    MP_CHECK_OK(mp_rope_init(&rope, spec, 8, true, &error), &error);
    mp_rope_row(&rope, 3, row);
    for (int i = 0; i < 4; i++) {
        double angle = 3 * pow(10000, -2.0 * i / 8);
        MP_CHECK_NEAR(row[2 * i], cos(angle), 1e-7);
        MP_CHECK_NEAR(row[2 * i + 1], sin(angle), 1e-7);
    }
    mp_rope_deinit(&rope);
    set_string(spec, "llama.rope.scaling.type", "llama3");
    MP_CHECK_STATUS(mp_rope_init(&rope, spec, 8, true, &error), MP_FORMAT, &error); /* no factors yet */
    mp_rope_deinit(&rope);
    set_real(spec, "llama.rope.scaling.factor", 8);
    set_real(spec, "llama.rope.scaling.low_freq_factor", 1);
    set_real(spec, "llama.rope.scaling.high_freq_factor", 4);
    set_real(spec, "llama.rope.scaling.original_context_length", 8192);
    MP_CHECK_OK(mp_rope_init(&rope, spec, 8, true, &error), &error);
    MP_CHECK_NEAR(rope.inverse[0], 1, 1e-12); /* short wavelengths are unchanged */
    /* wavelength of the last pair is 2 pi 1000 = 6283: 8192 / 6283 = 1.304 -> smooth (1.304 - 1) / 3 */
    double smooth = (8192 / (2 * 3.14159265358979323846 * 1000) - 1) / 3;
    MP_CHECK_NEAR(rope.inverse[3], 0.001 * ((1 - smooth) / 8 + smooth), 1e-12);
    mp_rope_deinit(&rope);
    mp_spec_unpin(spec);
    spec = mp_spec_create();
    MP_CHECK_OK(mp_spec_set_architecture(spec, "llama", &error), &error);
    set_string(spec, "llama.rope.scaling.type", "ntk");
    MP_CHECK_STATUS(mp_rope_init(&rope, spec, 8, true, &error), MP_FORMAT, &error);
    MP_CHECK_HAS(error.message, "ntk");
    mp_rope_deinit(&rope);
    mp_spec_unpin(spec);
}

MP_TEST(models_rope_yarn) {
    mp_error error;
    mp_rope rope;
    mp_spec *spec = mp_spec_create();
    MP_CHECK_OK(mp_spec_set_architecture(spec, "llama", &error), &error);
    set_real(spec, "llama.rope.freq_base", 10000);
    set_string(spec, "llama.rope.scaling.type", "yarn");
    set_real(spec, "llama.rope.scaling.factor", 4);
    MP_CHECK_STATUS(mp_rope_init(&rope, spec, 8, true, &error), MP_FORMAT, &error); /* no original context length */
    mp_rope_deinit(&rope);
    set_real(spec, "llama.rope.scaling.original_context_length", 2048);
    MP_CHECK_OK(mp_rope_init(&rope, spec, 8, true, &error), &error);
    /* the ramp runs from the pair that turns 32 times within the original context to the pair that turns once:
     * 8 ln(2048 / (32 * 2 pi)) / (2 ln 10000) = 1.008 and 2.513, rounded outwards to 1 and 3 */
    MP_CHECK_NEAR(rope.inverse[0], 1, 1e-12);
    MP_CHECK_NEAR(rope.inverse[1], 0.1, 1e-12);
    MP_CHECK_NEAR(rope.inverse[2], 0.01 * (0.5 + 0.5 / 4), 1e-12);
    MP_CHECK_NEAR(rope.inverse[3], 0.001 / 4, 1e-12);
    MP_CHECK_NEAR(rope.attention_scale, 1 + 0.1 * log(4), 1e-6);
    mp_rope_deinit(&rope);
    mp_spec_unpin(spec);
}
