// The kernel for x86-64 with PCLMULQDQ: folds 64 bytes at a time by carry-less multiplication, and stores
// what it loads on the way.
#if defined(__x86_64__)

#include <nmmintrin.h>
#include <wmmintrin.h>

#include <cstring>

#include "kernels.h"
#include "polynomial.h"

#define TARGET __attribute__((target("sse4.2,pclmul")))
#define INLINE __attribute__((target("sse4.2,pclmul"), always_inline)) inline

namespace flashckpt {
namespace {

enum class Mode { kCrcOnly, kCached, kStreaming };

// `accumulator` moved on by the distance that `constants` stand for, plus `next`. A register holds its
// polynomial bit-reflected, the low half being the higher powers; a product of two reflected 64-bit factors
// comes out multiplied by x, and a 32-bit remainder shifted left by one stands for remainder * x^31. So
// folding over D bits takes x^(D+32) for the low half and x^(D-32) for the high one.
INLINE __m128i fold(__m128i accumulator, __m128i constants, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(accumulator, constants, 0x00);
    const __m128i high = _mm_clmulepi64_si128(accumulator, constants, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

constexpr uint64_t kFold64Low = fold_constant(512 + 32);
constexpr uint64_t kFold64High = fold_constant(512 - 32);
constexpr uint64_t kFold16Low = fold_constant(128 + 32);
constexpr uint64_t kFold16High = fold_constant(128 - 32);

INLINE __m128i constants(uint64_t low, uint64_t high) {
    return _mm_set_epi64x(static_cast<long long>(high), static_cast<long long>(low));
}

template <Mode mode>
INLINE void store(uint8_t* destination, __m128i value) {
    if (mode == Mode::kStreaming) _mm_stream_si128(reinterpret_cast<__m128i*>(destination), value);
    if (mode == Mode::kCached) _mm_storeu_si128(reinterpret_cast<__m128i*>(destination), value);
}

INLINE __m128i load(const uint8_t* source) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
}

// Short runs and unaligned ends: the CRC32 instruction takes eight bytes or one byte at a time.
template <Mode mode>
INLINE uint32_t plain(uint32_t state, uint8_t* destination, const uint8_t* source, size_t length) {
    size_t i = 0;
    for (; i + 8 <= length; i += 8) {
        uint64_t word;
        std::memcpy(&word, source + i, 8);
        if (mode != Mode::kCrcOnly) std::memcpy(destination + i, &word, 8);
        state = static_cast<uint32_t>(_mm_crc32_u64(state, word));
    }
    for (; i < length; ++i) {
        if (mode != Mode::kCrcOnly) destination[i] = source[i];
        state = _mm_crc32_u8(state, source[i]);
    }
    return state;
}

template <Mode mode>
TARGET uint32_t run(uint32_t state, uint8_t* destination, const uint8_t* source, size_t length) {
    if (mode == Mode::kStreaming) {
        // Streaming stores need aligned addresses; whole cache lines from the start spare a partial flush.
        const size_t misaligned = static_cast<size_t>(-reinterpret_cast<uintptr_t>(destination)) & 63;
        const size_t head = misaligned < length ? misaligned : length;
        state = plain<Mode::kCached>(state, destination, source, head);
        destination += head;
        source += head;
        length -= head;
    }
    if (length < 64)
        return plain<mode == Mode::kCrcOnly ? mode : Mode::kCached>(state, destination, source, length);

    __m128i a0 = load(source), a1 = load(source + 16), a2 = load(source + 32), a3 = load(source + 48);
    store<mode>(destination, a0);
    store<mode>(destination + 16, a1);
    store<mode>(destination + 32, a2);
    store<mode>(destination + 48, a3);
    a0 = _mm_xor_si128(a0, _mm_cvtsi32_si128(static_cast<int>(state)));
    size_t i = 64;
    const __m128i by64 = constants(kFold64Low, kFold64High);
    for (; i + 64 <= length; i += 64) {
        if (mode != Mode::kCrcOnly)
            _mm_prefetch(reinterpret_cast<const char*>(source + i + 1024), _MM_HINT_T0);
        const __m128i b0 = load(source + i), b1 = load(source + i + 16);
        const __m128i b2 = load(source + i + 32), b3 = load(source + i + 48);
        if (mode != Mode::kCrcOnly) {
            store<mode>(destination + i, b0);
            store<mode>(destination + i + 16, b1);
            store<mode>(destination + i + 32, b2);
            store<mode>(destination + i + 48, b3);
        }
        a0 = fold(a0, by64, b0);
        a1 = fold(a1, by64, b1);
        a2 = fold(a2, by64, b2);
        a3 = fold(a3, by64, b3);
    }
    const __m128i by16 = constants(kFold16Low, kFold16High);
    a1 = fold(a0, by16, a1);
    a2 = fold(a1, by16, a2);
    a3 = fold(a2, by16, a3);
    // 16 bytes are left. They have the same remainder as all bytes before; the CRC32 instruction reduces
    // them.
    uint64_t rest = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(a3)));
    rest = _mm_crc32_u64(rest, static_cast<uint64_t>(_mm_extract_epi64(a3, 1)));
    return plain<mode == Mode::kCrcOnly ? mode : Mode::kCached>(
        static_cast<uint32_t>(rest), destination + (mode == Mode::kCrcOnly ? 0 : i), source + i, length - i);
}

uint32_t update(uint32_t state, const uint8_t* data, size_t length) {
    return run<Mode::kCrcOnly>(state, nullptr, data, length);
}

uint32_t copy(uint32_t state, uint8_t* destination, const uint8_t* source, size_t length, Stores stores) {
    return stores == Stores::kStreaming ? run<Mode::kStreaming>(state, destination, source, length)
                                        : run<Mode::kCached>(state, destination, source, length);
}

bool supported() { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }

}  // namespace

const Kernel kPclmulKernel{"pclmul", supported, update, copy, copy_then_update<update>};

}  // namespace flashckpt

#endif
