/* capture.h: the first numbers of what each stage of a decoder gave out, for whoever holds them against another
 * engine's.
 *
 * A call that asks for it (mp_text_request.capture) gets records of every row that a token is drawn from: of the last
 * token of its prompt, which is token 0, and of every token of its answer that was computed. A token's records are, in
 * this order, its embedding, the output of each layer, the last norm and the logits, as the sampler finds them.
 *
 * Their memory is there before the call is queued, at a place that the token's number says: whatever is computed twice
 * (guesses that were wrong, after a preemption, by another worker) is written twice to the same place, and nobody
 * counts, locks or allocates. Tokens beyond the memory are dropped. */
#ifndef MP_MODELS_CAPTURE_H
#define MP_MODELS_CAPTURE_H

#include <stddef.h>
#include <stdint.h>

enum {                                  /* of a call; checked where one is made */
       MP_CAPTURE_MOST_VALUES = 1 << 20,
       MP_CAPTURE_OTHERS = 3 /* records of a token beside those of the layers */
};

typedef struct mp_capture {
    /* request */
    int32_t values; /* first so many of each record; 0: nothing is captured */
    int32_t most;   /* records that there may be memory for */
    /* of the model; filled in by the engine's check before the call is queued */
    int32_t layers, hidden, vocab;
    /* result */
    int32_t tokens; /* whose records there is memory for */
    float *data;    /* [tokens, mp_capture_floats] */
    _Atomic uint32_t sampled; /* tokens whose records are complete, as far as there is memory; release after they are */
} mp_capture;

typedef struct mp_capture_row { /* a row of a pass whose records are wanted */
    int row, output;        /* its number, and that of its logits */
    int32_t values, logits; /* floats of a record, and of the one with logits */
    float *to;              /* its token's place in `data` */
} mp_capture_row;

static inline int32_t mp_capture_values(const mp_capture *capture, int32_t width) {
    return capture->values < width ? capture->values : width;
}
static inline int32_t mp_capture_records(const mp_capture *capture) { /* of a token */
    return capture->layers + MP_CAPTURE_OTHERS;
}
static inline size_t mp_capture_floats(const mp_capture *capture) { /* of a token */
    return (size_t)(mp_capture_records(capture) - 1) * (size_t)mp_capture_values(capture, capture->hidden) +
           (size_t)mp_capture_values(capture, capture->vocab);
}
static inline mp_capture_row mp_capture_at(const mp_capture *capture, int token, int row, int output) {
    return (mp_capture_row){.row = row,
                            .output = output,
                            .values = mp_capture_values(capture, capture->hidden),
                            .logits = mp_capture_values(capture, capture->vocab),
                            .to = capture->data + (size_t)token * mp_capture_floats(capture)};
}

#endif
