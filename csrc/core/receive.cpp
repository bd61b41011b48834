#include "receive.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "arguments.h"
#include "checked.h"
#include "crc32c.h"
#include "landing.h"

namespace flashckpt {
namespace {

Status check_apart(const GatherPiece* pieces, size_t count) {
    for (size_t i = 1; i < count; ++i) {
        if (pieces[i].source_offset < pieces[i - 1].source_offset + pieces[i - 1].length) {
            return Status::invalid("piece " + std::to_string(i) +
                                   ": expected it behind the one before, found offset " +
                                   std::to_string(pieces[i].source_offset));
        }
    }
    return Status::ok();
}

// Returns 0 or an errno.
int receive_all(int fd, uint8_t* to, int64_t length) noexcept {
    while (length > 0) {
        const ssize_t count = ::recv(fd, to, static_cast<size_t>(length), 0);
        if (count == 0) return ECONNRESET;
        if (count < 0) {
            if (errno == EINTR) continue;
            return errno;
        }
        to += count;
        length -= count;
    }
    return 0;
}

// Keeps two chunks: the one being received, and the one before, which is verified and being copied.
class Receiver {
  public:
    Receiver(const GatherPiece* pieces, size_t count, uint8_t* scratch, int64_t chunk_bytes) noexcept
        : next_(pieces), end_(pieces + count), free_(scratch), spare_(scratch + chunk_bytes) {}

    uint8_t* room() const { return free_; }

    // Returns whether the chunk in `room` is right. Chunks come in ascending order.
    bool take(ChunkRange chunk, uint32_t crc) noexcept {
        if (~land_held_and_sum(free_, chunk.end - chunk.begin) != crc) return false;
        held_ = chunk;
        std::swap(free_, spare_);
        return true;
    }

    void finish() noexcept {
        land_held_and_sum(nullptr, 0);
        store_fence();
    }

  private:
    uint32_t land_held_and_sum(const uint8_t* data, int64_t length) noexcept {
        const ChunkRange held = std::exchange(held_, {0, 0});
        return sum_while_landing(active_kernel(), data, length, [&](auto&& land_part) {
            while (next_ != end_ && next_->source_offset + next_->length <= held.begin) ++next_;
            for (const GatherPiece* piece = next_; piece != end_ && piece->source_offset < held.end; ++piece) {
                const Part wanted = part_of(*piece, held);
                if (wanted.length > 0) land_part(wanted, spare_ + (wanted.from - held.begin));
            }
        });
    }

    const GatherPiece* next_;  // the first one that may reach into the chunk that is held
    const GatherPiece* const end_;
    uint8_t* free_;
    uint8_t* spare_;
    ChunkRange held_{0, 0};
};

}  // namespace

Status receive_chunks(int fd, int64_t offset, int64_t length, int64_t chunk_bytes, const uint32_t* crcs,
                      size_t crc_count, const GatherPiece* pieces, size_t piece_count, uint8_t* scratch,
                      int64_t scratch_bytes, std::vector<int64_t>* bad) noexcept {
    return without_exceptions([&] {
        bad->clear();
        Status status = check_area(offset, length);
        if (!status.is_ok()) return status;
        status = check_chunking(length, chunk_bytes, crc_count, 1);
        if (!status.is_ok()) return status;
        status = check_pieces(pieces, piece_count, INT64_MAX);
        if (!status.is_ok()) return status;
        status = check_apart(pieces, piece_count);
        if (!status.is_ok()) return status;
        const int64_t most = std::min(chunk_bytes, length);
        if (scratch_bytes / 2 < most) {
            return Status::invalid("scratch: expected room for two chunks of " + std::to_string(most) +
                                   " bytes, found " + std::to_string(scratch_bytes));
        }

        Receiver receiver(pieces, piece_count, scratch, most);
        const int64_t count = chunk_count(length, chunk_bytes);
        for (int64_t index = 0; index < count; ++index) {
            const ChunkRange within = chunk_range(index, length, chunk_bytes);
            if (const int error = receive_all(fd, receiver.room(), within.end - within.begin)) {
                receiver.finish();
                return Status::io(error, {});
            }
            if (!receiver.take({offset + within.begin, offset + within.end}, crcs[index])) bad->push_back(index);
        }
        receiver.finish();
        return Status::ok();
    });
}

}  // namespace flashckpt
