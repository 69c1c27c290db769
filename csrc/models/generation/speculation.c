#include "models/generation/speculation.h"

static const double MARGIN = 1.02;    /* minimum expected speed-up by drafts, because measurements are inexact */
static const double TRIAL = 0.01;     /* share of the decode time that unprofitable drafts may cost */
static const double OPENING = 2;      /* initial balance, in decode steps: pays for the first attempts, before anything
                                       * is measured */
static const double MOST_DRIFT = 0.2; /* maximum drift taken from one step, so that one delayed step does not distort
                                       * the estimates */
static const double RESERVE = 8;      /* maximum balance, in decode steps */
enum { TRIAL_RUN = MP_DRAFT_LONG, TRIAL_TOKENS = 3, FIRST = 4 };

void mp_speculation_init(mp_speculation *s, mp_speculate mode) {
    *s = (mp_speculation){.mode = mode, .odds = {0.3f, 0.5f, 0.7f, 0.85f}};
}

static int odds_row(int run) { return run <= 2 ? 0 : run <= 4 ? 1 : run <= 8 ? 2 : 3; }

static float odds_of(const mp_speculation *s, const mp_draft *draft, int i) {
    int row = odds_row(draft->run + i);
    return draft->odds[row] > 0 ? draft->odds[row] : s->odds[row];
}

bool mp_speculation_open(const mp_speculation *s, int sequences, int rows) {
    if (s->mode == MP_SPECULATE_OFF || rows >= MP_DRAFT_ROWS)
        return false;
    return s->mode == MP_SPECULATE_ALWAYS || (rows == sequences && s->plain[rows].seen && s->balance_ns > 0);
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
            if (drafts[g]->count > 0 && drafts[g]->run >= TRIAL_RUN && (!best || drafts[g]->run > best->run))
                best = drafts[g];
    int count = room < TRIAL_TOKENS ? room : TRIAL_TOKENS;
    for (int g = 0; g < n; g++)
        if (drafts[g] != best || drafts[g]->count > count)
            drafts[g]->count = drafts[g] == best ? count : 0;
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
    /* Add the likeliest token first: within a draft, the odds of acceptance never rise from token to token. */
    int taken[MP_DRAFT_ROWS] = {0}, best[MP_DRAFT_ROWS] = {0};
    double next[MP_DRAFT_ROWS], tokens = sequences;
    double rate = MARGIN * tokens / s->plain[sequences].ns;
    bool pays = false;
    for (int g = 0; g < n; g++)
        next[g] = drafts[g]->count > 0 ? odds_of(s, drafts[g], 0) : 0;
    for (int more = 1; more <= room; more++) {
        int likeliest = 0;
        for (int g = 1; g < n; g++)
            if (next[g] > next[likeliest])
                likeliest = g;
        mp_draft *draft = drafts[likeliest];
        if (next[likeliest] <= 0)
            break;
        tokens += next[likeliest];
        next[likeliest] *= ++taken[likeliest] < draft->count ? odds_of(s, draft, taken[likeliest]) : 0;
        double now = tokens / time_of(s, sequences, rows + more, (double)row_ns);
        if (now <= rate)
            continue; /* try further rows: a kernel tile has several rows, so one more may be almost free */
        rate = now;
        pays = true;
        for (int g = 0; g < n; g++)
            best[g] = taken[g];
    }
    if (!pays) {
        try_again(s, drafts, n, sequences, room);
        return;
    }
    for (int g = 0; g < n; g++)
        drafts[g]->count = best[g];
}

static void run_mean(float *mean, bool accepted, float weight) {
    *mean += ((accepted ? 1.0f : 0.0f) - *mean) * weight;
    *mean = *mean > 0.001f ? *mean : 0.001f; /* stay above 0, which means unknown */
}

void mp_speculation_learn(mp_speculation *s, mp_draft *draft, int i, bool accepted) {
    int row = odds_row(draft->run + i);
    if (!(draft->odds[row] > 0))
        draft->odds[row] = s->odds[row];
    run_mean(&draft->odds[row], accepted, 1.0f / 8);
    run_mean(&s->odds[row], accepted, 1.0f / 32);
}

void mp_speculation_account(mp_speculation *s, int sequences, int checked, int accepted, uint64_t took_ns) {
    if (sequences > MP_DRAFT_ROWS || sequences + checked > MP_DRAFT_ROWS)
        return;
    mp_pace *pace = checked ? &s->drafted[sequences + checked] : &s->plain[sequences];
    double ns = (double)took_ns;
    if (pace->seen < FIRST) { /* minimum of the first measurements: disturbances only lengthen a step */
        pace->ns = pace->seen == 0 || ns < pace->ns ? ns : pace->ns;
        pace->seen++;
    } else { /* correct all estimates by 1/8 of the drift, which usually affects all steps, and this one by another
              * 1/32 */
        double drift = ns / pace->ns - 1;
        drift = drift > MOST_DRIFT ? MOST_DRIFT : drift < -MOST_DRIFT ? -MOST_DRIFT : drift;
        for (int i = 1; i <= MP_DRAFT_ROWS; i++) {
            s->plain[i].ns *= 1 + drift / 8;
            s->drafted[i].ns *= 1 + drift / 8;
        }
        pace->ns *= 1 + drift / 32;
    }
    if (!s->plain[sequences].seen)
        return;
    double base = s->plain[sequences].ns;
    if (!s->opened)
        s->balance_ns = OPENING * base;
    s->opened = true;
    s->balance_ns += TRIAL * base + accepted * base / sequences;
    if (checked && pace->ns > base)
        s->balance_ns -= pace->ns - base;
    if (s->balance_ns > RESERVE * base)
        s->balance_ns = RESERVE * base;
}
