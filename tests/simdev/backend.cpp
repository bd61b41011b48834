// What torch asks of a device beside operators, and the functions that Python calls (see __init__.py).
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>

#include "copies.h"
#include "memory.h"
#include "operators.h"
#include "streams.h"

namespace simdev {
namespace {

// Holds the moment that was recorded last.
class Event {
  public:
    void record(const c10::Stream& stream) {
        MomentPtr moment = mark(stream);
        std::lock_guard<std::mutex> lock(mutex_);
        last_ = std::move(moment);
    }
    MomentPtr last() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return last_;
    }

  private:
    mutable std::mutex mutex_;
    MomentPtr last_;
};

MomentPtr last_moment(void* event) { return event == nullptr ? nullptr : static_cast<Event*>(event)->last(); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
  public:
    c10::DeviceType type() const override { return kDeviceType; }
    c10::DeviceIndex deviceCount() const noexcept override { return kDeviceCount; }

    c10::Device getDevice() const override { return checked_device(current_device()); }
    void setDevice(c10::Device device) const override {
        if (device.has_index()) set_current_device(device.index());
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.index() >= 0 && device.index() < kDeviceCount) set_current_device(device.index());
    }
    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device before = getDevice();
        setDevice(device);
        return before;
    }

    c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
    c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(device.index()); }
    // Every stream has a thread of its own, so a priority is accepted and makes no difference.
    c10::Stream getNewStream(c10::Device device, int) const override { return next_pool_stream(device.index()); }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return next_pool_stream(device.index());
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        const c10::Stream before = current_stream(stream.device_index());
        set_current_stream(stream);
        return before;
    }
    bool queryStream(const c10::Stream& stream) const override { return is_idle(stream); }
    void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(stream); }
    void synchronizeDevice(const c10::DeviceIndex index) const override {
        synchronize_device(index < 0 ? current_device() : index);
    }
    bool isStreamCapturing(const c10::Stream&) const override { return false; }

    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        if (*event == nullptr) *event = new Event();
        static_cast<Event*>(*event)->record(stream);
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (MomentPtr moment = last_moment(event)) wait_in_stream(stream, std::move(moment));
    }
    bool queryEvent(void* event) const override {
        const MomentPtr moment = last_moment(event);
        return !moment || moment->passed();
    }
    void synchronizeEvent(void* event) const override {
        if (const MomentPtr moment = last_moment(event)) moment->wait();
    }
    double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
        const MomentPtr first = last_moment(begin);
        const MomentPtr second = last_moment(end);
        TORCH_CHECK(first && second, "expected two recorded events");
        return std::chrono::duration<double, std::milli>(second->time() - first->time()).count();
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event*>(event);
    }

    void recordDataPtrOnStream(const c10::DataPtr& block, const c10::Stream& stream) const override {
        device_allocator().recordStream(block, stream);
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

class Hooks final : public at::PrivateUse1HooksInterface {
  public:
    void init() const override {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

    c10::DeviceIndex deviceCount() const override { return kDeviceCount; }
    c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
    void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
        const c10::DeviceIndex before = current_device();
        set_current_device(index);
        return before;
    }
    // Negative: leave the current device as it is, which is what code that was built without a device asks for.
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
        return index < 0 ? current_device() : exchangeDevice(index);
    }

    bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
    at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
    at::Device getDeviceFromPtr(void* address) const override { return checked_device(device_of(address)); }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size_bytes) const override {
        resize_storage(*storage.unsafeGetStorageImpl(), size_bytes);
    }
};

struct RegisterHooks {
    RegisterHooks() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
} register_hooks;

thread_local std::string this_threads_message;

// Keeps the message of an exception for `simdev_message`, as no exception may leave a C function.
template <typename Body>
int without_exceptions(Body&& body) {
    try {
        body();
        return 0;
    } catch (const c10::Error& error) {
        this_threads_message = error.what_without_backtrace();
    } catch (const std::exception& error) {
        this_threads_message = error.what();
    }
    return 1;
}

}  // namespace
}  // namespace simdev

// Those that return an int and take no address give 1 on failure; `simdev_message` then tells the reason.
extern "C" {

const char* simdev_message() { return simdev::this_threads_message.c_str(); }

int simdev_busy(double seconds) {
    return simdev::without_exceptions([&] { simdev::busy(seconds); });
}

// Stops the current stream until `simdev_release` is called with what is returned.
void* simdev_hold() { return new simdev::MomentPtr(simdev::hold(simdev::current_stream(simdev::current_device()))); }

void simdev_release(void* held) {
    auto* moment = static_cast<simdev::MomentPtr*>(held);
    (*moment)->pass();
    delete moment;
}

void simdev_set_bandwidth(double pinned, double pageable) { simdev::set_bandwidth(pinned, pageable); }

// `counts` has room for nine: asynchronous, synchronous and bytes of host to device, device to host, device to device.
void simdev_counts(int64_t* counts) {
    for (const auto direction : {simdev::Direction::kHostToDevice, simdev::Direction::kDeviceToHost,
                                 simdev::Direction::kDeviceToDevice}) {
        const simdev::CopyCounts& copies = simdev::copy_counts(direction);
        *counts++ = copies.asynchronous;
        *counts++ = copies.synchronous;
        *counts++ = copies.bytes;
    }
}

void simdev_reset_counts() {
    simdev::reset_copy_counts();
    simdev::reset_operators_that_waited();
}

const char* simdev_operators_that_waited() {
    thread_local std::string lines;
    lines = simdev::operators_that_waited();
    return lines.c_str();
}

int simdev_host_register(void* address, size_t size_bytes) { return simdev::host_register(address, size_bytes); }

int simdev_host_unregister(void* address) { return simdev::host_unregister(address); }

size_t simdev_registered_bytes() { return simdev::registered_bytes(); }

void simdev_fail_registration(int code, int64_t after_calls, size_t above_bytes) {
    simdev::set_registration_fault({code, after_calls, above_bytes});
}

int simdev_take_last_error() { return simdev::take_last_error(); }

int simdev_set_memory_limit(int device, size_t limit_bytes) {
    return simdev::without_exceptions(
        [&] { simdev::set_memory_limit(static_cast<c10::DeviceIndex>(device), limit_bytes); });
}

void simdev_shutdown() { simdev::shutdown(); }

}  // extern "C"
