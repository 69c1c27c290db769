/* siphash.h: a keyed hash of bytes, for tables whose entries come from files or requests. */
#ifndef MP_BASE_SIPHASH_H
#define MP_BASE_SIPHASH_H

#include <stddef.h>
#include <stdint.h>

/* SipHash-1-3 of `bytes` bytes (Aumasson and Bernstein, "SipHash: a fast short-input PRF"). */
uint64_t mp_siphash(const uint64_t key[2], const void *data, size_t bytes);
/* Set a new random key, so that no file or request can be crafted whose entries collide. */
void mp_siphash_key(uint64_t key[2]);

#endif
