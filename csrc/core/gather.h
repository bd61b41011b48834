// The load path: verified bytes of a shard's file into tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "status.h"
#include "workers.h"

namespace flashckpt {

struct GatherPiece {
    int64_t source_offset;  // from the start of the data area
    int64_t destination_address;
    int64_t length;
};

// Checks that each piece lies within a data area of that length and has a destination.
Status check_pieces(const GatherPiece* pieces, size_t count, int64_t data_length);

// Reads the chunks that the pieces touch and copies the pieces to their destinations. Pieces may come in any
// order and may share source bytes; their destinations must be writable and must not overlap.
//
// With `verify`, each chunk is read completely and checked before a byte of it reaches a destination. `bad`
// returns the indices of chunks that are wrong or cut short, sorted; the destinations of their bytes are
// unchanged. Without it `crcs` is ignored, `bad` has only the chunks that were cut short, and some of
// their bytes may have been copied. After an I/O error any part of the destinations may have been written.
Status gather_read(int fd, int64_t data_offset, int64_t data_length, int64_t chunk_bytes,
                   const uint32_t* crcs, size_t crc_count, const GatherPiece* pieces, size_t piece_count,
                   int threads, bool verify, std::vector<int64_t>* bad,
                   int64_t inline_bytes = kInlineBytes) noexcept;

// Does the same from memory. The caller guarantees that the memory neither shrinks (if a mapped file shrinks,
// that is a signal) nor changes: a chunk is checked in place and copied from there.
Status gather_copy(const uint8_t* data, int64_t data_length, int64_t chunk_bytes, const uint32_t* crcs,
                   size_t crc_count, const GatherPiece* pieces, size_t piece_count, int threads, bool verify,
                   std::vector<int64_t>* bad, int64_t inline_bytes = kInlineBytes) noexcept;

}  // namespace flashckpt
