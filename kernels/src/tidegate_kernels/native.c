/* Products with packed weights, and a whole decoder for few rows, on x86-64 CPUs: what `native` calls through ctypes.
 *
 * Owns no memory: every pointer is the caller's. Weights are brought to fp32 in registers or in a thread's scratch, four
 * rows at a time, to the very values that `dequantised` gives; products and sums are fp32. Compiled once for each
 * instruction set, AVX2 with F16C and FMA or AVX-512, and never at run time.
 */

#include <immintrin.h>
#include <linux/futex.h>
#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* ---- vectors: LANES floats ---- */

#ifdef __AVX512F__
#define LANES 16
typedef __m512 floats;
#define load _mm512_loadu_ps
#define store _mm512_storeu_ps
#define broadcast _mm512_set1_ps
#define fused _mm512_fmadd_ps
#define least _mm512_min_ps
#define most _mm512_max_ps
#define nearest(x) _mm512_roundscale_ps(x, 8)
#define to_power(x) _mm512_scalef_ps(broadcast(1), x)
#define whole(x) _mm512_cvtepi32_ps(x)
typedef __m512i whole_numbers;
INLINE floats load_first(const float *from, long count) {
    return _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
}
INLINE void store_first(float *to, floats values, long count) {
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), values);
}
INLINE whole_numbers load_bytes(const uint8_t *from) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from)); }
INLINE whole_numbers load_signed(const int8_t *from) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from)); }
INLINE floats low_nibbles(whole_numbers x) { return whole(_mm512_and_si512(x, _mm512_set1_epi32(15))); }
INLINE floats high_nibbles(whole_numbers x) { return whole(_mm512_srli_epi32(x, 4)); }
INLINE floats load_halves(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)from)); }
INLINE floats load_brains(const uint16_t *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)), 16));
}
INLINE floats load_float8(const uint8_t *from) {
    /* The exponent's bias is 7 in e4m3 and 15 in fp16. */
    __m256i bits = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)from));
    bits = _mm256_andnot_si256(_mm256_set1_epi16(0x4000), _mm256_slli_epi16(bits, 7));
    return _mm512_mul_ps(_mm512_cvtph_ps(bits), broadcast(256));
}
/* The sums of four vectors' lanes. */
INLINE __m128 sums(floats a, floats b, floats c, floats d) {
    floats ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    floats cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
    floats all = _mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee);
    __m256 half = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
    return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
}
INLINE float largest(floats x) { return _mm512_reduce_max_ps(x); }
#else
#define LANES 8
typedef __m256 floats;
#define load _mm256_loadu_ps
#define store _mm256_storeu_ps
#define broadcast _mm256_set1_ps
#define fused _mm256_fmadd_ps
#define least _mm256_min_ps
#define most _mm256_max_ps
#define nearest(x) _mm256_round_ps(x, 8)
#define whole(x) _mm256_cvtepi32_ps(x)
typedef __m256i whole_numbers;
INLINE floats to_power(floats x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
}
INLINE whole_numbers first_lanes(long count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE floats load_first(const float *from, long count) { return _mm256_maskload_ps(from, first_lanes(count)); }
INLINE void store_first(float *to, floats values, long count) { _mm256_maskstore_ps(to, first_lanes(count), values); }
INLINE whole_numbers load_bytes(const uint8_t *from) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from)); }
INLINE whole_numbers load_signed(const int8_t *from) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from)); }
INLINE floats low_nibbles(whole_numbers x) { return whole(_mm256_and_si256(x, _mm256_set1_epi32(15))); }
INLINE floats high_nibbles(whole_numbers x) { return whole(_mm256_srli_epi32(x, 4)); }
INLINE floats load_halves(const uint16_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)from)); }
INLINE floats load_brains(const uint16_t *from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from)), 16));
}
INLINE floats load_float8(const uint8_t *from) {
    /* The exponent's bias is 7 in e4m3 and 15 in fp16. */
    __m128i bits = _mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)from));
    bits = _mm_andnot_si128(_mm_set1_epi16(0x4000), _mm_slli_epi16(bits, 7));
    return _mm256_mul_ps(_mm256_cvtph_ps(bits), broadcast(256));
}
INLINE __m128 sums(floats a, floats b, floats c, floats d) {
    floats ab = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
    floats cd = _mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d);
    floats all = _mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xee);
    return _mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1);
}
INLINE float largest(floats x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}
#endif

INLINE float sum(floats x) { return _mm_cvtss_f32(sums(x, x, x, x)); }

/* e to the power of x, within 2 units in the last place; NaN stays NaN. Beyond ±87 the result stays at the limit. */
INLINE floats exponential(floats x) {
    x = least(broadcast(88), most(broadcast(-87), x)); /* of a NaN and a number, these give the second: x */
    floats power = nearest(x * broadcast(1.44269504f));
    floats rest = fused(power, broadcast(-0.693359375f), x);
    rest = fused(power, broadcast(2.12194440e-4f), rest);
    floats y = broadcast(1.9875691500e-4f);
    y = fused(y, rest, broadcast(1.3981999507e-3f));
    y = fused(y, rest, broadcast(8.3334519073e-3f));
    y = fused(y, rest, broadcast(4.1665795894e-2f));
    y = fused(y, rest, broadcast(1.6666665459e-1f));
    y = fused(y, rest, broadcast(5.0000001201e-1f));
    y = fused(y, rest * rest, rest + broadcast(1));
    return y * to_power(power);
}

/* ---- weights ---- */

enum kind { FLOAT32, BFLOAT16, FLOAT16, FLOAT8, SIGNED8, UNSIGNED8, UNSIGNED4, Q4_K, Q6_K };

/* `native.Matrix`: rows of values, or of codes with a scale and perhaps a minimum for each group of columns. */
typedef struct {
    const void *codes;
    const void *scales; /* [rows, groups]; NULL = the codes are the values */
    const void *minima; /* or NULL */
    const uint8_t *zeros; /* codes of the value zero, [rows, groups], where there are no minima; or NULL */
    int64_t rows, columns, groups; /* groups of a row */
    int32_t kind, scale_kind;
    float zero; /* code of the value zero, where there is neither */
} Matrix;

INLINE float half(const uint8_t *from) {
    uint16_t bits;
    memcpy(&bits, from, 2);
    return _cvtsh_ss(bits);
}

static const int bytes_of_kind[] = {4, 2, 2, 1, 1, 1};

/* LANES values of a kind that needs no scale. */
INLINE floats load_kind(const void *from, enum kind kind, long at) {
    switch (kind) {
    case BFLOAT16: return load_brains((const uint16_t *)from + at);
    case FLOAT16: return load_halves((const uint16_t *)from + at);
    case FLOAT8: return load_float8((const uint8_t *)from + at);
    case SIGNED8: return whole(load_signed((const int8_t *)from + at));
    case UNSIGNED8: return whole(load_bytes((const uint8_t *)from + at));
    default: return load((const float *)from + at);
    }
}

INLINE void widen_kind(const void *from, enum kind kind, long count, float *to) {
    long at = 0;
    for (; at + LANES <= count; at += LANES) store(to + at, load_kind(from, kind, at));
    if (at < count && count >= LANES)
        store(to + count - LANES, load_kind(from, kind, count - LANES)); /* some of them again */
    else if (at < count) {
        _Alignas(64) uint8_t rest[4 * LANES] = {0};
        int size = bytes_of_kind[kind];
        memcpy(rest, (const uint8_t *)from + at * size, (count - at) * size);
        store_first(to + at, load_kind(rest, kind, 0), count - at);
    }
}

/* `count` values from any address in fp32. */
static void widen(const void *from, enum kind kind, long count, float *to) {
    switch (kind) { /* the loops are made for each kind */
    case BFLOAT16: widen_kind(from, BFLOAT16, count, to); break;
    case FLOAT16: widen_kind(from, FLOAT16, count, to); break;
    case FLOAT8: widen_kind(from, FLOAT8, count, to); break;
    case SIGNED8: widen_kind(from, SIGNED8, count, to); break;
    case UNSIGNED8: widen_kind(from, UNSIGNED8, count, to); break;
    default: memcpy(to, from, count * sizeof(float));
    }
}

/* Where a row's values go: to memory, or, with `x`, into their product with it. */
typedef struct {
    float *to;
    const float *x;
    floats total[2];
} Sink;
INLINE void put(Sink *sink, int part, long at, floats value) {
    if (sink->x)
        sink->total[part] = fused(value, load(sink->x + at), sink->total[part]);
    else
        store(sink->to + at, value);
}

/* Codes that come from memory are asked for a page ahead, where a CPU's own guess ends: a quarter less time. */
INLINE void fetch(const uint8_t *codes) { _mm_prefetch((const char *)codes + 4096, _MM_HINT_T0); }

/* A row of codes: value = code * scale + minimum, of each group of so many columns. */
INLINE void scaled_bytes(const uint8_t *codes, enum kind kind, long columns, long group, const float *scales,
                         const float *minima, Sink *sink) {
    for (long at = 0; at < columns; scales++, minima++) {
        floats scale = broadcast(*scales), minimum = broadcast(*minima);
        UNROLL for (long end = at + group; at < end; at += 2 * LANES) {
            if (at % 64 == 0) fetch(codes + at);
            put(sink, 0, at, fused(load_kind(codes, kind, at), scale, minimum));
            if (at + LANES < end) put(sink, 1, at + LANES, fused(load_kind(codes, kind, at + LANES), scale, minimum));
        }
        at -= (group / LANES % 2) * LANES;
    }
}

/* The same for codes of four bits, the first half of whose columns lies in the low halves of the bytes. Both halves go on
 * by runs of columns that share a scale: groups, or halves of them where one lies across the middle. */
INLINE void scaled_nibbles(const uint8_t *codes, long half, long run, long halved, const float *scales,
                           const float *minima, Sink *sink) {
    long middle = half / run;
    for (long unit = 0, at = 0; at < half; unit++) {
        long low = unit >> halved, high = (unit + middle) >> halved;
        floats low_scale = broadcast(scales[low]), low_minimum = broadcast(minima[low]);
        floats high_scale = broadcast(scales[high]), high_minimum = broadcast(minima[high]);
        UNROLL for (long end = at + run; at < end; at += LANES) {
            if (at % 64 == 0) fetch(codes + at);
            whole_numbers bytes = load_bytes(codes + at);
            put(sink, 0, at, fused(low_nibbles(bytes), low_scale, low_minimum));
            put(sink, 1, half + at, fused(high_nibbles(bytes), high_scale, high_minimum));
        }
    }
}

/* A row of codes with scales. */
INLINE void scaled_row(const Matrix *w, long row, const float *scales, const float *minima, Sink *sink) {
    long columns = w->columns, group = columns / w->groups, half = columns / 2;
    const uint8_t *codes = w->codes;
    if (w->kind == SIGNED8)
        scaled_bytes(codes + row * columns, SIGNED8, columns, group, scales, minima, sink);
    else if (w->kind == UNSIGNED8 && group == 32)
        scaled_bytes(codes + row * columns, UNSIGNED8, columns, 32, scales, minima, sink);
    else if (w->kind == UNSIGNED8)
        scaled_bytes(codes + row * columns, UNSIGNED8, columns, group, scales, minima, sink);
    else if (group == 32 && half % 32 == 0) /* the usual case, its loops unrolled */
        scaled_nibbles(codes + row * half, half, 32, 0, scales, minima, sink);
    else if (half % group == 0)
        scaled_nibbles(codes + row * half, half, group, 0, scales, minima, sink);
    else
        scaled_nibbles(codes + row * half, half, group / 2, 1, scales, minima, sink);
}

/* Scales and minima of `count` rows in fp32. */
static void widen_scales(const Matrix *w, long row, long count, float *scales, float *minima) {
    long first = row * w->groups * bytes_of_kind[w->scale_kind], all = count * w->groups;
    widen((const uint8_t *)w->scales + first, w->scale_kind, all, scales);
    if (w->minima)
        widen((const uint8_t *)w->minima + first, w->scale_kind, all, minima);
    else if (w->zeros)
        for (long g = 0; g < all; g++) minima[g] = -(float)w->zeros[row * w->groups + g] * scales[g];
    else
        for (long g = 0; g < all; g++) minima[g] = -w->zero * scales[g];
}

/* Blocks of 256 values in 144 bytes: scale and minimum of eight runs of 32 in six bits each. */
static void q4_k_blocks(const uint8_t *block, long values, float *to) {
    for (const float *end = to + values; to < end; to += 256, block += 144) {
        float d = half(block), least_d = half(block + 2);
        const uint8_t *six = block + 4, *codes = block + 16;
        for (int run = 0; run < 8; run += 2, codes += 32) {
            floats scale[2], minimum[2];
            for (int odd = 0; odd < 2; odd++) {
                int n = run + odd;
                int s = n < 4 ? six[n] & 63 : (six[n + 4] & 15) | six[n - 4] >> 6 << 4;
                int m = n < 4 ? six[n + 4] & 63 : six[n + 4] >> 4 | six[n] >> 6 << 4;
                scale[odd] = broadcast(d * s), minimum[odd] = broadcast(-(least_d * m));
            }
            for (int at = 0; at < 32; at += LANES) {
                whole_numbers bytes = load_bytes(codes + at);
                store(to + run * 32 + at, fused(low_nibbles(bytes), scale[0], minimum[0]));
                store(to + run * 32 + 32 + at, fused(high_nibbles(bytes), scale[1], minimum[1]));
            }
        }
    }
}

/* Blocks of 256 values in 210 bytes: low nibbles, two high bits, int8 scales of runs of 16, and fp16's. */
static void q6_k_blocks(const uint8_t *block, long values, float *to) {
    for (const float *end = to + values; to < end; to += 256, block += 210) {
        const int8_t *scales = (const int8_t *)block + 192;
        float d = half(block + 208);
        for (int part = 0; part < 2; part++) {
            int8_t codes[128];
            for (int at = 0; at < 32; at++) {
                uint8_t high = block[128 + part * 32 + at];
                uint8_t first = block[part * 64 + at], second = block[part * 64 + 32 + at];
                codes[at] = (int8_t)((first & 15) | (high & 3) << 4) - 32;
                codes[32 + at] = (int8_t)((second & 15) | (high >> 2 & 3) << 4) - 32;
                codes[64 + at] = (int8_t)(first >> 4 | (high >> 4 & 3) << 4) - 32;
                codes[96 + at] = (int8_t)(second >> 4 | (high >> 6) << 4) - 32;
            }
            for (int at = 0; at < 128; at += LANES)
                store(to + part * 128 + at,
                      whole(load_signed(codes + at)) * broadcast(d * scales[part * 8 + at / 16]));
        }
    }
}

/* `count` rows in fp32. `room` holds two floats for each of their groups. */
static void row_values(const Matrix *w, long row, long count, float *room, float *to) {
    long columns = w->columns, groups = w->groups;
    const uint8_t *codes = w->codes;
    if (w->kind == Q4_K || w->kind == Q6_K) { /* a row's blocks follow each other, and rows do */
        long first = row * (columns / 256), values = count * columns;
        if (w->kind == Q4_K)
            q4_k_blocks(codes + first * 144, values, to);
        else
            q6_k_blocks(codes + first * 210, values, to);
        return;
    }
    if (!w->scales) {
        widen(codes + row * columns * bytes_of_kind[w->kind], w->kind, count * columns, to);
        return;
    }
    float *scales = room, *minima = room + count * groups;
    widen_scales(w, row, count, scales, minima);
    for (long r = 0; r < count; r++, scales += groups, minima += groups, to += columns) {
        Sink sink = {.to = to};
        scaled_row(w, row + r, scales, minima, &sink);
    }
}

/* ---- products ---- */

#define ROWS 4
/* Columns at a time: as many rows of them as are multiplied together stay in a core's nearest cache. */
#define DEPTH 1024
#if LANES == 16
#define WIDTH 6
#else
#define WIDTH 2
#endif

/* `to[m * stride + r]` (+)= the product of row r of `w` with row m of `x`, for ROWS and `width` of them. */
INLINE void tile(int width, const float *w, long w_stride, const float *x, long x_stride, long columns, float *to,
                 long stride, int adds) {
    floats totals[ROWS][WIDTH];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int m = 0; m < width; m++) totals[r][m] = broadcast(0);
    long at = 0;
    for (; at + LANES <= columns; at += LANES) {
        floats own[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) own[r] = load(w + r * w_stride + at);
        UNROLL for (int m = 0; m < width; m++) {
            floats values = load(x + m * x_stride + at);
            UNROLL for (int r = 0; r < ROWS; r++) totals[r][m] = fused(own[r], values, totals[r][m]);
        }
    }
    if (at < columns)
        UNROLL for (int m = 0; m < width; m++) {
            floats values = load_first(x + m * x_stride + at, columns - at);
            UNROLL for (int r = 0; r < ROWS; r++)
                totals[r][m] = fused(load_first(w + r * w_stride + at, columns - at), values, totals[r][m]);
        }
    UNROLL for (int m = 0; m < width; m++) {
        __m128 found = sums(totals[0][m], totals[1][m], totals[2][m], totals[3][m]);
        float *place = to + m * stride;
        if (adds) found += _mm_loadu_ps(place);
        _mm_storeu_ps(place, found);
    }
}

INLINE void single(const float *w, const float *x, long columns, float *to, int adds) {
    floats first = broadcast(0), second = broadcast(0);
    long at = 0;
    for (; at + 2 * LANES <= columns; at += 2 * LANES) {
        first = fused(load(w + at), load(x + at), first);
        second = fused(load(w + at + LANES), load(x + at + LANES), second);
    }
    for (; at < columns; at += LANES) {
        long count = columns - at < LANES ? columns - at : LANES;
        first = fused(load_first(w + at, count), load_first(x + at, count), first);
    }
    float found = sum(first + second);
    *to = adds ? *to + found : found;
}

/* `to[m * stride + r]` (+)= products of `rows` rows of fp32 `w` with `count` rows of `x`. */
static void products(const float *w, long w_stride, long rows, const float *x, long x_stride, long count, long columns,
                     float *to, long stride, int adds) {
    if (count > WIDTH && columns > DEPTH) {
        for (long from = 0; from < columns; from += DEPTH)
            products(w + from, w_stride, rows, x + from, x_stride, count, columns - from < DEPTH ? columns - from : DEPTH,
                     to, stride, adds || from);
        return;
    }
    for (; count > 0; x += WIDTH * x_stride, to += WIDTH * stride, count -= WIDTH) {
        long r = 0;
        for (; r + ROWS <= rows; r += ROWS) {
            const float *own = w + r * w_stride;
            switch (count) {
#if WIDTH > 2
            case 5: tile(5, own, w_stride, x, x_stride, columns, to + r, stride, adds); break;
            case 4: tile(4, own, w_stride, x, x_stride, columns, to + r, stride, adds); break;
            case 3: tile(3, own, w_stride, x, x_stride, columns, to + r, stride, adds); break;
            case 2: tile(2, own, w_stride, x, x_stride, columns, to + r, stride, adds); break;
#endif
            case 1: tile(1, own, w_stride, x, x_stride, columns, to + r, stride, adds); break;
            default: tile(WIDTH, own, w_stride, x, x_stride, columns, to + r, stride, adds);
            }
        }
        for (; r < rows; r++)
            for (long m = 0; m < count && m < WIDTH; m++)
                single(w + r * w_stride, x + m * x_stride, columns, to + m * stride + r, adds);
    }
}

/* `to[r]` (+)= the product of ROWS rows of codes with scales and one vector, the values never in memory. */
static void scaled_products(const Matrix *w, long row, const float *x, float *to, int adds, float *room) {
    float *scales = room, *minima = room + ROWS * w->groups;
    widen_scales(w, row, ROWS, scales, minima);
    floats totals[ROWS];
    for (long r = 0; r < ROWS; r++, scales += w->groups, minima += w->groups) {
        Sink sink = {.x = x, .total = {broadcast(0), broadcast(0)}};
        scaled_row(w, row + r, scales, minima, &sink);
        totals[r] = sink.total[0] + sink.total[1];
    }
    __m128 found = sums(totals[0], totals[1], totals[2], totals[3]);
    if (adds) found += _mm_loadu_ps(to);
    _mm_storeu_ps(to, found);
}

/* `native.Projection`: up to three matrices below each other, and a bias or NULL. */
typedef struct {
    Matrix parts[3];
    int64_t count;
    const float *bias;
} Projection;

/* Rows of `x` that stay in a core's cache while weights go by. */
#define BAND (16 * WIDTH)

/* Rows `[first, end)` of a product: `to[m * stride + row]` (+)= w[row] · x[m] + bias[row]. */
static void product_rows(const Projection *p, long first, long end, const float *x, long x_stride, long count, float *to,
                         long stride, int adds, float *scratch) {
    for (; count > BAND; x += BAND * x_stride, to += BAND * stride, count -= BAND)
        product_rows(p, first, end, x, x_stride, BAND, to, stride, adds, scratch);
    long start = 0;
    for (const Matrix *w = p->parts; w < p->parts + p->count; start += w->rows, w++) {
        long columns = w->columns, until = end < start + w->rows ? end : start + w->rows;
        for (long row = first > start ? first : start; row < until; row += ROWS) {
            long rows = until - row < ROWS ? until - row : ROWS;
            if (count == 1 && rows == ROWS && w->scales) {
                scaled_products(w, row - start, x, to + row, adds, scratch);
                continue;
            }
            const float *values = scratch;
            if (w->kind == FLOAT32)
                values = (const float *)w->codes + (row - start) * columns;
            else
                row_values(w, row - start, rows, scratch + ROWS * columns, scratch);
            products(values, columns, rows, x, x_stride, count, columns, to + row, stride, adds);
        }
    }
    if (p->bias)
        for (long m = 0; m < count; m++)
            for (long row = first; row < end; row++) to[m * stride + row] += p->bias[row];
}

/* ---- threads ---- */

/* `native.Threads`: OpenMP's own entry points, so that work runs on the threads that torch has already. */
typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* NULL = there is one thread */
    int (*team_size)(void);
    int64_t count;
    float *scratch; /* a piece for each thread */
    int64_t scratch_floats;
} Threads;

#define SPINS 300 /* some ten microseconds, more than a phase's threads usually differ by */

/* The threads of one call: where they take their next piece of work from, and wait for each other. */
typedef struct Team {
    void (*work)(struct Team *, float *scratch);
    const void *arguments[2];
    const Threads *threads;
    int size;
    _Alignas(64) atomic_long next;
    _Alignas(64) atomic_int arrived;
    atomic_int phase, sleepers, started;
} Team;

#define EACH(piece, count) for (long piece; (piece = atomic_fetch_add(&team->next, 1)) < (count);)

/* Return when all have come; what was handed out counts from 0 again. */
static void meet(Team *team) {
    if (team->size == 1) {
        team->next = 0;
        return;
    }
    int phase = atomic_load(&team->phase);
    if (atomic_fetch_add(&team->arrived, 1) + 1 == team->size) {
        team->arrived = 0;
        team->next = 0;
        atomic_store(&team->phase, phase + 1);
        if (atomic_load(&team->sleepers)) syscall(SYS_futex, &team->phase, FUTEX_WAKE_PRIVATE, team->size, 0, 0, 0);
        return;
    }
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load(&team->phase) != phase) return;
        _mm_pause();
    }
    atomic_fetch_add(&team->sleepers, 1);
    while (atomic_load(&team->phase) == phase) syscall(SYS_futex, &team->phase, FUTEX_WAIT_PRIVATE, phase, 0, 0, 0);
    atomic_fetch_sub(&team->sleepers, 1);
}

static void enter(void *argument) {
    Team *team = argument;
    int number = atomic_fetch_add(&team->started, 1);
    if (team->threads->parallel) team->size = team->threads->team_size(); /* the same for all of them */
    team->work(team, team->threads->scratch + number * team->threads->scratch_floats);
}

static void run_team(Team *team) {
    team->size = 1;
    if (team->threads->parallel && team->threads->count > 1)
        team->threads->parallel(enter, team, team->threads->count, 0);
    else
        team->work(team, team->threads->scratch);
}

/* Rows of a matrix that are one piece of work. */
static long piece_rows(const Team *team, long rows) {
    long share = rows / (team->size * 8) / ROWS * ROWS;
    return share < 4 * ROWS ? 4 * ROWS : share;
}

static long all_rows(const Projection *p) {
    long rows = 0;
    for (long part = 0; part < p->count; part++) rows += p->parts[part].rows;
    return rows;
}

/* All rows of a product, divided among the team, whose threads do not wait for each other at the end. */
static void team_product(Team *team, const Projection *p, const float *x, long x_stride, long count, float *to,
                         long stride, int adds, float *scratch) {
    long rows = all_rows(p);
    long step = piece_rows(team, rows);
    EACH(piece, (rows + step - 1) / step) {
        long first = piece * step, end = first + step < rows ? first + step : rows;
        product_rows(p, first, end, x, x_stride, count, to, stride, adds, scratch);
    }
}

/* ---- a decoder's steps ---- */

/* `native.Layer` */
typedef struct {
    Projection qkv, output, gate_up, down;
    const float *attention_norm, *qk_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm;
    void *keys, *values; /* [blocks, kv heads, block tokens, head size] */
    float *key_scales, *value_scales;
    int64_t heads, kv_heads, inner, window, rope, group; /* window 0 = none; rope -1 = none */
    float scale, soft_cap;                        /* 0 = none */
} Layer;

/* `native.Decoder` */
typedef struct {
    const Layer *layers;
    int64_t layer_count;
    Projection embedding, head;
    const float *norm;
    int64_t hidden, head_size, rotated, block_tokens;
    float eps, embedding_scale, logit_soft_cap; /* 0 = none */
    int32_t kv_kind, is_gelu;
} Decoder;

/* `native.Step`: the rows to compute, where their keys lie, and room for what is between. */
typedef struct {
    int64_t rows, table_width, logit_rows;
    const int64_t *tokens, *positions, *owners, *wanted;
    const int64_t *const *slots; /* of each group of layers, and so are the tables */
    const int32_t *const *tables;
    const float *const *cosines, *const *sines; /* of each rope, [rows, rotated]; a sine's first half is negated */
    float *residual, *x, *heads, *attended, *inner, *logits;
} Step;

static void norm(const float *x, const float *weight, long count, float eps, float *to) {
    floats squares = broadcast(0);
    long at = 0;
    for (; at < count; at += LANES) {
        floats values = load_first(x + at, count - at < LANES ? count - at : LANES);
        squares = fused(values, values, squares);
    }
    float factor = 1 / sqrtf(sum(squares) / count + eps);
    for (at = 0; at < count; at++) to[at] = x[at] * factor * weight[at];
}

static void turn(float *head, const float *cosines, const float *sines, long rotated) {
    long half = rotated / 2;
    for (long at = 0; at < half; at++) {
        float first = head[at], second = head[half + at];
        head[at] = fmaf(second, sines[at], first * cosines[at]);
        head[half + at] = fmaf(first, sines[half + at], second * cosines[half + at]);
    }
}

static uint8_t to_float8(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint8_t sign = bits >> 24 & 0x80;
    float size = fabsf(value);
    if (size != size) return 0x7f;
    if (size >= 448) return sign | 0x7e;
    if (size < 0x1p-6f) return sign | (uint8_t)rintf(size * 512);
    memcpy(&bits, &size, 4);
    return sign | (uint8_t)(((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3));
}

static uint16_t to_brain(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* A token's head to its place in the cache, as `reference.store_kv` writes it. */
static void keep(const float *head, long size, enum kind kind, void *cache, float *scales, long place) {
    if (kind == FLOAT32) {
        memcpy((float *)cache + place * size, head, size * sizeof(float));
    } else if (kind == BFLOAT16) {
        for (long at = 0; at < size; at++) ((uint16_t *)cache)[place * size + at] = to_brain(head[at]);
    } else if (kind == FLOAT16) {
        for (long at = 0; at < size; at++) ((uint16_t *)cache)[place * size + at] = _cvtss_sh(head[at], 0);
    } else {
        float top = 1e-12f;
        for (long at = 0; at < size; at++) top = fabsf(head[at]) <= top ? top : fabsf(head[at]); /* a NaN wins */
        float scale = scales[place] = top / (kind == FLOAT8 ? 448 : 127);
        uint8_t *codes = (uint8_t *)cache + place * size;
        for (long at = 0; at < size; at++)
            codes[at] = kind == FLOAT8 ? to_float8(head[at] / scale) : (uint8_t)(int8_t)rintf(head[at] / scale);
    }
}

INLINE floats hyperbolic_tangent(floats x) { return broadcast(1) - broadcast(2) / (exponential(x + x) + broadcast(1)); }

static void soften(float *values, long count, float cap) {
    for (long at = 0; at < count; at += LANES) {
        long some = count - at < LANES ? count - at : LANES;
        floats x = load_first(values + at, some);
        store_first(values + at, hyperbolic_tangent(x / broadcast(cap)) * broadcast(cap), some);
    }
}

/* `gate` becomes silu(gate) * up, or gelu's approximation by tanh. */
static void activate(float *gate, const float *up, long count, int is_gelu) {
    for (long at = 0; at < count; at += LANES) {
        long some = count - at < LANES ? count - at : LANES;
        floats x = load_first(gate + at, some);
        floats share;
        if (is_gelu)
            share = broadcast(0.5f) +
                    broadcast(0.5f) * hyperbolic_tangent(broadcast(0.7978845608f) * fused(x * x * x, broadcast(0.044715f), x));
        else
            share = broadcast(1) / (broadcast(1) + exponential(-x));
        store_first(gate + at, x * share * load_first(up + at, some), some);
    }
}

/* Scores to shares that sum to one; the room behind them reaches to the next whole vector. */
static void softmax(float *scores, long count) {
    long padded = (count + LANES - 1) / LANES * LANES;
    for (long at = count; at < padded; at++) scores[at] = -INFINITY;
    floats top = load(scores);
    for (long at = LANES; at < padded; at += LANES) top = most(top, load(scores + at));
    floats highest = broadcast(largest(top)), total = broadcast(0);
    for (long at = 0; at < padded; at += LANES) {
        floats weights = exponential(load(scores + at) - highest);
        store(scores + at, weights);
        total += weights;
    }
    floats factor = broadcast(1 / sum(total));
    for (long at = 0; at < padded; at += LANES) store(scores + at, load(scores + at) * factor);
}

/* One row's attention for `count` heads that share keys, from head `first` on. */
static void attend(const Decoder *d, const Layer *layer, const Step *step, long row, long first, long count,
                   float *scratch) {
    long size = d->head_size, block_tokens = d->block_tokens, quantised = d->kv_kind >= FLOAT8;
    long end = step->positions[row] + 1;
    long begin = layer->window && end > layer->window ? end - layer->window : 0;
    long stride = (end - begin + LANES - 1) / LANES * LANES;
    const int32_t *table = step->tables[layer->group] + step->owners[row] * step->table_width;
    long kv_head = first / (layer->heads / layer->kv_heads);
    const float *query = step->heads + (row * (layer->heads + 2 * layer->kv_heads) + first) * size;
    float *to = step->attended + (row * layer->heads + first) * size;
    float *tile_values = scratch, *scores = scratch + block_tokens * size;
    for (int pass = 0; pass < 2; pass++) {
        const void *cache = pass ? layer->values : layer->keys;
        const float *scales = pass ? layer->value_scales : layer->key_scales;
        for (long at = begin, next; at < end; at = next) {
            next = (at / block_tokens + 1) * block_tokens;
            if (next > end) next = end;
            long tokens = next - at, offset = at % block_tokens;
            long place = (table[at / block_tokens] * layer->kv_heads + kv_head) * block_tokens + offset;
            const float *own = (const float *)cache + place * size;
            if (d->kv_kind != FLOAT32) {
                widen((const uint8_t *)cache + place * size * bytes_of_kind[d->kv_kind], d->kv_kind, tokens * size,
                      tile_values);
                own = tile_values;
            }
            float *found = scores + (at - begin);
            if (pass == 0) products(own, size, tokens, query, size, count, size, found, stride, 0);
            if (quantised)
                for (long h = 0; h < count; h++)
                    for (long t = 0; t < tokens; t++) found[h * stride + t] *= scales[place + t];
            if (pass == 0) continue;
            for (long h = 0; h < count; h++)
                for (long lane = 0; lane < size; lane += LANES) {
                    long some = size - lane < LANES ? size - lane : LANES;
                    floats total = load_first(to + h * size + lane, some);
                    for (long t = 0; t < tokens; t++)
                        total = fused(broadcast(found[h * stride + t]), load_first(own + t * size + lane, some), total);
                    store_first(to + h * size + lane, total, some);
                }
        }
        if (pass == 1) break;
        for (long h = 0; h < count; h++) {
            float *own = scores + h * stride;
            for (long t = 0; t < end - begin; t++) own[t] *= layer->scale;
            if (layer->soft_cap != 0) soften(own, end - begin, layer->soft_cap);
            softmax(own, end - begin);
        }
        memset(to, 0, count * size * sizeof(float));
    }
}

/* A head of all rows from the fused projection: normalised, turned, and kept where it is a key or a value. */
static void make_head(const Decoder *d, const Layer *layer, const Step *step, long head, float *scratch) {
    long size = d->head_size, all = layer->heads + 2 * layer->kv_heads, kept = head - layer->heads;
    product_rows(&layer->qkv, head * size, (head + 1) * size, step->x, d->hidden, step->rows, step->heads, all * size, 0,
                 scratch);
    for (long row = 0; row < step->rows; row++) {
        float *own = step->heads + (row * all + head) * size;
        if (kept < layer->kv_heads) {
            if (layer->qk_norm) norm(own, layer->qk_norm + head * size, size, d->eps, own);
            if (layer->rope >= 0)
                turn(own, step->cosines[layer->rope] + row * d->rotated, step->sines[layer->rope] + row * d->rotated,
                     d->rotated);
        }
        long slot = step->slots[layer->group][row];
        if (kept < 0 || slot < 0) continue;
        int is_value = kept >= layer->kv_heads;
        long kv_head = is_value ? kept - layer->kv_heads : kept;
        long place = (slot / d->block_tokens * layer->kv_heads + kv_head) * d->block_tokens + slot % d->block_tokens;
        keep(own, size, d->kv_kind, is_value ? layer->values : layer->keys,
             is_value ? layer->value_scales : layer->key_scales, place);
    }
}

/* Add a projection of `x` to the residual, normalised before where the model does that; then `x` = the next norm. */
static void add_projection(Team *team, const Decoder *d, const Step *step, const Projection *p, const float *x,
                           long columns, const float *post_norm, const float *next_norm, float *scratch) {
    float *to = post_norm ? step->x : step->residual;
    team_product(team, p, x, columns, step->rows, to, d->hidden, !post_norm, scratch);
    meet(team);
    EACH(row, step->rows) {
        float *residual = step->residual + row * d->hidden, *own = step->x + row * d->hidden;
        if (post_norm) {
            norm(own, post_norm, d->hidden, d->eps, own);
            for (long at = 0; at < d->hidden; at++) residual[at] += own[at];
        }
        if (next_norm) norm(residual, next_norm, d->hidden, d->eps, own);
    }
    meet(team);
}

static void decode(Team *team, float *scratch) {
    const Decoder *d = team->arguments[0];
    const Step *step = team->arguments[1];
    EACH(row, step->rows) {
        float *residual = step->residual + row * d->hidden;
        row_values(d->embedding.parts, step->tokens[row], 1, scratch, residual);
        if (d->embedding_scale != 0)
            for (long at = 0; at < d->hidden; at++) residual[at] *= d->embedding_scale;
        norm(residual, d->layers->attention_norm, d->hidden, d->eps, step->x + row * d->hidden);
    }
    meet(team);
    for (const Layer *layer = d->layers, *end = layer + d->layer_count; layer < end; layer++) {
        EACH(head, layer->heads + 2 * layer->kv_heads) make_head(d, layer, step, head, scratch);
        meet(team);
        /* Heads that share keys together, unless these are too few pieces for the team. */
        long share = layer->heads / layer->kv_heads;
        long together = step->rows * layer->kv_heads < 4 * team->size ? 1 : share;
        EACH(piece, step->rows * layer->heads / together) {
            long row = piece * together / layer->heads;
            attend(d, layer, step, row, piece * together - row * layer->heads, together, scratch);
        }
        meet(team);
        add_projection(team, d, step, &layer->output, step->attended, layer->heads * d->head_size,
                       layer->post_attention_norm, layer->mlp_norm, scratch);
        long inner = layer->inner, rows = piece_rows(team, inner);
        EACH(piece, (inner + rows - 1) / rows) {
            long first = piece * rows, last = first + rows < inner ? first + rows : inner;
            for (int is_up = 0; is_up < 2; is_up++)
                product_rows(&layer->gate_up, first + is_up * inner, last + is_up * inner, step->x, d->hidden, step->rows,
                             step->inner, 2 * inner, 0, scratch);
            for (long row = 0; row < step->rows; row++) {
                float *gate = step->inner + row * 2 * inner + first;
                activate(gate, gate + inner, last - first, d->is_gelu);
            }
        }
        meet(team);
        add_projection(team, d, step, &layer->down, step->inner, 2 * inner, layer->post_mlp_norm,
                       layer + 1 < end ? layer[1].attention_norm : NULL, scratch);
    }
    EACH(row, step->logit_rows)
        norm(step->residual + step->wanted[row] * d->hidden, d->norm, d->hidden, d->eps, step->x + row * d->hidden);
    meet(team);
    long vocabulary = d->head.parts->rows;
    team_product(team, &d->head, step->x, d->hidden, step->logit_rows, step->logits, vocabulary, 0, scratch);
    if (d->logit_soft_cap == 0) return;
    meet(team);
    EACH(row, step->logit_rows) soften(step->logits + row * vocabulary, vocabulary, d->logit_soft_cap);
}

/* ---- what `native` calls ---- */

/* Keys, values and the logits `[logit_rows, vocabulary]` of a step. */
EXPORT void tidegate_decode(const Decoder *decoder, const Step *step, const Threads *threads) {
    Team team = {.work = decode, .arguments = {decoder, step}, .threads = threads};
    run_team(&team);
}

/* `to` = `count` rows of `x` times a projection's rows; without `x`, the values of `count` rows from the first on. */
typedef struct {
    const Projection *projection;
    const float *x;
    int64_t first, count;
    float *to;
} Task;

static void multiply(Team *team, float *scratch) {
    const Task *task = team->arguments[0];
    const Projection *p = task->projection;
    team_product(team, p, task->x, p->parts->columns, task->count, task->to, all_rows(p), 0, scratch);
}

/* `to` `[count, rows]` = `x` `[count, columns]` times the projection's rows. */
EXPORT void tidegate_multiply(const Projection *p, const float *x, int64_t count, float *to, const Threads *threads) {
    Task task = {p, x, 0, count, to};
    Team team = {.work = multiply, .arguments = {&task}, .threads = threads};
    run_team(&team);
}

static void widen_rows(Team *team, float *scratch) {
    const Task *task = team->arguments[0];
    EACH(piece, (task->count + ROWS - 1) / ROWS) {
        long first = task->first + piece * ROWS, end = first + ROWS, start = 0;
        if (end > task->first + task->count) end = task->first + task->count;
        for (const Matrix *w = task->projection->parts; first < end; start += w->rows, w++) {
            long until = end < start + w->rows ? end : start + w->rows;
            if (first >= until) continue;
            row_values(w, first - start, until - first, scratch, task->to + (first - task->first) * w->columns);
            first = until;
        }
    }
}

/* `to` `[count, columns]` = the values of rows `[first, first + count)`. */
EXPORT void tidegate_rows(const Projection *p, int64_t first, int64_t count, float *to, const Threads *threads) {
    Task task = {p, NULL, first, count, to};
    Team team = {.work = widen_rows, .arguments = {&task}, .threads = threads};
    run_team(&team);
}
