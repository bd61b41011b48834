#include "layout.h"

namespace flashckpt {
namespace {

// Field number and wire type, as protobuf writes them; all numbers here are below 16, so a tag is one byte.
constexpr uint8_t varint_tag(unsigned field) { return static_cast<uint8_t>(field << 3); }
constexpr uint8_t bytes_tag(unsigned field) { return static_cast<uint8_t>(field << 3 | 2); }

// A varint in its shortest form, of at most 64 bits.
bool read_varint(const uint8_t** at, const uint8_t* end, uint64_t* value) {
    uint64_t result = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        if (*at == end) return false;
        const uint8_t byte = *(*at)++;
        if (shift == 63 && byte > 1) return false;
        result |= uint64_t{byte & 0x7Fu} << shift;
        if (byte < 0x80) {
            *value = result;
            return byte != 0 || shift == 0;
        }
    }
    return false;
}

bool read_natural(const uint8_t** at, const uint8_t* end, int64_t* value) {
    uint64_t found = 0;
    if (!read_varint(at, end, &found) || found > uint64_t{INT64_MAX}) return false;
    *value = static_cast<int64_t>(found);
    return true;
}

bool read_bytes(const uint8_t** at, const uint8_t* end, int64_t limit, std::string_view* value) {
    uint64_t length = 0;
    if (!read_varint(at, end, &length)) return false;
    if (length > static_cast<uint64_t>(end - *at) || length > static_cast<uint64_t>(limit)) return false;
    *value = {reinterpret_cast<const char*>(*at), static_cast<size_t>(length)};
    *at += length;
    return true;
}

// Returns whether the field with this tag comes next. If so, moves behind the tag.
bool comes(const uint8_t** at, const uint8_t* end, uint8_t tag) {
    if (*at == end || **at != tag) return false;
    ++*at;
    return true;
}

bool read_part(std::string_view part, int64_t name_bytes, LayoutPathPart* into) {
    const auto* at = reinterpret_cast<const uint8_t*>(part.data());
    const uint8_t* const end = at + part.size();
    *into = {};
    if (comes(&at, end, bytes_tag(1))) {
        into->is_key = true;
        if (!read_bytes(&at, end, name_bytes, &into->key)) return false;
    } else if (comes(&at, end, varint_tag(2))) {
        uint64_t index = 0;
        if (!read_varint(&at, end, &index)) return false;
        into->index = static_cast<int64_t>(index);
    } else {
        return false;
    }
    return at == end;
}

// A packed field of numbers; absent where there are none.
bool read_numbers(const uint8_t** at, const uint8_t* end, unsigned field, int64_t dims,
                  std::vector<int64_t>* numbers) {
    numbers->clear();
    if (!comes(at, end, bytes_tag(field))) return true;
    std::string_view packed;
    if (!read_bytes(at, end, end - *at, &packed) || packed.empty()) return false;
    const auto* inner = reinterpret_cast<const uint8_t*>(packed.data());
    const uint8_t* const inner_end = inner + packed.size();
    while (inner != inner_end) {
        int64_t number = 0;
        if (static_cast<int64_t>(numbers->size()) == dims || !read_natural(&inner, inner_end, &number)) {
            return false;
        }
        numbers->push_back(number);
    }
    return true;
}

// A number that is absent where it is 0.
bool read_optional(const uint8_t** at, const uint8_t* end, unsigned field, int64_t* value) {
    *value = 0;
    if (!comes(at, end, varint_tag(field))) return true;
    return read_natural(at, end, value) && *value != 0;
}

}  // namespace

LayoutReader::Next LayoutReader::next(LayoutEntry* entry) {
    if (at_ == end_) return Next::kEnd;
    std::string_view encoded;
    if (count_ == caps_.entries || !comes(&at_, end_, bytes_tag(1)) ||
        !read_bytes(&at_, end_, caps_.entry_bytes, &encoded)) {
        return Next::kDeclined;
    }
    const auto* begin = reinterpret_cast<const uint8_t*>(encoded.data());
    if (!read_entry(begin, begin + encoded.size(), entry) || !keeps_rules(*entry) || !lies_behind(*entry)) {
        return Next::kDeclined;
    }
    ++count_;
    const int64_t entry_end = entry->offset_bytes + entry->length_bytes;
    if (entry_end > data_end_) data_end_ = entry_end;
    previous_offset_ = entry->offset_bytes;
    previous_length_ = entry->length_bytes;
    previous_dtype_ = entry->dtype;
    previous_sizes_ = entry->sizes;
    return Next::kEntry;
}

// Reads fields in the order of their numbers, each once, defaults absent: the only encoding that a writer
// makes.
bool LayoutReader::read_entry(const uint8_t* at, const uint8_t* end, LayoutEntry* entry) const {
    entry->key = {};
    if (comes(&at, end, bytes_tag(1)) &&
        (!read_bytes(&at, end, caps_.name_bytes, &entry->key) || entry->key.empty())) {
        return false;
    }
    entry->path.clear();
    while (comes(&at, end, bytes_tag(2))) {
        std::string_view part;
        if (static_cast<int64_t>(entry->path.size()) == caps_.path_parts ||
            !read_bytes(&at, end, end - at, &part)) {
            return false;
        }
        entry->path.emplace_back();
        if (!read_part(part, caps_.name_bytes, &entry->path.back())) return false;
    }
    std::string_view dtype;
    if (entry->path.empty() || !comes(&at, end, bytes_tag(3)) || !read_bytes(&at, end, end - at, &dtype)) {
        return false;
    }
    for (entry->dtype = 0; entry->dtype < dtypes_.size(); ++entry->dtype) {
        if (dtypes_[entry->dtype].name == dtype) break;
    }
    int64_t per_rank = 0;
    const bool whole = entry->dtype < dtypes_.size() &&
                       read_numbers(&at, end, 4, caps_.dims, &entry->shape) &&
                       read_numbers(&at, end, 5, caps_.dims, &entry->offsets) &&
                       read_numbers(&at, end, 6, caps_.dims, &entry->sizes) &&
                       read_optional(&at, end, 7, &entry->offset_bytes) &&
                       read_optional(&at, end, 8, &entry->length_bytes) &&
                       read_optional(&at, end, 9, &per_rank) && per_rank <= 1;
    entry->per_rank = per_rank == 1;
    return whole && at == end;
}

// Checks that the entry's region lies within its tensor and has as many bytes as it says.
bool LayoutReader::keeps_rules(const LayoutEntry& entry) const {
    const size_t dims = entry.shape.size();
    if (entry.offsets.size() != dims || entry.sizes.size() != dims) return false;
    int64_t bytes = dtypes_[entry.dtype].item_bytes;
    for (size_t dim = 0; dim < dims; ++dim) {
        int64_t stop = 0;
        if (__builtin_add_overflow(entry.offsets[dim], entry.sizes[dim], &stop) || stop > entry.shape[dim]) {
            return false;
        }
        if (__builtin_mul_overflow(bytes, entry.sizes[dim], &bytes)) return false;
    }
    int64_t end = 0;
    return bytes == entry.length_bytes && entry.offset_bytes % caps_.alignment_bytes == 0 &&
           !__builtin_add_overflow(entry.offset_bytes, entry.length_bytes, &end);
}

// Checks that the entry's bytes are behind all before it, or exactly those of a like entry before it: tied
// tensors.
bool LayoutReader::lies_behind(const LayoutEntry& entry) const {
    if (entry.offset_bytes >= data_end_) return true;
    return entry.offset_bytes == previous_offset_ && entry.length_bytes == previous_length_ &&
           entry.dtype == previous_dtype_ && entry.sizes == previous_sizes_;
}

}  // namespace flashckpt
