// A test is a named function. CHECK records a failure with both values and continues.
#pragma once

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace flashckpt::test {

struct Test {
    const char* name;
    void (*run)();
};

std::vector<Test>& tests();
void fail(const char* file, int line, const std::string& what);

struct Registered {
    Registered(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

template <typename A, typename B>
void check_equal(const char* file, int line, const char* text, const A& found, const B& expected) {
    if (found == expected) return;
    std::ostringstream out;
    out << text << ": found " << found << ", expected " << expected;
    fail(file, line, out.str());
}

// CRC32C one bit at a time: slow, and shares nothing with the kernels.
uint32_t reference_crc(const uint8_t* data, size_t length, uint32_t seed = 0);

std::vector<uint8_t> random_bytes(size_t length, uint32_t seed);

// Runs `body` once with every kernel of this machine, and puts the first choice back.
void with_each_kernel(void (*body)(const std::string& kernel));

// An unnamed file with the given content.
class TemporaryFile {
  public:
    explicit TemporaryFile(const std::vector<uint8_t>& content);
    ~TemporaryFile();
    TemporaryFile(const TemporaryFile&) = delete;
    TemporaryFile& operator=(const TemporaryFile&) = delete;
    int fd() const { return fd_; }
    void truncate(int64_t length);

  private:
    int fd_;
};

std::vector<uint32_t> chunk_crcs(const std::vector<uint8_t>& data, size_t offset, size_t chunk_bytes);

}  // namespace flashckpt::test

#define TEST(name)                                                           \
    static void name();                                                      \
    static const flashckpt::test::Registered registered_##name(#name, name); \
    static void name()
#define CHECK(condition) ((condition) ? void() : flashckpt::test::fail(__FILE__, __LINE__, #condition))
#define CHECK_EQUAL(found, expected) flashckpt::test::check_equal(__FILE__, __LINE__, #found, found, expected)
