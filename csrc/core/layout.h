// Reads the entries of an encoded layout that keeps every rule. A layout that breaks a rule is declined: then
// the decoder in Python decides, and names the rule. What is accepted here is accepted there, with the same
// meaning.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace flashckpt {

// The limits of the format that a reader has to know; flashckpt/format/caps.py has the reasons.
struct LayoutCaps {
    int64_t entries;
    int64_t entry_bytes;
    int64_t name_bytes;
    int64_t path_parts;
    int64_t dims;
    int64_t alignment_bytes;
};

struct Dtype {
    std::string_view name;
    int64_t item_bytes;
};

struct LayoutPathPart {
    bool is_key;
    std::string_view key;
    int64_t index;
};

// Holds views into the encoded bytes; the vectors are reused for the next entry.
struct LayoutEntry {
    std::string_view key;
    std::vector<LayoutPathPart> path;
    size_t dtype = 0;  // index into the dtypes
    std::vector<int64_t> shape, offsets, sizes;
    int64_t offset_bytes = 0;
    int64_t length_bytes = 0;
    bool per_rank = false;
};

// Reads one entry after the other. It does not check whether text is UTF-8, and whether entries of one key
// agree with each other.
class LayoutReader {
  public:
    LayoutReader(const uint8_t* data, size_t length, const std::vector<Dtype>& dtypes, LayoutCaps caps)
        : at_(data), end_(data + length), dtypes_(dtypes), caps_(caps) {}

    enum class Next { kEntry, kEnd, kDeclined };
    Next next(LayoutEntry* entry);

  private:
    bool read_entry(const uint8_t* at, const uint8_t* end, LayoutEntry* entry) const;
    bool keeps_rules(const LayoutEntry& entry) const;
    bool lies_behind(const LayoutEntry& entry) const;

    const uint8_t* at_;
    const uint8_t* const end_;
    const std::vector<Dtype>& dtypes_;
    const LayoutCaps caps_;
    int64_t count_ = 0;
    int64_t data_end_ = 0;  // the end of the bytes of the entries so far
    // Of the entry before: an entry that shares its bytes must have the same dtype and sizes.
    int64_t previous_offset_ = -1, previous_length_ = -1;
    size_t previous_dtype_ = 0;
    std::vector<int64_t> previous_sizes_;
};

}  // namespace flashckpt
