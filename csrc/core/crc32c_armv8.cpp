// The kernel for aarch64 with the CRC32 extension (all of ARMv8.1 and most of 8.0).
#if defined(__aarch64__)

#include <sys/auxv.h>

#include "kernels.h"

#if defined(__clang__)
#define FLASHCKPT_CRC_TARGET __attribute__((target("crc")))
#else
#define FLASHCKPT_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace flashckpt {
namespace {
// The instructions themselves, since <arm_acle.h> only declares them when the whole file is built with +crc.
FLASHCKPT_CRC_TARGET inline uint32_t crc_u64(uint32_t state, uint64_t word) {
    __asm__("crc32cx %w0, %w0, %x1" : "+r"(state) : "r"(word));
    return state;
}
FLASHCKPT_CRC_TARGET inline uint32_t crc_u8(uint32_t state, uint8_t byte) {
    __asm__("crc32cb %w0, %w0, %w1" : "+r"(state) : "r"(uint32_t{byte}));
    return state;
}
}  // namespace
}  // namespace flashckpt

#include "interleaved.h"

namespace flashckpt {
namespace {
bool supported() {
    constexpr unsigned long kHwcapCrc32 = 1ul << 7;  // HWCAP_CRC32, which older headers lack
    return (getauxval(AT_HWCAP) & kHwcapCrc32) != 0;
}
}  // namespace

const Kernel kArmv8Kernel{"armv8", supported, update_interleaved, copy_by_tiles<update_interleaved>,
                          copy_then_update<update_interleaved>};

}  // namespace flashckpt

#endif
