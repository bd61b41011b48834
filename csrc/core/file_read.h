// Reading by pread, which answers a truncated file with a short count where a mapping would raise SIGBUS.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace flashckpt {

// Reads `length` bytes at `offset`. Returns how many were read (fewer only at the end of the file), or
// -errno.
int64_t read_fully(int fd, void* buffer, int64_t length, int64_t offset) noexcept;

struct Freed {
    void operator()(void* memory) const noexcept { std::free(memory); }
};
using Scratch = std::unique_ptr<uint8_t, Freed>;

// Allocates page-aligned memory for one thread's chunk. Null if there is none.
Scratch make_scratch(int64_t bytes) noexcept;

}  // namespace flashckpt
