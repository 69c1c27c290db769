/* test_files_bpe.c: parts of byte-pair vocabularies that given words need, and vocabularies that are refused. */
#include "base/alloc.h"
#include "bpe_fixture.h"
#include "kernel_edge.h"
#include "test_files.h"

static void set_strings(mp_spec *spec, const char *key, int count, const char *const *texts) {
    uint64_t offsets[64] = {0};
    char bytes[1024];
    mp_error error;
    for (int i = 0; i < count; i++) {
        memcpy(bytes + offsets[i], texts[i], strlen(texts[i]));
        offsets[i + 1] = offsets[i] + strlen(texts[i]);
    }
    mp_value value = {
        .type = MP_VALUE_STRINGS, .gguf_type = -1, .count = (uint64_t)count, .as.strings = {bytes, offsets}};
    MP_CHECK_OK(mp_spec_set(spec, key, &value, &error), &error);
}

#define COUNT(list) ((int)(sizeof(list) / sizeof *(list)))

static mp_spec *spec_of(int tokens, const char *const *token, int merges, const char *const *merge) {
    mp_spec *spec = mp_spec_create();
    if (tokens)
        set_strings(spec, "tokenizer.ggml.tokens", tokens, token);
    if (merges)
        set_strings(spec, "tokenizer.ggml.merges", merges, merge);
    return spec;
}

static const char *const letters[] = {"a", "b", "c", "\xc3\xa9", "ab", "bc", "abc", "\xc3\xa9\x61", "", "\xa9", "",
                                      "a\xc3", "\xc3"};
static const char *const joins[] = {"b c", "a b", "ab c", "\xc3\xa9 a", "a bc"};

static mp_bpe *bpe_of(mp_spec *spec) {
    mp_bpe *bpe;
    mp_error error;
    MP_CHECK_OK(mp_bpe_create(spec, &bpe, &error), &error);
    mp_spec_unpin(spec); /* `bpe` holds its own reference */
    return bpe;
}

/* Check the part of the vocabulary that `word` needs. want: "tokens | merges", in order, tokens by index. */
static void check_part(const mp_bpe *bpe, const char *word, const char *want) {
    mp_bpe_part part;
    mp_error error;
    char got[256] = "";
    MP_CHECK_OK(mp_bpe_part_init(&part, bpe, &error), &error);
    const size_t bytes = strlen(word), floats = bytes / sizeof(float) + 1;
    float *edge = kt_edge((int64_t)floats); /* a read past the word's end crashes */
    char *copy = (char *)(edge + floats) - bytes;
    memcpy(copy, word, bytes);
    mp_bpe_part_add(&part, bpe, copy, bytes);
    kt_edge_free(edge, (int64_t)floats);
    MP_CHECK_OK(mp_bpe_part_finish(&part, bpe, &error), &error);
    size_t at = 0;
    for (uint32_t i = 0; i < part.token_count; i++)
        at += (size_t)snprintf(got + at, sizeof got - at, "%d ", part.tokens[i]);
    at += (size_t)snprintf(got + at, sizeof got - at, "|");
    for (uint32_t i = 0; i < part.merge_count; i++)
        at += (size_t)snprintf(got + at, sizeof got - at, " %d+%d", part.merges[i][0], part.merges[i][1]);
    MP_CHECK_STR(got, want);
    mp_bpe_part_deinit(&part);
    mp_bpe_part_deinit(&part); /* empty: nothing is freed twice */
}

MP_TEST(files_bpe_subsets_of_a_vocabulary) {
    mp_bpe *bpe = bpe_of(spec_of(COUNT(letters), letters, COUNT(joins), joins));
    MP_CHECK(bpe != NULL);
    check_part(bpe, "", "|");
    check_part(bpe, "zzz", "|");
    check_part(bpe, "abc", "0 1 2 4 5 6 | 1+2 0+1 4+2 0+5");
    check_part(bpe, "cab", "0 1 2 4 | 0+1");
    check_part(bpe, "bca\xc3\xa9", "0 1 2 3 5 | 1+2"); /* tokens 9, 11 and 12 have half of a character */
    check_part(bpe,
               "\xc3\xa9"
               "ab",
               "0 1 3 4 7 | 0+1 3+0");
    MP_CHECK_INT(mp_bpe_find(bpe, "abc", 3), 6);
    MP_CHECK_INT(mp_bpe_find(bpe, "abcd", 4), -1);
    MP_CHECK_INT(mp_bpe_word_cost(bpe, 2), 4);
    MP_CHECK_INT(mp_bpe_word_cost(bpe, 1000), 3000); /* the longest token has three bytes */
    mp_bpe_destroy(bpe);
    mp_bpe_destroy(NULL);
}

/* The table grows with the vocabulary: every token is found, and a text that is not a token is not found. */
MP_TEST(files_bpe_many_tokens) {
    enum { N = 3000 };
    static uint64_t offsets[N + 1];
    static char bytes[8 * N];
    static const char *const merge[] = {"t t1"}; /* "tt1" is token 1 */
    mp_error error;
    mp_spec *spec = mp_spec_create();
    for (int i = 0; i < N; i++) {
        char token[16];
        snprintf(token, sizeof token, "t%d", i - 1);
        const char *from = i == 0 ? "t" : i == 1 ? "tt1" : token;
        memcpy(bytes + offsets[i], from, strlen(from));
        offsets[i + 1] = offsets[i] + strlen(from);
    }
    mp_value tokens = {.type = MP_VALUE_STRINGS, .gguf_type = -1, .count = N, .as.strings = {bytes, offsets}};
    MP_CHECK_OK(mp_spec_set(spec, "tokenizer.ggml.tokens", &tokens, &error), &error);
    set_strings(spec, "tokenizer.ggml.merges", 1, merge);
    mp_bpe *bpe = bpe_of(spec);
    MP_CHECK(bpe != NULL);
    for (int i = 0; i < N; i++)
        MP_CHECK_INT(mp_bpe_find(bpe, bytes + offsets[i], offsets[i + 1] - offsets[i]), i);
    MP_CHECK_INT(mp_bpe_find(bpe, "t2999", 5), -1);
    check_part(bpe, "tt1", "0 1 2 | 0+2");
    check_part(bpe, "t2998", "0 3 30 300 2999 |"); /* the last token, too */
    mp_bpe_destroy(bpe);
}

/* The bytes of a merge are limited: 512 with the space, so that the joint text fits. */
MP_TEST(files_bpe_merges_of_long_tokens) {
    enum { LEFT = 250, MAX = 512 };
    for (int bytes = MAX; bytes <= MAX + 1; bytes++) {
        char texts[2 * MAX], merge[MAX + 1]; /* "lr" "lr" are the tokens l, r and lr */
        const size_t right = (size_t)bytes - 1 - LEFT;
        memset(texts, 'l', LEFT);
        memset(texts + LEFT, 'r', right);
        memcpy(texts + LEFT + right, texts, LEFT + right);
        memcpy(merge, texts, LEFT);
        merge[LEFT] = ' ';
        memset(merge + LEFT + 1, 'r', right);
        const uint64_t ends[] = {0, LEFT, LEFT + right, 2 * (LEFT + right)}, merges[] = {0, (uint64_t)bytes};
        mp_value tokens = {.type = MP_VALUE_STRINGS, .gguf_type = -1, .count = 3, .as.strings = {texts, ends}};
        mp_value rows = {.type = MP_VALUE_STRINGS, .gguf_type = -1, .count = 1, .as.strings = {merge, merges}};
        mp_spec *spec = mp_spec_create();
        mp_error error;
        MP_CHECK_OK(mp_spec_set(spec, "tokenizer.ggml.tokens", &tokens, &error), &error);
        MP_CHECK_OK(mp_spec_set(spec, "tokenizer.ggml.merges", &rows, &error), &error);
        mp_bpe *bpe = bpe_of(spec);
        MP_CHECK_INT(bpe != NULL, bytes == MAX);
        if (bpe)
            MP_CHECK_INT(mp_bpe_find(bpe, texts, LEFT + right), 2);
        mp_bpe_destroy(bpe);
    }
}

MP_TEST(files_bpe_refuses_unsuitable) {
    static const struct {
        const char *tokens[4], *merges[2];
        bool fits;
    } cases[] = {
        {{"a", "b", "ab"}, {"a b"}, true},           {{"a", "b", "ab"}, {"a c"}, false}, /* c is not a token */
        {{"a", "b", "ab"}, {"c b"}, false},          {{"a", "b", "ba"}, {"a b"}, false}, /* ab is not a token */
        {{"a", "b", "ab"}, {"ab"}, false},                                               /* no separator */
        {{"a", "b", "ab"}, {" ab"}, false},          {{"a", "b", "ab"}, {"ab "}, false},
        {{"a", "b", "ab", "a"}, {"a b"}, false},     /* a duplicate token */
        {{"a", "\xff", "a\xff"}, {"a \xff"}, false}, /* not UTF-8 */
        {{"a", "b c", "ab c"}, {"a b c"}, true},     /* the first space separates */
        {{"a", "b", "ab"}, {NULL}, false},           {{NULL}, {"a b"}, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int tokens = 0, merges = 0;
        while (tokens < 4 && cases[i].tokens[tokens])
            tokens++;
        while (merges < 2 && cases[i].merges[merges])
            merges++;
        mp_bpe *bpe = bpe_of(spec_of(tokens, cases[i].tokens, merges, cases[i].merges));
        if ((bpe != NULL) != cases[i].fits)
            MP_FAIL("case %d: %s", (int)i, bpe ? "fits" : "does not fit");
        mp_bpe_destroy(bpe);
    }
}

/* Tokens and merges must be arrays of strings that are not empty. */
MP_TEST(files_bpe_refuses_other_types) {
    static const char *const keys[] = {"tokenizer.ggml.tokens", "tokenizer.ggml.merges"};
    static const int64_t integers[] = {1, 2};
    const uint64_t none = 0;
    const mp_value others[] = {{.type = MP_VALUE_INTS, .count = 2, .as.integers = integers},
                               {.type = MP_VALUE_STRING, .count = 2, .as.string = "ab"},
                               {.type = MP_VALUE_STRINGS, .count = 0, .as.strings = {"", &none}}};
    for (int wrong = 0; wrong < 2; wrong++)
        for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
            mp_error error;
            mp_spec *spec = spec_of(wrong == 0 ? 0 : COUNT(letters), letters, wrong == 1 ? 0 : COUNT(joins), joins);
            MP_CHECK_OK(mp_spec_set(spec, keys[wrong], &others[i], &error), &error);
            MP_CHECK(bpe_of(spec) == NULL);
        }
}

MP_TEST(files_bpe_allocation_failures) {
    mp_spec *spec = spec_of(COUNT(letters), letters, COUNT(joins), joins);
    mp_test_alloc_sweep(use_vocabulary, spec);
    mp_spec_unpin(spec);
}
