/* fuzz_isolation.c: any bytes as the output of a worker process: a spec, the ring of its replies, or the reply, with a
 * correct checksum, to an admission, a plan or a step. A caller must never see an impossible value. */
#include "require.h"
#include "../c/request_fixture.h"

#include <stdatomic.h>

#include "files/spec_build.h"
#include "isolation/capability_wire.h"
#include "isolation/proxy.h"
#include "isolation/spec_codec.h"

enum { VOCAB = 50, MAX_TOKENS = 6, CHOICES = 2, TOPS = 2, TEXTS = 3, WIDTH = 4, TOTAL = 20 };

static bool never(void *arg) {
    (void)arg;
    return false;
}

static void decode_spec(const uint8_t *data, size_t size) {
    mp_spec *spec;
    mp_error error;
    uint8_t *again;
    size_t bytes;
    uint8_t *aligned = malloc(size + !size);
    REQUIRE(aligned);
    memcpy(aligned, data, size);
    mp_status status = mp_spec_decode(aligned, size, &spec, &error);
    free(aligned);
    if (status != MP_OK) {
        REQUIRE(error.message[0]);
        return;
    }
    REQUIRE(mp_spec_encode(spec, &again, &bytes, &error) == MP_OK);
    mp_free(again);
    mp_spec_unpin(spec);
}

static mp_channel_page page;
static const mp_isolation_kind no_kind;

/* Read from a ring whose positions, headers and data are arbitrary. */
static void read_ring(const uint8_t *data, size_t size) {
    static uint8_t frame_data[MP_FRAME_MAX];
    mp_channel channel;
    mp_error error;
    mp_frame frame;
    uint64_t head = 0;
    memset(&page, 0, sizeof page);
    memcpy(&head, data, size < 4 ? size : 4);
    if (size > 4)
        memcpy(page.replies.data, data + 4, size - 4 < MP_RING_BYTES ? size - 4 : MP_RING_BYTES);
    atomic_store(&page.replies.head, head);
    mp_channel_init(&channel, &page, true, &error, never, NULL);
    while (mp_channel_waiting(&channel) && mp_channel_receive(&channel, false, &frame, frame_data))
        REQUIRE(frame.bytes <= MP_FRAME_MAX);
}

/* Send `data` in frames of up to 100 bytes, so that values cross frame boundaries. */
static void send(mp_channel *child, mp_frame_kind kind, const uint8_t *data, size_t size) {
    do {
        size_t chunk = size > 100 ? 100 : size;
        mp_channel_send(child, kind, chunk == size, data, chunk);
        data += chunk;
        size -= chunk;
    } while (size);
}

typedef enum kind { EMBED, TEXT, IMAGES, VISION, FORMED } kind; /* FORMED: a text request with a mask and a capture */

static mp_request *make_call(kind kind) {
    static const int32_t ids[] = {1, 2, 3, 4};
    static const int64_t offsets[] = {0, 1, 3, 4};
    static const char *const stop[] = {"!!"};
    static const int32_t stop_bytes[] = {2};
    mp_error error;
    if (kind == IMAGES) {
        static const int32_t sizes[2 * TEXTS] = {[0 ... 2 * TEXTS - 1] = 1};
        static const uint8_t pixels[3 * TEXTS];
        mp_image_embedding_request *call;
        REQUIRE(make_image_embedding_request(TEXTS, sizes, pixels, sizeof pixels, &call, &error) == MP_OK);
        REQUIRE(mp_image_embedding_request_output(call, TEXTS, WIDTH, &error) == MP_OK);
        return &call->base;
    }
    if (kind == EMBED) {
        mp_embedding_request *call;
        REQUIRE(make_embedding_request(TEXTS, ids, offsets, NULL, &call, &error) == MP_OK);
        REQUIRE(mp_embedding_request_output(call, (mp_embedding_sizes){.width = WIDTH}, &error) == MP_OK);
        return &call->base;
    }
    mp_text_args args = {.n_prompt = 4, .prompt = ids, .n_choices = CHOICES, .n_stop = 1, .stop = stop,
                         .stop_bytes = stop_bytes,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = MAX_TOKENS,
                                      .logprobs = TOPS}};
    static const int32_t sides[] = {1, 1}, runs[] = {1, 2, 1};
    static const uint8_t pixels[3], key[MP_IMAGE_KEY];
    static const int32_t sources[] = {0, -1};
    if (kind == VISION) {
        args.vision = true;
        args.images = (mp_text_image_args){.n_tiles = 1, .n_runs = 1, .sizes = sides, .pixels = pixels, .n_bytes = 3,
                                           .tile_keys = key, .run_keys = key, .spans = runs, .sources = sources,
                                           .n_sources = 2};
    }
    static const uint32_t mask[] = {1 << 3 | 1 << 7, 1};
    static const int32_t ends[] = {7};
    if (kind == FORMED) {
        args.n_choices = 1;
        args.mask = mask;
        args.mask_bytes = sizeof mask;
        args.capture_values = 2;
        args.capture_records = 100;
    }
    mp_text_request *call;
    REQUIRE(mp_text_request_create(&args, &call, &error) == MP_OK);
    call->vocab = VOCAB + 3;
    call->sampled_vocab = VOCAB;
    call->ends = ends;
    call->n_ends = 1;
    call->capture.layers = 1;
    call->capture.hidden = WIDTH;
    call->capture.vocab = VOCAB;
    REQUIRE(mp_text_request_output(call, 3, &error) == MP_OK);
    return &call->base;
}

static void check_text(const mp_text_request *call) {
    REQUIRE(call->cached_tokens >= 0 && call->cached_tokens <= call->n_prompt);
    REQUIRE(call->capture.sampled <= call->choices[0].token_count + 1);
    for (int c = 0; c < call->n_choices; c++) {
        const mp_choice *choice = &call->choices[c];
        REQUIRE(choice->token_count <= MAX_TOKENS && choice->text_bytes <= choice->text_capacity);
        REQUIRE(mp_is_utf8(choice->text, choice->text_bytes));
        REQUIRE(choice->finish >= MP_FINISH_NONE && choice->finish <= MP_FINISH_CANCELLED);
        for (uint32_t t = 0; t < choice->token_count; t++) {
            REQUIRE(choice->tokens[t].id >= 0 && choice->tokens[t].id < VOCAB);
            /* each token needs a mask, and only the first mask was sent */
            const uint32_t id = (uint32_t)choice->tokens[t].id;
            REQUIRE(!call->masks || (t == 0 && (call->masks[c].bits[id / 32] >> id % 32 & 1)));
            uint32_t end = choice->tokens[t].byte_end;
            REQUIRE(end <= choice->text_capacity);
            REQUIRE(end >= choice->text_bytes || ((uint8_t)choice->text[end] & 0xC0) != 0x80);
            for (int k = 0; k < TOPS; k++)
                REQUIRE(choice->top_ids[t * TOPS + (uint32_t)k] < VOCAB);
        }
    }
}

/* Send a correct reply to a message that precedes the fuzzed one. */
static void answer(mp_channel *child, mp_frame_kind kind) {
    static mp_wire_out out;
    mp_wire_begin(&out, child, kind);
    mp_put_u32(&out, 1);
    if (kind == MP_FRAME_ADMIT) {
        mp_put_error(&out, MP_OK, NULL);
    } else {
        mp_put_u32(&out, 0);
        mp_put_u32(&out, TEXTS);
        mp_put_u32(&out, 1);
        mp_put_u64(&out, 1000);
    }
    mp_wire_end(&out);
}

static void serve(kind kind, int stage, const uint8_t *data, size_t size) {
    static mp_plan plan;
    mp_outcome outcomes[MP_PLAN_MAX];
    mp_error error, child_error;
    mp_engine *engine;
    mp_channel child;
    mp_request *call = make_call(kind);
    const bool text = kind == TEXT || kind == VISION || kind == FORMED;
    mp_item item = {.request = call, .total = text ? TOTAL : TEXTS};
    mp_item *items[1] = {&item};
    mp_lease lease = {.threads = 1};
    mp_proxy_args args = {.kind = &no_kind, .capability = call->capability, .memory_bytes = 1 << 20,
                          .start_ns = 1000000, .stall_ns = 1};
    mp_budget budget = {.limit = UINT64_MAX};
    memset(&page, 0, sizeof page);
    REQUIRE(mp_proxy_attach(&args, &budget, &page, &engine, &error) == MP_OK);
    mp_channel_init(&child, &page, false, &child_error, never, NULL);
    stage ? answer(&child, MP_FRAME_ADMIT) : send(&child, MP_FRAME_ADMIT, data, size);
    mp_status status = engine->ops->admit(engine, &item, &error);
    REQUIRE((status == MP_OK) == (item.state != NULL));
    if (status == MP_OK) {
        stage > 1 ? answer(&child, MP_FRAME_PLAN) : send(&child, MP_FRAME_PLAN, data, size);
        engine->ops->plan(engine, items, 1, 1000, &plan);
        REQUIRE(plan.count == 1 && plan.items[0] == &item && plan.threads >= 1);
        REQUIRE(plan.amount[0] > 0 || kind == VISION);
        for (int i = 0; i < 2 && !engine->lost(engine); i++) { /* step 2 starts from the state after step 1 */
            size_t chunk = i ? size - size / 2 : size / 2;
            if (stage == 2)
                send(&child, MP_FRAME_STEP, i ? data + size / 2 : data, chunk);
            engine->ops->step(engine, &lease, &plan, outcomes);
            if (outcomes[0] == MP_OUTCOME_DONE || outcomes[0] == MP_OUTCOME_FAILED)
                break;
        }
        REQUIRE(item.cursor <= item.total);
    }
    engine->ops->retire(engine, &item);
    engine->ops->destroy(engine);
    REQUIRE(budget.used == 0);
    if (text)
        check_text((mp_text_request *)call);
    else if (kind == IMAGES)
        REQUIRE(((mp_image_embedding_request *)call)->done <= TEXTS);
    else
        REQUIRE(((mp_embedding_request *)call)->done <= TEXTS);
    mp_request_destroy(call);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0)
        return 0;
    uint8_t what = *data++;
    size--;
    if (what % 4 == 0)
        decode_spec(data, size);
    else if (what % 4 == 1)
        read_ring(data, size);
    else
        serve(what % 4 == 3 ? (what & 128 ? VISION : what & 64 ? FORMED : TEXT) : what & 128 ? IMAGES : EMBED,
              what / 4 % 3, data, size);
    return 0;
}
