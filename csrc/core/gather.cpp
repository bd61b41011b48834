#include "gather.h"

#include <algorithm>
#include <string>
#include <utility>

#include "arguments.h"
#include "checked.h"
#include "crc32c.h"
#include "file_read.h"
#include "landing.h"

namespace flashckpt {

Status check_pieces(const GatherPiece* pieces, size_t count, int64_t data_length) {
    for (size_t i = 0; i < count; ++i) {
        const GatherPiece& piece = pieces[i];
        const auto invalid = [i](const std::string& what) {
            return Status::invalid("piece " + std::to_string(i) + ": " + what);
        };
        if (piece.length < 0) return invalid(expected("length >= 0", piece.length));
        if (piece.source_offset < 0) {
            return invalid(expected("source offset >= 0", piece.source_offset));
        }
        if (piece.destination_address < 0 || (piece.destination_address == 0 && piece.length > 0)) {
            return invalid(expected("destination address > 0", piece.destination_address));
        }
        int64_t end = 0;
        if (!checked_add(piece.source_offset, piece.length, &end) || end > data_length) {
            return invalid("expected source within " + std::to_string(data_length) + " bytes, found offset " +
                           std::to_string(piece.source_offset) + " and length " +
                           std::to_string(piece.length));
        }
        int64_t destination_end = 0;
        if (!checked_add(piece.destination_address, piece.length, &destination_end)) {
            return invalid("expected destination within the address space, found address " +
                           std::to_string(piece.destination_address) + " and length " +
                           std::to_string(piece.length));
        }
    }
    return Status::ok();
}

namespace {

// Which pieces touch each chunk: those of chunk touched[i] are order[begin[i]] to order[begin[i + 1] - 1].
// Its size follows the bytes that are asked for, not the size of the data area, which a damaged header could
// claim.
struct PiecesByChunk {
    std::vector<int64_t> touched;  // the chunks that any piece touches, ascending
    std::vector<size_t> begin;     // one more than `touched`
    std::vector<size_t> order;     // piece indices

    PiecesByChunk(const GatherPiece* pieces, size_t count, int64_t chunk_bytes) {
        struct Touch {
            int64_t chunk;
            size_t piece;
        };
        const auto earlier = [](const Touch& a, const Touch& b) { return a.chunk < b.chunk; };
        std::vector<Touch> touches;
        touches.reserve(count);
        for (size_t i = 0; i < count; ++i) {
            if (pieces[i].length == 0) continue;
            const int64_t last = (pieces[i].source_offset + pieces[i].length - 1) / chunk_bytes;
            for (int64_t c = pieces[i].source_offset / chunk_bytes; c <= last; ++c) touches.push_back({c, i});
        }
        // Load plans mostly come in file order.
        if (!std::is_sorted(touches.begin(), touches.end(), earlier)) {
            std::stable_sort(touches.begin(), touches.end(), earlier);
        }
        order.reserve(touches.size());
        for (const Touch& touch : touches) {
            if (touched.empty() || touched.back() != touch.chunk) {
                touched.push_back(touch.chunk);
                begin.push_back(order.size());
            }
            order.push_back(touch.piece);
        }
        begin.push_back(order.size());
    }
};

// From this size on, a system call for one piece is cheaper than a second copy. This applies only if nothing
// is verified, and if both ends are aligned alike: otherwise the kernel's string copy is three times slower.
constexpr int64_t kDirectPiece = 32 << 10;
constexpr int64_t kDirectAlignment = 32;

struct Job {
    const Kernel& kernel;
    int fd;
    const uint8_t* mapped;  // the data area in memory that cannot shrink; nullptr: read it through `fd`
    int64_t data_offset;
    int64_t data_length;
    int64_t chunk_bytes;
    const uint32_t* crcs;
    const GatherPiece* pieces;
    const PiecesByChunk& by_chunk;
    bool verify;

    const size_t* first_piece(size_t position) const {
        return by_chunk.order.data() + by_chunk.begin[position];
    }
    ChunkRange range(size_t position) const {
        return chunk_range(by_chunk.touched[position], data_length, chunk_bytes);
    }

    bool goes_directly(const Part& wanted) const {
        const int64_t apart = reinterpret_cast<int64_t>(wanted.to) - (data_offset + wanted.from);
        return wanted.length >= kDirectPiece && apart % kDirectAlignment == 0;
    }

    // Copies out of a mapping without verifying.
    void copy_unverified(ChunkRange chunk, const size_t* first, const size_t* end) const {
        for (const size_t* piece = first; piece != end; ++piece) {
            const Part wanted = part_of(pieces[*piece], chunk);
            land(wanted, mapped + wanted.from);
        }
    }

    // Reads large parts straight to their destinations, and small ones by one read of the range they span.
    int read_unverified(ChunkRange chunk, const size_t* first, const size_t* end, uint8_t* scratch) const {
        int64_t low = chunk.end;
        int64_t high = chunk.begin;
        for (const size_t* piece = first; piece != end; ++piece) {
            const Part wanted = part_of(pieces[*piece], chunk);
            if (goes_directly(wanted)) {
                const int64_t count = read_fully(fd, wanted.to, wanted.length, data_offset + wanted.from);
                if (count < 0) return static_cast<int>(count);
                if (count < wanted.length) return 0;
            } else {
                low = std::min(low, wanted.from);
                high = std::max(high, wanted.from + wanted.length);
            }
        }
        if (low >= high) return 1;
        const int64_t count = read_fully(fd, scratch, high - low, data_offset + low);
        if (count < 0) return static_cast<int>(count);
        if (count < high - low) return 0;
        for (const size_t* piece = first; piece != end; ++piece) {
            const Part wanted = part_of(pieces[*piece], chunk);
            if (!goes_directly(wanted)) land(wanted, scratch + (wanted.from - low));
        }
        return 1;
    }
};

// Does one thread's share of the work. With verification it keeps two chunks: the one being summed, and the
// one before, which is verified and is copied to its destinations meanwhile. If they are read from a file,
// they are in a buffer of this thread. In a mapping they stay in place, and are in the cache when they are
// copied.
class Reader {
  public:
    Reader(const Job& job, Scratch scratch, int64_t scratch_bytes) noexcept
        : job_(job),
          scratch_(std::move(scratch)),
          free_(scratch_.get()),
          spare_(scratch_ == nullptr ? nullptr : free_ + scratch_bytes) {}

    // Returns 1 if the chunk is right, 0 if it is bad, else -errno. The next call or finish() copies a right
    // chunk.
    int read(size_t position) noexcept {
        const ChunkRange chunk = job_.range(position);
        const size_t* const first = job_.first_piece(position);
        const size_t* const end = job_.first_piece(position + 1);
        const int64_t length = chunk.end - chunk.begin;
        const uint8_t* data = free_;
        if (job_.mapped != nullptr) {
            if (!job_.verify) {
                job_.copy_unverified(chunk, first, end);
                return 1;
            }
            data = job_.mapped + chunk.begin;
        } else {
            if (!job_.verify) return job_.read_unverified(chunk, first, end, free_);
            const int64_t count = read_fully(job_.fd, free_, length, job_.data_offset + chunk.begin);
            if (count < 0) return static_cast<int>(count);
            if (count < length) return 0;
        }
        if (~copy_held_and_sum(data, length) != job_.crcs[job_.by_chunk.touched[position]]) return 0;
        held_ = data;
        std::swap(free_, spare_);
        holds_ = true;
        held_position_ = position;
        return 1;
    }

    // Copies what is still held and orders all stores.
    void finish() noexcept {
        copy_held_and_sum(nullptr, 0);
        store_fence();
    }

  private:
    uint32_t copy_held_and_sum(const uint8_t* data, int64_t length) noexcept {
        const bool holds = std::exchange(holds_, false);
        return sum_while_landing(job_.kernel, data, length, [&](auto&& land_part) {
            if (!holds) return;
            const ChunkRange chunk = job_.range(held_position_);
            const size_t* const end = job_.first_piece(held_position_ + 1);
            for (const size_t* piece = job_.first_piece(held_position_); piece != end; ++piece) {
                const Part wanted = part_of(job_.pieces[*piece], chunk);
                land_part(wanted, held_ + (wanted.from - chunk.begin));
            }
        });
    }

    const Job& job_;
    const Scratch scratch_;
    uint8_t* free_;
    uint8_t* spare_;
    const uint8_t* held_ = nullptr;
    bool holds_ = false;
    size_t held_position_ = 0;
};

Status gather(int fd, const uint8_t* mapped, int64_t data_offset, int64_t data_length, int64_t chunk_bytes,
              const uint32_t* crcs, size_t crc_count, const GatherPiece* pieces, size_t piece_count,
              int threads, bool verify, std::vector<int64_t>* bad, int64_t inline_bytes) noexcept {
    return without_exceptions([&] {
        bad->clear();
        Status status = check_area(data_offset, data_length);
        if (!status.is_ok()) return status;
        status = check_chunking(data_length, chunk_bytes, crc_count, threads, verify);
        if (!status.is_ok()) return status;
        status = check_pieces(pieces, piece_count, data_length);
        if (!status.is_ok()) return status;

        const PiecesByChunk by_chunk(pieces, piece_count, chunk_bytes);
        const auto touched = static_cast<int64_t>(by_chunk.touched.size());
        if (touched == 0) return Status::ok();
        const int64_t scratch_bytes = std::min(chunk_bytes, data_length);
        int64_t buffers_bytes = 0;
        if (__builtin_mul_overflow(scratch_bytes, int64_t{2}, &buffers_bytes)) return Status::io(ENOMEM, {});
        int64_t read_bytes = 0;
        if (__builtin_mul_overflow(touched, scratch_bytes, &read_bytes)) read_bytes = INT64_MAX;
        threads = useful_threads(threads, read_bytes, inline_bytes);

        const Job job{active_kernel(), fd,   mapped, data_offset, data_length,
                      chunk_bytes,     crcs, pieces, by_chunk,    verify};
        // One byte per chunk, each written by one thread only.
        std::vector<uint8_t> failed(by_chunk.touched.size());
        Claims claims(touched, chunk_batch(touched, chunk_bytes, threads));
        FirstError error;
        run_in_threads(threads, [&] {
            Scratch scratch = mapped == nullptr ? make_scratch(buffers_bytes) : Scratch{};
            if (scratch == nullptr && mapped == nullptr) return error.set(ENOMEM);
            Reader reader(job, std::move(scratch), scratch_bytes);
            int64_t first = 0, last = 0;
            while (error.get() == 0 && claims.take(&first, &last)) {
                for (int64_t i = first; i < last && error.get() == 0; ++i) {
                    const int result = reader.read(static_cast<size_t>(i));
                    if (result < 0) error.set(-result);
                    if (result == 0) failed[static_cast<size_t>(i)] = 1;
                }
            }
            reader.finish();
        });
        if (error.get() != 0) return Status::io(error.get(), {});
        for (size_t i = 0; i < failed.size(); ++i) {
            if (failed[i] != 0) bad->push_back(by_chunk.touched[i]);
        }
        return Status::ok();
    });
}

}  // namespace

Status gather_read(int fd, int64_t data_offset, int64_t data_length, int64_t chunk_bytes,
                   const uint32_t* crcs, size_t crc_count, const GatherPiece* pieces, size_t piece_count,
                   int threads, bool verify, std::vector<int64_t>* bad, int64_t inline_bytes) noexcept {
    return gather(fd, nullptr, data_offset, data_length, chunk_bytes, crcs, crc_count, pieces, piece_count,
                  threads, verify, bad, inline_bytes);
}

Status gather_copy(const uint8_t* data, int64_t data_length, int64_t chunk_bytes, const uint32_t* crcs,
                   size_t crc_count, const GatherPiece* pieces, size_t piece_count, int threads, bool verify,
                   std::vector<int64_t>* bad, int64_t inline_bytes) noexcept {
    // An empty buffer may be nullptr, which means a file to gather().
    static const uint8_t nothing = 0;
    return gather(-1, data == nullptr ? &nothing : data, 0, data_length, chunk_bytes, crcs, crc_count, pieces,
                  piece_count, threads, verify, bad, inline_bytes);
}

}  // namespace flashckpt
