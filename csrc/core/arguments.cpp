#include "arguments.h"

#include "checked.h"

namespace flashckpt {

Status check_chunking(int64_t length, int64_t chunk_bytes, size_t crc_count, int threads, bool needs_crcs) {
    if (length < 0) return Status::invalid(expected("data length >= 0", length));
    if (chunk_bytes <= 0) return Status::invalid(expected("chunk_bytes > 0", chunk_bytes));
    if (threads < 1 || threads > kMaxThreads) {
        return Status::invalid(
            expected(("threads from 1 to " + std::to_string(kMaxThreads)).c_str(), threads));
    }
    const auto chunks = static_cast<uint64_t>(chunk_count(length, chunk_bytes));
    if (needs_crcs && crc_count != chunks) {
        return Status::invalid("expected " + std::to_string(chunks) + " chunk checksums for " +
                               std::to_string(length) + " bytes in chunks of " + std::to_string(chunk_bytes) +
                               ", found " + std::to_string(crc_count));
    }
    return Status::ok();
}

Status check_area(int64_t data_offset, int64_t data_length) {
    if (data_offset < 0) return Status::invalid(expected("data offset >= 0", data_offset));
    if (data_length < 0) return Status::invalid(expected("data length >= 0", data_length));
    int64_t end = 0;
    if (!checked_add(data_offset, data_length, &end)) {
        return Status::invalid("expected a data area within 2**63 bytes, found offset " +
                               std::to_string(data_offset) + " and length " + std::to_string(data_length));
    }
    return Status::ok();
}

}  // namespace flashckpt
