#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "../core/receive.h"
#include "check.h"

using namespace flashckpt;
using namespace flashckpt::test;

namespace {

// A connection. A thread writes `bytes` to its far end, in pieces of odd sizes, and then closes it.
class Sent {
  public:
    explicit Sent(std::vector<uint8_t> bytes) : bytes_(std::move(bytes)) {
        int ends[2];
        CHECK_EQUAL(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
        fd_ = ends[0];
        writer_ = std::thread([this, to = ends[1]] {
            size_t at = 0;
            for (size_t step = 1; at < bytes_.size(); step = step * 3 % 70'001 + 1) {
                const size_t size = std::min(step, bytes_.size() - at);
                const ssize_t count = ::send(to, bytes_.data() + at, size, MSG_NOSIGNAL);
                if (count <= 0) break;
                at += static_cast<size_t>(count);
            }
            ::close(to);
        });
    }
    ~Sent() {
        ::close(fd_);
        writer_.join();
    }
    int fd() const { return fd_; }

  private:
    const std::vector<uint8_t> bytes_;
    int fd_ = -1;
    std::thread writer_;
};

int64_t address(uint8_t* data) { return reinterpret_cast<int64_t>(data); }

}  // namespace

TEST(receive_random_plans) {
    with_each_kernel([](const std::string&) {
        std::mt19937 random(41);
        for (int round = 0; round < 40; ++round) {
            const size_t chunk_bytes = std::vector<size_t>{13, 512, 4096, 65'536}[random() % 4];
            const std::vector<uint8_t> area = random_bytes(1 + random() % 200'000, 42);
            const size_t offset = random() % area.size() / chunk_bytes * chunk_bytes;
            const std::vector<uint8_t> window(area.begin() + static_cast<int64_t>(offset), area.end());
            const std::vector<uint32_t> crcs = chunk_crcs(window, 0, chunk_bytes);
            std::vector<uint8_t> found(area.size() * 2 + 1000, 0x77);
            std::vector<uint8_t> expected = found;
            std::vector<GatherPiece> pieces;
            const size_t most = std::vector<size_t>{3, 300, 90'000}[random() % 3];
            size_t from = random() % area.size();
            for (size_t to = 0; from < area.size();) {
                const size_t length = std::min(random() % (most + 1), area.size() - from);
                pieces.push_back({static_cast<int64_t>(from), address(found.data() + to), static_cast<int64_t>(length)});
                for (size_t i = from; i < from + length; ++i) {
                    if (i >= offset) expected[to + i - from] = area[i];
                }
                to += length;
                from += length + (random() % 3 == 0 ? random() % (most + 1) : 0);
                if (length == 0) ++from;
            }
            const Sent sent(window);
            std::vector<uint8_t> scratch(2 * chunk_bytes);
            std::vector<int64_t> bad{1};
            CHECK(receive_chunks(sent.fd(), static_cast<int64_t>(offset), static_cast<int64_t>(window.size()),
                                 static_cast<int64_t>(chunk_bytes), crcs.data(), crcs.size(), pieces.data(),
                                 pieces.size(), scratch.data(), static_cast<int64_t>(scratch.size()), &bad)
                      .is_ok());
            CHECK(bad.empty());
            CHECK(found == expected);
        }
    });
}

TEST(receive_names_the_bad_chunks) {
    std::vector<uint8_t> data = random_bytes(10'000, 43);
    const std::vector<uint32_t> crcs = chunk_crcs(data, 0, 1024);
    data[2048] ^= 1;
    data[9'999] ^= 1;
    std::vector<uint8_t> found(10'000);
    const GatherPiece all{0, address(found.data()), 10'000};
    const Sent sent(data);
    std::vector<int64_t> bad;
    std::vector<uint8_t> scratch(2048);
    CHECK(receive_chunks(sent.fd(), 0, 10'000, 1024, crcs.data(), crcs.size(), &all, 1, scratch.data(), 2048, &bad)
              .is_ok());
    CHECK(bad == (std::vector<int64_t>{2, 9}));
    std::fill_n(data.begin() + 2048, 1024, uint8_t{0});
    std::fill(data.begin() + 9216, data.end(), uint8_t{0});
    CHECK(found == data);  // not a byte of the two
}

TEST(receive_of_a_connection_that_ends_or_stalls) {
    const std::vector<uint8_t> data = random_bytes(10'000, 44);
    const std::vector<uint32_t> crcs = chunk_crcs(data, 0, 1024);
    std::vector<uint8_t> found(10'000);
    const GatherPiece all{0, address(found.data()), 10'000};
    std::vector<int64_t> bad;
    std::vector<uint8_t> scratch(2048);
    const auto receive = [&](int fd) {
        return receive_chunks(fd, 0, 10'000, 1024, crcs.data(), crcs.size(), &all, 1, scratch.data(), 2048, &bad);
    };
    {
        const Sent sent(std::vector<uint8_t>(data.begin(), data.begin() + 5000));
        CHECK_EQUAL(receive(sent.fd()).errno_value(), ECONNRESET);
        CHECK(std::equal(found.begin(), found.begin() + 4096, data.begin()));  // the complete chunk is in place
    }
    int ends[2];
    CHECK_EQUAL(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    const timeval patience{0, 50'000};
    CHECK_EQUAL(::setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience), 0);
    CHECK_EQUAL(::send(ends[1], data.data(), 1500, 0), 1500);
    CHECK_EQUAL(receive(ends[0]).errno_value(), EAGAIN);
    ::close(ends[0]);
    ::close(ends[1]);
    CHECK_EQUAL(receive(-1).errno_value(), EBADF);
}

TEST(receive_refuses_bad_plans) {
    std::vector<uint8_t> found(100);
    const std::vector<uint32_t> crcs(1);
    std::vector<int64_t> bad;
    std::vector<uint8_t> scratch(200);
    const auto refused = [&](std::vector<GatherPiece> pieces, int64_t offset, int64_t length, int64_t room = 200) {
        const Status status = receive_chunks(-1, offset, length, 100, crcs.data(), crcs.size(), pieces.data(),
                                             pieces.size(), scratch.data(), room, &bad);
        return status.code() == Code::kInvalidArgument;
    };
    const int64_t to = address(found.data());
    CHECK(refused({{0, to, 10}, {9, to + 10, 5}}, 0, 100));
    CHECK(refused({{10, to, 10}, {0, to + 10, 5}}, 0, 100));
    CHECK(refused({{0, 0, 10}}, 0, 100));
    CHECK(refused({{-1, to, 10}}, 0, 100));
    CHECK(refused({{INT64_MAX - 4, to, 10}}, 0, 100));
    CHECK(refused({}, -1, 100));
    CHECK(refused({}, 0, 101));
    CHECK(refused({}, INT64_MAX - 10, 100));
    CHECK(refused({}, 0, 100, 199));
}
