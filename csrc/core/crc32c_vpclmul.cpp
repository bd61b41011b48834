// The kernel for x86-64 with AVX2 and VPCLMULQDQ: as crc32c_pclmul.cpp, 256 bytes at a time.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "kernels.h"
#include "polynomial.h"

#define TARGET __attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq")))
#define INLINE __attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq"), always_inline)) inline

namespace flashckpt {
namespace {

enum class Mode { kCrcOnly, kCached, kStreaming };

constexpr size_t kLanes = 8;
constexpr size_t kRound = kLanes * 32;
// How far ahead of the loads the source is fetched.
constexpr size_t kPrefetchBytes = 2048;

// See fold() in crc32c_pclmul.cpp for the constants; here both 128-bit halves fold over the same distance.
INLINE __m256i fold(__m256i accumulator, __m256i constants, __m256i next) {
    const __m256i low = _mm256_clmulepi64_epi128(accumulator, constants, 0x00);
    const __m256i high = _mm256_clmulepi64_epi128(accumulator, constants, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

template <uint64_t kBits>
INLINE __m256i constants() {
    constexpr auto kLow = static_cast<long long>(fold_constant(kBits + 32));
    constexpr auto kHigh = static_cast<long long>(fold_constant(kBits - 32));
    return _mm256_set_epi64x(kHigh, kLow, kHigh, kLow);
}

INLINE __m256i load(const uint8_t* source) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
}

template <Mode mode>
INLINE void store(uint8_t* destination, __m256i value) {
    if (mode == Mode::kStreaming) _mm256_stream_si256(reinterpret_cast<__m256i*>(destination), value);
    if (mode == Mode::kCached) _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination), value);
}

// Short runs and unaligned ends: the CRC32 instruction takes eight bytes or one byte at a time.
template <bool kCopies>
INLINE uint32_t plain(uint32_t state, uint8_t* destination, const uint8_t* source, size_t length) {
    size_t i = 0;
    for (; i + 8 <= length; i += 8) {
        uint64_t word;
        std::memcpy(&word, source + i, 8);
        if (kCopies) std::memcpy(destination + i, &word, 8);
        state = static_cast<uint32_t>(_mm_crc32_u64(state, word));
    }
    for (; i < length; ++i) {
        if (kCopies) destination[i] = source[i];
        state = _mm_crc32_u8(state, source[i]);
    }
    return state;
}

INLINE __m256i seed_of(uint32_t state) {
    return _mm256_set_epi32(0, 0, 0, 0, 0, 0, 0, static_cast<int>(state));
}

// The CRC state that 32 folded bytes stand for.
INLINE uint32_t reduce(__m256i folded) {
    const __m128i by16 = _mm_set_epi64x(static_cast<long long>(fold_constant(128 - 32)),
                                        static_cast<long long>(fold_constant(128 + 32)));
    const __m128i first_half = _mm256_castsi256_si128(folded);
    const __m128i low = _mm_clmulepi64_si128(first_half, by16, 0x00);
    const __m128i high = _mm_clmulepi64_si128(first_half, by16, 0x11);
    const __m128i joined = _mm_xor_si128(_mm_xor_si128(low, high), _mm256_extracti128_si256(folded, 1));
    // 16 bytes are left. They have the same remainder as all bytes before; the CRC32 instruction reduces
    // them.
    const uint64_t state = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(joined)));
    return static_cast<uint32_t>(_mm_crc32_u64(state, static_cast<uint64_t>(_mm_extract_epi64(joined, 1))));
}

template <Mode mode>
TARGET uint32_t run(uint32_t state, uint8_t* destination, const uint8_t* source, size_t length) {
    constexpr bool kCopies = mode != Mode::kCrcOnly;
    if (mode == Mode::kStreaming) {
        // Streaming stores need aligned addresses; whole cache lines from the start spare a partial flush.
        const size_t misaligned = static_cast<size_t>(-reinterpret_cast<uintptr_t>(destination)) & 63;
        const size_t head = misaligned < length ? misaligned : length;
        state = plain<true>(state, destination, source, head);
        destination += head;
        source += head;
        length -= head;
    }
    if (length < 64) return plain<kCopies>(state, destination, source, length);

    const __m256i seed = seed_of(state);
    const __m256i by32 = constants<256>();
    __m256i last;
    size_t i = 0;
    if (length >= kRound) {
        __m256i a[kLanes];
        for (size_t lane = 0; lane < kLanes; ++lane) {
            a[lane] = load(source + 32 * lane);
            if (kCopies) store<mode>(destination + 32 * lane, a[lane]);
        }
        a[0] = _mm256_xor_si256(a[0], seed);
        const __m256i by_round = constants<kRound * 8>();
        for (i = kRound; i + kRound <= length; i += kRound) {
            if (kCopies) {
                for (size_t line = 0; line < kRound; line += 64) {
                    _mm_prefetch(reinterpret_cast<const char*>(source + i + kPrefetchBytes + line),
                                 _MM_HINT_T0);
                }
            }
            for (size_t lane = 0; lane < kLanes; ++lane) {
                const __m256i next = load(source + i + 32 * lane);
                if (kCopies) store<mode>(destination + i + 32 * lane, next);
                a[lane] = fold(a[lane], by_round, next);
            }
        }
        last = a[0];
        for (size_t lane = 1; lane < kLanes; ++lane) last = fold(last, by32, a[lane]);
    } else {
        last = load(source);
        if (kCopies) store<mode>(destination, last);
        last = _mm256_xor_si256(last, seed);
        i = 32;
    }
    for (; i + 32 <= length; i += 32) {
        const __m256i next = load(source + i);
        if (kCopies) store<mode>(destination + i, next);
        last = fold(last, by32, next);
    }

    return plain<kCopies>(reduce(last), kCopies ? destination + i : nullptr, source + i, length - i);
}

// If only the checksum is wanted and the bytes are in the cache, the multiplier is the limit while the
// CRC32 unit idles. So a block is split in four: one part is folded, and at the same time the CRC32
// instruction takes the other three, in a proportion that keeps both units busy.
constexpr size_t kSteps = 128;
constexpr size_t kFoldedStep = 4 * 32;
constexpr size_t kWordStep = 5 * 8;
constexpr size_t kFoldedPart = kSteps * kFoldedStep;
constexpr size_t kWordPart = kSteps * kWordStep;
constexpr size_t kMixedBlock = kFoldedPart + 3 * kWordPart;
constexpr ShiftTable kWordShift(zero_bytes_factor(kWordPart));

INLINE uint32_t crc_word(uint32_t state, const uint8_t* data) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    return static_cast<uint32_t>(_mm_crc32_u64(state, word));
}

TARGET uint32_t update_mixed(uint32_t state, const uint8_t* data) {
    const uint8_t* words = data + kFoldedPart;
    const __m256i by_step = constants<kFoldedStep * 8>();
    __m256i a0 = _mm256_xor_si256(seed_of(state), load(data));
    __m256i a1 = load(data + 32), a2 = load(data + 64), a3 = load(data + 96);
    uint32_t b0 = 0, b1 = 0, b2 = 0;
    for (size_t step = 0;;) {
        for (size_t i = 0; i < kWordStep; i += 8) {
            b0 = crc_word(b0, words + i);
            b1 = crc_word(b1, words + kWordPart + i);
            b2 = crc_word(b2, words + 2 * kWordPart + i);
        }
        words += kWordStep;
        data += kFoldedStep;
        if (++step == kSteps) break;
        a0 = fold(a0, by_step, load(data));
        a1 = fold(a1, by_step, load(data + 32));
        a2 = fold(a2, by_step, load(data + 64));
        a3 = fold(a3, by_step, load(data + 96));
    }
    const __m256i by32 = constants<256>();
    const uint32_t folded = reduce(fold(fold(fold(a0, by32, a1), by32, a2), by32, a3));
    return kWordShift(kWordShift(kWordShift(folded) ^ b0) ^ b1) ^ b2;
}

TARGET uint32_t update(uint32_t state, const uint8_t* data, size_t length) {
    for (; length >= kMixedBlock; data += kMixedBlock, length -= kMixedBlock)
        state = update_mixed(state, data);
    return run<Mode::kCrcOnly>(state, nullptr, data, length);
}

uint32_t copy(uint32_t state, uint8_t* destination, const uint8_t* source, size_t length, Stores stores) {
    return stores == Stores::kStreaming ? run<Mode::kStreaming>(state, destination, source, length)
                                        : run<Mode::kCached>(state, destination, source, length);
}

TARGET uint32_t update_while_copying(uint32_t state, const uint8_t* data, size_t length, uint8_t* destination,
                                     const uint8_t* source, size_t copy_length) {
    // Streaming stores need aligned addresses.
    const size_t head = static_cast<size_t>(-reinterpret_cast<uintptr_t>(destination)) & 63;
    if (head <= copy_length && length >= kRound && copy_length - head >= kRound) {
        std::memcpy(destination, source, head);
        destination += head;
        source += head;
        copy_length -= head;
        const size_t both = (length < copy_length ? length : copy_length) / kRound * kRound;
        __m256i a[kLanes];
        for (size_t lane = 0; lane < kLanes; ++lane) {
            a[lane] = load(data + 32 * lane);
            store<Mode::kStreaming>(destination + 32 * lane, load(source + 32 * lane));
        }
        a[0] = _mm256_xor_si256(a[0], seed_of(state));
        const __m256i by_round = constants<kRound * 8>();
        for (size_t i = kRound; i < both; i += kRound) {
            for (size_t lane = 0; lane < kLanes; ++lane) {
                a[lane] = fold(a[lane], by_round, load(data + i + 32 * lane));
                store<Mode::kStreaming>(destination + i + 32 * lane, load(source + i + 32 * lane));
            }
        }
        const __m256i by32 = constants<256>();
        __m256i last = a[0];
        for (size_t lane = 1; lane < kLanes; ++lane) last = fold(last, by32, a[lane]);
        state = reduce(last);
        data += both;
        length -= both;
        destination += both;
        source += both;
        copy_length -= both;
    }
    if (copy_length != 0) streaming_copy(destination, source, copy_length);
    return update(state, data, length);
}

bool supported() {
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul") &&
           __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq");
}

}  // namespace

const Kernel kVpclmulKernel{"vpclmul", supported, update, copy, update_while_copying};

}  // namespace flashckpt

#endif
