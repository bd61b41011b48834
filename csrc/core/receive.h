// The load path without a file in between: receives chunks of a shard from a socket into tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gather.h"
#include "status.h"

namespace flashckpt {

// Receives `length` bytes of a data area from `offset` on: chunks of `chunk_bytes`, the last one perhaps
// shorter. Copies the bytes of the pieces to their destinations and drops the rest. Pieces outside of these
// bytes are ignored. Pieces must be sorted by their offset in the area and share no source bytes; their
// destinations must be writable and must not overlap.
//
// `scratch` has room for two chunks. It is the caller's so that it stays in the cache from call to call.
// Chunks are received into it, which is quicker than into tensors that are not cached, checked there, and
// only then copied. `bad` returns the wrong ones, counted from the first one here; their destinations are
// unchanged.
//
// kIo: the socket's own error; EAGAIN if it has a timeout and was silent for that long; ECONNRESET if the
// other end closed it early. Earlier chunks may then be in place.
Status receive_chunks(int fd, int64_t offset, int64_t length, int64_t chunk_bytes, const uint32_t* crcs,
                      size_t crc_count, const GatherPiece* pieces, size_t piece_count, uint8_t* scratch,
                      int64_t scratch_bytes, std::vector<int64_t>* bad) noexcept;

}  // namespace flashckpt
