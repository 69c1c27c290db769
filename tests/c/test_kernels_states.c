/* Scans of recurrent states: every variant has the bits of ref/ for all shapes, and however the rows are divided into
 * calls; ref/ is close to a recurrence in double precision. */
#include "kernel_edge.h"
#include "kernel_test.h"

/* the template for kt_next_or_plain */
#include "kernels/simd/vec_plain.h"

#include "kernels/simd/rows_tmpl.h"

enum { STATE, U, O, RESULTS, K = RESULTS, Q, V, DECAY, BETA, ARRAYS };
enum { WITH_BETA = 1, WITH_U = 2, WITH_O = 4, LANES = MP_STATE_BLOCK };

static const float untouched = -77.0f; /* fills u and o, of which the columns from dv on must keep it */

typedef struct scan_case {
    mp_state_scan scan;
    float *array[ARRAYS]; /* each ends at an inaccessible page */
    int64_t size[ARRAYS];
    int blocks;
} scan_case;

/* Index in the state of component i of column c. */
static int64_t state_at(const mp_state_scan *scan, int i, int c) {
    return ((int64_t)c / LANES * scan->dk + i) * LANES + c % LANES;
}

/* Random ordinary numbers, and random distances between rows. */
static scan_case make_case(mp_test_random *random, int dk, int dv, int rows, int options) {
    const int width[ARRAYS] = {[U] = dv, [O] = dv, [K] = dk, [Q] = dk, [V] = dv, [DECAY] = 1, [BETA] = 1};
    int64_t ld[ARRAYS];
    scan_case c = {.blocks = (dv + LANES - 1) / LANES};
    for (int i = 0; i < ARRAYS; i++) {
        ld[i] = i == BETA ? ld[DECAY] : width[i] + kt_pick(random, 0, 3);
        c.size[i] = i == STATE ? (int64_t)c.blocks * dk * LANES : rows ? (rows - 1) * ld[i] + width[i] : 0;
        c.array[i] = kt_edge(c.size[i]);
        kt_random(random, c.array[i], c.size[i]);
        for (int64_t j = 0; (i == U || i == O) && j < c.size[i]; j++)
            c.array[i][j] = untouched;
    }
    c.scan = (mp_state_scan){.state = c.array[STATE], .dk = dk, .dv = dv, .rows = rows,
                             .k = c.array[K], .q = options & WITH_O ? c.array[Q] : NULL, .v = c.array[V],
                             .decay = c.array[DECAY], .beta = options & WITH_BETA ? c.array[BETA] : NULL,
                             .u = options & WITH_U ? c.array[U] : NULL, .o = options & WITH_O ? c.array[O] : NULL,
                             .ldk = ld[K], .ldq = ld[Q], .ldv = ld[V], .ld_gates = ld[DECAY], .ldu = ld[U],
                             .ldo = ld[O]};
    return c;
}

static void free_case(scan_case *c) {
    for (int i = 0; i < ARRAYS; i++)
        kt_edge_free(c->array[i], c->size[i]);
}

/* Copy the results of a case to or from other memory. */
static void copy_results(scan_case *c, float *const *other, bool restore) {
    for (int i = 0; i < RESULTS; i++)
        memcpy(restore ? c->array[i] : other[i], restore ? other[i] : c->array[i], sizeof(float) * (size_t)c->size[i]);
}

/* Run the scan for ranges of blocks, each in calls of random numbers of rows. */
static void run_in_parts(const kt_set *set, mp_test_random *random, const scan_case *c) {
    for (int b0 = 0, b1; b0 < c->blocks; b0 = b1) {
        b1 = kt_pick(random, b0 + 1, c->blocks);
        for (int r = 0, n; r < c->scan.rows; r += n) {
            mp_state_scan part = c->scan;
            part.rows = n = kt_pick(random, 1, c->scan.rows - r);
            part.k += r * part.ldk;
            part.q = part.q ? part.q + r * part.ldq : NULL;
            part.v += r * part.ldv;
            part.decay += r * part.ld_gates;
            part.beta = part.beta ? part.beta + r * part.ld_gates : NULL;
            part.u = part.u ? part.u + r * part.ldu : NULL;
            part.o = part.o ? part.o + r * part.ldo : NULL;
            set->call.state_scan(&part, b0, b1);
        }
    }
}

/* Compare each set, from a state whose padding is NaN, with one call of the first set. */
static void compare_scans(const kt_set *sets, int count, mp_test_random *random, int dk) {
    static const int some_rows[] = {1, 2, 3, 0, 20, 7, 1, 4};
    const int dv = dk % 7 ? kt_pick(random, 1, 70) : LANES * kt_pick(random, 1, 4), options = kt_pick(random, 0, 7);
    const int rows = some_rows[kt_pick(random, 0, 7)];
    scan_case c = make_case(random, dk, dv, rows, options);
    for (int i = 0; i < ARRAYS; i++) {
        const int kind = kt_pick(random, 0, 4 * KT_EXTREMES);
        if (kind < KT_EXTREMES && (i == STATE || i >= RESULTS))
            kt_extreme(random, (enum kt_extreme)kind, c.array[i], c.size[i]);
    }
    float *before[RESULTS], *want[RESULTS];
    for (int i = 0; i < RESULTS; i++) {
        before[i] = kt_edge(c.size[i]);
        want[i] = kt_edge(c.size[i]);
    }
    copy_results(&c, before, false);
    sets->call.state_scan(&c.scan, 0, c.blocks);
    copy_results(&c, want, false);
    for (int i = U; i <= O; i++)
        for (int64_t j = 0, ld = i == U ? c.scan.ldu : c.scan.ldo; j < c.size[i]; j++)
            MP_CHECK(j % ld < dv || want[i][j] == untouched);
    for (const kt_set *set = sets; set < sets + count; set++) {
        copy_results(&c, before, true);
        for (int i = 0; i < dk; i++)
            for (int l = dv; l < c.blocks * LANES; l++)
                c.array[STATE][state_at(&c.scan, i, l)] = NAN;
        run_in_parts(set, random, &c);
        for (int i = 0; i < dk; i++)
            for (int b = 0; b < c.blocks; b++) {
                const int64_t at = state_at(&c.scan, i, b * LANES);
                const int n = dv - b * LANES < LANES ? dv - b * LANES : LANES;
                kt_same(set, want[STATE] + at, c.array[STATE] + at, n,
                        "state dk=%d dv=%d rows=%d options=%d, block %d of component %d", dk, dv, rows, options, b, i);
            }
        for (int i = U; i <= O; i++)
            kt_same(set, want[i], c.array[i], c.size[i], "%s dk=%d dv=%d rows=%d options=%d", i == U ? "u" : "o", dk,
                    dv, rows, options);
    }
    for (int i = 0; i < RESULTS; i++) {
        kt_edge_free(before[i], c.size[i]);
        kt_edge_free(want[i], c.size[i]);
    }
    free_case(&c);
}

MP_TEST(kernels_states_match_ref) {
    mp_test_random random = {1};
    uint32_t asked = 0;
    kt_set sets[KT_MASKS + 2] = {kt_ref()}; /* ref too: its rows may be divided as well */
    int count = 1;
    for (kt_set v = {0}; kt_next_or_plain(&v, MP_SLOT_state_scan, rows_fill);)
        sets[count++] = v;
    for (int round = 0; round < 2; round++)
        for (int dk = 1; dk < 260; dk++)
            if (mp_test_take(&asked))
                compare_scans(sets, count, &random, dk);
}

/* Compare ref with the recurrence in double precision, for keys of length 1 (or 0) and gates from 0 to 1. */
MP_TEST(kernels_states_ref_in_double) {
    enum { ROWS = 64, DV = 21 };
    mp_test_random random = {2};
    const kt_set ref = kt_ref();
    for (int dk = 256; dk > 0; dk /= 3)
        for (int with_beta = 0; with_beta < 2; with_beta++) {
            scan_case c = make_case(&random, dk, DV, ROWS, WITH_U | WITH_O | with_beta * WITH_BETA);
            const mp_state_scan *const scan = &c.scan;
            for (int64_t r = 0; r < ROWS; r++) {
                double square = 0.0;
                for (int i = 0; i < dk; i++)
                    square += pow(scan->k[r * scan->ldk + i], 2.0);
                for (int i = 0; i < dk; i++)
                    c.array[K][r * scan->ldk + i] /= (float)fmax(sqrt(square), 1e-3);
                c.array[DECAY][r * scan->ld_gates] = fabsf(scan->decay[r * scan->ld_gates]);
                c.array[BETA][r * scan->ld_gates] = fabsf(c.array[BETA][r * scan->ld_gates]);
            }
            double state[256][DV];
            for (int i = 0; i < dk; i++)
                for (int j = 0; j < DV; j++)
                    state[i][j] = scan->state[state_at(scan, i, j)];
            ref.call.state_scan(scan, 0, c.blocks);
            for (int64_t r = 0; r < ROWS; r++)
                for (int j = 0; j < DV; j++) {
                    const float *const k = scan->k + r * scan->ldk, *const q = scan->q + r * scan->ldq;
                    double u = scan->v[r * scan->ldv + j], o = 0.0;
                    for (int i = 0; i < dk; i++)
                        state[i][j] *= scan->decay[r * scan->ld_gates];
                    for (int i = 0; i < dk && with_beta; i++)
                        u -= state[i][j] * k[i];
                    u *= with_beta ? scan->beta[r * scan->ld_gates] : 1.0f;
                    for (int i = 0; i < dk; i++)
                        o += (state[i][j] += k[i] * u) * q[i];
                    MP_CHECK_NEAR(scan->u[r * scan->ldu + j], u, 1e-6);
                    MP_CHECK_NEAR(scan->o[r * scan->ldo + j], o, 4e-6);
                }
            for (int i = 0; i < dk; i++)
                for (int j = 0; j < DV; j++)
                    MP_CHECK_NEAR(scan->state[state_at(scan, i, j)], state[i][j], 1e-6);
            free_case(&c);
        }
}
