// CRC32C (Castagnoli, reflected) alone and fused with a copy, by the best kernel this CPU has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "status.h"

namespace flashckpt {

// How a copy's bytes reach memory. Streaming stores bypass the caches: they save the read of the
// destination that a cached store needs, and only pay off if the bytes are not read again soon. They
// are unordered until store_fence().
enum class Stores { kCached, kStreaming };

// From this size on a single copy gains from streaming stores; below it the destination likely stays cached.
inline constexpr size_t kStreamingBytes = size_t{1} << 20;

// One implementation. `state` is the CRC before its final inversion: start with ~seed, invert the result.
struct Kernel {
    const char* name;
    bool (*supported)();
    uint32_t (*update)(uint32_t state, const uint8_t* data, size_t length);
    uint32_t (*copy)(uint32_t state, uint8_t* destination, const uint8_t* source, size_t length,
                     Stores stores);
    // Sums `data` and at the same time copies other bytes with streaming stores: the sum waits for the
    // arithmetic units, the copy for memory.
    uint32_t (*update_while_copying)(uint32_t state, const uint8_t* data, size_t length, uint8_t* destination,
                                     const uint8_t* source, size_t copy_length);
};

// Returns the CRC32C of the bytes that `seed` is the CRC of, followed by `data`. `seed` 0 is the CRC of
// nothing.
uint32_t crc32c(uint32_t seed, const void* data, size_t length) noexcept;

// Does what crc32c() does, and copies the bytes in the same pass. The ranges must not overlap. Once this
// returns, the stores are ordered like any other.
uint32_t copy_crc32c(uint32_t seed, void* destination, const void* source, size_t length) noexcept;

// Returns the CRC of A followed by B, from the CRCs of both and the length of B, in O(log length).
uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t second_length) noexcept;

// Returns `state` after `length` zero bytes, in O(log length).
uint32_t crc32c_zeros(uint32_t state, uint64_t length) noexcept;

// Copies without a checksum and without filling the caches with the destination.
void streaming_copy(void* destination, const void* source, size_t length) noexcept;

// Orders streaming stores before whatever follows. Each thread that made some must call it.
void store_fence() noexcept;

// The kernel in use. Chosen once by CPU; set_kernel() is for tests and measurements.
const Kernel& active_kernel() noexcept;
std::vector<std::string> available_kernels();
Status set_kernel(const std::string& name) noexcept;

}  // namespace flashckpt
