#include <algorithm>
#include <cstring>

#include "../core/gather.h"
#include "check.h"

using namespace flashckpt;
using namespace flashckpt::test;

namespace {

constexpr int64_t kOffset = 4096 + 17;  // of the data area in the file; misaligned on purpose

std::vector<uint8_t> with_header(const std::vector<uint8_t>& data) {
    std::vector<uint8_t> content = random_bytes(kOffset, 99);
    content.insert(content.end(), data.begin(), data.end());
    return content;
}

int64_t address(uint8_t* data) { return reinterpret_cast<int64_t>(data); }

}  // namespace

TEST(gather_random_plans) {
    with_each_kernel([](const std::string&) {
        std::mt19937 random(21);
        for (int round = 0; round < 40; ++round) {
            const std::vector<uint8_t> data = random_bytes(random() % 200'000, 22);
            const TemporaryFile file(with_header(data));
            const size_t chunk_bytes = std::vector<size_t>{13, 512, 4096, 65'536, 300'000}[random() % 5];
            const std::vector<uint32_t> crcs = chunk_crcs(data, 0, chunk_bytes);
            std::vector<uint8_t> found(400'000, 0x77);
            std::vector<uint8_t> expected = found;
            std::vector<GatherPiece> pieces;
            size_t to = 0;
            for (int i = 0; i < 20; ++i) {
                // Any order, shared sources.
                const size_t from = data.empty() ? 0 : random() % data.size();
                const size_t most = std::min<size_t>(data.size() - from, i % 4 == 0 ? 70'000 : 3000);
                const size_t length = std::min(most == 0 ? 0 : random() % (most + 1), found.size() - to);
                pieces.push_back(
                    {static_cast<int64_t>(from), address(found.data() + to), static_cast<int64_t>(length)});
                std::copy_n(data.begin() + static_cast<int64_t>(from), length,
                            expected.begin() + static_cast<int64_t>(to));
                to = std::min(to + length + random() % 50, found.size());
            }
            std::vector<int64_t> bad;
            const Status status =
                gather_read(file.fd(), kOffset, static_cast<int64_t>(data.size()),
                            static_cast<int64_t>(chunk_bytes), crcs.data(), crcs.size(), pieces.data(),
                            pieces.size(), 1 + round % 4, round % 3 != 0, &bad, 0);
            CHECK(status.is_ok());
            CHECK(bad.empty());
            CHECK(found == expected);
            std::fill(found.begin(), found.end(), uint8_t{0x77});
            CHECK(gather_copy(data.data(), static_cast<int64_t>(data.size()),
                              static_cast<int64_t>(chunk_bytes), crcs.data(), crcs.size(), pieces.data(),
                              pieces.size(), 1 + round % 4, round % 3 != 0, &bad, 0)
                      .is_ok());
            CHECK(bad.empty());
            CHECK(found == expected);
        }
    });
}

TEST(gather_keeps_bad_chunks_from_every_destination) {
    with_each_kernel([](const std::string&) {
        const size_t chunk = 4096;
        const std::vector<uint8_t> data = random_bytes(50 * chunk + 100, 23);
        std::vector<uint32_t> crcs = chunk_crcs(data, 0, chunk);
        std::vector<uint8_t> damaged = with_header(data);
        damaged[kOffset + 3 * chunk + 4095] ^= 0x01;
        damaged[kOffset + 20 * chunk] ^= 0x80;
        damaged[kOffset + 40 * chunk] ^= 0x80;  // not asked for
        const TemporaryFile file(damaged);
        for (int threads : {1, 3}) {
            std::vector<uint8_t> found(data.size(), 0);
            const GatherPiece pieces[] = {
                {0, address(found.data()), static_cast<int64_t>(30 * chunk)},
                {45 * chunk, address(found.data() + 45 * chunk), static_cast<int64_t>(5 * chunk + 100)},
            };
            std::vector<int64_t> bad;
            CHECK(gather_read(file.fd(), kOffset, static_cast<int64_t>(data.size()), chunk, crcs.data(),
                              crcs.size(), pieces, 2, threads, true, &bad, 0)
                      .is_ok());
            CHECK(bad == (std::vector<int64_t>{3, 20}));
            for (size_t i = 0; i < data.size(); ++i) {
                const size_t index = i / chunk;
                const bool wanted = index < 30 || index >= 45;
                CHECK_EQUAL(found[i], wanted && index != 3 && index != 20 ? data[i] : 0);
            }
            const std::vector<uint8_t> read = found;
            std::fill(found.begin(), found.end(), uint8_t{0});
            CHECK(gather_copy(damaged.data() + kOffset, static_cast<int64_t>(data.size()), chunk, crcs.data(),
                              crcs.size(), pieces, 2, threads, true, &bad, 0)
                      .is_ok());
            CHECK(bad == (std::vector<int64_t>{3, 20}));
            CHECK(found == read);
        }
    });
}

TEST(gather_from_a_truncated_file) {
    const size_t chunk = 1000;
    const std::vector<uint8_t> data = random_bytes(10 * chunk, 24);
    const std::vector<uint32_t> crcs = chunk_crcs(data, 0, chunk);
    for (int64_t kept : {int64_t{0}, int64_t{1}, int64_t{4999}, int64_t{5000}, int64_t{9999}}) {
        TemporaryFile file(with_header(data));
        file.truncate(kOffset + kept);
        std::vector<uint8_t> found(data.size(), 0);
        const GatherPiece piece{0, address(found.data()), static_cast<int64_t>(data.size())};
        std::vector<int64_t> bad;
        CHECK(gather_read(file.fd(), kOffset, static_cast<int64_t>(data.size()), chunk, crcs.data(),
                          crcs.size(), &piece, 1, 2, true, &bad, 0)
                  .is_ok());
        const int64_t whole = kept / static_cast<int64_t>(chunk);
        CHECK_EQUAL(bad.size(), static_cast<size_t>(10 - whole));
        for (size_t i = 0; i < bad.size(); ++i) CHECK_EQUAL(bad[i], whole + static_cast<int64_t>(i));
        const auto good_bytes = static_cast<size_t>(whole) * chunk;
        CHECK(std::equal(found.begin(), found.begin() + static_cast<int64_t>(good_bytes), data.begin()));
        CHECK(std::all_of(found.begin() + static_cast<int64_t>(good_bytes), found.end(),
                          [](uint8_t b) { return b == 0; }));
        // Without verification it is still reported.
        CHECK(gather_read(file.fd(), kOffset, static_cast<int64_t>(data.size()), chunk, nullptr, 0, &piece, 1,
                          2, false, &bad, 0)
                  .is_ok());
        CHECK_EQUAL(bad.size(), static_cast<size_t>(10 - whole));
    }
}

TEST(gather_reports_errors_of_the_system) {
    uint8_t byte = 0;
    const uint32_t crc = 0;
    const GatherPiece piece{0, address(&byte), 1};
    std::vector<int64_t> bad;
    const Status status = gather_read(-1, 0, 1, 1, &crc, 1, &piece, 1, 1, true, &bad);
    CHECK(status.code() == Code::kIo);
    CHECK_EQUAL(status.errno_value(), EBADF);
}

TEST(gather_refuses_bad_arguments) {
    uint8_t bytes[8] = {};
    const std::vector<uint8_t> data = random_bytes(8, 25);
    const TemporaryFile file(data);
    const std::vector<uint32_t> crcs = chunk_crcs(data, 0, 4);
    std::vector<int64_t> bad;
    const auto refused = [&](int64_t offset, int64_t length, int64_t chunk, size_t crc_count,
                             GatherPiece piece, int threads) {
        const Status status = gather_read(file.fd(), offset, length, chunk, crcs.data(), crc_count, &piece, 1,
                                          threads, true, &bad);
        return status.code() == Code::kInvalidArgument;
    };
    const GatherPiece good{0, address(bytes), 8};
    CHECK(!refused(0, 8, 4, 2, good, 1));
    CHECK(refused(-1, 8, 4, 2, good, 1));
    CHECK(refused(0, -8, 4, 2, good, 1));
    CHECK(refused(INT64_MAX, 8, 4, 2, good, 1));
    CHECK(refused(0, 8, 0, 2, good, 1));
    CHECK(refused(0, 8, 4, 1, good, 1));
    CHECK(refused(0, 8, 4, 2, good, 0));
    CHECK(refused(0, 8, 4, 2, {1, address(bytes), 8}, 1));
    CHECK(refused(0, 8, 4, 2, {-1, address(bytes), 1}, 1));
    CHECK(refused(0, 8, 4, 2, {0, address(bytes), -1}, 1));
    CHECK(refused(0, 8, 4, 2, {0, 0, 1}, 1));
    CHECK(refused(0, 8, 4, 2, {0, INT64_MAX, 8}, 1));
    CHECK(refused(0, 8, 4, 2, {INT64_MAX, address(bytes), 8}, 1));
    CHECK(!refused(0, 8, 4, 2, {8, 0, 0}, 1));
}
