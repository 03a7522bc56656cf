/* XXH3, 64 bits, by its authors' files (third_party: xxHash 0.8.4), and copies that are hashed on the way.
 *
 * A payload passes through the core once: hashing each piece after its copy takes up to 60 % longer. */
#ifndef KVSTORE_CHECKSUM_H
#define KVSTORE_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include "third_party/xxh_x86dispatch.c"
#else
#define XXH_INLINE_ALL
#include "third_party/xxhash.h"
#define XXH3_64bits_withSeed_dispatch XXH3_64bits_withSeed
#define XXH3_64bits_update_dispatch XXH3_64bits_update
#endif

/* Shared memory is read only once: the compiler must not assume that it still holds what was read
 * before, and read it again. */
#define READ_ONCE() __asm__ volatile("" ::: "memory")
#define READ_ONCE_INTO(value) __asm__("" : "+x"(value))

static inline uint32_t load32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

static inline uint64_t load64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

/* The hash of any number of pieces. */
typedef struct {
    XXH3_state_t hash;
    int streams; /* copies go around the caches, where the processor can: for bytes that are not read
                    soon. Fence before another thread learns of them. */
} Xxh3;

static void xxh3_begin(Xxh3 *state) {
    XXH3_64bits_reset(&state->hash);
    state->streams = 0;
}

#if defined(__x86_64__)
/* Copies stripes and hashes the copies. `to` is aligned to a stripe if it streams. */
#define STRIPES(isa, attribute, vector, load, store, stream) \
    attribute static void stripes_##isa(XXH3_state_t *hash, uint8_t *to, const uint8_t *from, \
                                        size_t count, int streams) { \
        XXH_ALIGN(XXH_ACC_ALIGN) xxh_u64 acc[8]; \
        size_t done = hash->nbStripesSoFar; \
        memcpy(acc, hash->acc, sizeof acc); \
        while (count) { \
            size_t end = hash->nbStripesPerBlock - done < count ? hash->nbStripesPerBlock : done + count; \
            count -= end - done; \
            for (; done < end; done++, from += XXH_STRIPE_LEN, to += XXH_STRIPE_LEN) { \
                vector stripe[XXH_STRIPE_LEN / sizeof(vector)]; \
                for (size_t at = 0; at < XXH_STRIPE_LEN / sizeof(vector); at++) { \
                    stripe[at] = load((const vector *)from + at); \
                    READ_ONCE_INTO(stripe[at]); \
                    if (streams) \
                        stream((vector *)to + at, stripe[at]); \
                    else \
                        store((vector *)to + at, stripe[at]); \
                } \
                XXH3_accumulate_512_##isa(acc, stripe, XXH3_kSecret + XXH_SECRET_CONSUME_RATE * done); \
            } \
            if (done == hash->nbStripesPerBlock) { \
                XXH3_scrambleAcc_##isa(acc, XXH3_kSecret + hash->secretLimit); \
                done = 0; \
            } \
        } \
        hash->nbStripesSoFar = done; \
        memcpy(hash->acc, acc, sizeof acc); \
    }

STRIPES(sse2, XXH_TARGET_SSE2, __m128i, _mm_loadu_si128, _mm_storeu_si128, _mm_stream_si128)
STRIPES(avx2, XXH_TARGET_AVX2, __m256i, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256)
STRIPES(avx512, XXH_TARGET_AVX512, __m512i, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_stream_si512)

static void (*copy_stripes)(XXH3_state_t *, uint8_t *, const uint8_t *, size_t, int) = stripes_sse2;

static void xxh3_choose(void) {
    int best = XXH_featureTest();
    copy_stripes = best >= XXH_AVX512 ? stripes_avx512 : best == XXH_AVX2 ? stripes_avx2 : stripes_sse2;
}

static void stream_fence(void) {
    _mm_sfence();
}
#else
static void xxh3_choose(void) {}
static void stream_fence(void) {}
#endif

/* Hashes a piece, and copies it to `to`, if any. Others may write to `from` meanwhile: what is hashed is
 * what was copied. */
static void xxh3_feed(Xxh3 *state, uint8_t *to, const uint8_t *from, size_t size) {
    XXH3_state_t *hash = &state->hash;
    if (!to) {
        XXH3_64bits_update_dispatch(hash, from, size);
        return;
    }
#if defined(__x86_64__)
    if (size > 2 * XXH3_INTERNALBUFFER_SIZE) {
        size_t head = XXH3_INTERNALBUFFER_SIZE - hash->bufferedSize;
        memcpy(hash->buffer + hash->bufferedSize, from, head);
        READ_ONCE();
        memcpy(to, hash->buffer + hash->bufferedSize, head);
        copy_stripes(hash, hash->buffer, hash->buffer, XXH3_INTERNALBUFFER_SIZE / XXH_STRIPE_LEN, 0);
        size_t count = (size - head - 1) / XXH_STRIPE_LEN, bytes = count * XXH_STRIPE_LEN;
        copy_stripes(hash, to + head, from + head, count, state->streams && !((uintptr_t)(to + head) % XXH_STRIPE_LEN));
        to += head + bytes;
        from += head + bytes;
        size -= head + bytes;
        memcpy(hash->buffer + XXH3_INTERNALBUFFER_SIZE - XXH_STRIPE_LEN,
               (state->streams ? from : to) - XXH_STRIPE_LEN, XXH_STRIPE_LEN);
        hash->totalLen += head + bytes;
        hash->bufferedSize = 0;
    }
#endif
    memcpy(to, from, size);
    READ_ONCE();
    XXH3_64bits_update_dispatch(hash, to, size);
}

static uint64_t xxh3_end(const Xxh3 *state) {
    return XXH3_64bits_digest(&state->hash);
}

static uint64_t xxh3(const uint8_t *data, size_t size, uint64_t seed) {
    return XXH3_64bits_withSeed_dispatch(data, size, seed);
}

#endif
