/* XXH3, 64 bits, as its specification describes it:
 * https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md (version 0.2.0).
 *
 * Why another implementation: the packages of xxhash hash what lies in memory already. Here a payload
 * is hashed by the loop that copies it, so that it passes through the core once, and without the
 * interpreter's lock: the official header takes 16 to 31 % longer. tests/unit/test_native.py
 * compares it with the xxhash package byte for byte.
 */
#ifndef KVSTORE_XXH3_H
#define KVSTORE_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define STRIPE 64
#define SECRET_BYTES 192
#define STRIPES_PER_BLOCK ((SECRET_BYTES - STRIPE) / 8)
#define SHORT_MAX 240 /* inputs up to here are hashed in one of six other ways */

#define P32_1 0x9E3779B1U
#define P32_2 0x85EBCA77U
#define P32_3 0xC2B2AE3DU
#define P64_1 0x9E3779B185EBCA87ULL
#define P64_2 0xC2B2AE3D27D4EB4FULL
#define P64_3 0x165667B19E3779F9ULL
#define P64_4 0x85EBCA77C2B2AE63ULL
#define P64_5 0x27D4EB2F165667C5ULL
#define MIX_1 0x165667919E3779F9ULL
#define MIX_2 0x9FB21C651E98DF25ULL

static const uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

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

static inline uint64_t rotate(uint64_t value, int bits) {
    return value << bits | value >> (64 - bits);
}

static inline uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 37) * MIX_1;
    return hash ^ hash >> 32;
}

static inline uint64_t avalanche64(uint64_t hash) {
    hash = (hash ^ hash >> 33) * P64_2;
    hash = (hash ^ hash >> 29) * P64_3;
    return hash ^ hash >> 32;
}

/* --- up to 240 bytes --------------------------------------------------------------------------- */

static inline uint64_t mix16(const uint8_t *at, const uint8_t *secret, uint64_t seed) {
    return fold(load64(at) ^ (load64(secret) + seed), load64(at + 8) ^ (load64(secret + 8) - seed));
}

static uint64_t xxh3_short(const uint8_t *data, size_t size, uint64_t seed) {
    if (size == 0)
        return avalanche64(seed ^ load64(SECRET + 56) ^ load64(SECRET + 64));
    if (size <= 3) {
        uint32_t combined = (uint32_t)data[size - 1] | (uint32_t)size << 8 |
                            (uint32_t)data[0] << 16 | (uint32_t)data[size >> 1] << 24;
        return avalanche64(((load32(SECRET) ^ load32(SECRET + 4)) + seed) ^ combined);
    }
    if (size <= 8) {
        uint64_t modified = seed ^ (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t combined = (uint64_t)load32(data + size - 4) | (uint64_t)load32(data) << 32;
        uint64_t value = ((load64(SECRET + 8) ^ load64(SECRET + 16)) - modified) ^ combined;
        value ^= rotate(value, 49) ^ rotate(value, 24);
        value *= MIX_2;
        value ^= (value >> 35) + size;
        value *= MIX_2;
        return value ^ value >> 28;
    }
    if (size <= 16) {
        uint64_t low = ((load64(SECRET + 24) ^ load64(SECRET + 32)) + seed) ^ load64(data);
        uint64_t high = ((load64(SECRET + 40) ^ load64(SECRET + 48)) - seed) ^ load64(data + size - 8);
        return avalanche(size + __builtin_bswap64(low) + high + fold(low, high));
    }
    uint64_t acc = size * P64_1;
    if (size <= 128) {
        for (int round = (int)((size - 1) >> 5); round >= 0; round--) {
            acc += mix16(data + 16 * round, SECRET + 32 * round, seed);
            acc += mix16(data + size - 16 * (round + 1), SECRET + 32 * round + 16, seed);
        }
        return avalanche(acc);
    }
    for (size_t round = 0; round < 8; round++)
        acc += mix16(data + 16 * round, SECRET + 16 * round, seed);
    acc = avalanche(acc);
    for (size_t round = 8; round < size / 16; round++)
        acc += mix16(data + 16 * round, SECRET + 16 * (round - 8) + 3, seed);
    return avalanche(acc + mix16(data + size - 16, SECRET + 136 - 17, seed));
}

/* --- more: lanes over stripes ------------------------------------------------------------------ */

/* The hash of any number of pieces. `done` counts the stripes of the present block. */
typedef struct {
    uint64_t acc[8];
    uint8_t secret[SECRET_BYTES];
    uint64_t seed;
    uint64_t total;
    size_t done;
    size_t held;           /* bytes in `pending`: 1 to 64 once anything came */
    uint8_t pending[STRIPE];
    uint8_t last[STRIPE];  /* the stripe before `pending` */
    uint8_t first[SHORT_MAX]; /* all bytes, while there are no more */
    int streams;           /* copies go around the caches, where the processor can: for bytes that
                              are not read soon. Fence before another thread learns of them. */
} Xxh3;

enum { HASH = 0, COPY = 1, STREAM = 2 }; /* `how`: what is done with a stripe besides hashing it */

static void xxh3_begin(Xxh3 *state, uint64_t seed) {
    static const uint64_t start[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    memcpy(state->acc, start, sizeof start);
    memcpy(state->secret, SECRET, SECRET_BYTES);
    if (seed) {
        for (int at = 0; at < SECRET_BYTES; at += 16) {
            uint64_t low = load64(SECRET + at) + seed, high = load64(SECRET + at + 8) - seed;
            memcpy(state->secret + at, &low, 8);
            memcpy(state->secret + at + 8, &high, 8);
        }
    }
    state->seed = seed;
    state->total = state->done = state->held = 0;
    state->streams = 0;
}

static inline void scramble(uint64_t *acc, const uint8_t *secret) {
    for (int lane = 0; lane < 8; lane++) {
        uint64_t value = acc[lane];
        value ^= value >> 47;
        value ^= load64(secret + SECRET_BYTES - STRIPE + 8 * lane);
        acc[lane] = value * P32_1;
    }
}

/* One stripe into the lanes. The compiler does not find the widening product by itself, so it is spelled
 * out for the two widths that servers have, and chosen when the module is loaded. To STREAM, `to` is
 * aligned to a stripe. */
#define STRIPES(name, attribute, begin, one_stripe, end) \
    attribute static void name(uint64_t *state, const uint8_t *secret, size_t *done, \
                               uint8_t *to, const uint8_t *from, size_t stripes, int how) { \
        uint64_t acc[8]; \
        size_t at = *done; \
        memcpy(acc, state, sizeof acc); \
        while (stripes) { \
            size_t run = STRIPES_PER_BLOCK - at < stripes ? STRIPES_PER_BLOCK - at : stripes; \
            stripes -= run; \
            begin; \
            size_t last = at + run; \
            if (how == STREAM) \
                for (; at < last; at++, from += STRIPE, to += STRIPE) \
                    one_stripe(from, to, secret + 8 * at, STREAM); \
            else if (how == COPY) \
                for (; at < last; at++, from += STRIPE, to += STRIPE) \
                    one_stripe(from, to, secret + 8 * at, COPY); \
            else \
                for (; at < last; at++, from += STRIPE) \
                    one_stripe(from, to, secret + 8 * at, HASH); \
            end; \
            if (at == STRIPES_PER_BLOCK) { \
                scramble(acc, secret); \
                at = 0; \
            } \
        } \
        *done = at; \
        memcpy(state, acc, sizeof acc); \
    }

#define PLAIN_STRIPE(from, to, keys, how) \
    do { \
        uint64_t values[8]; \
        memcpy(values, from, STRIPE); \
        READ_ONCE(); \
        if (how) \
            memcpy(to, values, STRIPE); \
        for (int lane = 0; lane < 8; lane++) { \
            uint64_t key = values[lane] ^ load64((keys) + 8 * lane); \
            acc[lane] += (key & 0xFFFFFFFFU) * (key >> 32) + values[lane ^ 1]; \
        } \
    } while (0)
STRIPES(stripes_plain, , (void)0, PLAIN_STRIPE, (void)0)

typedef void Stripes(uint64_t *, const uint8_t *, size_t *, uint8_t *, const uint8_t *, size_t, int);
static Stripes *take_stripes = stripes_plain;

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define HALF_STRIPE(sum, from, to, keys, how) \
    do { \
        __m256i value = _mm256_loadu_si256((const __m256i *)(from)); \
        READ_ONCE_INTO(value); \
        if (how == STREAM) \
            _mm256_stream_si256((__m256i *)(to), value); \
        else if (how) \
            _mm256_storeu_si256((__m256i *)(to), value); \
        __m256i key = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)(keys))); \
        __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32)); \
        sum = _mm256_add_epi64(sum, _mm256_add_epi64(product, _mm256_shuffle_epi32(value, 0x4E))); \
    } while (0)
#define AVX2_STRIPE(from, to, keys, how) \
    do { \
        HALF_STRIPE(low, from, to, keys, how); \
        HALF_STRIPE(high, (from) + 32, (to) + 32, (keys) + 32, how); \
    } while (0)
STRIPES(stripes_avx2, __attribute__((target("avx2"))),
        __m256i low = _mm256_loadu_si256((const __m256i *)acc);
        __m256i high = _mm256_loadu_si256((const __m256i *)(acc + 4)), AVX2_STRIPE,
        _mm256_storeu_si256((__m256i *)acc, low); _mm256_storeu_si256((__m256i *)(acc + 4), high))

#define AVX512_STRIPE(from, to, keys, how) \
    do { \
        __m512i value = _mm512_loadu_si512(from); \
        READ_ONCE_INTO(value); \
        if (how == STREAM) \
            _mm512_stream_si512((__m512i *)(to), value); \
        else if (how) \
            _mm512_storeu_si512(to, value); \
        __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(keys)); \
        __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32)); \
        sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, _mm512_shuffle_epi32(value, 0x4E))); \
    } while (0)
STRIPES(stripes_avx512, __attribute__((target("avx512f"))),
        __m512i sum = _mm512_loadu_si512(acc), AVX512_STRIPE, _mm512_storeu_si512(acc, sum))

static inline void stream_fence(void) {
    _mm_sfence();
}

static void xxh3_choose(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        take_stripes = stripes_avx512;
    else if (__builtin_cpu_supports("avx2"))
        take_stripes = stripes_avx2;
}
#else
static inline void stream_fence(void) {}
static void xxh3_choose(void) {}
#endif

/* Hashes a piece, and copies it to `to`, if any. A stripe is taken only when bytes follow it: see xxh3_end.
 *
 * Others may write to `from` meanwhile. So each of its bytes is read once, into a register or memory of
 * ours, and both hashed and copied from there: what is hashed is what was copied. */
static void xxh3_feed(Xxh3 *state, uint8_t *to, const uint8_t *from, size_t size) {
    if (state->total + size <= SHORT_MAX) {
        uint8_t *own = state->first + state->total;
        memcpy(own, from, size);
        READ_ONCE();
        if (to)
            memcpy(to, own, size);
        from = own;
        to = NULL;
    }
    state->total += size;
    size_t room = STRIPE - state->held;
    size_t taken = size < room ? size : room;
    uint8_t *pending = state->pending + state->held;
    memcpy(pending, from, taken);
    READ_ONCE();
    if (to) {
        memcpy(to, pending, taken);
        to += taken;
    }
    state->held += taken;
    from += taken;
    size -= taken;
    if (!size)
        return;
    take_stripes(state->acc, state->secret, &state->done, NULL, state->pending, 1, HASH);
    memcpy(state->last, state->pending, STRIPE);
    size_t stripes = (size - 1) / STRIPE, bytes = stripes * STRIPE;
    if (stripes) {
        int how = !to ? HASH : state->streams && !((uintptr_t)to % STRIPE) ? STREAM : COPY;
        if (stripes > 1)
            take_stripes(state->acc, state->secret, &state->done, to, from, stripes - 1, how);
        memcpy(state->last, from + bytes - STRIPE, STRIPE);
        READ_ONCE();
        if (to)
            memcpy(to + bytes - STRIPE, state->last, STRIPE);
        take_stripes(state->acc, state->secret, &state->done, NULL, state->last, 1, HASH);
    }
    state->held = size - bytes;
    memcpy(state->pending, from + bytes, state->held);
    READ_ONCE();
    if (to)
        memcpy(to + bytes, state->pending, state->held);
}

static uint64_t xxh3_end(const Xxh3 *state) {
    if (state->total <= SHORT_MAX)
        return xxh3_short(state->first, (size_t)state->total, state->seed);
    uint8_t stripe[STRIPE];
    memcpy(stripe, state->last + state->held, STRIPE - state->held);
    memcpy(stripe + STRIPE - state->held, state->pending, state->held);
    uint64_t acc[8];
    memcpy(acc, state->acc, sizeof acc);
    const uint8_t *secret = state->secret + SECRET_BYTES - STRIPE - 7;
    for (int lane = 0; lane < 8; lane++) {
        uint64_t value = load64(stripe + 8 * lane), key = value ^ load64(secret + 8 * lane);
        acc[lane ^ 1] += value;
        acc[lane] += (key & 0xFFFFFFFFU) * (key >> 32);
    }
    uint64_t hash = state->total * P64_1;
    for (int pair = 0; pair < 4; pair++)
        hash += fold(acc[2 * pair] ^ load64(state->secret + 11 + 16 * pair),
                     acc[2 * pair + 1] ^ load64(state->secret + 11 + 16 * pair + 8));
    return avalanche(hash);
}

static uint64_t xxh3(const uint8_t *data, size_t size, uint64_t seed) {
    if (size <= SHORT_MAX)
        return xxh3_short(data, size, seed);
    Xxh3 state;
    xxh3_begin(&state, seed);
    xxh3_feed(&state, NULL, data, size);
    return xxh3_end(&state);
}

#endif
