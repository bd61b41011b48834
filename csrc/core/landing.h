// Copies the bytes of verified chunks to their destinations. Used for reading files and for receiving.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "checked.h"
#include "crc32c.h"
#include "gather.h"

namespace flashckpt {

// From this size on a copy gains from bypassing the caches.
inline constexpr int64_t kStreamedPart = 4 << 10;

// The part of a piece that lies in one chunk.
struct Part {
    int64_t from;  // offset within the data area
    int64_t length;
    uint8_t* to;
};

inline Part part_of(const GatherPiece& piece, ChunkRange chunk) noexcept {
    const int64_t from = std::max(piece.source_offset, chunk.begin);
    const int64_t end = std::min(piece.source_offset + piece.length, chunk.end);
    return {from, end - from,
            reinterpret_cast<uint8_t*>(piece.destination_address + (from - piece.source_offset))};
}

// Copies one part. Call store_fence() after the last one.
inline void land(const Part& part, const uint8_t* source) noexcept {
    if (part.length >= kStreamedPart) {
        streaming_copy(part.to, source, static_cast<size_t>(part.length));
    } else {
        std::memcpy(part.to, source, static_cast<size_t>(part.length));
    }
}

// Returns the state of the CRC of `data`. At the same time it copies the parts of the chunk before, which is
// verified, to their destinations. `each_held(land)` calls `land(part, source)` for each of them.
template <typename EachHeld>
uint32_t sum_while_landing(const Kernel& kernel, const uint8_t* data, int64_t length,
                           EachHeld&& each_held) noexcept {
    uint32_t state = ~uint32_t{0};
    each_held([&](const Part& part, const uint8_t* source) {
        if (part.length < kStreamedPart || length == 0) return land(part, source);
        const int64_t summed = std::min(length, part.length);
        state = kernel.update_while_copying(state, data, static_cast<size_t>(summed), part.to, source,
                                            static_cast<size_t>(part.length));
        data += summed;
        length -= summed;
    });
    return length == 0 ? state : kernel.update(state, data, static_cast<size_t>(length));
}

}  // namespace flashckpt
