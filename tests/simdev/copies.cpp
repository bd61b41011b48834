#include "copies.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>

#include "memory.h"
#include "streams.h"
#include "tensors.h"

namespace simdev {
namespace {

using at::Tensor;

std::array<CopyCounts, 3> g_copy_counts;
std::atomic<double> g_pinned_bandwidth{0};
std::atomic<double> g_pageable_bandwidth{0};

// The link between the host and one device in one direction. Copies of several streams share its bandwidth.
class Link {
  public:
    // Takes the time that `bytes` need on the link. Called by workers.
    void pass(int64_t bytes, double bandwidth) {
        const auto duration = std::chrono::duration<double>(static_cast<double>(bytes) / bandwidth);
        Clock::time_point done;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            done = std::max(Clock::now(), free_at_) + std::chrono::duration_cast<Clock::duration>(duration);
            free_at_ = done;
        }
        sleep_until(done);
    }

  private:
    std::mutex mutex_;
    Clock::time_point free_at_;
};

Link& link(c10::DeviceIndex index, Direction direction) {
    static auto* links = new std::array<std::array<Link, 2>, kDeviceCount>();
    return (*links)[static_cast<size_t>(index)][direction == Direction::kHostToDevice ? 0 : 1];
}

bool is_plain_memory(const Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }

// Whether the copy moves bytes as they are, so that a device can do it without a temporary on the host.
bool is_byte_copy(const Tensor& from, const Tensor& to) {
    return from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() && from.strides() == to.strides() &&
           is_plain_memory(to) && from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
}

// Moves the bytes in slices, each when the link has had the time for it: whoever reads or writes too early sees a
// copy that is partly done.
void copy_bytes_paced(char* to, const char* from, int64_t size_bytes, Link& link, double bandwidth) {
    constexpr int64_t kSlices = 32;
    constexpr int64_t kSmallestSlice = int64_t{64} << 10;
    const int64_t slice = std::max(kSmallestSlice, size_bytes / kSlices);
    for (int64_t at = 0; at < size_bytes; at += slice) {
        const int64_t length = std::min(slice, size_bytes - at);
        link.pass(length, bandwidth);
        std::memcpy(to + at, from + at, static_cast<size_t>(length));
    }
}

// One copy between host and device; both tensors are those that workers may use.
struct HostCopy {
    Tensor to;
    Tensor from;
    c10::DeviceIndex device;
    Direction direction;
    bool pinned;

    void run() const {
        const double bandwidth = pinned ? g_pinned_bandwidth : g_pageable_bandwidth;
        const int64_t size_bytes = static_cast<int64_t>(to.nbytes());
        Link& used = link(device, direction);
        Tensor target = to;
        if (bandwidth <= 0) {
            target.copy_(from);
        } else if (is_byte_copy(from, to)) {
            copy_bytes_paced(static_cast<char*>(to.data_ptr()), static_cast<const char*>(from.data_ptr()), size_bytes,
                             used, bandwidth);
        } else {
            used.pass(size_bytes, bandwidth);
            target.copy_(from);
        }
    }
};

// As CUDA: asynchronous if the host memory is pinned and the device can do it alone. It can change the type on
// its way out, but not on its way in, and strides on the host take a temporary there.
bool is_asynchronous(const Tensor& from, const Tensor& host, bool pinned, Direction direction, const Tensor& to) {
    if (!pinned || !host.is_contiguous()) return false;
    if (direction == Direction::kHostToDevice) {
        return from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes();
    }
    return true;
}

void copy_with_host(const Tensor& from, const Tensor& to, bool non_blocking) {
    const bool inbound = is_sim(to);
    const Direction direction = inbound ? Direction::kHostToDevice : Direction::kDeviceToHost;
    const Tensor& host = inbound ? from : to;
    const c10::Device device = inbound ? to.device() : from.device();
    OnDevice on(device);
    check_before_launch(device.index());

    const bool pinned = is_plain_memory(host) ? is_pinned_range(host.data_ptr(), host.nbytes())
                                              : is_pinned(host.data_ptr());
    const bool asynchronous = non_blocking && is_asynchronous(from, host, pinned, direction, to);
    CopyCounts& counts = g_copy_counts[static_cast<size_t>(direction)];
    ++(asynchronous ? counts.asynchronous : counts.synchronous);
    counts.bytes += static_cast<int64_t>(to.nbytes());

    const c10::Stream stream = current_stream(device.index());
    HostCopy copy{for_workers(to), for_workers(from).expand(to.sizes()), device.index(), direction, pinned};
    if (asynchronous) {
        enqueue(stream, [copy] { copy.run(); });
        record_pinned_use(host.data_ptr(), stream);
    } else {
        run_and_wait(stream, [&] { copy.run(); });
        raise_failure_of_work(device.index());
    }
}

// On the source's current stream. Between devices, what is queued on the target's current stream comes before it,
// and what is queued there later comes after it.
void copy_between_devices(const Tensor& from, const Tensor& to) {
    const c10::Stream stream = current_stream(from.device().index());
    const c10::Stream other = current_stream(to.device().index());
    check_before_launch(from.device().index());
    CopyCounts& counts = g_copy_counts[static_cast<size_t>(Direction::kDeviceToDevice)];
    ++counts.asynchronous;
    counts.bytes += static_cast<int64_t>(to.nbytes());
    if (other != stream) wait_in_stream(stream, mark(other));
    enqueue(stream, [target = for_workers(to), source = for_workers(from).expand(to.sizes())]() mutable {
        target.copy_(source);
    });
    if (other != stream) wait_in_stream(other, mark(stream));
}

}  // namespace

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
    if (to.numel() == 0) return to;
    if (is_sim(from) && is_sim(to)) {
        copy_between_devices(from, to);
    } else {
        copy_with_host(from, to, non_blocking);
    }
    return to;
}

const CopyCounts& copy_counts(Direction direction) { return g_copy_counts[static_cast<size_t>(direction)]; }

void reset_copy_counts() {
    for (CopyCounts& counts : g_copy_counts) {
        counts.asynchronous = 0;
        counts.synchronous = 0;
        counts.bytes = 0;
    }
}

void set_bandwidth(double pinned, double pageable) {
    g_pinned_bandwidth = pinned;
    g_pageable_bandwidth = pageable;
}

}  // namespace simdev
