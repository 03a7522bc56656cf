/* SipHash-2-4 with 128 bits of output, as its authors publish it: https://www.aumasson.jp/siphash/siphash.pdf,
 * and https://github.com/veorq/SipHash for the longer output. tests/unit/native/test_capabilities.py compares it
 * with their test vectors.
 *
 * Why this one: it is a keyed MAC for short messages. The MAC of a capability takes some 40 ns; HMAC-SHA256
 * takes ten times as long. */
#ifndef KVSTORE_SIPHASH_H
#define KVSTORE_SIPHASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SIPHASH_KEY_BYTES 16
#define SIPHASH_BYTES 16

static inline uint64_t sip_turned(uint64_t value, int bits) {
    return value << bits | value >> (64 - bits);
}

static inline void sip_rounds(uint64_t v[4], int count) {
    while (count--) {
        v[0] += v[1];
        v[2] += v[3];
        v[1] = sip_turned(v[1], 13) ^ v[0];
        v[3] = sip_turned(v[3], 16) ^ v[2];
        v[0] = sip_turned(v[0], 32);
        v[2] += v[1];
        v[0] += v[3];
        v[1] = sip_turned(v[1], 17) ^ v[2];
        v[3] = sip_turned(v[3], 21) ^ v[0];
        v[2] = sip_turned(v[2], 32);
    }
}

/* Writes the MAC of `size` bytes under a key of SIPHASH_KEY_BYTES to `mac`. */
static void siphash(const uint8_t *key, const uint8_t *data, size_t size, uint8_t mac[SIPHASH_BYTES]) {
    uint64_t k[2], word, last = (uint64_t)size << 56;
    memcpy(k, key, sizeof k);
    uint64_t v[4] = {k[0] ^ 0x736F6D6570736575ULL, k[1] ^ 0x646F72616E646F6DULL ^ 0xEE,
                     k[0] ^ 0x6C7967656E657261ULL, k[1] ^ 0x7465646279746573ULL};
    for (; size >= 8; size -= 8, data += 8) {
        memcpy(&word, data, 8);
        v[3] ^= word;
        sip_rounds(v, 2);
        v[0] ^= word;
    }
    for (size_t index = 0; index < size; index++)
        last |= (uint64_t)data[index] << 8 * index;
    v[3] ^= last;
    sip_rounds(v, 2);
    v[0] ^= last;
    for (int half = 0; half < 2; half++) {
        v[half ? 1 : 2] ^= half ? 0xDD : 0xEE;
        sip_rounds(v, 4);
        word = v[0] ^ v[1] ^ v[2] ^ v[3];
        memcpy(mac + 8 * half, &word, 8);
    }
}

#endif
