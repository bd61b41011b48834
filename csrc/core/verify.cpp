#include "verify.h"

#include <algorithm>
#include <string>

#include "arguments.h"
#include "checked.h"
#include "crc32c.h"
#include "file_read.h"

namespace flashckpt {
namespace {

// How much of a file is in memory at a time: small enough for the second-level cache, whatever the chunk
// size.
constexpr int64_t kStepBytes = 128 << 10;

// `check(scratch, chunk)` returns 1 (right), 0 (bad) or -errno.
template <typename Check>
Status for_each_chunk(int64_t length, int64_t chunk_bytes, int threads, int64_t scratch_bytes,
                      int64_t inline_bytes, std::vector<int64_t>* bad, Check&& check) {
    const int64_t chunks = chunk_count(length, chunk_bytes);
    threads = useful_threads(threads, length, inline_bytes);
    std::vector<uint8_t> failed(static_cast<size_t>(chunks));
    Claims claims(chunks, chunk_batch(chunks, chunk_bytes, threads));
    FirstError error;
    run_in_threads(threads, [&] {
        Scratch scratch;
        if (scratch_bytes > 0) {
            scratch = make_scratch(scratch_bytes);
            if (scratch == nullptr) return error.set(ENOMEM);
        }
        int64_t first = 0, last = 0;
        while (error.get() == 0 && claims.take(&first, &last)) {
            for (int64_t i = first; i < last && error.get() == 0; ++i) {
                const int result = check(scratch.get(), i);
                if (result < 0) error.set(-result);
                if (result == 0) failed[static_cast<size_t>(i)] = 1;
            }
        }
    });
    if (error.get() != 0) return Status::io(error.get(), {});
    for (int64_t i = 0; i < chunks; ++i) {
        if (failed[static_cast<size_t>(i)] != 0) bad->push_back(i);
    }
    return Status::ok();
}

}  // namespace

Status verify_chunks(const uint8_t* data, int64_t length, int64_t chunk_bytes, const uint32_t* crcs,
                     size_t crc_count, int threads, std::vector<int64_t>* bad,
                     int64_t inline_bytes) noexcept {
    return without_exceptions([&] {
        bad->clear();
        Status status = check_chunking(length, chunk_bytes, crc_count, threads);
        if (!status.is_ok()) return status;
        const Kernel& kernel = active_kernel();
        return for_each_chunk(
            length, chunk_bytes, threads, 0, inline_bytes, bad, [&](uint8_t*, int64_t index) {
                const ChunkRange chunk = chunk_range(index, length, chunk_bytes);
                const uint32_t state = kernel.update(~uint32_t{0}, data + chunk.begin,
                                                     static_cast<size_t>(chunk.end - chunk.begin));
                return ~state == crcs[index] ? 1 : 0;
            });
    });
}

Status verify_file(int fd, int64_t data_offset, int64_t data_length, int64_t chunk_bytes,
                   const uint32_t* crcs, size_t crc_count, int threads, std::vector<int64_t>* bad,
                   int64_t inline_bytes) noexcept {
    return without_exceptions([&] {
        bad->clear();
        Status status = check_area(data_offset, data_length);
        if (!status.is_ok()) return status;
        status = check_chunking(data_length, chunk_bytes, crc_count, threads);
        if (!status.is_ok()) return status;
        const Kernel& kernel = active_kernel();
        const int64_t step_bytes = std::min({chunk_bytes, data_length, kStepBytes});
        return for_each_chunk(data_length, chunk_bytes, threads, step_bytes, inline_bytes, bad,
                              [&](uint8_t* scratch, int64_t index) {
                                  const ChunkRange chunk = chunk_range(index, data_length, chunk_bytes);
                                  uint32_t state = ~uint32_t{0};
                                  for (int64_t at = chunk.begin; at < chunk.end; at += step_bytes) {
                                      const int64_t step = std::min(step_bytes, chunk.end - at);
                                      const int64_t count = read_fully(fd, scratch, step, data_offset + at);
                                      if (count < 0) return static_cast<int>(count);
                                      if (count < step) return 0;
                                      state = kernel.update(state, scratch, static_cast<size_t>(step));
                                  }
                                  return ~state == crcs[index] ? 1 : 0;
                              });
    });
}

Status checksum_ranges(const MemoryRange* ranges, size_t range_count, uint32_t* crcs, int threads,
                       int64_t inline_bytes) noexcept {
    return without_exceptions([&] {
        Status status = check_chunking(0, 1, 0, threads);
        if (!status.is_ok()) return status;
        int64_t total = 0;
        for (size_t i = 0; i < range_count; ++i) {
            const MemoryRange& range = ranges[i];
            if (range.length < 0 || (range.address == 0 && range.length > 0) ||
                __builtin_add_overflow(total, range.length, &total)) {
                return Status::invalid("range " + std::to_string(i) +
                                       ": expected an address and a length from 0 on, found address " +
                                       std::to_string(range.address) + ", length " + std::to_string(range.length));
            }
        }
        const Kernel& kernel = active_kernel();
        threads = useful_threads(threads, total, inline_bytes);
        Claims claims(static_cast<int64_t>(range_count), static_cast<int64_t>(range_count) / (threads * 8));
        run_in_threads(threads, [&] {
            int64_t first = 0, last = 0;
            while (claims.take(&first, &last)) {
                for (int64_t i = first; i < last; ++i) {
                    const auto* data = reinterpret_cast<const uint8_t*>(ranges[i].address);
                    crcs[i] = ~kernel.update(~uint32_t{0}, data, static_cast<size_t>(ranges[i].length));
                }
            }
        });
        return Status::ok();
    });
}

}  // namespace flashckpt
