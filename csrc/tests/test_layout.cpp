#include "../core/layout.h"

#include <string>

#include "check.h"

using namespace flashckpt;

namespace {

const std::vector<Dtype> kDtypes{{"float32", 4}, {"uint8", 1}};
constexpr LayoutCaps kCaps{1 << 20, 16 << 10, 4 << 10, 64, 64, 64};

// The fields of an entry, as a writer encodes them: key "a", path ("a", 7), float32[2, 3] at byte 64.
const std::string kKey("\x0a\x01" "a", 3);
const std::string kPath("\x12\x03\x0a\x01" "a" "\x12\x02\x10\x07", 9);
const std::string kDtype("\x1a\x07" "float32", 9);
const std::string kShape("\x22\x02\x02\x03", 4);
const std::string kOffsets("\x2a\x02\x00\x00", 4);
const std::string kSizes("\x32\x02\x02\x03", 4);
const std::string kPlace("\x38\x40\x40\x18", 4);

std::string entry(const std::string& fields) {
    return std::string("\x0a") + static_cast<char>(fields.size()) + fields;
}

std::string whole() { return kKey + kPath + kDtype + kShape + kOffsets + kSizes + kPlace; }

// Returns how many entries are read before the end; -1 if the layout is declined.
int count(const std::string& data, LayoutCaps caps = kCaps) {
    // A copy of its own, so that the sanitizers see a read beyond it.
    const std::vector<uint8_t> bytes(data.begin(), data.end());
    LayoutReader reader(bytes.data(), bytes.size(), kDtypes, caps);
    LayoutEntry found;
    for (int entries = 0;; ++entries) {
        switch (reader.next(&found)) {
            case LayoutReader::Next::kEnd:
                return entries;
            case LayoutReader::Next::kDeclined:
                return -1;
            case LayoutReader::Next::kEntry:
                break;
        }
    }
}

}  // namespace

TEST(layout_of_one_entry) {
    const std::string data = entry(whole() + "\x48\x01");
    LayoutReader reader(reinterpret_cast<const uint8_t*>(data.data()), data.size(), kDtypes, kCaps);
    LayoutEntry found;
    CHECK(reader.next(&found) == LayoutReader::Next::kEntry);
    CHECK_EQUAL(found.key, "a");
    CHECK_EQUAL(found.path.size(), size_t{2});
    CHECK(found.path[0].is_key && found.path[0].key == "a");
    CHECK(!found.path[1].is_key && found.path[1].index == 7);
    CHECK_EQUAL(found.dtype, size_t{0});
    CHECK(found.shape == (std::vector<int64_t>{2, 3}));
    CHECK(found.offsets == (std::vector<int64_t>{0, 0}));
    CHECK(found.sizes == (std::vector<int64_t>{2, 3}));
    CHECK_EQUAL(found.offset_bytes, 64);
    CHECK_EQUAL(found.length_bytes, 24);
    CHECK(found.per_rank);
    CHECK(reader.next(&found) == LayoutReader::Next::kEnd);
}

TEST(layout_declines_what_is_not_spelled_as_a_writer_does) {
    CHECK_EQUAL(count(""), 0);
    CHECK_EQUAL(count(entry(whole())), 1);
    CHECK_EQUAL(count(entry(kPath + kKey + kDtype + kShape + kOffsets + kSizes + kPlace)), -1);  // order
    CHECK_EQUAL(count(entry(kKey + whole())), -1);                                               // twice
    CHECK_EQUAL(count(entry(whole() + std::string("\x48\x00", 2))), -1);  // a default that is there
    CHECK_EQUAL(count(entry(whole() + "\x48\x02")), -1);                  // a true that is not 1
    CHECK_EQUAL(count(entry(whole() + "\x50\x01")), -1);                  // a field nobody knows
    CHECK_EQUAL(count(entry(kKey + kDtype)), -1);                          // no path
    CHECK_EQUAL(count(entry(kKey + kPath + kDtype)), -1);                  // no dimensions, but bytes missing
    CHECK_EQUAL(count(std::string("\x0a\x80\x00", 3)), -1);               // a length in too many bytes
    CHECK_EQUAL(count(std::string("\x12\x00", 2)), -1);
    for (size_t length = 1; length < entry(whole()).size(); ++length) {
        CHECK_EQUAL(count(entry(whole()).substr(0, length)), -1);  // cut short
    }
}

TEST(layout_declines_what_breaks_a_rule) {
    const std::string tail = kOffsets + kSizes + kPlace;
    CHECK_EQUAL(count(entry(kKey + kPath + kDtype + std::string("\x22\x02\x01\x03", 4) + tail)), -1);
    CHECK_EQUAL(count(entry(kKey + kPath + std::string("\x1a\x05uint8", 7) + kShape + tail)), -1);
    CHECK_EQUAL(count(entry(kKey + kPath + std::string("\x1a\x04" "bits", 6) + kShape + tail)), -1);
    CHECK_EQUAL(count(entry(kKey + kPath + kDtype + kShape + kOffsets + kSizes + "\x38\x41\x40\x18")), -1);
    CHECK_EQUAL(count(entry(whole()) + entry(whole())), 2);  // tied
    CHECK_EQUAL(count(entry(whole()) + entry(kKey + kPath + kDtype + kShape + kOffsets + kSizes + "\x40\x18")),
                -1);  // before the one before
    LayoutCaps one = kCaps;
    one.entries = 1;
    CHECK_EQUAL(count(entry(whole()) + entry(whole()), one), -1);
    LayoutCaps narrow = kCaps;
    narrow.dims = 1;
    CHECK_EQUAL(count(entry(whole()), narrow), -1);
    narrow = kCaps;
    narrow.path_parts = 1;
    CHECK_EQUAL(count(entry(whole()), narrow), -1);
    narrow = kCaps;
    narrow.name_bytes = 0;
    CHECK_EQUAL(count(entry(whole()), narrow), -1);
}
