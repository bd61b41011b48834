// Every operator of the simulated devices, as torch's dispatcher calls it.
//
// Memory, views and copies are written out. Everything else goes through one function, `run_operator`, which has
// torch's CPU kernel compute on the workers' mapping of the device memory. If the outputs' shapes are known
// beforehand, which torch's meta kernels tell, the call returns at once, as a kernel launch does; else it waits.
#include "operators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "memory.h"
#include "streams.h"

namespace simdev {
namespace {

using at::Tensor;
using c10::IntArrayRef;
using c10::IValue;
using Stack = torch::jit::Stack;

const c10::DispatchKeySet kSimKeys(c10::DispatchKey::PrivateUse1);
const c10::DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);
const c10::DispatchKeySet kMetaKeys(c10::DispatchKey::Meta);

// Makes `device` current while it lives.
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

bool is_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDeviceType; }

// ---- Tensors seen from a worker

// A number that Python wrapped into a tensor does not take part in type promotion. The flag says so.
Tensor wrapped_as(const Tensor& original, Tensor tensor) {
    if (original.unsafeGetTensorImpl()->is_wrapped_number()) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
}

// The same bytes at the address where a worker can use them. Holds no reference to the storage: work that is queued
// keeps no memory alive, as a kernel does not.
Tensor for_workers(const Tensor& tensor) {
    void* address = nullptr;
    if (tensor.numel() > 0) {
        address = tensor.data_ptr();
        if (is_sim(tensor)) address = worker_address(address);
    }
    Tensor view = at::from_blob(address, tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()));
    view._set_conj(tensor.is_conj());
    view._set_neg(tensor.is_neg());
    return wrapped_as(tensor, view);
}

// A CPU tensor's value at the time of the call; what the host does to it later is not seen by what is queued.
Tensor snapshot(const Tensor& tensor) { return wrapped_as(tensor, tensor.clone()); }

Tensor empty_like_on_host(const Tensor& tensor) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()));
}

// ---- Memory and views

Tensor empty_memory_format(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<c10::Device> device, std::optional<bool>,
                           std::optional<at::MemoryFormat> format) {
    OnDevice on(device.value_or(c10::Device(kDeviceType)));
    return at::detail::empty_generic(size, &device_allocator(), kSimKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
    OnDevice on(device.value_or(c10::Device(kDeviceType)));
    return at::detail::empty_strided_generic(size, stride, &device_allocator(), kSimKeys,
                                             c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
    c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(size);
    if (format.value_or(at::MemoryFormat::Contiguous) != at::MemoryFormat::Contiguous) {
        impl->empty_tensor_restride(*format);
    }
    const auto elements = static_cast<size_t>(impl->storage_offset() + impl->numel());
    const size_t needed_bytes = impl->numel() == 0 ? 0 : elements * impl->itemsize();
    if (needed_bytes > impl->storage().nbytes()) {
        resize_storage(*impl->storage().unsafeGetStorageImpl(), needed_bytes);
    }
    return self;
}

Tensor& set_to_nothing(Tensor& self) {
    OnDevice on(self.device());
    c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, device_allocator().allocate(0), &device_allocator(),
                         /*resizable=*/true);
    return at::native::set_storage_cpu_(self, std::move(nothing), 0, {0}, {});
}

bool is_set_to(const Tensor& self, const Tensor& other) {
    return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
           self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
           self.strides() == other.strides();
}

void record_stream(Tensor& self, c10::Stream stream) {
    if (self.storage().data() != nullptr) record_use(self.storage().data(), stream);
}

// ---- Copies

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
bool is_asynchronous(const Tensor& self, const Tensor& host, bool pinned, Direction direction, const Tensor& to) {
    if (!pinned || !host.is_contiguous()) return false;
    if (direction == Direction::kHostToDevice) {
        return self.scalar_type() == to.scalar_type() && self.sizes() == to.sizes();
    }
    return true;
}

void copy_with_host(const Tensor& self, const Tensor& to, bool non_blocking) {
    const bool inbound = is_sim(to);
    const Direction direction = inbound ? Direction::kHostToDevice : Direction::kDeviceToHost;
    const Tensor& host = inbound ? self : to;
    const c10::Device device = inbound ? to.device() : self.device();
    OnDevice on(device);
    check_before_launch(device.index());

    const bool pinned = is_plain_memory(host) ? is_pinned_range(host.data_ptr(), host.nbytes())
                                              : is_pinned(host.data_ptr());
    const bool asynchronous = non_blocking && is_asynchronous(self, host, pinned, direction, to);
    CopyCounts& counts = g_copy_counts[static_cast<size_t>(direction)];
    ++(asynchronous ? counts.asynchronous : counts.synchronous);
    counts.bytes += static_cast<int64_t>(to.nbytes());

    const c10::Stream stream = current_stream(device.index());
    HostCopy copy{for_workers(to), for_workers(self).expand(to.sizes()), device.index(), direction, pinned};
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
void copy_between_devices(const Tensor& self, const Tensor& to) {
    const c10::Stream stream = current_stream(self.device().index());
    const c10::Stream other = current_stream(to.device().index());
    check_before_launch(self.device().index());
    CopyCounts& counts = g_copy_counts[static_cast<size_t>(Direction::kDeviceToDevice)];
    ++counts.asynchronous;
    counts.bytes += static_cast<int64_t>(to.nbytes());
    if (other != stream) wait_in_stream(stream, mark(other));
    enqueue(stream, [target = for_workers(to), source = for_workers(self).expand(to.sizes())]() mutable {
        target.copy_(source);
    });
    if (other != stream) wait_in_stream(other, mark(stream));
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
    if (to.numel() == 0) return to;
    if (is_sim(self) && is_sim(to)) {
        copy_between_devices(self, to);
    } else {
        copy_with_host(self, to, non_blocking);
    }
    return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
    to.resize_(self.sizes());
    return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
    Tensor value = at::empty({}, at::TensorOptions(self.scalar_type()));
    copy_from(self.reshape({}), value, false);
    return value.item();
}

// ---- Everything else

std::mutex g_waited_mutex;
std::map<std::string, int64_t> g_waited;

void count_waiting(const c10::OperatorHandle& op) {
    std::lock_guard<std::mutex> lock(g_waited_mutex);
    ++g_waited[c10::toString(op.operator_name())];
}

// A copy of `value` with `change` applied to every tensor in it.
template <typename Change>
IValue change_tensors(const IValue& value, Change&& change) {
    if (value.isTensor()) return change(value.toTensor());
    if (value.isTensorList()) {
        c10::List<Tensor> changed;
        for (const Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
        return changed;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> changed;
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
            changed.push_back(tensor.has_value() ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
        }
        return changed;
    }
    return value;
}

template <typename Visit>
void visit_tensors(const IValue& value, Visit&& visit) {
    change_tensors(value, [&](const Tensor& tensor) {
        visit(tensor);
        return tensor;
    });
}

// A call of one operator: its arguments, taken off the stack.
class Call {
  public:
    Call(const c10::OperatorHandle& op, Stack& stack) : op_(op), schema_(op.schema()) {
        const size_t count = schema_.arguments().size();
        arguments_.assign(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
        torch::jit::drop(stack, count);
        for (const IValue& argument : arguments_) visit_tensors(argument, [this](const Tensor& t) { look_at(t); });
        TORCH_CHECK(device_.has_value(), c10::toString(op.operator_name()), ": expected a tensor on sim, found none");
    }

    c10::Device device() const { return *device_; }

    void run(Stack& stack) {
        const c10::Stream stream = current_stream(device_->index());
        std::optional<Stack> shapes;
        if (may_be_queued()) shapes = shapes_of_results();
        const std::vector<IValue> results = shapes ? queue(stream, *shapes) : compute_and_wait(stream);
        stack.insert(stack.end(), results.begin(), results.end());
    }

  private:
    void look_at(const Tensor& tensor) {
        if (!tensor.defined()) return;
        if (is_sim(tensor)) {
            TORCH_CHECK(!device_ || *device_ == tensor.device(), c10::toString(op_.operator_name()),
                        ": expected all tensors on one device, found ", *device_, " and ", tensor.device());
            device_ = tensor.device();
        } else {
            // As on CUDA, a number may come from the host, and so may indices; nothing else may.
            const bool indexing = op_.schema().name().find("index") != std::string::npos;
            TORCH_CHECK(tensor.is_cpu() && (tensor.dim() == 0 || indexing), c10::toString(op_.operator_name()),
                        ": expected all tensors on sim, found one of shape ", tensor.sizes(), " on ",
                        tensor.device());
        }
    }

    bool is_written(size_t argument) const {
        const c10::AliasInfo* alias = schema_.arguments()[argument].alias_info();
        return alias != nullptr && alias->isWrite();
    }

    // In-place operators keep the shapes of their arguments; operators with `out=` may change them.
    bool is_in_place() const {
        const std::string& name = schema_.name();
        return !name.empty() && name.back() == '_' && schema_.overload_name().find("out") == std::string::npos;
    }

    bool may_be_queued() const {
        for (const c10::Argument& result : schema_.returns()) {
            const c10::TypePtr& type = result.type();
            const bool tensors = type->isSubtypeOf(*c10::TensorType::get()) ||
                                 type->isSubtypeOf(*c10::ListType::ofTensors());
            if (!tensors) return false;
        }
        // The order of random numbers must not depend on the threads' timing.
        return !op_.hasTag(at::Tag::nondeterministic_seeded);
    }

    // The results with their shapes and types, without data; nothing if only the computation can tell.
    std::optional<Stack> shapes_of_results() const {
        if (!op_.hasKernelForDispatchKey(c10::DispatchKey::Meta)) {
            return is_in_place() ? std::optional<Stack>(Stack{}) : std::nullopt;
        }
        Stack stack;
        for (const IValue& argument : arguments_) stack.push_back(change_tensors(argument, without_data));
        try {
            at::AutoDispatchBelowADInplaceOrView no_autograd;
            op_.redispatchBoxed(kMetaKeys, &stack);
        } catch (const c10::Error&) {
            return std::nullopt;  // if the call is wrong, computing it says why
        }
        return stack;
    }

    static Tensor without_data(const Tensor& tensor) {
        if (!is_sim(tensor)) return tensor;
        return wrapped_as(tensor, at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
    }

    static Tensor allocate_like(const Tensor& shape) {
        if (!shape.defined()) return Tensor();
        return at::detail::empty_strided_generic(shape.sizes(), shape.strides(), &device_allocator(), kSimKeys,
                                                 shape.scalar_type());
    }

    // The argument that a result is said to be, such as `self` of an in-place operator.
    std::optional<size_t> argument_returned_as(size_t result) const {
        const c10::AliasInfo* alias = schema_.returns()[result].alias_info();
        if (alias == nullptr) return std::nullopt;
        TORCH_CHECK_NOT_IMPLEMENTED(alias->isWrite(), c10::toString(op_.operator_name()),
                                    " makes a view and is not known to sim: add it to tests/simdev/operators.cpp");
        for (size_t index = 0; index < arguments_.size(); ++index) {
            const c10::AliasInfo* other = schema_.arguments()[index].alias_info();
            if (other != nullptr && *other == *alias) return index;
        }
        return std::nullopt;
    }

    std::vector<IValue> queue(const c10::Stream& stream, const Stack& shapes) {
        std::vector<IValue> results;
        std::vector<std::pair<size_t, IValue>> computed;  // results that are no argument, as workers see them
        for (size_t index = 0; index < schema_.returns().size(); ++index) {
            if (const auto argument = argument_returned_as(index)) {
                fit_argument(*argument, shapes, index);
                results.push_back(arguments_[*argument]);
                continue;
            }
            IValue fresh = change_tensors(shapes[index], allocate_like);
            computed.emplace_back(index, change_tensors(fresh, worker_view));
            results.push_back(std::move(fresh));
        }
        Stack inputs;
        for (const IValue& argument : arguments_) inputs.push_back(change_tensors(argument, queued_input));
        enqueue(stream, [op = op_, inputs = std::move(inputs), computed = std::move(computed)]() mutable {
            op.redispatchBoxed(kCpuKeys, &inputs);
            for (const auto& [index, target] : computed) copy_value(inputs[index], target);
        });
        return results;
    }

    // An `out=` tensor of another shape is resized before anything is queued.
    void fit_argument(size_t argument, const Stack& shapes, size_t result) const {
        if (result >= shapes.size() || !shapes[result].isTensor()) return;
        const Tensor& shape = shapes[result].toTensor();
        const Tensor& tensor = arguments_[argument].toTensor();
        if (tensor.sizes() != shape.sizes()) resize_(tensor, shape.sizes(), std::nullopt);
    }

    static Tensor worker_view(const Tensor& tensor) { return tensor.defined() ? for_workers(tensor) : tensor; }

    static Tensor queued_input(const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        return is_sim(tensor) ? for_workers(tensor) : snapshot(tensor);
    }

    static void copy_value(const IValue& from, const IValue& to) {
        std::vector<Tensor> sources;
        visit_tensors(from, [&](const Tensor& tensor) { sources.push_back(tensor); });
        size_t next = 0;
        visit_tensors(to, [&](const Tensor& tensor) {
            const Tensor& source = sources.at(next++);
            if (!tensor.defined()) return;
            TORCH_CHECK(source.sizes() == tensor.sizes(), "sim expected a result of shape ", tensor.sizes(),
                        ", the kernel gave ", source.sizes());
            Tensor target = tensor;
            if (target.numel() > 0) target.copy_(source);
        });
    }

    // Runs the CPU kernel on the stream and waits. Tensors that it writes to are copies, which it may resize.
    std::vector<IValue> compute_and_wait(const c10::Stream& stream) {
        for (size_t index = 0; index < schema_.returns().size(); ++index) argument_returned_as(index);
        count_waiting(op_);
        Stack values;
        std::vector<std::pair<Tensor, Tensor>> written;  // the tensor, and its copy on the host
        for (size_t index = 0; index < arguments_.size(); ++index) {
            values.push_back(change_tensors(arguments_[index], [&](const Tensor& tensor) {
                if (!is_sim(tensor)) return tensor;
                if (!is_written(index)) return for_workers(tensor);
                written.emplace_back(tensor, empty_like_on_host(tensor));
                return written.back().second;
            }));
        }
        std::vector<std::pair<Tensor, Tensor>> before;
        for (const auto& [tensor, copy] : written) before.emplace_back(copy, for_workers(tensor));
        run_and_wait(stream, [&] {
            for (auto& [copy, value] : before) copy.copy_(value);
            op_.redispatchBoxed(kCpuKeys, &values);
        });
        raise_failure_of_work(device_->index());

        std::vector<std::pair<Tensor, Tensor>> outputs;  // memory of the device as workers see it, and its value
        for (const auto& [tensor, copy] : written) {
            if (tensor.sizes() != copy.sizes()) resize_(tensor, copy.sizes(), std::nullopt);
            outputs.emplace_back(for_workers(tensor), copy);
        }
        std::vector<IValue> results;
        for (size_t index = 0; index < schema_.returns().size(); ++index) {
            if (const auto argument = argument_returned_as(index)) {
                results.push_back(arguments_[*argument]);
                continue;
            }
            results.push_back(change_tensors(values[index], [&](const Tensor& value) {
                if (!value.defined()) return value;
                Tensor fresh = allocate_like(value);
                outputs.emplace_back(for_workers(fresh), value);
                return fresh;
            }));
        }
        run_and_wait(stream, [&] {
            for (auto& [memory, value] : outputs) {
                if (memory.numel() > 0) memory.copy_(value);
            }
        });
        return results;
    }

    const c10::OperatorHandle op_;
    const c10::FunctionSchema& schema_;
    std::vector<IValue> arguments_;
    std::optional<c10::Device> device_;
};

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
    Call call(op, *stack);
    OnDevice on(call.device());
    check_before_launch(call.device().index());
    call.run(*stack);
}

}  // namespace

const CopyCounts& copy_counts(Direction direction) { return g_copy_counts[static_cast<size_t>(direction)]; }

void reset_copy_counts() {
    for (CopyCounts& counts : g_copy_counts) {
        counts.asynchronous = 0;
        counts.synchronous = 0;
        counts.bytes = 0;
    }
    std::lock_guard<std::mutex> lock(g_waited_mutex);
    g_waited.clear();
}

void set_bandwidth(double pinned, double pageable) {
    g_pinned_bandwidth = pinned;
    g_pageable_bandwidth = pageable;
}

void busy(double seconds) {
    check_before_launch(current_device());
    enqueue(current_stream(current_device()), [seconds] { sleep_for(seconds); });
}

std::string operators_that_waited() {
    std::lock_guard<std::mutex> lock(g_waited_mutex);
    std::string lines;
    for (const auto& [name, calls] : g_waited) lines += name + " " + std::to_string(calls) + "\n";
    return lines;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", &empty_memory_format);
    library.impl("empty_strided", &empty_strided);
    library.impl("resize_", &resize_);
    library.impl("set_", &set_to_nothing);
    library.impl("set_.source_Tensor", &at::native::set_tensor_);
    library.impl("set_.source_Storage", &at::native::set_);
    library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
    library.impl("is_set_to", &is_set_to);
    library.impl("record_stream", &record_stream);
    library.impl("as_strided", &at::native::as_strided_tensorimpl);
    library.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(&at::native::view));
    library.impl("_reshape_alias", &at::native::_reshape_alias);
    library.impl("unfold", &at::native::unfold);
    library.impl("view_as_real", &at::native::view_as_real);
    library.impl("view_as_complex", &at::native::view_as_complex);
    library.impl("_copy_from", &copy_from);
    library.impl("_copy_from_and_resize", &copy_from_and_resize);
    library.impl("_local_scalar_dense", &local_scalar_dense);
    // These would else be taken apart, or refused, before the fallback is asked; the CPU's own kernels give the CPU's
    // own numbers.
    for (const char* name : {"native_layer_norm", "convolution", "convolution_backward"}) {
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_operator>());
    }
}

}  // namespace simdev
