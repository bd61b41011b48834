#include <cstring>

#include "../core/crc32c.h"
#include "check.h"

using namespace flashckpt;
using namespace flashckpt::test;

TEST(known_values) {
    with_each_kernel([](const std::string&) {
        CHECK_EQUAL(crc32c(0, "", 0), 0u);
        CHECK_EQUAL(crc32c(0, nullptr, 0), 0u);
        CHECK_EQUAL(crc32c(0, "123456789", 9), 0xe3069283u);
        uint8_t bytes[32];
        std::memset(bytes, 0, sizeof bytes);
        CHECK_EQUAL(crc32c(0, bytes, sizeof bytes), 0x8a9136aau);  // RFC 3720, B.4
        std::memset(bytes, 0xff, sizeof bytes);
        CHECK_EQUAL(crc32c(0, bytes, sizeof bytes), 0x62a8ab43u);
        for (uint8_t i = 0; i < 32; ++i) bytes[i] = i;
        CHECK_EQUAL(crc32c(0, bytes, sizeof bytes), 0x46dd794eu);
    });
}

TEST(every_length_at_every_alignment) {
    with_each_kernel([](const std::string&) {
        const std::vector<uint8_t> data = random_bytes(1200, 1);
        for (size_t start : {0, 1, 2, 3, 5, 7, 8, 15, 31, 33, 63}) {
            for (size_t length = 0; length + start <= 1100; length += length < 600 ? 1 : 37) {
                CHECK_EQUAL(crc32c(0, data.data() + start, length),
                            reference_crc(data.data() + start, length));
            }
        }
    });
}

TEST(long_runs_cross_all_block_sizes) {
    with_each_kernel([](const std::string&) {
        static const std::vector<uint8_t> data = random_bytes(200'000, 2);
        static const uint32_t whole = reference_crc(data.data(), data.size());
        CHECK_EQUAL(crc32c(0, data.data(), data.size()), whole);
        for (size_t length : {6143, 6144, 6145, 31743, 31744, 31745, 63488, 63495, 100'001}) {
            CHECK_EQUAL(crc32c(0, data.data() + 3, length), reference_crc(data.data() + 3, length));
            // A seed carries on where another call ended.
            const uint32_t first = crc32c(0, data.data(), length);
            CHECK_EQUAL(crc32c(first, data.data() + length, data.size() - length), whole);
        }
    });
}

TEST(copy_is_exact_and_stays_within_its_range) {
    with_each_kernel([](const std::string&) {
        const std::vector<uint8_t> source = random_bytes(3000, 3);
        for (Stores stores : {Stores::kCached, Stores::kStreaming}) {
            for (size_t to : {0, 1, 31, 32, 63, 64}) {
                for (size_t from : {0, 1, 13, 64}) {
                    for (size_t length :
                         {0, 1, 7, 8, 63, 64, 65, 255, 256, 257, 511, 512, 1000, 2048, 2801}) {
                        std::vector<uint8_t> target(3100, 0xa5);
                        uint8_t* destination = target.data() + 100 - 36 + to;
                        const uint32_t state =
                            active_kernel().copy(~0u, destination, source.data() + from, length, stores);
                        store_fence();
                        CHECK_EQUAL(~state, reference_crc(source.data() + from, length));
                        CHECK(std::memcmp(destination, source.data() + from, length) == 0);
                        for (const uint8_t* p = target.data(); p < destination; ++p) CHECK_EQUAL(*p, 0xa5);
                        for (const uint8_t* p = destination + length; p < target.data() + target.size();
                             ++p) {
                            CHECK_EQUAL(*p, 0xa5);
                        }
                    }
                }
            }
        }
    });
}

TEST(large_copies_stream) {
    with_each_kernel([](const std::string&) {
        static const std::vector<uint8_t> source = random_bytes(kStreamingBytes + 12'345, 4);
        static const uint32_t crc = reference_crc(source.data(), source.size());
        std::vector<uint8_t> target(source.size() + 1);
        CHECK_EQUAL(copy_crc32c(0, target.data() + 1, source.data(), source.size()), crc);
        CHECK(std::memcmp(target.data() + 1, source.data(), source.size()) == 0);
    });
}

TEST(streaming_copy_at_every_alignment) {
    const std::vector<uint8_t> source = random_bytes(1000, 5);
    for (size_t to = 0; to < 65; ++to) {
        for (size_t length : {1, 63, 64, 65, 127, 128, 129, 700}) {
            std::vector<uint8_t> target(1000, 0x5a);
            streaming_copy(target.data() + to, source.data() + 3, length);
            store_fence();
            CHECK(std::memcmp(target.data() + to, source.data() + 3, length) == 0);
            CHECK_EQUAL(target[to + length], 0x5a);
        }
    }
}

TEST(combine_equals_the_whole) {
    const std::vector<uint8_t> data = random_bytes(5000, 6);
    for (size_t cut = 0; cut <= data.size(); cut += 113) {
        const uint32_t first = reference_crc(data.data(), cut);
        const uint32_t second = reference_crc(data.data() + cut, data.size() - cut);
        CHECK_EQUAL(crc32c_combine(first, second, data.size() - cut),
                    reference_crc(data.data(), data.size()));
    }
    // Lengths that no buffer has: joining in two ways must agree.
    for (uint64_t length :
         {uint64_t{1} << 31, (uint64_t{1} << 31) - 1, (uint64_t{1} << 40) + 7, UINT64_MAX / 3}) {
        const uint32_t left =
            crc32c_combine(crc32c_combine(0x12345678, 0x9abcdef0, length), 0x0f1e2d3c, length);
        const uint32_t right =
            crc32c_combine(0x12345678, crc32c_combine(0x9abcdef0, 0x0f1e2d3c, length), 2 * length);
        CHECK_EQUAL(left, right);
    }
}

TEST(zeros_need_no_memory) {
    const std::vector<uint8_t> zeros(10'000);
    for (size_t length : {0, 1, 255, 256, 257, 10'000}) {
        CHECK_EQUAL(~crc32c_zeros(~0x1234567u, length), reference_crc(zeros.data(), length, 0x1234567));
    }
}

TEST(unknown_kernel_is_refused) {
    const std::string before = active_kernel().name;
    const Status status = set_kernel("abacus");
    CHECK(status.code() == Code::kInvalidArgument);
    CHECK(status.message().find("portable") != std::string::npos);
    CHECK_EQUAL(std::string(active_kernel().name), before);
}

TEST(summing_while_copying_other_bytes) {
    with_each_kernel([](const std::string&) {
        const std::vector<uint8_t> data = random_bytes(5000, 7);
        const std::vector<uint8_t> other = random_bytes(5000, 8);
        for (size_t length : {0, 1, 255, 256, 257, 1000, 4096, 4999}) {
            for (size_t copied : {0, 1, 255, 256, 300, 319, 320, 1024, 4990}) {
                for (size_t to : {0, 1, 32, 63}) {
                    std::vector<uint8_t> target(5200, 0x3c);
                    uint8_t* destination = target.data() + 64 + to;
                    const uint32_t state = active_kernel().update_while_copying(
                        ~0x13579bdfu, data.data() + 1, length, destination, other.data() + 3, copied);
                    store_fence();
                    CHECK_EQUAL(~state, reference_crc(data.data() + 1, length, 0x13579bdf));
                    CHECK(std::memcmp(destination, other.data() + 3, copied) == 0);
                    CHECK_EQUAL(destination[-1], 0x3c);
                    CHECK_EQUAL(destination[copied], 0x3c);
                }
            }
        }
    });
}
