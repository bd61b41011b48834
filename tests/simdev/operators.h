// Copies and other operators of the simulated devices.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

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

// Queues `seconds` of work on the current stream.
void busy(double seconds);

// Operators that made the host wait since the last reset, one per line, each with its number of calls.
std::string operators_that_waited();

}  // namespace simdev
