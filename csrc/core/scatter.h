// The save path: copies tensors into a slot and computes its checksums, in one pass over memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "status.h"
#include "workers.h"

namespace flashckpt {

struct ScatterPiece {
    int64_t source_address;  // 0: the bytes are already in place and are only checksummed
    int64_t destination_offset;
    int64_t length;
};

// Copies the pieces into `destination`, fills the gaps with zeros and writes the CRC32C of every
// `chunk_bytes` of the whole destination (the last chunk may be shorter) to `crcs`.
//
// Pieces must be sorted by destination offset, must not overlap and must lie within the destination; the
// sources must be readable and must not overlap the destination. `crc_count` must be the number of chunks. On
// a bad argument nothing is written. All stores are ordered when this returns.
Status scatter_copy(uint8_t* destination, int64_t destination_length, const ScatterPiece* pieces,
                    size_t piece_count, int64_t chunk_bytes, uint32_t* crcs, size_t crc_count, int threads,
                    int64_t inline_bytes = kInlineBytes) noexcept;

}  // namespace flashckpt
