// Checks of arguments that several calls share, with their messages.
#pragma once

#include <cstdint>
#include <string>

#include "status.h"

namespace flashckpt {

inline constexpr int kMaxThreads = 1024;

inline std::string expected(const char* what, int64_t found) {
    return std::string("expected ") + what + ", found " + std::to_string(found);
}

// Checks `length` bytes in chunks of `chunk_bytes`, with `crc_count` checksums (unless none are needed),
// copied by `threads` threads.
Status check_chunking(int64_t length, int64_t chunk_bytes, size_t crc_count, int threads,
                      bool needs_crcs = true);

// Checks the position of a data area in a file.
Status check_area(int64_t data_offset, int64_t data_length);

}  // namespace flashckpt
