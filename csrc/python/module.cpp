// flashckpt.native._core only converts arguments, drops the GIL, and turns a Status into an exception.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "checked.h"
#include "crc32c.h"
#include "gather.h"
#include "layout.h"
#include "prefault.h"
#include "receive.h"
#include "scatter.h"
#include "verify.h"

namespace nb = nanobind;
using flashckpt::Code;
using flashckpt::Status;

namespace {

// The only table from Status to exceptions.
void raise_unless_ok(const Status& status) {
    switch (status.code()) {
        case Code::kOk:
            return;
        case Code::kInvalidArgument:
            PyErr_SetString(PyExc_ValueError, status.message().c_str());
            break;
        case Code::kIo:
            errno = status.errno_value();
            PyErr_SetFromErrno(PyExc_OSError);
            break;
    }
    throw nb::python_error();
}

// Holds a C-contiguous buffer for as long as this lives: its owner can neither free nor resize it meanwhile.
class Buffer {
  public:
    enum class Access { kRead, kWrite };

    Buffer(const char* name, nb::handle object, Access access = Access::kRead) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) {
            if (PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
            PyErr_Clear();
            throw_invalid(std::string(name) + ": expected a C-contiguous buffer");
        }
        if (access == Access::kWrite && view_.readonly != 0) {
            PyBuffer_Release(&view_);
            throw_invalid(std::string(name) + ": expected a writable buffer, found a read-only one");
        }
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    uint8_t* data() const { return static_cast<uint8_t*>(view_.buf); }
    int64_t length() const { return view_.len; }

    // Returns a copy as `Item`s, because the caller's bytes may be misaligned and must not change after the
    // check.
    template <typename Item>
    std::vector<Item> items(const char* name) const {
        if (view_.len % static_cast<Py_ssize_t>(sizeof(Item)) != 0) {
            throw_invalid(std::string(name) + ": expected a multiple of " + std::to_string(sizeof(Item)) +
                          " bytes, found " + std::to_string(view_.len));
        }
        std::vector<Item> items(static_cast<size_t>(view_.len) / sizeof(Item));
        if (!items.empty()) std::memcpy(items.data(), view_.buf, static_cast<size_t>(view_.len));
        return items;
    }

    [[noreturn]] static void throw_invalid(const std::string& message) {
        raise_unless_ok(Status::invalid(message));
        __builtin_unreachable();
    }

  private:
    Py_buffer view_{};
};

uint32_t crc32c(nb::handle data, uint32_t seed) {
    const Buffer buffer("data", data);
    // For a few bytes, releasing the GIL and waiting to get it back costs more than the work.
    constexpr int64_t kKeepGil = 64 << 10;
    if (buffer.length() < kKeepGil) {
        return flashckpt::crc32c(seed, buffer.data(), static_cast<size_t>(buffer.length()));
    }
    nb::gil_scoped_release released;
    return flashckpt::crc32c(seed, buffer.data(), static_cast<size_t>(buffer.length()));
}

nb::bytes scatter_copy(nb::handle destination, nb::handle pieces, int64_t chunk_bytes, int threads) {
    const Buffer to("destination", destination, Buffer::Access::kWrite);
    const auto list = Buffer("pieces", pieces).items<flashckpt::ScatterPiece>("pieces");
    std::vector<uint32_t> crcs;
    if (chunk_bytes > 0) crcs.resize(static_cast<size_t>(flashckpt::chunk_count(to.length(), chunk_bytes)));
    Status status = Status::ok();
    {
        nb::gil_scoped_release released;
        status = flashckpt::scatter_copy(to.data(), to.length(), list.data(), list.size(), chunk_bytes,
                                         crcs.data(), crcs.size(), threads);
    }
    raise_unless_ok(status);
    return nb::bytes(reinterpret_cast<const char*>(crcs.data()), crcs.size() * sizeof(uint32_t));
}

std::vector<int64_t> gather_read(int fd, int64_t data_offset, int64_t data_length, int64_t chunk_bytes,
                                 nb::handle chunk_crcs, nb::handle pieces, int threads, bool verify) {
    const auto crcs = Buffer("chunk_crcs", chunk_crcs).items<uint32_t>("chunk_crcs");
    const auto list = Buffer("pieces", pieces).items<flashckpt::GatherPiece>("pieces");
    std::vector<int64_t> bad;
    Status status = Status::ok();
    {
        nb::gil_scoped_release released;
        status = flashckpt::gather_read(fd, data_offset, data_length, chunk_bytes, crcs.data(), crcs.size(),
                                        list.data(), list.size(), threads, verify, &bad);
    }
    raise_unless_ok(status);
    return bad;
}

std::vector<int64_t> gather_copy(nb::handle data, int64_t chunk_bytes, nb::handle chunk_crcs,
                                 nb::handle pieces, int threads, bool verify) {
    const Buffer buffer("data", data);
    const auto crcs = Buffer("chunk_crcs", chunk_crcs).items<uint32_t>("chunk_crcs");
    const auto list = Buffer("pieces", pieces).items<flashckpt::GatherPiece>("pieces");
    std::vector<int64_t> bad;
    Status status = Status::ok();
    {
        nb::gil_scoped_release released;
        status = flashckpt::gather_copy(buffer.data(), buffer.length(), chunk_bytes, crcs.data(), crcs.size(),
                                        list.data(), list.size(), threads, verify, &bad);
    }
    raise_unless_ok(status);
    return bad;
}

std::vector<int64_t> receive_chunks(int fd, int64_t offset, int64_t length, int64_t chunk_bytes,
                                    nb::handle chunk_crcs, nb::handle pieces, nb::handle scratch) {
    const auto crcs = Buffer("chunk_crcs", chunk_crcs).items<uint32_t>("chunk_crcs");
    const auto list = Buffer("pieces", pieces).items<flashckpt::GatherPiece>("pieces");
    const Buffer room("scratch", scratch, Buffer::Access::kWrite);
    std::vector<int64_t> bad;
    Status status = Status::ok();
    {
        nb::gil_scoped_release released;
        status = flashckpt::receive_chunks(fd, offset, length, chunk_bytes, crcs.data(), crcs.size(), list.data(),
                                           list.size(), room.data(), room.length(), &bad);
    }
    raise_unless_ok(status);
    return bad;
}

std::vector<int64_t> verify_chunks(nb::handle data, int64_t chunk_bytes, nb::handle chunk_crcs, int threads) {
    const Buffer buffer("data", data);
    const auto crcs = Buffer("chunk_crcs", chunk_crcs).items<uint32_t>("chunk_crcs");
    std::vector<int64_t> bad;
    Status status = Status::ok();
    {
        nb::gil_scoped_release released;
        status = flashckpt::verify_chunks(buffer.data(), buffer.length(), chunk_bytes, crcs.data(),
                                          crcs.size(), threads, &bad);
    }
    raise_unless_ok(status);
    return bad;
}

std::vector<int64_t> verify_file(int fd, int64_t data_offset, int64_t data_length, int64_t chunk_bytes,
                                 nb::handle chunk_crcs, int threads) {
    const auto crcs = Buffer("chunk_crcs", chunk_crcs).items<uint32_t>("chunk_crcs");
    std::vector<int64_t> bad;
    Status status = Status::ok();
    {
        nb::gil_scoped_release released;
        status = flashckpt::verify_file(fd, data_offset, data_length, chunk_bytes, crcs.data(), crcs.size(),
                                        threads, &bad);
    }
    raise_unless_ok(status);
    return bad;
}

nb::bytes checksum_ranges(nb::handle ranges, int threads) {
    const auto list = Buffer("ranges", ranges).items<flashckpt::MemoryRange>("ranges");
    std::vector<uint32_t> crcs(list.size());
    Status status = Status::ok();
    {
        nb::gil_scoped_release released;
        status = flashckpt::checksum_ranges(list.data(), list.size(), crcs.data(), threads);
    }
    raise_unless_ok(status);
    return nb::bytes(reinterpret_cast<const char*>(crcs.data()), crcs.size() * sizeof(uint32_t));
}

// Makes a tuple, or one of a subclass that only adds names (a NamedTuple), as tuple.__new__ does.
nb::object make_tuple(PyTypeObject* type, std::initializer_list<nb::object> items) {
    nb::object made = nb::steal(type->tp_alloc(type, static_cast<Py_ssize_t>(items.size())));
    if (!made.is_valid()) throw nb::python_error();
    Py_ssize_t at = 0;
    for (const nb::object& item : items) PyTuple_SET_ITEM(made.ptr(), at++, item.inc_ref().ptr());
    return made;
}

PyTypeObject* tuple_type(const char* name, nb::handle type) {
    auto* found = reinterpret_cast<PyTypeObject*>(type.ptr());
    if (!PyType_Check(type.ptr()) || !PyType_IsSubtype(found, &PyTuple_Type) ||
        found->tp_basicsize != PyTuple_Type.tp_basicsize) {
        Buffer::throw_invalid(std::string(name) + ": expected a class of named tuples");
    }
    return found;
}

nb::object new_tuple(size_t size) {
    nb::object made = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(size)));
    if (!made.is_valid()) throw nb::python_error();
    return made;
}

// Returns an invalid object if the text is not UTF-8.
nb::object text(std::string_view bytes) {
    return nb::steal(PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), nullptr));
}

nb::object numbers(const std::vector<int64_t>& from) {
    nb::object made = new_tuple(from.size());
    for (size_t i = 0; i < from.size(); ++i) {
        PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), nb::int_(from[i]).release().ptr());
    }
    return made;
}

// Returns the path of an entry; an invalid object if a key is not UTF-8.
nb::object path_of(const flashckpt::LayoutEntry& entry, const nb::object& key) {
    nb::object made = new_tuple(entry.path.size());
    for (size_t i = 0; i < entry.path.size(); ++i) {
        const flashckpt::LayoutPathPart& part = entry.path[i];
        nb::object item;
        if (!part.is_key) {
            item = nb::int_(part.index);
        } else {
            item = part.key == entry.key ? key : text(part.key);
            if (!item.is_valid()) return {};
        }
        PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), item.release().ptr());
    }
    return made;
}

// Returns None if the layout is declined.
nb::object layout_entries(nb::handle data, nb::dict item_bytes, const std::vector<int64_t>& caps,
                          nb::handle entry_type, nb::handle box_type) {
    const Buffer buffer("data", data);
    if (caps.size() != 6) Buffer::throw_invalid("caps: expected 6 numbers");
    PyTypeObject* const entry_class = tuple_type("entry_type", entry_type);
    PyTypeObject* const box_class = tuple_type("box_type", box_type);
    std::vector<flashckpt::Dtype> dtypes;
    std::vector<nb::object> dtype_names;
    for (const auto& [name, bytes] : item_bytes) {
        Py_ssize_t length = 0;
        const char* utf8 = PyUnicode_AsUTF8AndSize(name.ptr(), &length);
        if (utf8 == nullptr) throw nb::python_error();
        dtypes.push_back({{utf8, static_cast<size_t>(length)}, nb::cast<int64_t>(bytes)});
        dtype_names.push_back(nb::borrow(name));
    }
    flashckpt::LayoutReader reader(buffer.data(), static_cast<size_t>(buffer.length()), dtypes,
                                   {caps[0], caps[1], caps[2], caps[3], caps[4], caps[5]});
    flashckpt::LayoutEntry entry;
    nb::list entries;
    using Next = flashckpt::LayoutReader::Next;
    for (Next next = reader.next(&entry); next != Next::kEnd; next = reader.next(&entry)) {
        if (next == Next::kDeclined) return nb::none();
        const nb::object key = text(entry.key);
        const nb::object path = key.is_valid() ? path_of(entry, key) : nb::object();
        if (!path.is_valid()) {
            PyErr_Clear();
            return nb::none();
        }
        const nb::object shape = numbers(entry.shape);
        const nb::object sizes = entry.sizes == entry.shape ? shape : numbers(entry.sizes);
        entries.append(make_tuple(
            entry_class,
            {key, path, dtype_names[entry.dtype], shape, make_tuple(box_class, {numbers(entry.offsets), sizes}),
             nb::int_(entry.offset_bytes), nb::int_(entry.length_bytes), nb::bool_(entry.per_rank)}));
    }
    return entries;
}

void prefault(nb::handle data, int threads) {
    const Buffer buffer("data", data, Buffer::Access::kWrite);
    Status status = Status::ok();
    {
        nb::gil_scoped_release released;
        status = flashckpt::prefault(buffer.data(), static_cast<size_t>(buffer.length()), threads);
    }
    raise_unless_ok(status);
}

}  // namespace

NB_MODULE(_core, module) {
    using namespace nb::literals;
    module.def("crc32c", &crc32c, "data"_a, "seed"_a = 0);
    module.def("crc32c_combine", &flashckpt::crc32c_combine, "first"_a, "second"_a, "second_length"_a);
    module.def("scatter_copy", &scatter_copy, "destination"_a, "pieces"_a, "chunk_bytes"_a, "threads"_a);
    module.def("gather_read", &gather_read, "fd"_a, "data_offset"_a, "data_length"_a, "chunk_bytes"_a,
               "chunk_crcs"_a, "pieces"_a, "threads"_a, "verify"_a = true);
    module.def("gather_copy", &gather_copy, "data"_a, "chunk_bytes"_a, "chunk_crcs"_a, "pieces"_a, "threads"_a,
               "verify"_a = true);
    module.def("receive_chunks", &receive_chunks, "fd"_a, "offset"_a, "length"_a, "chunk_bytes"_a, "chunk_crcs"_a,
               "pieces"_a, "scratch"_a);
    module.def("layout_entries", &layout_entries, "data"_a, "item_bytes"_a, "caps"_a, "entry_type"_a,
               "box_type"_a);
    module.def("verify_chunks", &verify_chunks, "data"_a, "chunk_bytes"_a, "chunk_crcs"_a, "threads"_a);
    module.def("verify_file", &verify_file, "fd"_a, "data_offset"_a, "data_length"_a, "chunk_bytes"_a,
               "chunk_crcs"_a, "threads"_a);
    module.def("checksum_ranges", &checksum_ranges, "ranges"_a, "threads"_a);
    module.def("prefault", &prefault, "data"_a, "threads"_a);
    module.def("kernel", [] { return std::string(flashckpt::active_kernel().name); });
    module.def("kernels", &flashckpt::available_kernels);
    module.def(
        "set_kernel", [](const std::string& name) { raise_unless_ok(flashckpt::set_kernel(name)); },
        "name"_a);
}
