// Streams and events of the simulated devices. A stream is a thread that runs what is queued on it, in order.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

namespace simdev {

inline constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
inline constexpr c10::DeviceIndex kDeviceCount = 2;
// The default stream (id 0) and those that `torch.Stream()` hands out in turn, as many as CUDA's pool has.
inline constexpr c10::StreamId kStreamsPerDevice = 33;

using Clock = std::chrono::steady_clock;
using Work = std::function<void()>;

// One point in the order of one stream. It has passed when the stream has run everything queued before it.
class Moment {
  public:
    bool passed() const;
    // Blocks the calling thread until the point has passed, or until the process is shutting down.
    void wait() const;
    Clock::time_point time() const;

    void pass();

  private:
    std::optional<Clock::time_point> passed_at_;  // guarded by the one lock for all moments
};
using MomentPtr = std::shared_ptr<Moment>;

// ---- What is current, per thread

c10::Device checked_device(c10::DeviceIndex index);
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
c10::Stream current_stream(c10::DeviceIndex index);
void set_current_stream(const c10::Stream& stream);
c10::Stream default_stream(c10::DeviceIndex index);
c10::Stream next_pool_stream(c10::DeviceIndex index);

// ---- Queueing

// An exception that `work` throws is kept for `raise_failure_of_work`: nobody waits for it here.
void enqueue(const c10::Stream& stream, Work work);
// Queues `work` and waits for it. Its exception is rethrown here.
void run_and_wait(const c10::Stream& stream, const Work& work);
MomentPtr mark(const c10::Stream& stream);
// Stops `stream` at this place until somebody calls `pass` of what is returned.
MomentPtr hold(const c10::Stream& stream);
// Makes everything queued on `stream` from now on wait for `moment`.
void wait_in_stream(const c10::Stream& stream, MomentPtr moment);

bool is_idle(const c10::Stream& stream);
void synchronize_stream(const c10::Stream& stream);
void synchronize_device(c10::DeviceIndex index);
// Raises the first exception that queued work of the device has thrown since the last call.
void raise_failure_of_work(c10::DeviceIndex index);

// ---- The reaper: one more thread, for what has to happen once other streams have got somewhere

void enqueue_reaper(Work work);
void drain_reaper();

// ---- Time and the end of the process

// Returns early if the process is shutting down.
void sleep_until(Clock::time_point when);
void sleep_for(double seconds);
// Drops what is queued and waits for what is running, so that no thread is at work while statics are destroyed.
void shutdown();

}  // namespace simdev
