// The kernel for x86-64 with SSE4.2's CRC32 instruction and nothing more.
#if defined(__x86_64__)

#include <nmmintrin.h>

#include "kernels.h"

#define FLASHCKPT_CRC_TARGET __attribute__((target("sse4.2")))

namespace flashckpt {
namespace {
FLASHCKPT_CRC_TARGET inline uint32_t crc_u64(uint32_t state, uint64_t word) {
    return static_cast<uint32_t>(_mm_crc32_u64(state, word));
}
FLASHCKPT_CRC_TARGET inline uint32_t crc_u8(uint32_t state, uint8_t byte) {
    return _mm_crc32_u8(state, byte);
}
}  // namespace
}  // namespace flashckpt

#include "interleaved.h"

namespace flashckpt {
namespace {
bool supported() { return __builtin_cpu_supports("sse4.2"); }
}  // namespace

const Kernel kSse42Kernel{"sse42", supported, update_interleaved, copy_by_tiles<update_interleaved>,
                          copy_then_update<update_interleaved>};

}  // namespace flashckpt

#endif
