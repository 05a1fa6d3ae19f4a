/* Runs conv_pool.c on random shapes, every array on the heap and not a byte longer than it has to be: for sanitizers. */

#include "conv_pool.c"

#include <stdlib.h>

static float *floats(int64_t count) {
    float *made = malloc(count * sizeof(float));
    for (int64_t i = 0; i < count; i++) made[i] = rand() % 7 - 3;
    return made;
}

int main(void) {
    for (int round = 0; round < 3000; round++) {
        Shape s = {.images = rand() % 5, .channels = 1 + rand() % 40, .kernel = 1 + rand() % 6, .outputs = 1 + rand() % 70};
        s.height = s.kernel + 1 + rand() % 8;
        s.width = s.kernel + 1 + rand() % 8;
        const int64_t pixels = s.images * image_size(&s), pooled = s.images * high(&s) * wide(&s) * s.outputs;
        const int64_t taps = s.kernel * s.channels, lines = s.kernel * s.outputs * up(taps);
        float *x = floats(pixels), *weights = floats(s.kernel * taps * up(s.outputs)), *bias = floats(up(s.outputs));
        float *out = floats(pooled), *grad = floats(pooled), *backward = floats(lines);
        float *x_grad = floats(pixels), *w_grad = floats(lines), *b_grad = floats(s.outputs);
        uint8_t *winner = malloc(pooled);
        void *memory = malloc(conv_pool_scratch(&s));
        const int of_images = rand() % 2;
        conv_pool_forward(&s, x, weights, bias, out, winner);
        conv_pool_backward(&s, x, grad, winner, of_images ? backward : NULL, memory, of_images ? x_grad : NULL, w_grad,
                           b_grad);
        void *all[] = {x, weights, bias, out, grad, backward, x_grad, w_grad, b_grad, winner, memory};
        for (unsigned i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    }
    return 0;
}
