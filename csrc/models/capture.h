/* capture.h: records of the first values of each stage of a decoder, for comparison with another engine.
 *
 * A request with `mp_text_request.capture` gets one set of records for every row that a token is sampled from: the last
 * prompt token, which is token 0, and every computed token of the completion. The records of a token are, in this
 * order, its embedding, the output of each layer, the final norm, and the logits as the sampler gets them.
 *
 * The memory is allocated before the request is queued, and the token number gives the address of its records. A row
 * that is computed twice (rejected drafts, after a preemption, by another worker) is written twice to the same address,
 * so capturing needs no counter, lock or allocation. Records of tokens beyond the allocated memory are dropped. */
#ifndef MP_MODELS_CAPTURE_H
#define MP_MODELS_CAPTURE_H

#include <stddef.h>
#include <stdint.h>

enum {                                  /* bounds of a request; checked when the request is created */
       MP_CAPTURE_MAX_VALUES = 1 << 20,
       MP_CAPTURE_OTHERS = 3 /* records of a token that are not layer outputs */
};

typedef struct mp_capture {
    /* request */
    int32_t values; /* number of leading values kept of each record; 0: nothing is captured */
    int32_t most;   /* maximum number of records allocated */
    /* properties of the model; the engine's check() fills them in before the request is queued */
    int32_t layers, hidden, vocab;
    /* result */
    int32_t tokens; /* number of tokens with memory for their records */
    float *data;    /* [tokens, mp_capture_floats] */
    _Atomic uint32_t sampled; /* tokens whose records are complete, up to `tokens`; stored with release order after the
                               * records */
} mp_capture;

typedef struct mp_capture_row { /* a row of a forward pass that is captured */
    int row, output;        /* index of the row in the pass, and of its logits among the outputs */
    int32_t values, logits; /* floats of a record, and of the logits record */
    float *to;              /* start of the token's records in `mp_capture.data` */
} mp_capture_row;

static inline int32_t mp_capture_values(const mp_capture *capture, int32_t width) {
    return capture->values < width ? capture->values : width;
}
static inline int32_t mp_capture_records(const mp_capture *capture) { /* records of one token */
    return capture->layers + MP_CAPTURE_OTHERS;
}
static inline size_t mp_capture_floats(const mp_capture *capture) { /* floats of one token's records */
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
