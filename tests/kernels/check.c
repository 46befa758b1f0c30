/* Checks of the C core without Python: every usable level and both dtypes against a plain computation in double.
 *
 *     check [SEED]
 *
 * Sizes lie around the borders of tiles, blocks and splits; options are drawn from the seed. Each array lies between
 * guard bands of NaN (poisoned under AddressSanitizer); what its strides skip is NaN, and so is the workspace. Prints
 * the first wrong element of each failing case.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mha.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct checker {
    uint64_t seed, random;
    int64_t passed, failed;
} checker;

/* SplitMix64: the next number below limit. */
static int64_t draw(checker *c, int64_t limit)
{
    uint64_t z = c->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (int64_t)((z ^ z >> 31) >> 1) % limit;
}

/* A number in [-1, 1). */
static double draw_real(checker *c) { return (double)draw(c, 1 << 24) / (1 << 23) - 1; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- memory between guard bands */

enum { GUARD = 256, UNSET = 0xff }; /* bytes of 0xff are NaN in every floating dtype */

typedef struct region {
    unsigned char *base;
    size_t size; /* without the two bands */
} region;

static unsigned char *content(const region *r) { return r->base + GUARD; }

static region open_region(int64_t size)
{
    region r = {malloc((size_t)size + 2 * GUARD), (size_t)size};
    if (!r.base) {
        fprintf(stderr, "no memory for %lld bytes\n", (long long)size);
        exit(1);
    }
    memset(r.base, UNSET, r.size + 2 * GUARD);
    ASAN_POISON_MEMORY_REGION(r.base, GUARD);
    ASAN_POISON_MEMORY_REGION(content(&r) + r.size, GUARD);
    return r;
}

static int is_unset(const unsigned char *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (bytes[i] != UNSET) return 0;
    return 1;
}

/* Whether the bands are as they were; nothing to do for a region that was never opened. */
static int close_region(region *r)
{
    if (!r->base) return 1;
    ASAN_UNPOISON_MEMORY_REGION(r->base, r->size + 2 * GUARD);
    int intact = is_unset(r->base, GUARD) && is_unset(content(r) + r->size, GUARD);
    free(r->base);
    return intact;
}

/* FNV-1a over words of 8 bytes and what is left. */
static uint64_t digest(const region *r)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < r->size; i += 8) {
        uint64_t word = 0;
        memcpy(&word, content(r) + i, r->size - i < 8 ? r->size - i : 8);
        hash = (hash ^ word ^ word >> 32) * 0x100000001b3u;
    }
    return hash;
}

/* ---- arrays */

enum {
    PADDED = 1 << 0,
    STRIDED = 1 << 1,
    REVERSED = 1 << 2,
    ROWS_FIRST = 1 << 3,
    BROADCAST = 1 << 4,
    FAR = 1 << 5,
    MIXED = 1 << 6,
    LENGTHS = 1 << 7,
    ONE_LENGTH = 1 << 8,
    CAUSAL = 1 << 9,
    LSE = 1 << 10,
    WEIGHTS = 1 << 11,
    OUT_STRIDED = 1 << 12,
    POISON = 1 << 13,
    BOOL_MASK = 1 << 14,
    FLOAT_MASK = 1 << 15,
    OTHER_MASK = 1 << 16,
    ONE_MASK_ROW = 1 << 17,
    WINDOW = 1 << 18,
    SOFTCAP = 1 << 19,
    SLOPES = 1 << 20,
    SINKS = 1 << 21,
    CHOSEN = 1 << 22,
    HALF_OUT = 1 << 23,
    ALL_BF16 = 1 << 24
};
static const char *const option_names[] = {"padded",     "strided",    "reversed",     "rows first", "broadcast",
                                           "far",        "mixed",      "lengths",      "one length", "causal",
                                           "lse",        "weights",    "out strided",  "poison",     "bool mask",
                                           "float mask", "other mask", "one mask row", "window",     "softcap",
                                           "slopes",     "sinks",      "chosen",       "half out",   "all bfloat16"};

typedef struct view {
    mha_array array;
    const struct view *scale;                /* of each row, beside MHA_I8 alone */
    int64_t outer, inner, heads, rows, cols; /* outer, inner: the leading dimensions */
    region memory;
} view;

static const char *dtype_name(mha_dtype dtype) { return dtype == MHA_F32 ? "float32" : "float64"; }
static int64_t item_bytes(mha_dtype dtype)
{
    if (dtype == MHA_BOOL || dtype == MHA_I8) return 1;
    return dtype == MHA_F16 || dtype == MHA_BF16 ? 2 : dtype == MHA_F32 ? 4 : 8;
}

/* ---- float16 and bfloat16, from their definition */

static int fraction_bits(mha_dtype half) { return half == MHA_F16 ? 10 : 7; }
static int exponent_bias(mha_dtype half) { return half == MHA_F16 ? 15 : 127; }

static double half_number(mha_dtype half, uint16_t bits)
{
    int fraction = fraction_bits(half), bias = exponent_bias(half), exponent = (bits & 0x7fff) >> fraction;
    int mantissa = bits & ((1 << fraction) - 1);
    double size = exponent > 2 * bias ? (mantissa ? NAN : INFINITY)
                  : exponent          ? ldexp((1 << fraction) + mantissa, exponent - bias - fraction)
                                      : ldexp(mantissa, 1 - bias - fraction);
    return bits & 0x8000 ? -size : size;
}

/* Rounded to nearest, ties to even. */
static uint16_t half_bits(mha_dtype half, double x)
{
    int fraction = fraction_bits(half), bias = exponent_bias(half), exponent = 0;
    int sign = signbit(x) ? 0x8000 : 0, infinity = (2 * bias + 1) << fraction;
    if (x != x) return (uint16_t)(infinity + 1);
    if (isinf(x) || x == 0) return (uint16_t)(sign | (x == 0 ? 0 : infinity));
    frexp(x, &exponent);
    exponent = (int)larger(exponent - 1, 1 - bias);
    int64_t steps = (int64_t)rint(ldexp(fabs(x), fraction - exponent));
    int64_t bits = ((int64_t)(exponent + bias) << fraction) + steps - (1 << fraction);
    return (uint16_t)(sign | smaller(bits, infinity));
}

/* An array (*lead, heads, rows, cols), laid out as the options say, between guard bands that its last element
 * touches. A single head or row has stride 0 and so serves any number of them. */
static view open_view(mha_dtype dtype, const int64_t lead[2], int64_t heads, int64_t rows, int64_t cols,
                      unsigned options)
{
    view v = {.outer = lead[0], .inner = lead[1], .heads = heads, .rows = rows, .cols = cols};
    int64_t pad = options & FAR ? 512 : options & PADDED ? 3 : 0;
    int64_t col = options & STRIDED ? 2 : 1, pitch = cols * col + pad;
    int64_t row = options & ROWS_FIRST ? pitch * heads + pad : pitch,
            head = options & ROWS_FIRST ? pitch : pitch * rows + pad;
    int64_t inner = options & ROWS_FIRST ? row * rows : head * heads, outer = options & BROADCAST ? 0 : inner * lead[1];
    int64_t last =
        (lead[0] - 1) * outer + (lead[1] - 1) * inner + (heads - 1) * head + (rows - 1) * row + (cols - 1) * col;
    int64_t sign = options & REVERSED ? -1 : 1;
    if (!heads || !rows || !cols) last = -1;
    v.memory = open_region((last + 1) * item_bytes(dtype));
    v.array.data = (char *)content(&v.memory) + (sign < 0 ? larger(last, 0) * item_bytes(dtype) : 0);
    v.array.dtype = dtype;
    v.array.head = heads == 1 ? 0 : sign * head;
    v.array.row = rows == 1 ? 0 : sign * row;
    v.array.col = sign * col;
    v.array.lead[0] = sign * outer;
    v.array.lead[1] = sign * inner;
    return v;
}

static char *cell(const view *v, int64_t b, int64_t h, int64_t i, int64_t c)
{
    const mha_array *a = &v->array;
    int64_t lead = b / v->inner * a->lead[0] + b % v->inner * a->lead[1];
    return a->data + (lead + h * a->head + i * a->row + c * a->col) * item_bytes(a->dtype);
}

static double number_at(mha_dtype dtype, const char *from)
{
    if (dtype == MHA_F16 || dtype == MHA_BF16) return half_number(dtype, *(const uint16_t *)from);
    if (dtype == MHA_F32) return *(const float *)from;
    return dtype == MHA_F64 ? *(const double *)from : *(const signed char *)from;
}

static double get(const view *v, int64_t b, int64_t h, int64_t i, int64_t c)
{
    double number = number_at(v->array.dtype, cell(v, b, h, i, c));
    return v->scale ? number * get(v->scale, b, h, i, 0) : number;
}

/* Integers are rounded and have no other number than finite ones; those go to their scale, and so to the whole row. */
static void set(const view *v, int64_t b, int64_t h, int64_t i, int64_t c, double x)
{
    char *to = cell(v, b, h, i, c);
    if (v->scale && !isfinite(x))
        set(v->scale, b, h, i, 0, x);
    else if (v->scale)
        *(signed char *)to = (signed char)rint(x / get(v->scale, b, h, i, 0));
    else if (v->array.dtype == MHA_F16 || v->array.dtype == MHA_BF16)
        *(uint16_t *)to = half_bits(v->array.dtype, x);
    else if (v->array.dtype == MHA_F32)
        *(float *)to = (float)x;
    else if (v->array.dtype == MHA_F64)
        *(double *)to = x;
    else
        *to = (char)x;
}

static int64_t get_integer(const view *v, int64_t b, int64_t i) { return *(const int64_t *)cell(v, b, 0, i, 0); }
static void set_integer(const view *v, int64_t b, int64_t i, int64_t n) { *(int64_t *)cell(v, b, 0, i, 0) = n; }

/* ---- a case */

typedef struct test {
    mha_params params;
    unsigned options;
    int64_t batches, group;
    view query, key, value, key_scale, value_scale, mask, lengths, offset, slopes, sinks, out, lse, weights;
    int64_t chosen[5]; /* queries whose weights are wanted */
    uint64_t inputs;   /* their digest */
    int failed;
} test;

static void fail(checker *c, test *t, const char *what)
{
    const mha_params *p = &t->params;
    t->failed = 1;
    if (c->failed >= 20) return; /* enough is printed */
    printf("FAILED %s %s seed %llu: ", mha_isa_name(p->isa), dtype_name(p->dtype), (unsigned long long)c->seed);
    printf("batches %lld, heads %lld, key/value heads %lld, ", (long long)t->batches, (long long)p->num_heads,
           (long long)p->num_kv_heads);
    printf("q_len %lld, kv_len %lld, head_dim %lld, value_dim %lld, ", (long long)p->q_len, (long long)p->kv_len,
           (long long)p->head_dim, (long long)p->value_dim);
    printf("scale %g, threads %d; options:", p->scale, p->num_threads);
    for (int n = 0; n < COUNT(option_names); n++)
        if (t->options >> n & 1) printf(" %s,", option_names[n]);
    printf(" %s\n", what);
}

static void fail_at(checker *c, test *t, const char *what, const int64_t at[4], double got, double want)
{
    char text[200];
    snprintf(text, sizeof text, "%s[%lld, %lld, %lld, %lld] = %.17g, expected %.17g", what, (long long)at[0],
             (long long)at[1], (long long)at[2], (long long)at[3], got, want);
    fail(c, t, text);
}

static void fill_uniform(checker *c, const view *v)
{
    for (int64_t b = 0; b < v->outer * v->inner; b++)
        for (int64_t h = 0; h < v->heads; h++)
            for (int64_t i = 0; i < v->rows; i++)
                for (int64_t n = 0; n < v->cols; n++) set(v, b, h, i, n, draw_real(c));
}

/* Rows that hide all, that hide nothing, whose biases are the largest numbers, and others with hidden runs of keys. */
static void fill_mask_row(checker *c, const view *v, int64_t b, int64_t h, int64_t i)
{
    int64_t kind = draw(c, 8), hidden_run = 0;
    double largest = (draw(c, 2) ? 1 : -1) * (v->array.dtype == MHA_F32 ? FLT_MAX : DBL_MAX);
    for (int64_t j = 0; j < v->cols; j++) {
        if (j % 8 == 0) hidden_run = draw(c, 2);
        int hidden = kind == 0 || (kind > 2 && (hidden_run || draw(c, 2)));
        if (v->array.dtype == MHA_BOOL)
            set(v, b, h, i, j, hidden ? 0 : (double)(1 + draw(c, 2)));
        else
            set(v, b, h, i, j, hidden ? -INFINITY : kind == 2 ? largest : 3 * draw_real(c));
    }
}

static void open_mask(checker *c, test *t)
{
    const mha_params *p = &t->params;
    mha_dtype other = p->dtype == MHA_F32 ? MHA_F64 : MHA_F32;
    mha_dtype dtype = t->options & BOOL_MASK ? MHA_BOOL : t->options & FLOAT_MASK ? p->dtype : other;
    int one = (t->options & ONE_MASK_ROW) != 0;
    if (!(t->options & (BOOL_MASK | FLOAT_MASK | OTHER_MASK))) return;
    t->mask = open_view(dtype, t->params.lead_shape, one ? 1 : p->num_heads, one ? 1 : p->q_len, p->kv_len, t->options);
    for (int64_t b = 0; b < t->batches; b++)
        for (int64_t h = 0; h < t->mask.heads; h++)
            for (int64_t i = 0; i < t->mask.rows; i++) fill_mask_row(c, &t->mask, b, h, i);
}

static void open_lengths(checker *c, test *t)
{
    const mha_params *p = &t->params;
    if (t->options & LENGTHS) {
        const int64_t edges[] = {INT64_MIN, -3, 0, 1, p->kv_len, p->kv_len + 7, INT64_MAX};
        t->lengths = open_view(MHA_I64, t->params.lead_shape, 1, t->options & ONE_LENGTH ? 1 : p->q_len, 1, t->options);
        for (int64_t b = 0; b < t->batches; b++)
            for (int64_t i = 0; i < t->lengths.rows; i++)
                set_integer(&t->lengths, b, i, draw(c, 3) ? draw(c, p->kv_len + 1) : edges[draw(c, COUNT(edges))]);
    }
    if (t->options & (CAUSAL | WINDOW | SLOPES)) {
        const int64_t edges[] = {-p->q_len, p->kv_len - p->q_len, 0, INT64_MIN / 2, INT64_MAX / 2};
        int far = t->options & SLOPES ? 3 : COUNT(edges); /* a score must not vanish beside its bias */
        t->offset = open_view(MHA_I64, t->params.lead_shape, 1, 1, 1, t->options);
        for (int64_t b = 0; b < t->batches; b++)
            set_integer(&t->offset, b, 0,
                        draw(c, 2) ? draw(c, p->q_len + p->kv_len + 1) - p->q_len : edges[draw(c, far)]);
    }
}

/* What changes scores or hides keys but masks and lengths, and the rows whose weights are wanted. */
static void open_rules(checker *c, test *t)
{
    mha_params *p = &t->params;
    const int64_t one[] = {1, 1};
    p->window_left = p->window_right = -1;
    if (t->options & WINDOW) {
        const int64_t sides[] = {-1, 0, 1, 5, 40, 255, 256, p->kv_len, INT64_MAX / 2};
        p->window_left = sides[draw(c, COUNT(sides))];
        p->window_right = sides[draw(c, COUNT(sides))];
    }
    if (t->options & SOFTCAP) p->softcap = draw(c, 4) ? 0.5 + draw_real(c) / 4 : 1e20;
    if (t->options & SLOPES) {
        t->slopes =
            open_view(p->dtype, p->lead_shape, p->num_heads, 1, 1, t->options & (PADDED | REVERSED | BROADCAST));
        fill_uniform(c, &t->slopes);
        p->slopes = t->slopes.array;
    }
    if (t->options & SINKS) {
        t->sinks = open_view(p->dtype, one, p->num_heads, 1, 1, t->options & PADDED);
        for (int64_t h = 0; h < p->num_heads; h++)
            set(&t->sinks, 0, h, 0, 0, draw(c, 4) ? 3 * draw_real(c) : draw(c, 2) ? -INFINITY : 60);
        p->sinks = t->sinks.array;
        p->sinks.lead[0] = p->sinks.lead[1] = 0;
    }
    if (t->options & CHOSEN && p->q_len) {
        for (int n = 0; n < COUNT(t->chosen); n++) t->chosen[n] = draw(c, p->q_len);
        p->weight_rows = t->chosen;
        p->num_weight_rows = COUNT(t->chosen);
    }
}

/* Whether masks aside query i of batch entry b sees key j. */
static int sees(const test *t, int64_t b, int64_t i, int64_t j)
{
    const mha_params *p = &t->params;
    if (t->lengths.memory.base && j >= get_integer(&t->lengths, b, i)) return 0;
    if (!t->offset.memory.base) return 1;
    int64_t back = i + get_integer(&t->offset, b, 0) - j;
    if (p->causal && back < 0) return 0;
    return (p->window_left < 0 || back <= p->window_left) && (p->window_right < 0 || -back <= p->window_right);
}

static int seen_by_any(const test *t, int64_t j)
{
    for (int64_t b = 0; b < t->batches; b++)
        for (int64_t i = 0; i < t->params.q_len; i++)
            if (sees(t, b, i, j)) return 1;
    return 0;
}

/* NaN in all keys and values beyond every query's; with POISON also NaN and infinities in a few that are visible. */
static void spoil(checker *c, test *t)
{
    const mha_params *p = &t->params;
    for (int64_t j = 0; j < p->kv_len; j++) {
        if (seen_by_any(t, j)) continue;
        for (int64_t b = 0; b < t->batches; b++)
            for (int64_t h = 0; h < p->num_kv_heads; h++) {
                for (int64_t e = 0; e < p->head_dim; e++) set(&t->key, b, h, j, e, NAN);
                for (int64_t n = 0; n < p->value_dim; n++) set(&t->value, b, h, j, n, NAN);
            }
    }
    if (!(t->options & POISON) || !p->kv_len) return;
    const double bad[] = {NAN, INFINITY, -INFINITY};
    for (int n = 0; n < COUNT(bad); n++) {
        int64_t b = draw(c, t->batches), h = draw(c, p->num_kv_heads);
        if (p->value_dim) set(&t->value, b, h, draw(c, p->kv_len), draw(c, p->value_dim), bad[n]);
        if (p->head_dim && n == 0) set(&t->key, b, h, draw(c, p->kv_len), draw(c, p->head_dim), NAN);
        if (p->head_dim && n == 1) set(&t->query, b, h, draw(c, p->q_len), draw(c, p->head_dim), NAN);
    }
}

/* The dtype of an input: that of the computation or, where they are mixed, often another one. */
static mha_dtype draw_dtype(checker *c, const test *t, int count)
{
    if (t->options & ALL_BF16 && t->params.dtype == MHA_F32) return MHA_BF16;
    const mha_dtype others[] = {t->params.dtype == MHA_F32 ? MHA_F64 : MHA_F32, MHA_F16, MHA_BF16, MHA_I8};
    int64_t drawn = draw(c, count + 1);
    return t->options & MIXED && drawn < count ? others[drawn] : t->params.dtype;
}

/* Keys or values, with their scales where they are integers. */
static void open_cached(checker *c, const test *t, view *v, view *scale, int64_t cols)
{
    const mha_params *p = &t->params;
    *v = open_view(draw_dtype(c, t, 4), p->lead_shape, p->num_kv_heads, p->kv_len, cols, t->options);
    if (v->array.dtype == MHA_I8) {
        *scale = open_view(MHA_F32, p->lead_shape, p->num_kv_heads, p->kv_len, 1, t->options);
        for (int64_t b = 0; b < t->batches; b++)
            for (int64_t h = 0; h < scale->heads; h++)
                for (int64_t j = 0; j < scale->rows; j++) set(scale, b, h, j, 0, (2 + draw_real(c)) / (3 * 127.0));
        v->scale = scale;
    }
    for (int64_t b = 0; b < t->batches; b++)
        for (int64_t h = 0; h < v->heads; h++)
            for (int64_t j = 0; j < v->rows; j++)
                for (int64_t n = 0; n < cols; n++)
                    set(v, b, h, j, n, draw_real(c) * (v->scale ? 127 * get(v->scale, b, h, j, 0) : 1));
}

static void open_test(checker *c, test *t)
{
    mha_params *p = &t->params;
    unsigned options = t->options, plain = options & ~(unsigned)(BROADCAST | STRIDED | REVERSED | FAR);
    const int64_t *lead = p->lead_shape;
    mha_dtype result = p->dtype == MHA_F64 || !(options & HALF_OUT) ? p->dtype : draw(c, 2) ? MHA_F16 : MHA_BF16;
    t->query = open_view(draw_dtype(c, t, 3), lead, p->num_heads, p->q_len, p->head_dim, options & ~(unsigned)FAR);
    t->out = open_view(result, lead, p->num_heads, p->q_len, p->value_dim,
                       plain | (options & OUT_STRIDED ? STRIDED | REVERSED : 0));
    if (options & LSE) t->lse = open_view(p->dtype, lead, p->num_heads, p->q_len, 1, plain);
    open_rules(c, t);
    int64_t weight_rows = p->weight_rows ? p->num_weight_rows : p->q_len;
    if (options & WEIGHTS) t->weights = open_view(p->dtype, lead, p->num_heads, weight_rows, p->kv_len, plain);
    fill_uniform(c, &t->query);
    open_cached(c, t, &t->key, &t->key_scale, p->head_dim);
    open_cached(c, t, &t->value, &t->value_scale, p->value_dim);
    open_mask(c, t);
    open_lengths(c, t);
    spoil(c, t);
    p->query = t->query.array;
    p->key = t->key.array;
    p->value = t->value.array;
    p->key_scale = t->key_scale.array;
    p->value_scale = t->value_scale.array;
    p->mask = t->mask.array;
    p->lengths = t->lengths.array;
    p->causal = (options & CAUSAL) != 0;
    p->offset = t->offset.array;
    p->out = t->out.array;
    p->lse = t->lse.array;
    p->weights = t->weights.array;
}

/* ---- the plain computation */

typedef struct expected {
    double *keys, *values;         /* of one key/value head, [kv_len][depth] */
    double *query, *weights, *out; /* of one query; the scale is in query, a hidden key has the weight 0 */
    double lse, tolerance;         /* of lse and out; relative for weights */
    double pairs;                  /* more of out, where the weights are rounded to bfloat16 */
} expected;

static double *new_numbers(int64_t count)
{
    double *numbers = malloc((size_t)larger(count, 1) * sizeof *numbers);
    if (!numbers) exit(1);
    return numbers;
}

static double *dense(const view *v, int64_t b, int64_t h)
{
    double *numbers = new_numbers(v->rows * v->cols);
    for (int64_t i = 0; i < v->rows; i++)
        for (int64_t n = 0; n < v->cols; n++) numbers[i * v->cols + n] = get(v, b, h, i, n);
    return numbers;
}

/* The score of a visible key, and |score| summed without cancellation in *size; -inf for a hidden key. */
static double score(const test *t, const expected *x, int64_t b, int64_t h, int64_t i, int64_t j, double *size)
{
    const mha_params *p = &t->params;
    double bias = 0, sum = 0;
    *size = 0;
    if (t->mask.memory.base) {
        double mask = get(&t->mask, b, h, i, j);
        if (t->mask.array.dtype == MHA_BOOL ? mask == 0 : mask == -INFINITY) return -INFINITY;
        bias = t->mask.array.dtype == MHA_BOOL ? 0 : p->dtype == MHA_F32 ? fmin(fmax(mask, -FLT_MAX), FLT_MAX) : mask;
    }
    for (int64_t e = 0; e < p->head_dim; e++) {
        double product = x->query[e] * x->keys[j * p->head_dim + e];
        sum += product;
        *size += fabs(product);
    }
    if (fabs(bias) < 1e30) *size += fabs(bias);
    if (p->softcap > 0) sum = p->softcap * tanh(sum / p->softcap);
    if (t->slopes.memory.base) {
        double steps = fabs((double)(i + get_integer(&t->offset, b, 0) - j)), slope = get(&t->slopes, b, h, 0, 0);
        *size += fabs(slope * steps);
        sum -= slope * steps;
    }
    return sum + bias;
}

/* Row i of head h: weights, out, lse and how far the core's may lie from them.
 *
 * With u the rounding unit, a score of head_dim products errs by at most (head_dim + 4) u size, its exponential by 2 u
 * size more and 4 u of its own, a weight by twice that; sums of 256 keys, and of blocks of them, by 300 u. The plain
 * sums here are of doubles and err by DBL_EPSILON a key. No value is larger than 1. Rounding to bfloat16 adds half a
 * step of each weight, and as much again for their sum, which is not rounded. */
static void expect(const test *t, expected *x, int64_t b, int64_t h, int64_t i)
{
    const mha_params *p = &t->params;
    double sink = t->sinks.memory.base ? get(&t->sinks, 0, h, 0, 0) : -INFINITY;
    double unit = p->dtype == MHA_F32 ? FLT_EPSILON / 2 : DBL_EPSILON / 2, key_size;
    double highest = sink, sum = 0, size = fabs(sink) < 1e30 ? fabs(sink) : 0;
    for (int64_t e = 0; e < p->head_dim; e++) x->query[e] = p->scale * get(&t->query, b, h, i, e);
    for (int64_t j = 0; j < p->kv_len; j++) {
        key_size = 0;
        double s = sees(t, b, i, j) ? score(t, x, b, h, i, j, &key_size) : -INFINITY;
        if (key_size > size) size = key_size;
        if (s > highest || s != s) highest = s;
        x->weights[j] = s;
    }
    for (int64_t n = 0; n < p->value_dim; n++) x->out[n] = 0;
    if (sink > -INFINITY) sum = exp(sink - highest);
    for (int64_t j = 0; j < p->kv_len; j++) {
        x->weights[j] = x->weights[j] == -INFINITY ? 0 : exp(x->weights[j] - highest);
        sum += x->weights[j];
    }
    for (int64_t j = 0; j < p->kv_len; j++) {
        if (x->weights[j] == 0) continue;
        x->weights[j] /= sum;
        for (int64_t n = 0; n < p->value_dim; n++) x->out[n] += x->weights[j] * x->values[j * p->value_dim + n];
    }
    x->lse = sum == 0 ? -INFINITY : highest + log(sum);
    x->tolerance = unit * (4 * (double)(p->head_dim + 8) * size + 300) + DBL_EPSILON * (double)p->kv_len;
    int pairs = p->isa == MHA_ISA_AVX512_BF16 && t->query.array.dtype == MHA_BF16 && t->key.array.dtype == MHA_BF16 &&
                t->value.array.dtype == MHA_BF16;
    x->pairs = pairs ? ldexp(1, -8) : 0;
    if (sum == 0) x->tolerance = x->pairs = 0;
}

static int is_close(double got, double want, double tolerance)
{
    return got == want || (got != got && want != want) || fabs(got - want) <= tolerance;
}

/* Compares columns of row i and erases them, so that what is left in the array was never an element. */
static void compare(checker *c, test *t, const char *what, const view *v, const int64_t at[3], const double *want,
                    double absolute, double relative)
{
    for (int64_t n = 0; n < v->cols; n++) {
        double got = get(v, at[0], at[1], at[2], n);
        if (!t->failed && !is_close(got, want[n], absolute + relative * fabs(want[n])))
            fail_at(c, t, what, (const int64_t[]){at[0], at[1], at[2], n}, got, want[n]);
        memset(cell(v, at[0], at[1], at[2], n), UNSET, (size_t)item_bytes(v->array.dtype));
    }
}

/* The rows of weights that belong to a query. */
static void compare_weights(checker *c, test *t, const int64_t at[3], const expected *x)
{
    double tiny = t->params.dtype == MHA_F32 ? FLT_MIN : DBL_MIN; /* a level may flush what is below */
    if (!t->params.weight_rows) compare(c, t, "weights", &t->weights, at, x->weights, tiny, x->tolerance);
    for (int64_t n = 0; n < t->params.num_weight_rows; n++)
        if (t->chosen[n] == at[2])
            compare(c, t, "weights", &t->weights, (const int64_t[]){at[0], at[1], n}, x->weights, tiny, x->tolerance);
}

static void compare_all(checker *c, test *t)
{
    const mha_params *p = &t->params;
    expected x = {
        .query = new_numbers(p->head_dim), .weights = new_numbers(p->kv_len), .out = new_numbers(p->value_dim)};
    /* what is below the normal numbers is far below the tolerance */
    double rounding = t->out.array.dtype == p->dtype ? 0 : ldexp(1, -1 - fraction_bits(t->out.array.dtype));
    for (int64_t b = 0; b < t->batches; b++)
        for (int64_t h = 0; h < p->num_heads; h++) {
            x.keys = dense(&t->key, b, h / t->group);
            x.values = dense(&t->value, b, h / t->group);
            for (int64_t i = 0; i < p->q_len; i++) {
                const int64_t at[] = {b, h, i};
                expect(t, &x, b, h, i);
                compare(c, t, "out", &t->out, at, x.out, x.tolerance + x.pairs, rounding);
                if (p->lse.data) compare(c, t, "lse", &t->lse, at, &x.lse, x.tolerance, 0);
                if (p->weights.data) compare_weights(c, t, at, &x);
            }
            free(x.keys);
            free(x.values);
        }
    const view *results[] = {&t->out, &t->lse, &t->weights};
    for (int n = 0; n < COUNT(results); n++)
        if (results[n]->memory.base && !is_unset(content(&results[n]->memory), results[n]->memory.size))
            fail(c, t, "wrote between the elements of a result");
    free(x.query);
    free(x.weights);
    free(x.out);
}

/* ---- running a case */

/* Results that were never written are NaN; the core writes the weights of visible keys only. */
static void blank_results(const test *t)
{
    const view *results[] = {&t->out, &t->lse, &t->weights};
    for (int n = 0; n < COUNT(results); n++)
        if (results[n]->memory.base) memset(content(&results[n]->memory), UNSET, results[n]->memory.size);
    if (!t->weights.memory.base) return;
    for (int64_t b = 0; b < t->batches; b++)
        for (int64_t h = 0; h < t->weights.heads; h++)
            for (int64_t i = 0; i < t->weights.rows; i++)
                for (int64_t j = 0; j < t->weights.cols; j++) set(&t->weights, b, h, i, j, 0);
}

static uint64_t digest_results(const test *t)
{
    return digest(&t->out.memory) + 3 * digest(&t->lse.memory) + 5 * digest(&t->weights.memory);
}

static uint64_t digest_inputs(const test *t)
{
    return digest(&t->query.memory) + 3 * digest(&t->key.memory) + 5 * digest(&t->value.memory) +
           7 * digest(&t->mask.memory) + 9 * digest(&t->lengths.memory) + 11 * digest(&t->offset.memory) +
           13 * digest(&t->slopes.memory) + 15 * digest(&t->sinks.memory) + 17 * digest(&t->key_scale.memory) +
           19 * digest(&t->value_scale.memory);
}

/* One call with a workspace of just the size asked for, at an address that is aligned for no vector. */
static void call(checker *c, test *t, int threads)
{
    t->params.num_threads = threads;
    int64_t bytes = mha_workspace_bytes(&t->params);
    if (bytes < 0) {
        fail(c, t, "mha_workspace_bytes refuses");
        return;
    }
    region workspace = open_region(bytes + 8);
    blank_results(t);
    mha_status status = mha_forward(&t->params, content(&workspace) + 8, bytes);
    if (status != MHA_OK) fail(c, t, "mha_forward refuses");
    if (!close_region(&workspace)) fail(c, t, "wrote outside the workspace");
}

/* A row has the same bits, NaN aside, without the rows behind it, where both calls use the same kernel. */
static void check_first_rows(checker *c, test *t, const unsigned char *whole)
{
    mha_params *p = &t->params;
    int64_t q_len = p->q_len, few = mha_few_rows() / t->group;
    p->q_len = q_len > few ? larger(q_len / 2, few + 1) : (q_len + 1) / 2;
    if (p->weight_rows) p->weights.data = NULL; /* they may be among the last rows */
    call(c, t, 1);
    for (int64_t b = 0; b < t->batches; b++)
        for (int64_t h = 0; h < p->num_heads; h++)
            for (int64_t i = 0; i < smaller(p->q_len, q_len); i++)
                for (int64_t n = 0; n < p->value_dim; n++) {
                    const char *element = cell(&t->out, b, h, i, n);
                    const unsigned char *before = whole + (element - (const char *)content(&t->out.memory));
                    double got = get(&t->out, b, h, i, n);
                    mha_dtype dtype = t->out.array.dtype;
                    if (!t->failed && got == got && memcmp(element, before, (size_t)item_bytes(dtype)) != 0)
                        fail_at(c, t, "other bits without the last rows: out", (const int64_t[]){b, h, i, n}, got,
                                number_at(dtype, (const char *)before));
                }
    p->q_len = q_len;
}

static void close_test(checker *c, test *t)
{
    view *views[] = {&t->query,  &t->key,    &t->value, &t->key_scale, &t->value_scale, &t->mask,   &t->lengths,
                     &t->offset, &t->slopes, &t->sinks, &t->out,       &t->lse,         &t->weights};
    if (digest_inputs(t) != t->inputs) fail(c, t, "changed an input");
    for (int n = 0; n < COUNT(views); n++)
        if (!close_region(&views[n]->memory)) fail(c, t, "wrote beside an array");
}

static void check_case(checker *c, test *t)
{
    open_test(c, t);
    t->inputs = digest_inputs(t);
    call(c, t, 1);
    uint64_t first = digest_results(t);
    for (int threads = 2; threads <= 3 && !t->failed; threads++) {
        call(c, t, threads);
        if (digest_results(t) != first) fail(c, t, "other bits than on one thread");
    }
    unsigned char *whole = malloc(t->out.memory.size + 1);
    if (!whole) exit(1);
    memcpy(whole, content(&t->out.memory), t->out.memory.size);
    compare_all(c, t);
    check_first_rows(c, t, whole);
    free(whole);
    close_test(c, t);
    c->passed += !t->failed;
    c->failed += t->failed;
}

/* ---- the grid */

static unsigned draw_options(checker *c)
{
    const unsigned masks[] = {0, 0, BOOL_MASK, FLOAT_MASK, OTHER_MASK};
    const unsigned bits[] = {PADDED,      STRIDED, REVERSED, ROWS_FIRST, BROADCAST, MIXED, LENGTHS, CAUSAL,   WEIGHTS,
                             OUT_STRIDED, POISON,  WINDOW,   SOFTCAP,    SLOPES,    SINKS, CHOSEN,  HALF_OUT, ALL_BF16};
    unsigned options = masks[draw(c, COUNT(masks))];
    for (int n = 0; n < COUNT(bits); n++)
        if (draw(c, 4) == 0) options |= bits[n];
    /* there a weight may become 0, and 0 times infinity is NaN */
    if (options & (SLOPES | SINKS)) options &= ~(unsigned)POISON;
    return options | (draw(c, 2) ? LSE : 0) | (draw(c, 2) ? ONE_LENGTH : 0) | (draw(c, 3) == 0 ? ONE_MASK_ROW : 0);
}

/* rows: of one key/value head, so queries times the group. */
static void check_sizes(checker *c, mha_isa isa, mha_dtype dtype, int64_t rows, int64_t keys, int64_t head_dim,
                        int64_t value_dim, unsigned options)
{
    int64_t most = rows * keys > 10000 ? 1 : 2, group = 1 + draw(c, 3), kv_heads = 1 + draw(c, most);
    if (rows % group) group = 1;
    test t = {.options = options, .group = group};
    mha_params *p = &t.params;
    p->isa = isa;
    p->dtype = dtype;
    p->lead_ndim = 2;
    p->lead_shape[0] = 1 + draw(c, most);
    p->lead_shape[1] = 1 + draw(c, most);
    t.batches = p->lead_shape[0] * p->lead_shape[1];
    p->num_heads = kv_heads * group;
    p->num_kv_heads = kv_heads;
    p->q_len = rows / group;
    p->kv_len = keys;
    p->head_dim = head_dim;
    p->value_dim = value_dim;
    p->scale = draw(c, 8) ? 1 / sqrt((double)larger(head_dim, 1)) : draw(c, 2) ? -0.3 : 0;
    check_case(c, &t);
}

static void check_level(checker *c, mha_isa isa, mha_dtype dtype)
{
    mha_tiles tile = mha_isa_tiles(isa, dtype);
    int64_t block = mha_key_block(), split = mha_key_split(), few = mha_few_rows(), panel = tile.panel,
            lanes = tile.lanes;
    const int64_t rows[] = {
        1, 2, 3, few - 1, few, few + 1, lanes + 1, panel - 1, panel, panel + 1, panel + tile.row_tile, 4 * panel + 1};
    const int64_t keys[] = {
        0,         1,     3,         tile.key_tile - 1, tile.key_tile, tile.key_tile + 1, 2 * tile.key_tile + 1, 37,
        block - 1, block, block + 1, split - 1,         split,         split + 1,         2 * split + 7};
    const int64_t depths[] = {0, 1, 5, lanes - 1, lanes, lanes + 1, 2 * lanes, 3 * lanes + 1, 4 * lanes, 5 * lanes + 3};
    for (int r = 0; r < COUNT(rows); r++)
        for (int k = 0; k < COUNT(keys); k++) {
            int64_t head_dim = depths[draw(c, COUNT(depths))], value_dim = depths[draw(c, COUNT(depths))];
            check_sizes(c, isa, dtype, rows[r], keys[k], head_dim, value_dim, LSE);
            check_sizes(c, isa, dtype, rows[r], keys[k], head_dim, value_dim, draw_options(c));
        }
    for (int e = 0; e < COUNT(depths); e++)
        for (int n = 0; n < COUNT(depths); n++) {
            check_sizes(c, isa, dtype, few, keys[draw(c, COUNT(keys))], depths[e], depths[n], draw_options(c));
            check_sizes(c, isa, dtype, panel + 1, tile.key_tile + 1, depths[e], depths[n], draw_options(c));
            check_sizes(c, isa, dtype, few + 1 + draw(c, panel), block + 1 + draw(c, block), depths[e], depths[n],
                        draw_options(c));
        }
    /* rows of keys so far apart that they are copied */
    check_sizes(c, isa, dtype, 4 * panel + 1, 4 * split + 1, 3, lanes, FAR | BROADCAST);
    check_sizes(c, isa, dtype, few + 1, 4 * split + 1, 3, lanes, FAR | BROADCAST | BOOL_MASK | POISON);
}

/* ---- rounding to float16 and bfloat16 */

/* Values of one key, so the result is their rounding: numbers of the dtype, those halfway between two of them and those
 * next to halfway, beyond the largest too. */
static void fill_halfway(mha_dtype half, float *values)
{
    for (int bits = 0; bits < 0x8000; bits++) {
        double number = half_number(half, (uint16_t)bits), next = half_number(half, (uint16_t)(bits + 1));
        if (next == INFINITY) next = ldexp(1, exponent_bias(half) + 1);
        float halfway = number < INFINITY ? (float)((number + next) / 2) : (float)number;
        const float four[] = {(float)number, halfway, nextafterf(halfway, 0), nextafterf(halfway, INFINITY)};
        for (int n = 0; n < 4; n++) {
            values[8 * bits + n] = four[n];
            values[8 * bits + 4 + n] = -four[n];
        }
    }
}

static void check_rounding(checker *c, mha_isa isa, mha_dtype half)
{
    enum { NUMBERS = 8 * 0x8000 };
    float zero = 0, *values = malloc(NUMBERS * sizeof *values);
    uint16_t *out = malloc(NUMBERS * sizeof *out);
    mha_params p = {.isa = isa, .dtype = MHA_F32, .num_threads = 1, .scale = 1, .num_heads = 1, .num_kv_heads = 1};
    p.window_left = p.window_right = -1;
    p.q_len = p.kv_len = p.head_dim = 1;
    p.value_dim = NUMBERS;
    p.query.data = p.key.data = (char *)&zero;
    p.value = (mha_array){.data = (char *)values, .col = 1};
    p.out = (mha_array){.data = (char *)out, .dtype = half, .col = 1};
    int64_t bytes = mha_workspace_bytes(&p);
    char *workspace = malloc((size_t)bytes);
    if (!values || !out || !workspace) exit(1);
    fill_halfway(half, values);
    int wrong = mha_forward(&p, workspace, bytes) != MHA_OK;
    if (wrong) printf("FAILED %s: a half-precision result is refused\n", mha_isa_name(isa));
    for (int n = 0; n < NUMBERS && !wrong; n++) {
        double want = half_number(half, half_bits(half, values[n])), got = half_number(half, out[n]);
        wrong = !is_close(got, want, 0);
        if (wrong) printf("FAILED %s: %a rounded to %a, expected %a\n", mha_isa_name(isa), values[n], got, want);
    }
    free(workspace);
    free(out);
    free(values);
    c->passed += !wrong;
    c->failed += wrong;
}

/* ---- a layer */

enum { QUERY, KEY, VALUE, OUT, MAPS };

typedef struct layer_test {
    test attention; /* its query, key and value are the projected ones, in double */
    view x[MAPS], weight[MAPS], bias[MAPS];
    view out;
} layer_test;

/* Numbers of [-1, 1) divided by root. */
static view open_uniform(checker *c, mha_dtype dtype, const int64_t lead[2], int64_t rows, int64_t cols, double root,
                         unsigned options)
{
    view v = open_view(dtype, lead, 1, rows, cols, options);
    fill_uniform(c, &v);
    for (int64_t b = 0; b < v.outer; b++)
        for (int64_t i = 0; i < rows; i++)
            for (int64_t n = 0; n < cols; n++) set(&v, b, 0, i, n, get(&v, b, 0, i, n) / root);
    return v;
}

/* x weight + bias for rows of x. */
static double *linear(const double *x, int64_t rows, const view *weight, const view *bias)
{
    double *y = new_numbers(rows * weight->cols);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t n = 0; n < weight->cols; n++) {
            double sum = get(bias, 0, 0, 0, n);
            for (int64_t e = 0; e < weight->rows; e++) sum += x[i * weight->rows + e] * get(weight, 0, 0, e, n);
            y[i * weight->cols + n] = sum;
        }
    return y;
}

/* The projection of batch entry b to the heads of an array. */
static void project(const layer_test *l, int map, view *heads, int64_t b)
{
    double *x = dense(&l->x[map], b, 0), *y = linear(x, heads->rows, &l->weight[map], &l->bias[map]);
    for (int64_t h = 0; h < heads->heads; h++)
        for (int64_t i = 0; i < heads->rows; i++)
            for (int64_t n = 0; n < heads->cols; n++)
                set(heads, b, h, i, n, y[(i * heads->heads + h) * heads->cols + n]);
    free(x);
    free(y);
}

/* What batch entry b attends to, [q_len][heads * value_dim]. */
static double *attended(const test *t, int64_t b)
{
    const mha_params *p = &t->params;
    double *all = new_numbers(p->q_len * p->num_heads * p->value_dim);
    expected x = {.query = new_numbers(p->head_dim), .weights = new_numbers(p->kv_len)};
    for (int64_t h = 0; h < p->num_heads; h++) {
        x.keys = dense(&t->key, b, h / t->group);
        x.values = dense(&t->value, b, h / t->group);
        for (int64_t i = 0; i < p->q_len; i++) {
            x.out = all + (i * p->num_heads + h) * p->value_dim;
            expect(t, &x, b, h, i);
        }
        free(x.keys);
        free(x.values);
    }
    free(x.query);
    free(x.weights);
    return all;
}

static void compare_layer(checker *c, layer_test *l)
{
    test *t = &l->attention;
    double unit = t->params.dtype == MHA_F32 ? FLT_EPSILON / 2 : DBL_EPSILON / 2;
    for (int64_t b = 0; b < t->batches; b++) {
        project(l, QUERY, &t->query, b);
        project(l, KEY, &t->key, b);
        project(l, VALUE, &t->value, b);
        double *heads = attended(t, b), *want = linear(heads, t->params.q_len, &l->weight[OUT], &l->bias[OUT]);
        for (int64_t i = 0; i < t->params.q_len; i++) {
            const int64_t at[] = {b, 0, i};
            /* numbers around 1, each a sum of some hundred products whose factors have errors of that kind */
            compare(c, t, "layer", &l->out, at, want + i * l->out.cols, 2000 * unit, 0);
        }
        free(heads);
        free(want);
    }
    if (!is_unset(content(&l->out.memory), l->out.memory.size)) fail(c, t, "wrote between the elements of the result");
}

static void call_layer(checker *c, layer_test *l, int threads)
{
    test *t = &l->attention;
    mha_layer layer = {.attention = t->params, .out = l->out.array};
    mha_linear *maps[] = {&layer.query, &layer.key, &layer.value, &layer.output};
    layer.attention.num_threads = threads;
    layer.attention.lead_ndim = 1;
    for (int m = 0; m < MAPS; m++)
        *maps[m] = (mha_linear){l->x[m].array, l->weight[m].array, l->bias[m].array.data,
                                l->x[m].rows,  l->weight[m].rows,  l->weight[m].cols};
    layer.output.len = t->params.q_len;
    int64_t bytes = mha_layer_workspace_bytes(&layer);
    region workspace = open_region(larger(bytes, 0) + 8);
    memset(content(&l->out.memory), UNSET, l->out.memory.size);
    if (mha_layer_forward(&layer, content(&workspace) + 8, bytes) != MHA_OK) fail(c, t, "mha_layer_forward refuses");
    if (mha_layer_forward(&layer, content(&workspace) + 8, bytes - 1) != MHA_ERR_WORKSPACE)
        fail(c, t, "mha_layer_forward takes a workspace that is too small");
    if (!close_region(&workspace)) fail(c, t, "wrote outside the workspace");
}

static void open_layer(checker *c, layer_test *l, int64_t width)
{
    test *t = &l->attention;
    mha_params *p = &t->params;
    const int64_t lead[] = {t->batches, 1}, one[] = {1, 1};
    const int64_t rows[] = {p->q_len, p->kv_len, p->kv_len, 0};
    const int64_t depths[] = {width, width + 1, width + 2, p->num_heads * p->value_dim};
    const int64_t cols[] = {p->num_heads * p->head_dim, p->num_kv_heads * p->head_dim, p->num_kv_heads * p->value_dim,
                            width};
    mha_dtype other = p->dtype == MHA_F32 ? MHA_F64 : MHA_F32;
    for (int m = 0; m < MAPS; m++) {
        mha_dtype dtype = t->options & MIXED && draw(c, 2) ? other : p->dtype;
        l->x[m] =
            open_uniform(c, dtype, lead, rows[m], depths[m], 1, t->options & (PADDED | STRIDED | REVERSED | BROADCAST));
        l->weight[m] = open_uniform(c, dtype, one, depths[m], cols[m], sqrt((double)larger(depths[m], 1)),
                                    draw(c, 2) ? t->options & (PADDED | STRIDED) : 0);
        l->bias[m] = open_uniform(c, p->dtype, one, 1, cols[m], 1, 0);
    }
    l->out = open_view(p->dtype, lead, 1, p->q_len, width, t->options & PADDED);
    t->query = open_view(MHA_F64, lead, p->num_heads, p->q_len, p->head_dim, 0);
    t->key = open_view(MHA_F64, lead, p->num_kv_heads, p->kv_len, p->head_dim, 0);
    t->value = open_view(MHA_F64, lead, p->num_kv_heads, p->kv_len, p->value_dim, 0);
    open_mask(c, t);
    open_lengths(c, t);
    p->mask = t->mask.array;
    p->lengths = t->lengths.array;
    p->offset = t->offset.array;
    p->causal = (t->options & CAUSAL) != 0;
    open_rules(c, t);
}

static void close_layer(checker *c, layer_test *l)
{
    test *t = &l->attention;
    view *views[] = {&l->out, &t->query, &t->key, &t->value, &t->mask, &t->lengths, &t->offset, &t->slopes, &t->sinks};
    int intact = 1;
    for (int n = 0; n < COUNT(views); n++) intact &= close_region(&views[n]->memory);
    for (int m = 0; m < MAPS; m++)
        intact &= close_region(&l->x[m].memory) & close_region(&l->weight[m].memory) & close_region(&l->bias[m].memory);
    if (!intact) fail(c, t, "layer: wrote beside an array");
}

/* width: of the queries and of the result; keys and values are a little wider. */
static void check_layer(checker *c, layer_test *l, int64_t width)
{
    test *t = &l->attention;
    open_layer(c, l, width);
    call_layer(c, l, 1);
    uint64_t first = digest(&l->out.memory);
    for (int threads = 2; threads <= 3; threads++) {
        call_layer(c, l, threads);
        if (digest(&l->out.memory) != first) fail(c, t, "layer: other bits than on one thread");
    }
    compare_layer(c, l);
    close_layer(c, l);
    c->passed += !t->failed;
    c->failed += t->failed;
}

static void check_layers(checker *c, mha_isa isa, mha_dtype dtype)
{
    mha_tiles tile = mha_isa_tiles(isa, dtype);
    const int64_t rows[] = {0, 1, 3, tile.row_tile, 33, 63, 64, 97, 130};
    const int64_t widths[] = {0, 1, tile.lanes + 1, tile.col_tile - 1, tile.col_tile, tile.col_tile + 1};
    const int64_t wide[] = {4 * tile.col_tile + 3, 511, 512, 513};
    const int64_t depths[] = {0, 1, tile.lanes, tile.lanes + 1, 13};
    for (int n = 0; n < 60; n++) {
        int64_t group = 1 + draw(c, 2), kv_heads = 1 + draw(c, 2);
        layer_test l = {.attention = {.options = draw_options(c), .group = group, .batches = 1 + draw(c, 2)}};
        mha_params *p = &l.attention.params;
        *p = (mha_params){.isa = isa, .dtype = dtype, .num_heads = group * kv_heads, .num_kv_heads = kv_heads};
        p->q_len = rows[draw(c, COUNT(rows))];
        p->kv_len = draw(c, 2) ? p->q_len : rows[draw(c, COUNT(rows))];
        p->head_dim = depths[draw(c, COUNT(depths))];
        p->value_dim = depths[draw(c, COUNT(depths))];
        p->scale = 1 / sqrt((double)larger(p->head_dim, 1));
        p->lead_ndim = 2;
        p->lead_shape[0] = l.attention.batches;
        p->lead_shape[1] = 1;
        check_layer(c, &l, n % 8 ? widths[draw(c, COUNT(widths))] : wide[draw(c, COUNT(wide))]);
    }
}

/* ---- the exponential */

static void check_exponential(checker *c, mha_isa isa, mha_dtype dtype, double x, int64_t count)
{
    int64_t bytes = item_bytes(dtype);
    region from = open_region(count * bytes), to = open_region(count * bytes);
    double unit = dtype == MHA_F32 ? FLT_EPSILON / 2 : DBL_EPSILON / 2, tiny = dtype == MHA_F32 ? FLT_MIN : DBL_MIN;
    double want = dtype == MHA_F32 ? exp2((float)x) : exp2(x);
    view source = {.inner = 1, .array = {.data = (char *)content(&from), .dtype = dtype, .col = 1}}, result = source;
    result.array.data = (char *)content(&to);
    for (int64_t i = 0; i < count; i++) set(&source, 0, 0, 0, i, x);
    mha_exp2(isa, dtype, content(&from), content(&to), count);
    int right = 1;
    for (int64_t i = 0; i < count; i++) {
        double got = get(&result, 0, 0, 0, i);
        /* 4 u: the polynomial's error and roundings; a level may flush what is below the normal numbers */
        int ok = want < tiny ? got >= 0 && got <= tiny : is_close(got, want, 4 * unit * want);
        if ((x == 0 || x == -1) && got != want) ok = 0;
        if (!ok && right)
            printf("FAILED %s %s: exp2(%.17g) = %.17g, expected %.17g\n", mha_isa_name(isa), dtype_name(dtype), x, got,
                   want);
        right = right && ok;
    }
    int intact = close_region(&from) & close_region(&to);
    if (!intact) printf("FAILED %s: exp2 wrote beside its result\n", mha_isa_name(isa));
    c->passed += right && intact;
    c->failed += !right || !intact;
}

static void check_exponentials(checker *c, mha_isa isa, mha_dtype dtype)
{
    const double edges[] = {0, -1, -0.0, -126, -127, -150, -1022, -1023, -1e4, -1e30, -INFINITY, NAN};
    int64_t lanes = mha_isa_tiles(isa, dtype).lanes;
    for (int n = 0; n < COUNT(edges); n++)
        for (int64_t count = 1; count <= 2 * lanes + 1; count++) check_exponential(c, isa, dtype, edges[n], count);
    for (int n = 0; n < 2000; n++) {
        double below = draw_real(c) - 1;
        check_exponential(c, isa, dtype, below * (n % 2 ? 1 : dtype == MHA_F32 ? 64 : 512), 1);
    }
}

/* ---- the hyperbolic tangent */

static void check_tanh(checker *c, mha_isa isa, mha_dtype dtype, double x)
{
    int64_t bytes = item_bytes(dtype);
    region from = open_region(bytes), to = open_region(bytes);
    view source = {.inner = 1, .array = {.data = (char *)content(&from), .dtype = dtype}}, result = source;
    result.array.data = (char *)content(&to);
    set(&source, 0, 0, 0, 0, x);
    mha_tanh(isa, dtype, content(&from), content(&to), 1);
    double got = get(&result, 0, 0, 0, 0), want = tanh(get(&source, 0, 0, 0, 0));
    /* 5 u: the polynomial's error and roundings, or those of an exponential, a difference and a quotient */
    int right = is_close(got, want, 5 * (dtype == MHA_F32 ? FLT_EPSILON / 2 : DBL_EPSILON / 2) * fabs(want));
    int intact = close_region(&from) & close_region(&to);
    if (!right || !intact)
        printf("FAILED %s %s: tanh(%.17g) = %.17g, expected %.17g\n", mha_isa_name(isa), dtype_name(dtype), x, got,
               want);
    c->passed += right && intact;
    c->failed += !right || !intact;
}

static void check_tanhs(checker *c, mha_isa isa, mha_dtype dtype)
{
    const double edges[] = {0, 0.625, -0.625, 1e-30, 40, -40, 1e30, INFINITY, -INFINITY, NAN};
    for (int n = 0; n < COUNT(edges); n++) check_tanh(c, isa, dtype, edges[n]);
    for (int n = 0; n < 2000; n++) check_tanh(c, isa, dtype, draw_real(c) * (n % 2 ? 1 : 12));
}

/* ---- refusals */

static void expect_status(checker *c, const char *what, mha_status got, mha_status want)
{
    c->passed += got == want;
    c->failed += got != want;
    if (got != want) printf("FAILED %s: status %d, expected %d\n", what, (int)got, (int)want);
}

/* What the core says of parameters before it looks for a workspace. */
static mha_status forward(const mha_params *p) { return mha_forward(p, NULL, 0); }

/* A call that is right as it stands, over arrays that nobody reads. */
static mha_params good_call(mha_isa isa, const mha_array *array)
{
    return (mha_params){.isa = isa,
                        .dtype = MHA_F32,
                        .num_threads = 1,
                        .window_left = -1,
                        .window_right = -1,
                        .scale = 1,
                        .num_heads = 1,
                        .num_kv_heads = 1,
                        .q_len = 2,
                        .kv_len = 3,
                        .head_dim = 4,
                        .value_dim = 4,
                        .query = *array,
                        .key = *array,
                        .value = *array,
                        .out = *array};
}

static void check_refused_workspaces(checker *c, const mha_params *good)
{
    float results[8];
    mha_params p = *good;
    p.out.data = (char *)results;
    p.out.row = 4;
    int64_t bytes = mha_workspace_bytes(&p);
    unsigned char *workspace = malloc((size_t)bytes);
    expect_status(c, "a good call", mha_forward(&p, workspace, bytes), MHA_OK);
    expect_status(c, "no workspace", mha_forward(&p, NULL, bytes), MHA_ERR_WORKSPACE);
    expect_status(c, "a workspace that is too small", mha_forward(&p, workspace, bytes - 1), MHA_ERR_WORKSPACE);
    expect_status(c, "a workspace of negative size", mha_forward(&p, workspace, -1), MHA_ERR_WORKSPACE);
    free(workspace);
    p.head_dim = INT64_MAX / 8;
    expect_status(c, "a workspace beyond what can be addressed",
                  mha_workspace_bytes(&p) < 0 ? MHA_ERR_WORKSPACE : MHA_OK, MHA_ERR_WORKSPACE);
}

static void check_refused_dtypes(checker *c, const mha_params *good)
{
    mha_params p = *good;
    p.dtype = MHA_BOOL;
    expect_status(c, "a result of bool", forward(&p), MHA_ERR_DTYPE);
    p = *good;
    p.key.dtype = MHA_I8;
    expect_status(c, "integers without scales", forward(&p), MHA_ERR_DTYPE);
    p = *good;
    p.value_scale = good->value;
    expect_status(c, "scales of numbers that are no integers", forward(&p), MHA_ERR_DTYPE);
    p = *good;
    p.query.dtype = MHA_I8;
    expect_status(c, "a query of integers", forward(&p), MHA_ERR_DTYPE);
    p = *good;
    p.dtype = MHA_F64;
    p.out.dtype = MHA_F16;
    expect_status(c, "a computation in float64 with a half-precision result", forward(&p), MHA_ERR_DTYPE);
}

static void check_refused_shapes(checker *c, const mha_params *good)
{
    mha_params p = *good;
    int64_t *sizes[] = {&p.q_len, &p.kv_len, &p.head_dim, &p.value_dim, &p.num_kv_heads, &p.lead_ndim};
    for (int n = 0; n < COUNT(sizes); n++) {
        p = *good;
        *sizes[n] = -1;
        expect_status(c, "a size below 0", forward(&p), MHA_ERR_SHAPE);
    }
    p = *good;
    p.num_threads = 0;
    expect_status(c, "no thread", forward(&p), MHA_ERR_SHAPE);
    p = *good;
    p.lead_ndim = MHA_MAX_LEAD + 1;
    expect_status(c, "too many dimensions", forward(&p), MHA_ERR_SHAPE);
    p = *good;
    p.num_kv_heads = 0;
    expect_status(c, "query heads without key heads", forward(&p), MHA_ERR_SHAPE);
    p = *good;
    p.window_left = 0;
    expect_status(c, "a window without an offset", forward(&p), MHA_ERR_SHAPE);
    p = *good;
    p.slopes = good->key;
    expect_status(c, "slopes without an offset", forward(&p), MHA_ERR_SHAPE);
    p = *good;
    p.q_len = 0;
    expect_status(c, "nothing to do", forward(&p), MHA_OK);
}

static mha_status layer_forward(const mha_layer *layer)
{
    char workspace[1];
    mha_status status = mha_layer_forward(layer, workspace, 0);
    return status != MHA_ERR_WORKSPACE && mha_layer_workspace_bytes(layer) >= 0 ? MHA_OK : status;
}

/* A layer is refused before anything of it is planned. */
static void check_refused_layers(checker *c, const mha_params *good)
{
    mha_linear linear = {good->query, good->query, NULL, 2, 4, 4};
    mha_layer right = {*good, linear, linear, linear, linear, good->out}, layer = right;
    right.attention.lead_ndim = right.attention.lead_shape[0] = 1;
    right.key.len = right.value.len = 3;
    expect_status(c, "a layer without a workspace", layer_forward(&right), MHA_ERR_WORKSPACE);
    expect_status(c, "a layer of no batch dimension", layer_forward(&layer), MHA_ERR_SHAPE);
    layer = right;
    layer.attention.isa = MHA_ISA_COUNT;
    expect_status(c, "a layer of no level", layer_forward(&layer), MHA_ERR_ISA);
    layer = right;
    layer.attention.dtype = MHA_I8;
    expect_status(c, "a layer of integers", layer_forward(&layer), MHA_ERR_DTYPE);
    mha_array *arrays[] = {&layer.query.x, &layer.key.x, &layer.value.weight, &layer.output.weight};
    for (int n = 0; n < COUNT(arrays); n++) {
        layer = right;
        arrays[n]->dtype = MHA_BF16;
        expect_status(c, "a map of halves", layer_forward(&layer), MHA_ERR_DTYPE);
    }
    int64_t *sizes[] = {&layer.attention.lead_shape[0], &layer.query.len, &layer.key.depth, &layer.output.cols};
    for (int n = 0; n < COUNT(sizes); n++) {
        layer = right;
        *sizes[n] = -1;
        expect_status(c, "a map of a size below 0", layer_forward(&layer), MHA_ERR_SHAPE);
        layer = right;
        *sizes[n] = INT64_MAX / 4; /* overflows nothing on the way */
        expect_status(c, "a layer beyond what can be addressed", layer_forward(&layer), MHA_ERR_WORKSPACE);
    }
}

static void check_refusals(checker *c, mha_isa isa)
{
    float numbers[8] = {0};
    const mha_array array = {.data = (char *)numbers, .row = 1, .col = 1};
    const mha_params good = good_call(isa, &array);
    mha_params p = good;
    for (int other = -1; other <= MHA_ISA_COUNT; other++) {
        p.isa = (mha_isa)other;
        if (!mha_isa_built(p.isa)) expect_status(c, "a level that is not built", forward(&p), MHA_ERR_ISA);
    }
    check_refused_workspaces(c, &good);
    check_refused_dtypes(c, &good);
    check_refused_shapes(c, &good);
    check_refused_layers(c, &good);
}

int main(int argc, char **argv)
{
    checker c = {.seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1};
    printf("%s, OpenMP %d, seed %llu\n", mha_compiler(), mha_openmp_version(), (unsigned long long)c.seed);
    for (int isa = 0; isa < MHA_ISA_COUNT; isa++) {
        if (!mha_isa_usable((mha_isa)isa)) {
            printf("%s: %s\n", mha_isa_name((mha_isa)isa),
                   mha_isa_built((mha_isa)isa) ? "not usable here" : "not built");
            continue;
        }
        for (int dtype = MHA_F32; dtype <= MHA_F64; dtype++) {
            int64_t failed = c.failed;
            c.random = c.seed;
            check_exponentials(&c, (mha_isa)isa, (mha_dtype)dtype);
            check_tanhs(&c, (mha_isa)isa, (mha_dtype)dtype);
            check_level(&c, (mha_isa)isa, (mha_dtype)dtype);
            check_layers(&c, (mha_isa)isa, (mha_dtype)dtype);
            printf("%s %s: %lld failed\n", mha_isa_name((mha_isa)isa), dtype_name((mha_dtype)dtype),
                   (long long)(c.failed - failed));
            fflush(stdout);
        }
        check_rounding(&c, (mha_isa)isa, MHA_F16);
        check_rounding(&c, (mha_isa)isa, MHA_BF16);
        check_refusals(&c, (mha_isa)isa);
    }
    if (c.failed)
        printf("%lld of %lld checks failed\n", (long long)c.failed, (long long)(c.failed + c.passed));
    else
        printf("%lld checks passed\n", (long long)c.passed);
    return c.failed != 0;
}
