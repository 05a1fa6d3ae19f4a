/* Convolution, max-pooling by 2 and ReLU in one pass over the images, and the gradient of it, on one thread.

   A pooling window keeps the largest of its four sums, and only that one has a gradient. The forward pass therefore
   stores its place: the backward pass then takes a quarter of the products, and none where ReLU gave zero.

   All images are [images][height][width][channels], float32. Kernels are square, of stride 1, without padding; a last
   line or column that no pooling window covers is left out. A tap is a place in a line of a kernel: column and channel,
   [kernel * channels], which lie side by side in the images as well. `outputs` and taps are filled up to whole vectors
   where weights are concerned. Everything is summed in one fixed order. A gradient that is not finite may spoil those
   of pixels beside its own. */

#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
enum { LANES = 16, MOST_VECS = 2 };
#elif defined(__AVX2__) /* half the registers, of half the length */
enum { LANES = 8, MOST_VECS = 1 };
#else
#error "this processor has no AVX2"
#endif
enum { BLOCK = 2, DEAD = 4 };

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint8_t bvec __attribute__((vector_size(LANES), aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef struct {
    int64_t images, height, width, channels, kernel, outputs;
} Shape;

/* The floats in a vector, to whose multiples weights are filled up. */
int64_t conv_pool_lanes(void) { return LANES; }

INLINE int64_t up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
INLINE int64_t high(const Shape *s) { return (s->height - s->kernel + 1) / 2; }
INLINE int64_t wide(const Shape *s) { return (s->width - s->kernel + 1) / 2; }
INLINE int64_t line(const Shape *s) { return s->width * s->channels; }
INLINE int64_t row_size(const Shape *s) { return up(s->kernel * s->channels); } /* of taps, filled up */
INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE ivec choose(ivec mask, ivec yes, ivec no) { return (yes & mask) | (no & ~mask); }

/* The pooled values of so many cells side by side and so many vectors of outputs, and which of its four sums each
   is. */
INLINE void cells_forward(const int cells, const int vecs, const Shape *s, const float *x, const float *weights,
                          const float *bias, int64_t left, float *out, uint8_t *winner) {
    const int64_t taps = s->kernel * s->channels, padded = up(s->outputs);
    vec sum[2][4][2] = {0};
    for (int64_t ky = 0; ky < s->kernel; ky++)
        for (int64_t tap = 0; tap < taps; tap++) {
            const float *pixel = x + ky * line(s) + tap, *factor = weights + (ky * taps + tap) * padded;
            UNROLL for (int dy = 0; dy < 2; dy++)
                UNROLL for (int dx = 0; dx < 2 * cells; dx++)
                    UNROLL for (int v = 0; v < vecs; v++)
                        sum[dy][dx][v] += pixel[dy * line(s) + dx * s->channels] * load(factor + v * LANES);
        }
    for (int cell = 0; cell < cells; cell++)
        for (int v = 0; v < vecs; v++) {
            vec best = sum[0][2 * cell][v];
            ivec which = {0};
            for (int i = 1; i < 4; i++) {
                const vec value = sum[i / 2][2 * cell + i % 2][v];
                const ivec better = (value > best) | (value != value); /* what is not a number wins */
                best = (vec)choose(better, (ivec)value, (ivec)best);
                which = choose(better, (ivec){0} + i, which);
            }
            best += load(bias + v * LANES);
            const ivec dead = best <= (vec){0};
            best = (vec)choose(dead, (ivec){0}, (ivec)best);
            const bvec codes = __builtin_convertvector(choose(dead, (ivec){0} + DEAD, which), bvec);
            const int64_t count = left - v * LANES < LANES ? left - v * LANES : LANES;
            memcpy(out + cell * s->outputs + v * LANES, &best, count * sizeof(float));
            memcpy(winner + cell * s->outputs + v * LANES, &codes, count);
        }
}

/* out, winner: [images][high][wide][outputs]; weights: [kernel][taps][outputs, filled up]; bias: [outputs, filled up].
   A winner is 0 to 3, line by line in its pooling window, or DEAD where ReLU gave zero. */
void conv_pool_forward(const Shape *s, const float *x, const float *weights, const float *bias, float *out,
                       uint8_t *winner) {
    for (int64_t n = 0; n < s->images; n++)
        for (int64_t o = 0; o < s->outputs; o += MOST_VECS * LANES)
            for (int64_t py = 0; py < high(s); py++)
                for (int64_t px = 0; px < wide(s); px += 2) {
                    const int64_t at = ((n * high(s) + py) * wide(s) + px) * s->outputs + o;
                    const float *corner = x + (n * s->height + 2 * py) * line(s) + 2 * px * s->channels;
                    const int two_cells = px + 1 < wide(s), two_vecs = MOST_VECS > 1 && o + LANES < s->outputs;
#define FORWARD(CELLS, VECS) \
    cells_forward(CELLS, VECS, s, corner, weights + o, bias + o, s->outputs - o, out + at, winner + at)
                    if (two_cells && two_vecs) FORWARD(2, 2);
                    else if (two_cells) FORWARD(2, 1);
                    else if (two_vecs) FORWARD(1, 2);
                    else FORWARD(1, 1);
                }
}

/* into[r * into_stride + ...] += the sum over entries of factor * from[r * from_stride + place + ...], for so many rows
   of so many vectors. */
INLINE void add_rows(const int rows, const int vecs, int64_t entries, const int32_t *place, const float *factor,
                     const float *from, int64_t from_stride, float *into, int64_t into_stride) {
    vec sum[8] = {0};
    for (int64_t e = 0; e < entries; e++)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < vecs; v++)
                sum[r * vecs + v] += factor[e] * load(from + place[e] + r * from_stride + v * LANES);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vecs; v++) *(vec *)(into + r * into_stride + v * LANES) += sum[r * vecs + v];
}

#define ANY(COUNT, CALL) \
    switch (COUNT) { \
        case 1: CALL(1); break; case 2: CALL(2); break; case 3: CALL(3); break; case 4: CALL(4); break; \
        case 5: CALL(5); break; case 6: CALL(6); break; case 7: CALL(7); break; default: CALL(8); \
    }
INLINE int64_t at_most_8(int64_t n) { return n < 8 ? n : 8; }

typedef struct {
    float *images, *image_gradient, *factor; /* [BLOCK images], [an image], each with a row to reach over; [entries] */
    int32_t *place, (*counts)[DEAD + 1]; /* [entries], [high * wide] */
} Scratch;

INLINE int64_t entries(const Shape *s) { return BLOCK * high(s) * wide(s) * (DEAD + 1) * s->outputs; }
INLINE int64_t image_size(const Shape *s) { return s->height * line(s); }

/* Bytes that `conv_pool_backward` needs to work in. */
int64_t conv_pool_scratch(const Shape *s) {
    return 4 * ((BLOCK + 1) * image_size(s) + 2 * row_size(s) + 2 * entries(s) + high(s) * wide(s) * (DEAD + 1));
}

/* The gradient of one image, from the places of its winners: [high * wide][DEAD + 1] lists of outputs. */
static void input_gradient(const Shape *s, const float *grad, const uint8_t *winner, const float *weights,
                           const Scratch *scratch, float *x_grad) {
    const int64_t cells = high(s) * wide(s), row = row_size(s);
    int32_t(*counts)[DEAD + 1] = scratch->counts;
    memset(counts, 0, cells * sizeof *counts);
    memset(scratch->image_gradient, 0, (image_size(s) + row_size(s)) * sizeof(float));
    for (int64_t cell = 0; cell < cells; cell++)
        for (int64_t o = 0; o < s->outputs; o++) {
            const int code = winner[cell * s->outputs + o];
            const int64_t slot = (cell * (DEAD + 1) + code) * s->outputs + counts[cell][code]++;
            scratch->place[slot] = o * row;
            scratch->factor[slot] = grad[cell * s->outputs + o];
        }
    for (int64_t ky = 0; ky < s->kernel; ky++) /* outermost: this line of all weights stays in the nearest cache */
        for (int64_t cell = 0; cell < cells; cell++)
            for (int i = 0; i < DEAD; i++) {
                const int64_t y = 2 * (cell / wide(s)) + i / 2 + ky, x = 2 * (cell % wide(s)) + i % 2;
                const int64_t list = (cell * (DEAD + 1) + i) * s->outputs;
                for (int64_t v = 0; v < row; v += 8 * LANES) {
#define INPUT(VECS) \
    add_rows(1, VECS, counts[cell][i], scratch->place + list, scratch->factor + list, \
             weights + ky * s->outputs * row + v, 0, scratch->image_gradient + y * line(s) + x * s->channels + v, 0)
                    ANY(at_most_8((row - v) / LANES), INPUT)
                }
            }
    memcpy(x_grad, scratch->image_gradient, image_size(s) * sizeof(float));
}

/* What a block of images adds to the gradient of one output's weights, w_grad: [kernel][row]. */
static void weight_gradient(const Shape *s, int64_t images, const float *grad, const uint8_t *winner,
                            const Scratch *scratch, float *w_grad) {
    const int64_t row = row_size(s);
    const int32_t step[DEAD + 1] = {0, s->channels, line(s), line(s) + s->channels, 0};
    int64_t found = 0, at = 0;
    for (int64_t n = 0; n < images; n++)
        for (int64_t py = 0; py < high(s); py++)
            for (int64_t px = 0; px < wide(s); px++, at += s->outputs) {
                const int code = winner[at];
                scratch->place[found] = n * image_size(s) + 2 * py * line(s) + 2 * px * s->channels + step[code];
                scratch->factor[found] = grad[at];
                found += code != DEAD;
            }
    if (row == LANES)
        for (int64_t ky = 0; ky < s->kernel; ky += 8) {
#define LINES(ROWS) \
    add_rows(ROWS, 1, found, scratch->place, scratch->factor, scratch->images + ky * line(s), line(s), \
             w_grad + ky * row, row)
            ANY(at_most_8(s->kernel - ky), LINES)
        }
    else
        for (int64_t ky = 0; ky < s->kernel; ky++)
            for (int64_t v = 0; v < row; v += 8 * LANES) {
#define VECTORS(VECS) \
    add_rows(1, VECS, found, scratch->place, scratch->factor, scratch->images + ky * line(s) + v, 0, \
             w_grad + ky * row + v, 0)
                ANY(at_most_8((row - v) / LANES), VECTORS)
            }
}

/* grad, winner: [images][high][wide][outputs]; weights: [kernel][outputs][row], a row being the taps, filled up, or
   NULL with x_grad, where nobody wants the images' gradient. Adds to w_grad: [outputs][kernel][row], and b_grad:
   [outputs]. */
void conv_pool_backward(const Shape *s, const float *x, const float *grad, const uint8_t *winner, const float *weights,
                        void *memory, float *x_grad, float *w_grad, float *b_grad) {
    const int64_t cells = high(s) * wide(s), size = image_size(s), row = row_size(s);
    Scratch scratch = {.images = memory};
    scratch.image_gradient = scratch.images + BLOCK * size + row;
    scratch.factor = scratch.image_gradient + size + row;
    scratch.place = (int32_t *)(scratch.factor + entries(s));
    scratch.counts = (int32_t(*)[DEAD + 1])(scratch.place + entries(s));
    memset(scratch.images, 0, (BLOCK * size + row) * sizeof(float));
    for (int64_t n = 0; n < s->images; n += BLOCK) {
        const int64_t some = s->images - n < BLOCK ? s->images - n : BLOCK, first = n * cells * s->outputs;
        memcpy(scratch.images, x + n * size, some * size * sizeof(float));
        for (int64_t o = 0; o < s->outputs; o++)
            weight_gradient(s, some, grad + first + o, winner + first + o, &scratch, w_grad + o * s->kernel * row);
        for (int64_t at = first; at < first + some * cells * s->outputs; at += s->outputs)
            for (int64_t o = 0; o < s->outputs; o++) b_grad[o] += winner[at + o] == DEAD ? 0 : grad[at + o];
        if (x_grad)
            for (int64_t i = n; i < n + some; i++)
                input_gradient(s, grad + i * cells * s->outputs, winner + i * cells * s->outputs, weights, &scratch,
                               x_grad + i * size);
    }
}
