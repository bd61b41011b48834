// Chooses the kernel, and implements what does not depend on it.
#include "crc32c.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "kernels.h"
#include "polynomial.h"

namespace flashckpt {
namespace {

// Best first.
const Kernel* const kKernels[] = {
#if defined(__x86_64__)
    &kVpclmulKernel,
    &kPclmulKernel,
    &kSse42Kernel,
#elif defined(__aarch64__)
    &kArmv8Kernel,
#endif
    &kPortableKernel,
};

const Kernel* best_kernel() noexcept {
    for (const Kernel* kernel : kKernels) {
        if (kernel->supported()) return kernel;
    }
    return &kPortableKernel;
}

std::atomic<const Kernel*>& active() noexcept {
    static std::atomic<const Kernel*> kernel{best_kernel()};
    return kernel;
}

}  // namespace

const Kernel& active_kernel() noexcept { return *active().load(std::memory_order_relaxed); }

std::vector<std::string> available_kernels() {
    std::vector<std::string> names;
    for (const Kernel* kernel : kKernels) {
        if (kernel->supported()) names.emplace_back(kernel->name);
    }
    return names;
}

Status set_kernel(const std::string& name) noexcept {
    return without_exceptions([&] {
        std::string known;
        for (const Kernel* kernel : kKernels) {
            if (!kernel->supported()) continue;
            if (name == kernel->name) {
                active().store(kernel, std::memory_order_relaxed);
                return Status::ok();
            }
            known += known.empty() ? kernel->name : std::string(", ") + kernel->name;
        }
        return Status::invalid("kernel '" + name + "': expected one of " + known);
    });
}

uint32_t crc32c(uint32_t seed, const void* data, size_t length) noexcept {
    return ~active_kernel().update(~seed, static_cast<const uint8_t*>(data), length);
}

uint32_t copy_crc32c(uint32_t seed, void* destination, const void* source, size_t length) noexcept {
    const Stores stores = length >= kStreamingBytes ? Stores::kStreaming : Stores::kCached;
    const uint32_t state = active_kernel().copy(~seed, static_cast<uint8_t*>(destination),
                                                static_cast<const uint8_t*>(source), length, stores);
    if (stores == Stores::kStreaming) store_fence();
    return ~state;
}

uint32_t crc32c_zeros(uint32_t state, uint64_t length) noexcept {
    return multiply(zero_bytes_factor(length), state);
}

uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t second_length) noexcept {
    // Both inversions cancel out: the states differ from the CRCs by all ones before and after.
    return crc32c_zeros(first, second_length) ^ second;
}

void streaming_copy(void* destination, const void* source, size_t length) noexcept {
    auto* to = static_cast<uint8_t*>(destination);
    const auto* from = static_cast<const uint8_t*>(source);
#if defined(__x86_64__)
    const size_t misaligned = static_cast<size_t>(-reinterpret_cast<uintptr_t>(to)) & 63;
    if (length >= misaligned + 64) {
        std::memcpy(to, from, misaligned);
        to += misaligned;
        from += misaligned;
        length -= misaligned;
        for (; length >= 64; to += 64, from += 64, length -= 64) {
            const auto* words = reinterpret_cast<const __m128i*>(from);
            auto* out = reinterpret_cast<__m128i*>(to);
            const __m128i a = _mm_loadu_si128(words), b = _mm_loadu_si128(words + 1);
            const __m128i c = _mm_loadu_si128(words + 2), d = _mm_loadu_si128(words + 3);
            _mm_stream_si128(out, a);
            _mm_stream_si128(out + 1, b);
            _mm_stream_si128(out + 2, c);
            _mm_stream_si128(out + 3, d);
        }
    }
#endif
    std::memcpy(to, from, length);
}

void store_fence() noexcept {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

}  // namespace flashckpt
