// Memory of the simulated devices, and host memory that they know as pinned.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>

#include "streams.h"

namespace simdev {

// What a freed block holds from the moment on that its stream gets there, and a fresh one until it is written.
inline constexpr unsigned char kPoison = 0xDD;

// ---- Device memory

c10::DeviceAllocator& device_allocator();
// The address at which workers find the byte that torch knows as `device_address`, which nobody can touch.
char* worker_address(const void* device_address);
bool is_worker_address(const void* address);
c10::DeviceIndex device_of(const void* device_address);
// Keeps the block from being reused until `stream` has run what is queued on it when the block is freed.
void record_use(const void* device_address, const c10::Stream& stream);
// Gives `storage` a block of another size and copies what fits, in the order of the device's current stream.
void resize_storage(c10::StorageImpl& storage, size_t size_bytes);
// Allocations beyond this raise torch.OutOfMemoryError. 0: no limit.
void set_memory_limit(c10::DeviceIndex index, size_t limit_bytes);

// ---- Pinned host memory

// Error codes have the numbers and names that CUDA gives them.
enum class Error : int {
    kSuccess = 0,
    kInvalidValue = 1,
    kMemoryAllocation = 2,
    kAlreadyRegistered = 712,
    kNotRegistered = 713,
};

// How `host_register` fails on demand.
struct RegistrationFault {
    int code = 0;            // 0: it does not
    int64_t after_calls = 0; // so many calls succeed first
    size_t above_bytes = 0;  // registrations up to this size succeed, and are not counted as calls
};

c10::Allocator& pinned_allocator();
int host_register(void* address, size_t size_bytes);
int host_unregister(void* address);
void set_registration_fault(const RegistrationFault& fault);
size_t registered_bytes();
bool is_pinned(const void* address);
// Whether all of a copy's host memory is pinned. Raises if only a part of it is, as CUDA does.
bool is_pinned_range(const void* address, size_t size_bytes);
// Keeps pinned memory of `pinned_allocator` from being freed before `stream` has run what is queued on it now.
void record_pinned_use(const void* address, const c10::Stream& stream);

// ---- The last error of the calling thread

void set_last_error(int code);
int take_last_error();
// What every launch does first: raises if an error of this thread or of the device's queued work was left unread.
void check_before_launch(c10::DeviceIndex index);

}  // namespace simdev
