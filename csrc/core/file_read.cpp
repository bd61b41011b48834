#include "file_read.h"

#include <unistd.h>

#include <cerrno>

namespace flashckpt {

int64_t read_fully(int fd, void* buffer, int64_t length, int64_t offset) noexcept {
    auto* to = static_cast<uint8_t*>(buffer);
    int64_t done = 0;
    while (done < length) {
        const ssize_t count = ::pread(fd, to + done, static_cast<size_t>(length - done), offset + done);
        if (count > 0) {
            done += count;
        } else if (count == 0) {
            break;
        } else if (errno != EINTR) {
            return -int64_t{errno};
        }
    }
    return done;
}

Scratch make_scratch(int64_t bytes) noexcept {
    constexpr int64_t kPage = 4096;
    const int64_t pages = bytes / kPage + 1;
    if (pages > INT64_MAX / kPage) return Scratch{};
    return Scratch{static_cast<uint8_t*>(std::aligned_alloc(kPage, static_cast<size_t>(pages * kPage)))};
}

}  // namespace flashckpt
