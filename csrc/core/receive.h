// The load path without a file between: chunks of a shard out of a socket into tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gather.h"
#include "status.h"

namespace flashckpt {

// Receives `length` bytes of a data area, those from `offset` on, which are chunks of `chunk_bytes` and perhaps a
// shorter last one, and puts what the pieces ask for to their destinations; the rest is dropped. Pieces outside
// are passed over. They are sorted by their offset in the area and share no source bytes; their destinations must
// be writable and must not overlap.
//
// `scratch` has room for two chunks, and is the caller's so that it stays in the cache from call to call: chunks
// are received into it, which is quicker than into tensors that are in no cache, checked there, and only then copied.
// Those that are wrong come back in `bad`, counted from the first one here; their destinations are unchanged.
//
// kIo: the socket's own error, EAGAIN where it has a timeout and was silent for that long, ECONNRESET where the
// other end closed it early. Chunks that came before may be in place then.
Status receive_chunks(int fd, int64_t offset, int64_t length, int64_t chunk_bytes, const uint32_t* crcs,
                      size_t crc_count, const GatherPiece* pieces, size_t piece_count, uint8_t* scratch,
                      int64_t scratch_bytes, std::vector<int64_t>* bad) noexcept;

}  // namespace flashckpt
