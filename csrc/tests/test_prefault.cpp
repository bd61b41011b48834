#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "../core/prefault.h"
#include "check.h"

using namespace flashckpt;
using namespace flashckpt::test;

namespace {

struct Mapping {
    uint8_t* data;
    size_t length;
    Mapping(int fd, size_t bytes, int protection = PROT_READ | PROT_WRITE) : length(bytes) {
        void* mapped = ::mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
        data = static_cast<uint8_t*>(mapped);
        CHECK(mapped != MAP_FAILED);
    }
    ~Mapping() { ::munmap(data, length); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    size_t resident_pages() const {
        std::vector<unsigned char> pages(length / 4096);
        CHECK_EQUAL(::mincore(data, length, pages.data()), 0);
        size_t count = 0;
        for (unsigned char page : pages) count += page & 1;
        return count;
    }
};

}  // namespace

TEST(prefault_makes_pages_resident_and_keeps_their_bytes) {
    for (int way = 0; way < 2; ++way) {
        TemporaryFile file({1, 2, 3});
        file.truncate(64 * 4096);
        const Mapping mapping(file.fd(), 64 * 4096);
        CHECK(mapping.resident_pages() < 64);
        // Odd ends: the pages that are touched only in part count too.
        if (way == 0) {
            CHECK(prefault(mapping.data + 4000, 62 * 4096, 2).is_ok());
        } else {
            CHECK_EQUAL(touch_pages(mapping.data + 4000, 62 * 4096), 0);
        }
        CHECK_EQUAL(mapping.resident_pages(), size_t{63});
        CHECK_EQUAL(mapping.data[2], 3);
        CHECK_EQUAL(mapping.data[3], 0);
    }
}

TEST(prefault_beyond_the_file_is_an_error_and_no_signal) {
    TemporaryFile file({});
    file.truncate(4 * 4096);
    const Mapping mapping(file.fd(), 16 * 4096);
    const Status status = prefault(mapping.data, mapping.length, 1);
    CHECK(status.code() == Code::kIo);
    CHECK_EQUAL(status.errno_value(), EFAULT);
    CHECK_EQUAL(touch_pages(mapping.data, mapping.length), EFAULT);
}

TEST(prefault_of_read_only_pages_is_an_error) {
    TemporaryFile file({});
    file.truncate(4 * 4096);
    const Mapping mapping(file.fd(), 4 * 4096, PROT_READ);
    CHECK(prefault(mapping.data, mapping.length, 1).code() == Code::kIo);
    CHECK_EQUAL(touch_pages(mapping.data, mapping.length), EFAULT);
}

TEST(prefault_loses_no_write_of_others) {
    TemporaryFile file({});
    file.truncate(16 * 4096);
    const Mapping mapping(file.fd(), 16 * 4096);
    std::atomic<bool> done{false};
    auto* counter = reinterpret_cast<std::atomic<uint32_t>*>(mapping.data + 4096);
    std::thread writer([&] {
        for (int i = 0; i < 200'000; ++i) counter->fetch_add(1, std::memory_order_relaxed);
        done = true;
    });
    do {
        CHECK(prefault(mapping.data, mapping.length, 2).is_ok());
        CHECK_EQUAL(touch_pages(mapping.data, mapping.length), 0);
    } while (!done);
    writer.join();
    CHECK_EQUAL(counter->load(), 200'000u);
}

TEST(prefault_of_nothing_and_with_bad_threads) {
    CHECK(prefault(nullptr, 0, 1).is_ok());
    CHECK_EQUAL(touch_pages(nullptr, 0), 0);
    uint8_t byte = 0;
    CHECK(prefault(&byte, 1, 0).code() == Code::kInvalidArgument);
    CHECK(prefault(&byte, SIZE_MAX, 1).code() == Code::kInvalidArgument);
}
