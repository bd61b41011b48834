#include "../core/crc32c.h"
#include "../core/verify.h"
#include "check.h"

using namespace flashckpt;
using namespace flashckpt::test;

TEST(verify_finds_each_bad_chunk) {
    with_each_kernel([](const std::string&) {
        static const std::vector<uint8_t> original = random_bytes(700'001, 31);
        for (size_t chunk : {997, 4096, 262'144, 1'000'000}) {
            std::vector<uint8_t> data = original;
            const std::vector<uint32_t> crcs = chunk_crcs(data, 0, chunk);
            const auto length = static_cast<int64_t>(data.size());
            for (int threads : {1, 4}) {
                std::vector<int64_t> bad{1};
                CHECK(verify_chunks(data.data(), length, static_cast<int64_t>(chunk), crcs.data(),
                                    crcs.size(), threads, &bad, 0)
                          .is_ok());
                CHECK(bad.empty());
            }
            data[0] ^= 1;
            data[data.size() - 1] ^= 0x80;
            const auto last = static_cast<int64_t>(crcs.size()) - 1;
            const std::vector<int64_t> both =
                last == 0 ? std::vector<int64_t>{0} : std::vector<int64_t>{0, last};
            const TemporaryFile file(data);
            for (int threads : {1, 4}) {
                std::vector<int64_t> bad;
                CHECK(verify_chunks(data.data(), length, static_cast<int64_t>(chunk), crcs.data(),
                                    crcs.size(), threads, &bad, 0)
                          .is_ok());
                CHECK(bad == both);
                CHECK(verify_file(file.fd(), 0, length, static_cast<int64_t>(chunk), crcs.data(), crcs.size(),
                                  threads, &bad, 0)
                          .is_ok());
                CHECK(bad == both);
            }
        }
    });
}

TEST(checksums_of_ranges) {
    static const std::vector<uint8_t> data = random_bytes(700'001, 33);
    static const auto begin = reinterpret_cast<int64_t>(data.data());
    static const std::vector<MemoryRange> ranges = {{begin, 0}, {begin + 1, 300'000}, {begin + 7, 700'001 - 7}, {begin, 1}};
    with_each_kernel([](const std::string&) {
        for (int threads : {1, 4}) {
            std::vector<uint32_t> crcs(ranges.size(), 1);
            CHECK(checksum_ranges(ranges.data(), ranges.size(), crcs.data(), threads, 0).is_ok());
            for (size_t i = 0; i < ranges.size(); ++i) {
                const auto* from = reinterpret_cast<const uint8_t*>(ranges[i].address);
                CHECK_EQUAL(crcs[i], crc32c(0, from, static_cast<size_t>(ranges[i].length)));
            }
        }
    });
    uint32_t crc = 0;
    const MemoryRange negative{begin, -1}, nowhere{0, 1};
    CHECK(!checksum_ranges(&negative, 1, &crc, 1).is_ok());
    CHECK(!checksum_ranges(&nowhere, 1, &crc, 1).is_ok());
    CHECK(!checksum_ranges(nullptr, 0, &crc, 0).is_ok());
    CHECK(checksum_ranges(nullptr, 0, &crc, 1).is_ok());
}

TEST(verify_of_nothing) {
    std::vector<int64_t> bad;
    CHECK(verify_chunks(nullptr, 0, 4096, nullptr, 0, 2, &bad).is_ok());
    const TemporaryFile file({});
    CHECK(verify_file(file.fd(), 0, 0, 4096, nullptr, 0, 2, &bad).is_ok());
    CHECK(bad.empty());
}

TEST(verify_file_that_is_too_short) {
    const std::vector<uint8_t> data = random_bytes(10'000, 32);
    const std::vector<uint32_t> crcs = chunk_crcs(data, 0, 1024);
    TemporaryFile file(data);
    file.truncate(5000);
    std::vector<int64_t> bad;
    CHECK(verify_file(file.fd(), 0, 10'000, 1024, crcs.data(), crcs.size(), 2, &bad, 0).is_ok());
    CHECK(bad == (std::vector<int64_t>{4, 5, 6, 7, 8, 9}));
    const Status status = verify_file(-1, 0, 10'000, 1024, crcs.data(), crcs.size(), 2, &bad, 0);
    CHECK_EQUAL(status.errno_value(), EBADF);
}

TEST(verify_refuses_a_wrong_number_of_checksums) {
    const uint32_t crcs[2] = {};
    const uint8_t bytes[10] = {};
    std::vector<int64_t> bad;
    CHECK(verify_chunks(bytes, 10, 4, crcs, 2, 1, &bad).code() == Code::kInvalidArgument);
    CHECK(verify_file(0, 0, 10, 4, crcs, 2, 1, &bad).code() == Code::kInvalidArgument);
    CHECK(verify_file(0, INT64_MAX, 10, 5, crcs, 2, 1, &bad).code() == Code::kInvalidArgument);
}
