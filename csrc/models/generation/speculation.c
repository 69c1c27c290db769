#include "models/generation/speculation.h"

static const double MARGIN = 1.02;    /* minimum expected speed-up by drafts, because measurements are inexact */
static const double TRIAL = 0.01;     /* share of the decode time that unprofitable drafts may cost */
static const double OPENING = 2;      /* initial balance, in decode steps: pays for the first attempts, before anything
                                       * is measured */
static const double MODEL_OPENING = 4; /* initial balance of a draft model, whose attempts cost more */
static const double MAX_DRIFT = 0.2; /* maximum drift taken from one step, so that one delayed step does not distort
                                       * the estimates */
static const double RESERVE = 8;      /* maximum balance, in decode steps */
enum {
    TRIAL_RUN = MP_DRAFT_LONG,
    TRIAL_TOKENS = 3,
    FIRST = 4,
    ALWAYS_TOKENS = 4, /* tokens of the draft model in each step of mode ALWAYS */
    AHEAD = 3          /* passes of the draft model that a decision looks ahead: rows may be cheaper in groups */
};

void mp_speculation_init(mp_speculation *s, mp_speculate mode) {
    *s = (mp_speculation){.mode = mode,
                          .odds = {0.3f, 0.5f, 0.7f, 0.85f, /* look-up */
                                   0.35f, 0.55f, 0.75f, 0.88f, 0.96f, 0.8f}};
}

/* Returns the row of odds of draft token i. */
static int odds_row(const mp_draft *draft, int i) {
    if (draft->of_model)
        return MP_ODDS_LOOKUP + draft->confidence[i];
    int run = draft->run + i;
    return run <= 2 ? 0 : run <= 4 ? 1 : run <= 8 ? 2 : 3;
}

static float odds_in(const mp_speculation *s, const mp_draft *draft, int row) {
    return draft->odds[row] > 0 ? draft->odds[row] : s->odds[row];
}

static float odds_of(const mp_speculation *s, const mp_draft *draft, int i) {
    return odds_in(s, draft, odds_row(draft, i));
}

bool mp_speculation_open(const mp_speculation *s, int sequences, int rows) {
    if (s->mode == MP_SPECULATE_OFF || rows >= MP_DRAFT_ROWS)
        return false;
    return s->mode == MP_SPECULATE_ALWAYS || (rows == sequences && s->plain[rows].seen && s->balance_ns > 0);
}

/* Records one of the first FIRST measurements. Keeps the minimum, because disturbances only lengthen a step. Returns
 * false, and records nothing, after these. */
static bool record_first(mp_pace *pace, double ns) {
    if (pace->seen >= FIRST)
        return false;
    pace->ns = pace->seen == 0 || ns < pace->ns ? ns : pace->ns;
    pace->seen++;
    return true;
}

/* Returns the relative difference of a measurement from the estimate, within MAX_DRIFT. */
static double drift_of(const mp_pace *pace, double ns) {
    const double drift = ns / pace->ns - 1;
    return drift > MAX_DRIFT ? MAX_DRIFT : drift < -MAX_DRIFT ? -MAX_DRIFT : drift;
}

/* Returns the time of a step of `rows` rows with drafts: measured, or interpolated from the nearest measurements. */
static double time_of(const mp_speculation *s, int sequences, int rows, double row_ns) {
    double base = s->plain[sequences].ns, from = base, to = 0;
    int low = sequences, high = rows;
    for (int i = sequences + 1; i <= rows; i++)
        if (s->drafted[i].seen) {
            low = i;
            from = s->drafted[i].ns;
        }
    while (high <= MP_DRAFT_ROWS && !s->drafted[high].seen)
        high++;
    if (high <= MP_DRAFT_ROWS)
        to = s->drafted[high].ns;
    row_ns = row_ns < base / 4 ? row_ns : base / 4;
    double ns = low == rows ? from
                : to > 0    ? from + (to - from) * (rows - low) / (high - low)
                            : from + row_ns * (rows - low);
    return ns > base ? ns : base;
}

/* Called when no draft is expected to pay. If the balance allows an attempt, keeps the draft with the longest match,
 * cut to TRIAL_TOKENS, and drops all others; otherwise drops all drafts. */
static void try_again(const mp_speculation *s, mp_draft **drafts, int n, int sequences, int room) {
    mp_draft *best = NULL;
    if (s->balance_ns > RESERVE / 2 * s->plain[sequences].ns)
        for (int g = 0; g < n; g++)
            if (drafts[g]->count > 0 && (drafts[g]->of_model || drafts[g]->run >= TRIAL_RUN) &&
                (!best || drafts[g]->run > best->run))
                best = drafts[g];
    int count = room < TRIAL_TOKENS ? room : TRIAL_TOKENS;
    for (int g = 0; g < n; g++)
        if (drafts[g] != best || drafts[g]->count > count)
            drafts[g]->count = drafts[g] == best ? count : 0;
}

/* Chooses the numbers of draft tokens with the highest expected tokens per time, best[n], and returns that rate; 0 if
 * no draft token is expected to pay. */
static double best_rate(const mp_speculation *s, mp_draft **drafts, int n, int sequences, int rows, double row_ns,
                        int *best) {
    /* Add the likeliest token first: within a draft, the odds of acceptance never rise from token to token. */
    int taken[MP_DRAFT_ROWS] = {0};
    double next[MP_DRAFT_ROWS] = {0}, tokens = sequences;
    double rate = MARGIN * tokens / s->plain[sequences].ns, found = 0;
    for (int g = 0; g < n; g++)
        next[g] = drafts[g]->count > 0 ? odds_of(s, drafts[g], 0) : 0;
    for (int more = 1; more <= MP_DRAFT_ROWS - rows; more++) {
        int likeliest = 0;
        for (int g = 1; g < n; g++)
            if (next[g] > next[likeliest])
                likeliest = g;
        mp_draft *draft = drafts[likeliest];
        if (next[likeliest] <= 0)
            break;
        tokens += next[likeliest];
        next[likeliest] *= ++taken[likeliest] < draft->count ? odds_of(s, draft, taken[likeliest]) : 0;
        double now = tokens / time_of(s, sequences, rows + more, row_ns);
        if (now <= rate)
            continue; /* try further rows: a kernel tile has several rows, so one more may be almost free */
        rate = found = now;
        for (int g = 0; g < n; g++)
            best[g] = taken[g];
    }
    return found;
}

void mp_speculation_choose(mp_speculation *s, mp_draft **drafts, int n, int sequences, int rows, uint64_t row_ns) {
    int room = MP_DRAFT_ROWS - rows;
    if (n == 0)
        return;
    if (s->mode == MP_SPECULATE_ALWAYS) {
        for (int g = 0; g < n; g++) {
            drafts[g]->count = drafts[g]->count < room ? drafts[g]->count : room;
            room -= drafts[g]->count;
        }
        return;
    }
    int best[MP_DRAFT_ROWS] = {0};
    if (!(best_rate(s, drafts, n, sequences, rows, (double)row_ns, best) > 0)) {
        try_again(s, drafts, n, sequences, room);
        return;
    }
    for (int g = 0; g < n; g++)
        drafts[g]->count = best[g];
}

static void run_mean(float *mean, float value, float weight) {
    *mean += (value - *mean) * weight;
    *mean = *mean > 0.001f ? *mean : 0.001f; /* stay above 0, which means unknown */
}

/* Records a value, 1 for an accepted token, in one row of odds, with a weight for the sequence's odds and one for the
 * engine's. */
static void learn_row(mp_speculation *s, mp_draft *draft, int row, float value, float weight, float engine_weight) {
    draft->odds[row] = odds_in(s, draft, row);
    run_mean(&draft->odds[row], value, weight);
    run_mean(&s->odds[row], value, engine_weight);
}

/* Weight of the next result after `learned` results, at least 1 / most. The initial odds count as four results. */
static float weight_of(uint32_t learned, uint32_t most) {
    return 1.0f / (float)(learned + 5 < most ? learned + 5 : most);
}

void mp_speculation_learn(mp_speculation *s, mp_draft *draft, int i, bool accepted) {
    const float slower = draft->of_model ? 0.5f : 1; /* the classes of a draft model depend less on the text */
    learn_row(s, draft, odds_row(draft, i), accepted ? 1.0f : 0.0f, slower / 8, slower / 32);
}

void mp_speculation_model_token(mp_speculation *s, mp_draft *draft, int i) {
    learn_row(s, draft, MP_ODDS_MEAN, odds_of(s, draft, i), weight_of(draft->learned++, 32),
              weight_of(s->learned++, 128));
}

/* ---- the draft model --------------------------------------------------------------------------------------------- */

/* Returns the time of a pass of the draft model: that of the nearest number of rows measured, or the predicted time. */
static double pass_time(const mp_speculation *s, int sequences, int rows) {
    for (int away = 0; away <= MP_DRAFT_ROWS; away++)
        for (int side = -1; side <= 1; side += 2) {
            const int at = rows + side * away;
            if (at >= 1 && at <= MP_DRAFT_ROWS && s->model_passes[at].seen)
                return s->model_passes[at].ns;
        }
    return s->model_share * s->plain[sequences].ns;
}

double mp_speculation_model_gain(const mp_speculation *s, mp_draft **drafts, int n, int sequences, uint64_t row_ns) {
    if (s->mode == MP_SPECULATE_ALWAYS)
        return 2;
    if (!(s->model_balance_ns > 0))
        return 0;
    int counts[MP_DRAFT_ROWS];
    double now = best_rate(s, drafts, n, sequences, sequences, (double)row_ns, counts), best = 0, tokens = sequences;
    const double plain = sequences / s->plain[sequences].ns, pass = pass_time(s, sequences, n);
    double odds[MP_DRAFT_ROWS];
    now = now > plain ? now : plain;
    for (int g = 0; g < n; g++)
        odds[g] = 1;
    for (int i = 1; i <= MP_DRAFT_MAX && sequences + n * i <= MP_DRAFT_ROWS; i++) {
        for (int g = 0; g < n; g++)
            tokens += odds[g] *= odds_in(s, drafts[g], MP_ODDS_MEAN);
        double rate = tokens / (time_of(s, sequences, sequences + n * i, (double)row_ns) + i * pass);
        best = rate > best ? rate : best;
    }
    return best / (MARGIN * now);
}

bool mp_speculation_may_try_model(const mp_speculation *s, int sequences) {
    return s->model_balance_ns > RESERVE / 2 * s->plain[sequences].ns;
}

bool mp_speculation_continue_model(const mp_speculation *s, mp_draft **drafts, int n, int sequences, uint64_t row_ns) {
    const int count = n > 0 ? drafts[0]->count : 0;
    int rows = sequences;
    if (n == 0 || sequences + n * (count + 1) > MP_DRAFT_ROWS)
        return false;
    if (s->mode == MP_SPECULATE_ALWAYS)
        return count < ALWAYS_TOKENS;
    double tokens = sequences, odds[MP_DRAFT_ROWS];
    for (int g = 0; g < n; g++) {
        odds[g] = 1;
        for (int i = 0; i < drafts[g]->count; i++)
            tokens += odds[g] *= odds_of(s, drafts[g], i);
        rows += drafts[g]->count;
    }
    const double pass = pass_time(s, sequences, n), verify = time_of(s, sequences, rows, (double)row_ns);
    const double plain = sequences / s->plain[sequences].ns;
    double rate = tokens / (verify + count * pass), more = 0;
    rate = rate > plain ? rate : plain;
    for (int ahead = 1; ahead <= AHEAD && rows + n * ahead <= MP_DRAFT_ROWS; ahead++) {
        for (int g = 0; g < n; g++)
            more += odds[g] *= odds_in(s, drafts[g], MP_ODDS_MEAN);
        double longer = time_of(s, sequences, rows + n * ahead, (double)row_ns) - verify + ahead * pass;
        if (more > rate * longer)
            return true;
    }
    return false;
}

double mp_speculation_saved_ns(const mp_speculation *s, double gain, int sequences, int64_t tokens) {
    return gain > 1 ? (1 - 1 / gain) * (double)tokens * s->plain[sequences].ns / sequences : 0;
}

void mp_speculation_model_pass(mp_speculation *s, int rows, uint64_t took_ns) {
    if (rows < 1 || rows > MP_DRAFT_ROWS)
        return;
    mp_pace *pace = &s->model_passes[rows];
    const double ns = (double)took_ns;
    s->model_balance_ns -= ns;
    s->model_step = true;
    if (!record_first(pace, ns))
        pace->ns *= 1 + drift_of(pace, ns) / 16;
}

/* ---- measured steps ---------------------------------------------------------------------------------------------- */

void mp_speculation_account(mp_speculation *s, int sequences, int checked, int accepted, uint64_t took_ns) {
    double *balance = s->model_step ? &s->model_balance_ns : &s->balance_ns;
    s->model_step = false;
    if (sequences > MP_DRAFT_ROWS || sequences + checked > MP_DRAFT_ROWS)
        return;
    mp_pace *pace = checked ? &s->drafted[sequences + checked] : &s->plain[sequences];
    double ns = (double)took_ns;
    if (!record_first(pace, ns)) {
        /* drift usually affects all steps: correct all estimates by 1/8 of it, and this one by another 1/32 */
        const double drift = drift_of(pace, ns);
        for (int i = 1; i <= MP_DRAFT_ROWS; i++) {
            s->plain[i].ns *= 1 + drift / 8;
            s->drafted[i].ns *= 1 + drift / 8;
        }
        pace->ns *= 1 + drift / 32;
    }
    if (!s->plain[sequences].seen)
        return;
    double base = s->plain[sequences].ns;
    if (!s->opened) {
        s->balance_ns = OPENING * base;
        s->model_balance_ns = MODEL_OPENING * base;
        s->opened = true;
    }
    s->balance_ns += TRIAL * base;
    s->model_balance_ns += TRIAL * base;
    *balance += accepted * base / sequences;
    if (checked && pace->ns > base)
        *balance -= pace->ns - base;
    if (s->balance_ns > RESERVE * base)
        s->balance_ns = RESERVE * base;
    if (s->model_balance_ns > RESERVE * base)
        s->model_balance_ns = RESERVE * base;
}
