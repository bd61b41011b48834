// Checks the chunks of a shard without moving them anywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "status.h"
#include "workers.h"

namespace flashckpt {

// The indices of the chunks of `data` whose CRC32C is not the given one, sorted.
Status verify_chunks(const uint8_t* data, int64_t length, int64_t chunk_bytes, const uint32_t* crcs,
                     size_t crc_count, int threads, std::vector<int64_t>* bad,
                     int64_t inline_bytes = kInlineBytes) noexcept;

// The same for a data area in a file. A chunk that the file ends before or within is bad.
Status verify_file(int fd, int64_t data_offset, int64_t data_length, int64_t chunk_bytes,
                   const uint32_t* crcs, size_t crc_count, int threads, std::vector<int64_t>* bad,
                   int64_t inline_bytes = kInlineBytes) noexcept;

}  // namespace flashckpt
