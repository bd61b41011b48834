#include "scatter.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "arguments.h"
#include "checked.h"
#include "crc32c.h"

namespace flashckpt {
namespace {

Status check_pieces(const ScatterPiece* pieces, size_t count, int64_t destination_length) {
    int64_t previous_end = 0;
    for (size_t i = 0; i < count; ++i) {
        const ScatterPiece& piece = pieces[i];
        const auto invalid = [i](const std::string& what) {
            return Status::invalid("piece " + std::to_string(i) + ": " + what);
        };
        if (piece.length < 0) return invalid(expected("length >= 0", piece.length));
        if (piece.source_address < 0) {
            return invalid(expected("source address >= 0", piece.source_address));
        }
        if (piece.destination_offset < 0) {
            return invalid(expected("destination offset >= 0", piece.destination_offset));
        }
        int64_t end = 0;
        if (!checked_add(piece.destination_offset, piece.length, &end) || end > destination_length) {
            return invalid("expected destination within " + std::to_string(destination_length) +
                           " bytes, found offset " + std::to_string(piece.destination_offset) +
                           " and length " + std::to_string(piece.length));
        }
        int64_t source_end = 0;
        if (!checked_add(piece.source_address, piece.length, &source_end)) {
            return invalid("expected source within the address space, found address " +
                           std::to_string(piece.source_address) + " and length " +
                           std::to_string(piece.length));
        }
        if (piece.destination_offset < previous_end) {
            return invalid("expected destination offset >= " + std::to_string(previous_end) +
                           " (sorted, not overlapping), found " + std::to_string(piece.destination_offset));
        }
        previous_end = end;
    }
    return Status::ok();
}

// A gap up to this size is summed byte by byte; for a longer one, skipping the zeros is quicker.
constexpr int64_t kShortGap = 256;

// A shorter piece has too few aligned bytes between its head and its tail for streaming stores.
constexpr int64_t kShortPiece = 512;

struct Job {
    const Kernel& kernel;
    uint8_t* destination;
    int64_t length;
    const ScatterPiece* pieces;
    size_t piece_count;
    int64_t chunk_bytes;
    uint32_t* crcs;
    bool streaming;

    uint32_t copy(uint32_t state, int64_t offset, const ScatterPiece& piece, int64_t count) const {
        const int64_t within = offset - piece.destination_offset;
        if (piece.source_address == 0)
            return kernel.update(state, destination + offset, static_cast<size_t>(count));
        const auto* source = reinterpret_cast<const uint8_t*>(piece.source_address + within);
        const Stores stores = streaming && count >= kShortPiece ? Stores::kStreaming : Stores::kCached;
        return kernel.copy(state, destination + offset, source, static_cast<size_t>(count), stores);
    }

    uint32_t zero(uint32_t state, int64_t offset, int64_t count) const {
        std::memset(destination + offset, 0, static_cast<size_t>(count));
        if (count > kShortGap) return crc32c_zeros(state, static_cast<uint64_t>(count));
        return kernel.update(state, destination + offset, static_cast<size_t>(count));
    }

    void run(int64_t first_chunk, int64_t last_chunk) const {
        int64_t at = first_chunk * chunk_bytes;
        const ScatterPiece* const end = pieces + piece_count;
        const ScatterPiece* piece = std::partition_point(
            pieces, end, [at](const ScatterPiece& p) { return p.destination_offset + p.length <= at; });
        for (int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
            const int64_t chunk_end = chunk_range(chunk, length, chunk_bytes).end;
            uint32_t state = ~uint32_t{0};
            while (at < chunk_end) {
                while (piece != end && piece->destination_offset + piece->length <= at) ++piece;
                int64_t stop = chunk_end;
                if (piece != end && piece->destination_offset <= at) {
                    stop = std::min(stop, piece->destination_offset + piece->length);
                    state = copy(state, at, *piece, stop - at);
                } else {
                    if (piece != end) stop = std::min(stop, piece->destination_offset);
                    state = zero(state, at, stop - at);
                }
                at = stop;
            }
            crcs[chunk] = ~state;
        }
    }
};

}  // namespace

Status scatter_copy(uint8_t* destination, int64_t destination_length, const ScatterPiece* pieces,
                    size_t piece_count, int64_t chunk_bytes, uint32_t* crcs, size_t crc_count, int threads,
                    int64_t inline_bytes) noexcept {
    return without_exceptions([&] {
        Status status = check_chunking(destination_length, chunk_bytes, crc_count, threads);
        if (!status.is_ok()) return status;
        status = check_pieces(pieces, piece_count, destination_length);
        if (!status.is_ok()) return status;

        const Job job{active_kernel(),
                      destination,
                      destination_length,
                      pieces,
                      piece_count,
                      chunk_bytes,
                      crcs,
                      destination_length >= static_cast<int64_t>(kStreamingBytes)};
        const int64_t chunks = chunk_count(destination_length, chunk_bytes);
        threads = useful_threads(threads, destination_length, inline_bytes);
        Claims claims(chunks, chunk_batch(chunks, chunk_bytes, threads));
        run_in_threads(threads, [&] {
            int64_t first = 0, last = 0;
            while (claims.take(&first, &last)) job.run(first, last);
            // Streaming stores are ordered within their own thread only.
            store_fence();
        });
        return Status::ok();
    });
}

}  // namespace flashckpt
