#include "streams.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace simdev {
namespace {

constexpr auto kShutdownPatience = std::chrono::seconds(5);

// SAFETY: everything that a worker thread touches is leaked on purpose. Threads outlive the destructors of statics.
struct Moments {
    std::mutex mutex;
    std::condition_variable changed;
    bool stopping = false;
};

Moments& moments() {
    static auto* all = new Moments();
    return *all;
}

class Worker {
  public:
    explicit Worker(std::function<void(std::exception_ptr)> on_failure) : on_failure_(std::move(on_failure)) {
        std::thread([this] { run(); }).detach();
    }

    void push(Work work) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            queue_.push_back(std::move(work));
            ++queued_;
        }
        changed_.notify_all();
    }

    bool idle() {
        std::lock_guard<std::mutex> lock(mutex_);
        return finished_ == queued_;
    }

    // Waits for what is queued now, not for what others queue meanwhile.
    void drain() {
        std::unique_lock<std::mutex> lock(mutex_);
        const uint64_t target = queued_;
        changed_.wait(lock, [&] { return finished_ >= target; });
    }

    void drop_queued() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            finished_ += queue_.size();
            queue_.clear();
        }
        changed_.notify_all();
    }

    void wait_until_idle(Clock::time_point deadline) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait_until(lock, deadline, [&] { return finished_ == queued_; });
    }

  private:
    void run() {
        // A worker computes, it never records for a backward pass.
        at::AutoDispatchBelowADInplaceOrView no_autograd;
        at::init_num_threads();  // as many as torch.set_num_threads said, or the results differ in the last bits
        for (;;) {
            Work work = take();
            try {
                work();
            } catch (...) {
                on_failure_(std::current_exception());
            }
            work = nullptr;  // what it captured goes before somebody is told that it is done
            {
                std::lock_guard<std::mutex> lock(mutex_);
                ++finished_;
            }
            changed_.notify_all();
        }
    }

    Work take() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !queue_.empty(); });
        Work work = std::move(queue_.front());
        queue_.pop_front();
        return work;
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Work> queue_;
    uint64_t queued_ = 0;
    uint64_t finished_ = 0;
    std::function<void(std::exception_ptr)> on_failure_;
};

// The streams of one device; a stream's thread starts when something is queued on it first.
class DeviceStreams {
  public:
    Worker& worker(c10::StreamId id) {
        TORCH_CHECK(id >= 0 && id < kStreamsPerDevice, "expected a stream id of sim from 0 to ",
                    kStreamsPerDevice - 1, ", found ", id);
        std::lock_guard<std::mutex> lock(mutex_);
        auto& worker = workers_[static_cast<size_t>(id)];
        if (!worker) worker = std::make_unique<Worker>([this](std::exception_ptr failure) { keep(failure); });
        return *worker;
    }

    std::vector<Worker*> started() {
        std::lock_guard<std::mutex> lock(mutex_);
        std::vector<Worker*> found;
        for (auto& worker : workers_) {
            if (worker) found.push_back(worker.get());
        }
        return found;
    }

    c10::StreamId next_pool_id() { return 1 + next_++ % (kStreamsPerDevice - 1); }

    std::exception_ptr take_failure() {
        std::lock_guard<std::mutex> lock(mutex_);
        return std::exchange(failure_, nullptr);
    }

  private:
    void keep(std::exception_ptr failure) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!failure_) failure_ = std::move(failure);
    }

    std::mutex mutex_;
    std::array<std::unique_ptr<Worker>, kStreamsPerDevice> workers_;
    std::atomic<c10::StreamId> next_{0};
    std::exception_ptr failure_;
};

DeviceStreams& streams_of(c10::DeviceIndex index) {
    static auto* all = new std::array<DeviceStreams, kDeviceCount>();
    return (*all)[static_cast<size_t>(checked_device(index).index())];
}

Worker& worker_of(const c10::Stream& stream) { return streams_of(stream.device_index()).worker(stream.id()); }

Worker& reaper() {
    static auto* worker = new Worker([](std::exception_ptr) {});  // it only waits, and fills and unmaps memory
    return *worker;
}

thread_local c10::DeviceIndex this_threads_device = 0;
thread_local std::array<c10::StreamId, kDeviceCount> this_threads_streams{};

c10::Stream stream_of(c10::DeviceIndex index, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, checked_device(index), id);
}

}  // namespace

bool Moment::passed() const {
    std::lock_guard<std::mutex> lock(moments().mutex);
    return passed_at_.has_value();
}

void Moment::wait() const {
    std::unique_lock<std::mutex> lock(moments().mutex);
    moments().changed.wait(lock, [&] { return passed_at_.has_value() || moments().stopping; });
}

Clock::time_point Moment::time() const {
    std::lock_guard<std::mutex> lock(moments().mutex);
    TORCH_CHECK(passed_at_, "expected an event that has completed: synchronize with both events before their times "
                            "are compared");
    return *passed_at_;
}

void Moment::pass() {
    {
        std::lock_guard<std::mutex> lock(moments().mutex);
        passed_at_ = Clock::now();
    }
    moments().changed.notify_all();
}

c10::Device checked_device(c10::DeviceIndex index) {
    TORCH_CHECK(index >= 0 && index < kDeviceCount, "expected a device of sim from sim:0 to sim:", kDeviceCount - 1,
                ", found index ", static_cast<int>(index));
    return c10::Device(kDeviceType, index);
}

c10::DeviceIndex current_device() { return this_threads_device; }

void set_current_device(c10::DeviceIndex index) { this_threads_device = checked_device(index).index(); }

c10::Stream current_stream(c10::DeviceIndex index) {
    if (index < 0) index = current_device();
    const c10::Device device = checked_device(index);
    return stream_of(index, this_threads_streams[static_cast<size_t>(device.index())]);
}

void set_current_stream(const c10::Stream& stream) {
    const c10::Device device = checked_device(stream.device_index());
    this_threads_streams[static_cast<size_t>(device.index())] = stream.id();
}

c10::Stream default_stream(c10::DeviceIndex index) { return stream_of(index < 0 ? current_device() : index, 0); }

c10::Stream next_pool_stream(c10::DeviceIndex index) {
    if (index < 0) index = current_device();
    return stream_of(index, streams_of(index).next_pool_id());
}

void enqueue(const c10::Stream& stream, Work work) { worker_of(stream).push(std::move(work)); }

void run_and_wait(const c10::Stream& stream, const Work& work) {
    std::exception_ptr failure;
    enqueue(stream, [&] {
        try {
            work();
        } catch (...) {
            failure = std::current_exception();
        }
    });
    worker_of(stream).drain();
    if (failure) std::rethrow_exception(failure);
}

MomentPtr mark(const c10::Stream& stream) {
    auto moment = std::make_shared<Moment>();
    enqueue(stream, [moment] { moment->pass(); });
    return moment;
}

MomentPtr hold(const c10::Stream& stream) {
    auto moment = std::make_shared<Moment>();
    wait_in_stream(stream, moment);
    return moment;
}

void wait_in_stream(const c10::Stream& stream, MomentPtr moment) {
    enqueue(stream, [moment = std::move(moment)] { moment->wait(); });
}

bool is_idle(const c10::Stream& stream) { return worker_of(stream).idle(); }

void synchronize_stream(const c10::Stream& stream) {
    worker_of(stream).drain();
    raise_failure_of_work(stream.device_index());
}

void synchronize_device(c10::DeviceIndex index) {
    for (Worker* worker : streams_of(index).started()) worker->drain();
    raise_failure_of_work(index);
}

void raise_failure_of_work(c10::DeviceIndex index) {
    if (const std::exception_ptr failure = streams_of(index).take_failure()) std::rethrow_exception(failure);
}

void enqueue_reaper(Work work) { reaper().push(std::move(work)); }

void drain_reaper() { reaper().drain(); }

void sleep_until(Clock::time_point when) {
    std::unique_lock<std::mutex> lock(moments().mutex);
    while (!moments().stopping && Clock::now() < when) moments().changed.wait_until(lock, when);
}

void sleep_for(double seconds) {
    sleep_until(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
}

void shutdown() {
    {
        std::lock_guard<std::mutex> lock(moments().mutex);
        moments().stopping = true;
    }
    moments().changed.notify_all();
    std::vector<Worker*> workers{&reaper()};
    for (c10::DeviceIndex index = 0; index < kDeviceCount; ++index) {
        for (Worker* worker : streams_of(index).started()) workers.push_back(worker);
    }
    for (Worker* worker : workers) worker->drop_queued();
    const auto deadline = Clock::now() + kShutdownPatience;
    for (Worker* worker : workers) worker->wait_until_idle(deadline);
}

}  // namespace simdev
