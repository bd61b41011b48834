// Declares the kernels that are compiled in. Which one is used is decided at run time, see crc32c.cpp.
#pragma once

#include "crc32c.h"

namespace flashckpt {

extern const Kernel kPortableKernel;
#if defined(__x86_64__)
extern const Kernel kSse42Kernel;
extern const Kernel kPclmulKernel;
extern const Kernel kVpclmulKernel;
#elif defined(__aarch64__)
extern const Kernel kArmv8Kernel;
#endif

// Copies for kernels whose CRC needs general registers: computing the CRC reads a tile into the first-level
// cache, and the tile is copied from there, so memory is read only once.
template <uint32_t (*update)(uint32_t, const uint8_t*, size_t)>
uint32_t copy_by_tiles(uint32_t state, uint8_t* destination, const uint8_t* source, size_t length,
                       Stores stores) {
    constexpr size_t kTileBytes = 12 << 10;
    while (length != 0) {
        const size_t tile = length < kTileBytes ? length : kTileBytes;
        state = update(state, source, tile);
        if (stores == Stores::kStreaming) {
            streaming_copy(destination, source, tile);
        } else {
            __builtin_memcpy(destination, source, tile);
        }
        destination += tile;
        source += tile;
        length -= tile;
    }
    return state;
}

// Used by kernels that gain nothing from summing and copying at the same time.
template <uint32_t (*update)(uint32_t, const uint8_t*, size_t)>
uint32_t copy_then_update(uint32_t state, const uint8_t* data, size_t length, uint8_t* destination,
                          const uint8_t* source, size_t copy_length) {
    if (copy_length != 0) streaming_copy(destination, source, copy_length);
    return update(state, data, length);
}

}  // namespace flashckpt
