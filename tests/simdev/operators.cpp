// Every operator of the simulated devices, as torch's dispatcher calls it.
//
// Memory, views and copies are written out. Everything else goes through one function, `run_operator`, which has
// torch's CPU kernel compute on the workers' mapping of the device memory. If the outputs' shapes are known
// beforehand, which torch's meta kernels tell, the call returns at once, as a kernel launch does; else it waits.
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "copies.h"
#include "memory.h"
#include "streams.h"
#include "tensors.h"

namespace simdev {
namespace {

using at::Tensor;
using c10::IntArrayRef;
using c10::IValue;
using Stack = torch::jit::Stack;

const c10::DispatchKeySet kSimKeys(c10::DispatchKey::PrivateUse1);
const c10::DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);
const c10::DispatchKeySet kMetaKeys(c10::DispatchKey::Meta);

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
        } catch (const std::exception&) {  // torch's own, or Python's: some meta kernels are written in Python
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
        Stack inputs;
        for (const IValue& argument : arguments_) inputs.push_back(change_tensors(argument, queued_input));
        std::vector<IValue> results;
        std::vector<std::pair<size_t, IValue>> computed;  // results for which there is memory, as workers see it
        for (size_t index = 0; index < schema_.returns().size(); ++index) {
            IValue result;
            if (const auto argument = argument_returned_as(index)) {
                result = arguments_[*argument];
                results.push_back(result);
                if (index >= shapes.size() || !may_be_resized(result, shapes[index])) continue;  // written in place
                // The kernel gets a tensor on the host, whose size it can change. The device's is resized now.
                inputs[*argument] = at::empty({0}, at::TensorOptions(result.toTensor().scalar_type()));
                if (result.toTensor().sizes() != shapes[index].toTensor().sizes()) {
                    resize_(result.toTensor(), shapes[index].toTensor().sizes(), std::nullopt);
                }
            } else {
                result = change_tensors(shapes[index], allocate_like);
                results.push_back(result);
            }
            computed.emplace_back(index, change_tensors(result, worker_view));
        }
        enqueue(stream, [op = op_, inputs = std::move(inputs), computed = std::move(computed)]() mutable {
            try {
                op.redispatchBoxed(kCpuKeys, &inputs);
                for (const auto& [index, target] : computed) copy_value(inputs[index], target);
            } catch (c10::Error& error) {
                error.add_context("raised by " + c10::toString(op.operator_name()) + ", which sim had queued");
                throw;
            }
        });
        return results;
    }

    // Whether the kernel changes the shape of this `out=`. Those of losses do so with a scalar, there and back.
    bool may_be_resized(const IValue& result, const IValue& shape) const {
        if (is_in_place() || !shape.isTensor()) return false;
        return result.toTensor().dim() == 0 || result.toTensor().sizes() != shape.toTensor().sizes();
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

void reset_operators_that_waited() {
    std::lock_guard<std::mutex> lock(g_waited_mutex);
    g_waited.clear();
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
    // Torch would take these apart, or refuse them, before it asks the fallback. The CPU's own kernels give the CPU's
    // own numbers.
    for (const char* name : {"native_layer_norm", "convolution", "convolution_backward", "silu_backward"}) {
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_operator>());
    }
}

}  // namespace simdev
