// Tensors of the simulated devices, and how workers see them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include "memory.h"
#include "streams.h"

namespace simdev {

// Makes `device` current while it lives, if it has an index.
class OnDevice {
  public:
    explicit OnDevice(c10::Device device) : before_(current_device()) {
        if (device.has_index()) set_current_device(device.index());
    }
    ~OnDevice() { set_current_device(before_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    const c10::DeviceIndex before_;
};

inline bool is_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDeviceType; }

// Returns `tensor`, marked if `original` is a number that Python wrapped: these take no part in type promotion.
inline at::Tensor wrapped_as(const at::Tensor& original, at::Tensor tensor) {
    if (original.unsafeGetTensorImpl()->is_wrapped_number()) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
}

// The same bytes at the address where a worker can use them. Holds no reference to the storage: work that is queued
// keeps no memory alive, as a kernel does not.
inline at::Tensor for_workers(const at::Tensor& tensor) {
    void* address = nullptr;
    if (tensor.numel() > 0) {
        address = tensor.data_ptr();
        if (is_sim(tensor)) address = worker_address(address);
    }
    at::Tensor view = at::from_blob(address, tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()));
    view._set_conj(tensor.is_conj());
    view._set_neg(tensor.is_neg());
    return wrapped_as(tensor, view);
}

}  // namespace simdev
