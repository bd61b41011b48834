#include "prefault.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "arguments.h"
#include "workers.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // older headers lack it; the kernel answers EINVAL if it does too
#endif

namespace flashckpt {
namespace {

// One system call faults this much, so that threads share the work and signals are handled soon.
constexpr uintptr_t kStepBytes = uintptr_t{64} << 20;

int populate(uintptr_t begin, size_t length) noexcept {
    while (::madvise(reinterpret_cast<void*>(begin), length, MADV_POPULATE_WRITE) != 0) {
        if (errno == EINTR) continue;
        if (errno == EINVAL) return touch_pages(reinterpret_cast<void*>(begin), length);
        return errno;
    }
    return 0;
}

}  // namespace

int touch_pages(void* address, size_t length) noexcept {
    if (length == 0) return 0;
    const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    const auto last = (reinterpret_cast<uintptr_t>(address) + (length - 1)) & ~(page - 1);
    for (uintptr_t at = reinterpret_cast<uintptr_t>(address) & ~(page - 1);; at += page) {
        // The kernel ORs 0 into the page's first word, atomically. Doing it here would be quicker, but an
        // unavailable page would then be a SIGBUS instead of an EFAULT. No thread waits on the futex, so none
        // is woken.
        uint32_t unused = 0;
        const int operation = FUTEX_OP(FUTEX_OP_OR, 0, FUTEX_OP_CMP_EQ, 0);
        if (::syscall(SYS_futex, &unused, FUTEX_WAKE_OP | FUTEX_PRIVATE_FLAG, 0, nullptr,
                      reinterpret_cast<uint32_t*>(at), operation) < 0 &&
            errno != EINTR && errno != EAGAIN) {
            return errno;
        }
        if (at == last) return 0;
    }
}

Status prefault(void* address, size_t length, int threads) noexcept {
    return without_exceptions([&] {
        if (threads < 1 || threads > kMaxThreads) {
            return Status::invalid(
                expected(("threads from 1 to " + std::to_string(kMaxThreads)).c_str(), threads));
        }
        if (length == 0) return Status::ok();
        const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
        const uintptr_t begin = reinterpret_cast<uintptr_t>(address) & ~(page - 1);
        uintptr_t end = 0;
        if (__builtin_add_overflow(reinterpret_cast<uintptr_t>(address), length, &end)) {
            return Status::invalid("expected a range within the address space");
        }
        const uintptr_t bytes = ((end - begin) + page - 1) & ~(page - 1);
        const auto steps = static_cast<int64_t>(bytes / kStepBytes + (bytes % kStepBytes != 0 ? 1 : 0));
        Claims claims(steps, 1);
        FirstError error;
        run_in_threads(static_cast<int>(std::min<int64_t>(threads, steps)), [&] {
            int64_t first = 0, last = 0;
            while (error.get() == 0 && claims.take(&first, &last)) {
                const uintptr_t offset = static_cast<uintptr_t>(first) * kStepBytes;
                const int result = populate(begin + offset, std::min(kStepBytes, bytes - offset));
                if (result != 0) error.set(result);
            }
        });
        return error.get() == 0 ? Status::ok() : Status::io(error.get(), {});
    });
}

}  // namespace flashckpt
