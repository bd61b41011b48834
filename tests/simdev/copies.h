// Copies between the host and the simulated devices, and what is counted of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>

namespace simdev {

enum class Direction { kHostToDevice, kDeviceToHost, kDeviceToDevice };

// Copies in one direction since the last reset.
struct CopyCounts {
    std::atomic<int64_t> asynchronous{0};
    std::atomic<int64_t> synchronous{0};
    std::atomic<int64_t> bytes{0};
};

const CopyCounts& copy_counts(Direction direction);
void reset_copy_counts();

// Bytes per second between host and device, per device and direction. 0: no limit.
void set_bandwidth(double pinned, double pageable);

// Torch's `_copy_from`: copies `from` into `to`, of which at least one is on sim, in the order of the current stream.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

}  // namespace simdev
