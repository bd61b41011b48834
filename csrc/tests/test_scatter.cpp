#include <algorithm>
#include <cstring>

#include "../core/scatter.h"
#include "check.h"

using namespace flashckpt;
using namespace flashckpt::test;

namespace {

int64_t address(const uint8_t* data) { return reinterpret_cast<int64_t>(data); }

struct Made {
    std::vector<uint8_t> destination;
    std::vector<uint32_t> crcs;
    Status status = Status::ok();
};

Made scatter(size_t length, const std::vector<ScatterPiece>& pieces, int64_t chunk_bytes, int threads) {
    Made made;
    made.destination = random_bytes(length, 77);  // what a recycled slot holds
    const size_t chunks =
        chunk_bytes > 0 ? (length + static_cast<size_t>(chunk_bytes) - 1) / static_cast<size_t>(chunk_bytes)
                        : 0;
    made.crcs.assign(chunks, 0);
    // inline_bytes 0: threads even where they are not worth it.
    made.status = scatter_copy(made.destination.data(), static_cast<int64_t>(length), pieces.data(),
                               pieces.size(), chunk_bytes, made.crcs.data(), made.crcs.size(), threads, 0);
    return made;
}

void check_against_reference(size_t length, const std::vector<ScatterPiece>& pieces, size_t chunk_bytes,
                             int threads) {
    std::vector<uint8_t> expected(length);
    const std::vector<uint8_t> before = random_bytes(length, 77);
    for (const ScatterPiece& piece : pieces) {
        const uint8_t* source = piece.source_address == 0
                                    ? before.data() + piece.destination_offset
                                    : reinterpret_cast<const uint8_t*>(piece.source_address);
        std::copy(source, source + piece.length, expected.begin() + piece.destination_offset);
    }
    const Made made = scatter(length, pieces, static_cast<int64_t>(chunk_bytes), threads);
    CHECK(made.status.is_ok());
    CHECK(made.destination == expected);
    CHECK(made.crcs == chunk_crcs(expected, 0, chunk_bytes));
}

}  // namespace

TEST(scatter_random_plans) {
    with_each_kernel([](const std::string&) {
        std::mt19937 random(11);
        const std::vector<uint8_t> source = random_bytes(9000, 12);
        for (int round = 0; round < 60; ++round) {
            const size_t length = random() % 20'000;
            std::vector<ScatterPiece> pieces;
            size_t at = random() % 3 == 0 ? 0 : random() % 700;
            while (at < length) {
                const size_t count = std::min<size_t>(length - at, random() % 4 == 0 ? 0 : random() % 3000);
                const size_t from = random() % (source.size() - count);
                const bool in_place = random() % 5 == 0;
                pieces.push_back({in_place ? 0 : address(source.data() + from), static_cast<int64_t>(at),
                                  static_cast<int64_t>(count)});
                at += count + (random() % 2 == 0 ? 0 : random() % 600);
            }
            const size_t chunk_bytes = std::vector<size_t>{1, 7, 64, 511, 512, 4096, 30'000}[random() % 7];
            check_against_reference(length, pieces, chunk_bytes, 1 + static_cast<int>(random() % 4));
        }
    });
}

TEST(scatter_large_with_threads) {
    with_each_kernel([](const std::string&) {
        static const std::vector<uint8_t> source = random_bytes(3 << 20, 13);
        std::vector<ScatterPiece> pieces{{address(source.data() + 5), 100, 1'500'001},
                                         {0, 1'500'200, 99'999},
                                         {address(source.data()), 2'000'000, 1'000'000}};
        check_against_reference(3'300'000, pieces, 262'144, 2);
        check_against_reference(3'300'000, pieces, 4096, 4);
    });
}

TEST(scatter_of_nothing) {
    check_against_reference(0, {}, 4096, 2);
    check_against_reference(1000, {}, 300, 2);  // zeros only
    check_against_reference(1000, {{0, 0, 1000}}, 300, 1);
    check_against_reference(10, {{0, 10, 0}}, 300, 1);
}

TEST(scatter_refuses_bad_pieces_and_writes_nothing) {
    const std::vector<uint8_t> source = random_bytes(100, 14);
    const int64_t from = address(source.data());
    struct Case {
        std::vector<ScatterPiece> pieces;
        const char* says;
    };
    const Case cases[] = {
        {{{from, 0, 10}, {from, 5, 10}}, "piece 1: expected destination offset >= 10"},
        {{{from, 50, 10}, {from, 0, 10}}, "piece 1: expected destination offset >= 60"},
        {{{from, 0, -1}}, "piece 0: expected length >= 0"},
        {{{from, -8, 4}}, "piece 0: expected destination offset >= 0"},
        {{{-from, 0, 4}}, "piece 0: expected source address >= 0"},
        {{{from, 0, 10}, {from, 95, 6}}, "piece 1: expected destination within 100 bytes"},
        {{{from, INT64_MAX, 1}}, "piece 0: expected destination within 100 bytes"},
        {{{from, 1, INT64_MAX}}, "piece 0: expected destination within 100 bytes"},
        {{{INT64_MAX, 0, 1}}, "piece 0: expected source within the address space"},
    };
    for (const Case& one : cases) {
        const Made made = scatter(100, one.pieces, 64, 2);
        CHECK(made.status.code() == Code::kInvalidArgument);
        CHECK_EQUAL(made.status.message().substr(0, std::strlen(one.says)), one.says);
        CHECK(made.destination == random_bytes(100, 77));
    }
}

TEST(scatter_refuses_bad_chunking) {
    uint8_t byte = 0;
    uint32_t crc = 0;
    CHECK(!scatter_copy(&byte, 1, nullptr, 0, 0, &crc, 1, 1).is_ok());
    CHECK(!scatter_copy(&byte, 1, nullptr, 0, -5, &crc, 1, 1).is_ok());
    CHECK(!scatter_copy(&byte, -1, nullptr, 0, 5, &crc, 0, 1).is_ok());
    CHECK(!scatter_copy(&byte, 1, nullptr, 0, 5, &crc, 0, 1).is_ok());
    CHECK(!scatter_copy(&byte, 1, nullptr, 0, 5, &crc, 2, 1).is_ok());
    CHECK(!scatter_copy(&byte, 1, nullptr, 0, 5, &crc, 1, 0).is_ok());
    CHECK(!scatter_copy(&byte, 1, nullptr, 0, 5, &crc, 1, 1 << 20).is_ok());
    CHECK(scatter_copy(&byte, 1, nullptr, 0, INT64_MAX, &crc, 1, 1).is_ok());
}
