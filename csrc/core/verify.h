// Computes checksums of bytes in place: chunks of a shard, and ranges of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "status.h"
#include "workers.h"

namespace flashckpt {

// Finds the chunks of `data` whose CRC32C is not the given one. Their indices are sorted.
Status verify_chunks(const uint8_t* data, int64_t length, int64_t chunk_bytes, const uint32_t* crcs,
                     size_t crc_count, int threads, std::vector<int64_t>* bad,
                     int64_t inline_bytes = kInlineBytes) noexcept;

// Does the same for a data area in a file. A chunk is bad if the file ends before or within it.
Status verify_file(int fd, int64_t data_offset, int64_t data_length, int64_t chunk_bytes,
                   const uint32_t* crcs, size_t crc_count, int threads, std::vector<int64_t>* bad,
                   int64_t inline_bytes = kInlineBytes) noexcept;

// A range of this process's memory.
struct MemoryRange {
    int64_t address;
    int64_t length;
};

// Writes the CRC32C of each range to `crcs`. The ranges must be readable and may overlap.
Status checksum_ranges(const MemoryRange* ranges, size_t range_count, uint32_t* crcs, int threads,
                       int64_t inline_bytes = kInlineBytes) noexcept;

}  // namespace flashckpt
