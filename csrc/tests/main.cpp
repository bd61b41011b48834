#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "../core/crc32c.h"
#include "check.h"

namespace flashckpt::test {
namespace {
int failures = 0;
}

std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

void fail(const char* file, int line, const std::string& what) {
    ++failures;
    if (failures <= 20) std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

// Not instrumented: this is not under test, and would take half of the time of a sanitizer run.
__attribute__((no_sanitize("address", "undefined", "thread"))) uint32_t reference_crc(const uint8_t* data,
                                                                                      size_t length,
                                                                                      uint32_t seed) {
    uint32_t state = ~seed;
    for (size_t i = 0; i < length; ++i) {
        state ^= data[i];
        for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) != 0 ? 0x82f63b78u : 0);
    }
    return ~state;
}

std::vector<uint8_t> random_bytes(size_t length, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<uint8_t> bytes(length);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    return bytes;
}

void with_each_kernel(void (*body)(const std::string& kernel)) {
    const std::string first = active_kernel().name;
    for (const std::string& name : available_kernels()) {
        CHECK(set_kernel(name).is_ok());
        body(name);
    }
    CHECK(set_kernel(first).is_ok());
}

TemporaryFile::TemporaryFile(const std::vector<uint8_t>& content) {
    char name[] = "/dev/shm/flashckpt-native-test-XXXXXX";
    fd_ = ::mkstemp(name);
    if (fd_ < 0 || ::unlink(name) != 0 ||
        ::pwrite(fd_, content.data(), content.size(), 0) != static_cast<ssize_t>(content.size())) {
        std::perror("temporary file");
        std::exit(2);
    }
}

TemporaryFile::~TemporaryFile() { ::close(fd_); }

void TemporaryFile::truncate(int64_t length) { CHECK_EQUAL(::ftruncate(fd_, length), 0); }

std::vector<uint32_t> chunk_crcs(const std::vector<uint8_t>& data, size_t offset, size_t chunk_bytes) {
    std::vector<uint32_t> crcs;
    for (size_t at = offset; at < data.size(); at += chunk_bytes) {
        crcs.push_back(reference_crc(data.data() + at, std::min(chunk_bytes, data.size() - at)));
    }
    return crcs;
}

}  // namespace flashckpt::test

int main() {
    using namespace flashckpt::test;
    int passed = 0;
    int failed = 0;
    for (const Test& test : tests()) {
        const int before = failures;
        test.run();
        if (failures == before) {
            ++passed;
        } else {
            ++failed;
            std::fprintf(stderr, "FAILED %s\n", test.name);
        }
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 && passed > 0 ? 0 : 1;
}
