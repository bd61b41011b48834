// Arithmetic on offsets that may come from damaged headers: every sum says whether it fits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashckpt {

// Returns false if `a + b` does not fit.
inline bool checked_add(int64_t a, int64_t b, int64_t* sum) noexcept {
    return !__builtin_add_overflow(a, b, sum);
}

// Returns the number of chunks in `length` bytes; the last one may be shorter. `length` must not be negative,
// `chunk_bytes` must be positive. Written without `length + chunk_bytes - 1`, which can overflow.
inline int64_t chunk_count(int64_t length, int64_t chunk_bytes) noexcept {
    return length / chunk_bytes + (length % chunk_bytes != 0 ? 1 : 0);
}

// Returns where chunk `index` begins and how long it is; `index` must be below chunk_count().
struct ChunkRange {
    int64_t begin;
    int64_t end;
};
inline ChunkRange chunk_range(int64_t index, int64_t length, int64_t chunk_bytes) noexcept {
    const int64_t begin = index * chunk_bytes;
    const int64_t rest = length - begin;
    return {begin, begin + (rest < chunk_bytes ? rest : chunk_bytes)};
}

}  // namespace flashckpt
