/* Recurrent mixers: the outputs and the state of a sequence have the same bits, whatever the passes, row blocks,
 * threads and rejected drafts were. */
#include "model_fixture.h"
#include "models/decoder/recurrent.h"

enum { ROWS = 60, CHANNELS = 37, TAPS = 3, KEYS = 2, HEADS = 4, DK = 7, DV = 21, THREADS = 3 };

typedef struct inputs {
    float x[ROWS][CHANNELS], k[ROWS][KEYS * DK], q[ROWS][KEYS * DK], v[ROWS][HEADS * DV], decay[ROWS][HEADS];
    float beta[ROWS][HEADS], kernel[TAPS][CHANNELS];
} inputs;

typedef struct outputs {
    float y[ROWS][CHANNELS], o[ROWS][HEADS * DV];
} outputs;

typedef struct sequence {
    const inputs *in;
    mp_causal_conv conv;
    mp_matrix_heads matrix;
    float *state, *log;
    size_t conv_state, conv_log, bytes; /* bytes of the convolution's parts, and of the state */
    outputs out;
} sequence;

static void begin(sequence *of, const inputs *in) {
    size_t log_bytes;
    *of = (sequence){.in = in, .matrix = {HEADS, KEYS, DK, DV, false}};
    of->conv = (mp_causal_conv){.channels = CHANNELS, .taps = TAPS, .kernel = (float *)(uintptr_t)in->kernel[0]};
    of->conv_state = mp_causal_conv_state(&of->conv, &of->conv_log);
    of->bytes = of->conv_state + mp_matrix_state(&of->matrix, &log_bytes);
    of->state = mp_alloc_zeroed(of->bytes, MP_TAG_MISC);
    of->log = mp_alloc_zeroed(of->conv_log + log_bytes, MP_TAG_MISC);
    MP_CHECK(of->state && of->log);
}

static void end(sequence *of) {
    mp_free(of->state);
    mp_free(of->log);
}

/* Computes a row block: rows [first, first + rows) of a pass that began `done` rows before, with the scratch of each
 * thread. Threads run one after another, as their parts are independent between barriers. */
static void compute(sequence *of, const mp_row_seq *seq, int first, int rows, int done) {
    const inputs *in = of->in;
    const mp_state_rows part = {seq, first, rows, done};
    const mp_state_scan scan = {.k = in->k[0], .q = in->q[0], .v = in->v[0], .o = of->out.o[0], .decay = in->decay[0],
                                .beta = in->beta[0], .ldk = KEYS * DK, .ldq = KEYS * DK, .ldv = HEADS * DV,
                                .ldo = HEADS * DV, .ld_gates = HEADS};
    float *const matrices = of->state + of->conv_state / sizeof(float);
    float *const log = of->log + of->conv_log / sizeof(float);
    const float *pointers[ROWS + TAPS];
    float *copy = mp_alloc(mp_matrix_copy(&of->matrix), MP_TAG_MISC);
    for (int t = 0; t < THREADS; t++) {
        const mp_team_thread thread = {t, THREADS, NULL, NULL};
        int64_t c0, c1;
        mp_team_split(&thread, CHANNELS, 16, &c0, &c1);
        mp_causal_conv_rows(&of->conv, &part, of->state, of->log, in->x[0], CHANNELS, of->out.y[0], CHANNELS, c0, c1,
                            pointers);
    }
    const mp_team_thread single = mp_team_single();
    mp_matrix_scan_rows(&of->matrix, &single, &part, matrices, log, &scan, copy);
    for (int t = 0; t < THREADS; t++)
        mp_matrix_log_rows(&of->matrix, &(mp_team_thread){t, THREADS, NULL, NULL}, &part, log, &scan);
    mp_free(copy);
}

/* Runs passes over all rows: with `random` some of them with drafts, of which some are rejected. */
static void run(sequence *of, mp_test_random *random) {
    mp_row_seq seq = {.state = (uint8_t *)of->state, .log = (uint8_t *)of->log};
    for (int at = 0; at < ROWS;) {
        const int left = ROWS - at, most = left < MP_STATE_LOG ? left : MP_STATE_LOG;
        seq.logs = random && left > 1 && mp_test_random_u64(random) % 3 > 0;
        const int rows = !random ? left : 1 + (int)(mp_test_random_u64(random) % (uint64_t)most);
        const int kept = seq.logs ? 1 + (int)(mp_test_random_u64(random) % (uint64_t)rows) : rows;
        for (int done = 0; done < rows;) {
            const int block = random ? 1 + (int)(mp_test_random_u64(random) % (uint64_t)(rows - done)) : rows;
            compute(of, &seq, at + done, block, done);
            done += block;
        }
        seq.pending = seq.logs ? kept : 0;
        at += kept;
        if (at == ROWS && seq.pending > 0) { /* the last row again, kept: the state gets all rows */
            seq.pending--;
            at--;
        }
    }
}

MP_TEST(models_recurrent_drafts_and_blocks_leave_the_same_bits) {
    static inputs in;
    static sequence all, parts;
    mp_error error;
    mp_test_random random = {11};
    float *const values = (float *)&in;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (size_t i = 0; i < sizeof in / sizeof *values; i++)
        values[i] = mp_test_random_float(&random, 0.0f, 0.5f);
    begin(&all, &in);
    run(&all, NULL);
    for (int i = 0; i < 200; i++) {
        begin(&parts, &in);
        run(&parts, &random);
        MP_CHECK(memcmp(&all.out, &parts.out, sizeof all.out) == 0);
        MP_CHECK(memcmp(all.state, parts.state, all.bytes) == 0);
        end(&parts);
    }
    end(&all);
}
