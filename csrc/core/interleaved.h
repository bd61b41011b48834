// Computes the CRC with a CPU's CRC instruction, which has a latency of three cycles and a throughput of one
// per cycle. So three neighbouring blocks are computed at a time and joined afterwards.
//
// This cannot be a template without macros: code in a function with a `target` attribute is only
// inlined into functions with the same attribute. Hence each kernel file defines FLASHCKPT_CRC_TARGET (the
// attribute), crc_u64() and crc_u8() before it includes this.
#pragma once

#include <cstring>

#include "polynomial.h"

namespace flashckpt {
namespace {

FLASHCKPT_CRC_TARGET inline uint64_t load_u64(const uint8_t* data) {
    uint64_t word;
    std::memcpy(&word, data, sizeof word);
    return word;
}

template <size_t kBlock>
FLASHCKPT_CRC_TARGET inline uint32_t three_blocks(uint32_t state, const uint8_t* data,
                                                  const ShiftTable& shift) {
    uint32_t a = state;
    uint32_t b = 0;
    uint32_t c = 0;
    for (size_t i = 0; i < kBlock; i += 8) {
        a = crc_u64(a, load_u64(data + i));
        b = crc_u64(b, load_u64(data + kBlock + i));
        c = crc_u64(c, load_u64(data + 2 * kBlock + i));
    }
    return shift(shift(a) ^ b) ^ c;
}

constexpr size_t kLongBlock = 2048;
constexpr size_t kShortBlock = 256;
constexpr ShiftTable kLongShift(zero_bytes_factor(kLongBlock));
constexpr ShiftTable kShortShift(zero_bytes_factor(kShortBlock));

FLASHCKPT_CRC_TARGET uint32_t update_interleaved(uint32_t state, const uint8_t* data, size_t length) {
    for (; length >= 3 * kLongBlock; data += 3 * kLongBlock, length -= 3 * kLongBlock) {
        state = three_blocks<kLongBlock>(state, data, kLongShift);
    }
    for (; length >= 3 * kShortBlock; data += 3 * kShortBlock, length -= 3 * kShortBlock) {
        state = three_blocks<kShortBlock>(state, data, kShortShift);
    }
    for (; length >= 8; data += 8, length -= 8) state = crc_u64(state, load_u64(data));
    for (; length != 0; ++data, --length) state = crc_u8(state, *data);
    return state;
}

}  // namespace
}  // namespace flashckpt
