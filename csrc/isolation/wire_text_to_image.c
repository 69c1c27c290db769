/* wire_text_to_image.c: image generation requests between processes; see capability_wire.h. To resume, a request needs
 * the latents after its last step, and the predicted latents of a preview that is due. The results of a step contain
 * both; the results of a decoded image contain its pixels. */
#include <float.h>
#include <stdatomic.h>
#include <string.h>

#include "isolation/capability_wire.h"

typedef struct t2i_progress {
    uint32_t cursor;
    int32_t previews;
} t2i_progress;

/* The images with indices [first, end). */
typedef struct span {
    int32_t first, end;
} span;

static mp_status t2i_check(const mp_request *base, mp_error *error) {
    if (((const mp_image_generation_request *)base)->keep)
        return mp_fail(error, MP_UNSUPPORTED, "text embeddings and latents of each step are not supported in worker "
                                              "processes; use isolation=\"thread\"");
    return MP_OK;
}

static size_t t2i_progress_bytes(const mp_request *request) {
    (void)request;
    return sizeof(t2i_progress);
}

static int32_t decoded_at(const mp_image_generation_request *request, uint32_t cursor) {
    const uint32_t steps = mp_image_generation_steps(request);
    return cursor > steps ? (int32_t)(cursor - steps) : 0;
}

/* Returns the images whose latents a process needs to resume at `cursor`: those begun but not decoded. */
static span needed_at(const mp_image_generation_request *request, uint32_t cursor) {
    const uint32_t steps = mp_image_generation_steps(request), done = cursor < steps ? cursor : steps;
    return (span){decoded_at(request, cursor),
                  (int32_t)((done + (uint32_t)request->n_steps - 1) / (uint32_t)request->n_steps)};
}

/* Returns the images whose latents changed between two cursors. */
static span changed_between(const mp_image_generation_request *request, uint32_t from, uint32_t to) {
    const uint32_t steps = mp_image_generation_steps(request), each = (uint32_t)request->n_steps;
    to = to < steps ? to : steps;
    return from < to ? (span){(int32_t)(from / each), (int32_t)((to + each - 1) / each)} : (span){0, 0};
}

static size_t latent_bytes(const mp_image_generation_request *request) {
    return (size_t)mp_image_generation_latents(request) * sizeof(float);
}

static float *latents_of(const mp_image_generation_request *request, span of, size_t *bytes) {
    *bytes = (size_t)(of.end - of.first) * latent_bytes(request);
    return request->latents + (int64_t)of.first * mp_image_generation_latents(request);
}

/* True while the preview of the last finished step is due but not made yet. */
static bool preview_open(const mp_image_generation_request *request, uint32_t cursor, int32_t previews) {
    return mp_image_generation_previews_due(request, cursor) > previews;
}

/* --- the request and its progress --- */

static void t2i_put_request(mp_wire_out *out, const mp_item *item, void *progress) {
    const mp_image_generation_request *request = (const mp_image_generation_request *)item->request;
    const int32_t previews = atomic_load_explicit(&request->previews_done, memory_order_relaxed);
    *(t2i_progress *)progress = (t2i_progress){item->cursor, previews};
    const size_t steps = (size_t)request->n_steps;
    mp_put_i32(out, request->width);
    mp_put_i32(out, request->height);
    mp_put_i32(out, request->n_steps);
    mp_put_i64(out, request->n_noise);
    mp_put_i32(out, request->n_texts);
    mp_put(out, request->n_ids, sizeof request->n_ids);
    for (int32_t t = 0; t < request->n_texts; t++)
        for (int e = 0; e < MP_T2I_ENCODERS; e++)
            mp_put_optional(out, request->ids[t][e], (size_t)request->n_ids[e] * sizeof(int32_t));
    mp_put(out, request->noise, (size_t)request->n_noise * sizeof *request->noise);
    mp_put(out, request->times, steps * sizeof *request->times);
    mp_put(out, request->sigmas, (steps + 1) * sizeof *request->sigmas);
    mp_put_i32(out, request->n_images);
    mp_put_f32(out, request->guidance);
    mp_put_i32(out, request->preview_every);
    mp_put_u8(out, request->keep);
    mp_put_i32(out, previews);
    size_t bytes;
    const float *latents = latents_of(request, needed_at(request, item->cursor), &bytes);
    mp_put(out, latents, bytes);
    if (preview_open(request, item->cursor, previews))
        mp_put(out, request->preview_latents, latent_bytes(request));
}

static mp_status t2i_get_request(mp_wire_in *in, mp_request **out, mp_error *error) {
    mp_image_generation_args args = {0};
    mp_image_generation_request *request = NULL;
    bool ok = true;
    args.width = mp_get_i32(in);
    args.height = mp_get_i32(in);
    args.n_steps =
        (int32_t)mp_wire_within(in, mp_get_i32(in), 1, MP_T2I_MAX_STEPS, "the number of steps is out of bounds");
    args.n_noise = mp_wire_within(in, mp_get_i64(in), 1, INT32_MAX, "the number of latents is out of bounds");
    args.n_texts = (int32_t)mp_get_count(in, MP_T2I_TEXTS, "the number of texts is out of bounds");
    for (int e = 0; e < MP_T2I_ENCODERS; e++)
        args.n_ids[e] = (int32_t)mp_get_count(in, MP_T2I_MAX_TOKENS, "the number of tokens is out of bounds");
    for (int32_t t = 0; t < args.n_texts; t++)
        for (int e = 0; e < MP_T2I_ENCODERS; e++)
            args.ids[t][e] = mp_get_optional(in, args.n_ids[e], sizeof(int32_t), &ok);
    args.noise = mp_get_array(in, args.n_noise, sizeof *args.noise, &ok);
    args.times = mp_get_array(in, args.n_steps, sizeof *args.times, &ok);
    args.sigmas = mp_get_array(in, (int64_t)args.n_steps + 1, sizeof *args.sigmas, &ok);
    args.n_images = mp_get_i32(in);
    args.guidance = mp_get_f32(in);
    args.preview_every = mp_get_i32(in);
    args.keep = mp_get_u8(in) != 0;
    mp_status status = in->failed ? mp_fail(error, MP_RECV, "a request was truncated")
                       : !ok      ? mp_fail_memory(error, sizeof *request, "a request")
                                  : mp_image_generation_request_create(&args, &request, error);
    if (status == MP_OK)
        *out = &request->base;
    for (int t = 0; t < MP_T2I_TEXTS; t++)
        for (int e = 0; e < MP_T2I_ENCODERS; e++)
            mp_free((void *)args.ids[t][e]);
    mp_free((void *)args.noise);
    mp_free((void *)args.times);
    mp_free((void *)args.sigmas);
    return status;
}

static mp_status t2i_get_progress(mp_wire_in *in, mp_item *item, void *progress, mp_error *error) {
    mp_image_generation_request *request = (mp_image_generation_request *)item->request;
    const uint32_t steps = mp_image_generation_steps(request);
    const int32_t previews = mp_get_i32(in);
    if (item->cursor > item->total || previews < 0 ||
        previews > mp_image_generation_previews_due(request, item->cursor))
        mp_wire_refuse(in, "a request's progress is past its end");
    if (in->failed)
        return mp_fail(error, MP_RECV, "a request was truncated");
    size_t bytes;
    float *latents = latents_of(request, needed_at(request, item->cursor), &bytes);
    mp_get(in, latents, bytes);
    if (preview_open(request, item->cursor, previews))
        mp_get(in, request->preview_latents, latent_bytes(request));
    *(t2i_progress *)progress = (t2i_progress){item->cursor, previews};
    atomic_store_explicit(&request->steps_done, (int32_t)(item->cursor < steps ? item->cursor : steps),
                          memory_order_relaxed);
    atomic_store_explicit(&request->previews_done, previews, memory_order_relaxed);
    atomic_store_explicit(&request->images_done, decoded_at(request, item->cursor), memory_order_relaxed);
    return in->failed ? mp_fail(error, MP_RECV, "a request was truncated") : MP_OK;
}

/* ---- results ---- */

static void t2i_put_results(mp_wire_out *out, const mp_item *item, void *progress) {
    const mp_image_generation_request *request = (const mp_image_generation_request *)item->request;
    t2i_progress *sent = progress;
    const int32_t previews = atomic_load_explicit(&request->previews_done, memory_order_relaxed);
    const size_t pixels = (size_t)mp_image_generation_pixels(request);
    size_t bytes;
    mp_put_u32(out, item->cursor);
    mp_put_i32(out, previews);
    const float *latents = latents_of(request, changed_between(request, sent->cursor, item->cursor), &bytes);
    mp_put(out, latents, bytes);
    if (previews > sent->previews)
        mp_put(out, request->previews + (size_t)sent->previews * pixels, (size_t)(previews - sent->previews) * pixels);
    if (item->cursor > sent->cursor && preview_open(request, item->cursor, previews))
        mp_put(out, request->preview_latents, latent_bytes(request));
    for (int32_t p = decoded_at(request, sent->cursor); p < decoded_at(request, item->cursor); p++)
        mp_put(out, request->pixels + (size_t)p * pixels, pixels * sizeof(float));
    *sent = (t2i_progress){item->cursor, previews};
}

/* Returns true if the latents or pixels of the images [first, end), `each` values per image, were received. */
static bool get_values(mp_wire_in *in, float *values, int64_t each, int32_t first, int32_t end, float low, float high,
                       const char *what) {
    if (end <= first)
        return !in->failed;
    return mp_get_floats(in, values + first * each, (size_t)(end - first) * (size_t)each, low, high, what);
}

/* Writes latents into the request before the message is known to be valid. If the message is refused, these latents are
 * unusable, but the step fails too, and the request restarts or fails. */
static bool t2i_get_results(mp_wire_in *in, const mp_item *item, uint32_t amount, mp_outcome outcome, void *progress) {
    const mp_image_generation_request *request = (const mp_image_generation_request *)item->request;
    t2i_progress *seen = progress;
    (void)amount;
    const uint32_t cursor = mp_get_u32(in);
    const int32_t previews = mp_get_i32(in), due = mp_image_generation_previews_due(request, cursor);
    if (in->failed)
        return false;
    if (cursor < seen->cursor || cursor > item->total)
        return mp_wire_refuse(in, "a request's progress decreases or is past its end");
    /* Previews of earlier steps must be finished; the preview of the last step may be in progress. */
    const bool fresh = cursor > 0 && due > mp_image_generation_previews_due(request, cursor - 1);
    if (previews < seen->previews || previews > due || previews < due - fresh)
        return mp_wire_refuse(in, "previews do not match the finished steps");
    if (outcome != MP_OUTCOME_FAILED && (outcome == MP_OUTCOME_DONE) != (cursor == item->total))
        return mp_wire_refuse(in, "an outcome does not match the finished images");
    const span changed = changed_between(request, seen->cursor, cursor);
    static const char *const refusal = "latents are not finite";
    const int64_t latents = mp_image_generation_latents(request), pixels = mp_image_generation_pixels(request);
    if (!get_values(in, request->latents, latents, changed.first, changed.end, -FLT_MAX, FLT_MAX, refusal))
        return false;
    if (previews > seen->previews && !mp_get(in, request->previews + seen->previews * pixels,
                                             (size_t)(previews - seen->previews) * (size_t)pixels))
        return false;
    if (cursor > seen->cursor && preview_open(request, cursor, previews) &&
        !get_values(in, request->preview_latents, latents, 0, 1, -FLT_MAX, FLT_MAX, refusal))
        return false;
    if (!get_values(in, request->pixels, pixels, decoded_at(request, seen->cursor), decoded_at(request, cursor), 0, 1,
                    "a pixel is not from 0 to 1"))
        return false;
    const bool moved = cursor > seen->cursor || previews > seen->previews;
    *seen = (t2i_progress){cursor, previews};
    return moved;
}

/* Progress is a denoising step, a preview or an image. Between two of these, the engine takes at most one step per
 * block of a network; before the first, one per block of all text encoders. The parent's model knows that number, but
 * an upper bound suffices. */
static uint64_t t2i_most_idle(const mp_request *request) {
    (void)request;
    return 1 << 16;
}

static void t2i_publish(mp_item *item, void *progress, uint64_t began_ns, uint64_t now_ns) {
    const t2i_progress *seen = progress;
    mp_image_generation_request *request = (mp_image_generation_request *)item->request;
    const uint32_t steps = mp_image_generation_steps(request);
    (void)began_ns;
    (void)now_ns;
    item->cursor = seen->cursor;
    mp_request_publish(&request->steps_done, (int32_t)(seen->cursor < steps ? seen->cursor : steps));
    mp_request_publish(&request->previews_done, seen->previews);
    mp_request_publish(&request->images_done, decoded_at(request, seen->cursor));
}

static void t2i_close(mp_item *item) { (void)item; }

const mp_request_wire mp_wire_text_to_image = {
    .check = t2i_check,
    .progress_bytes = t2i_progress_bytes,
    .put_request = t2i_put_request,
    .get_results = t2i_get_results,
    .most_idle = t2i_most_idle,
    .publish = t2i_publish,
    .close = t2i_close,
    .get_request = t2i_get_request,
    .get_progress = t2i_get_progress,
    .put_results = t2i_put_results,
};
