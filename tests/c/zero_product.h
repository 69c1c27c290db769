/* zero_product.h: the operands of a product of zeros, for tests of how much a product does. */
#ifndef ZERO_PRODUCT_H
#define ZERO_PRODUCT_H

#include "kernel_test.h"

typedef struct product {
    mp_wmat w;
    mp_acts x;
    void *memory;
    float *y; /* [M, N] */
} product;

static product product_of(mp_wkind kind, int M, int N, int K) {
    product p = {0};
    const mp_akind acts = mp_wmat_acts(kind);
    float *rows = kt_alloc(sizeof(float) * (size_t)M * (size_t)K);
    mp_wmat_init(&p.w, kind, N, K);
    p.w.data = kt_alloc(mp_wmat_bytes(&p.w) + MP_WMAT_SLACK);
    p.memory = kt_alloc(mp_acts_bytes(acts, M, K) + (acts == MP_A_F32 ? sizeof(float) * (size_t)M * (size_t)K : 0));
    mp_acts_init(&p.x, acts, M, K, p.memory);
    mp_acts_fill(&p.x, acts == MP_A_F32 ? p.memory : rows, K, 0, M);
    p.y = kt_alloc(sizeof(float) * (size_t)M * (size_t)N);
    kt_free(rows);
    return p;
}

static void drop(product *p) { kt_free(p->w.data), kt_free(p->memory), kt_free(p->y); }

#endif
