// The kernel for CPUs without a CRC or carry-less multiply instruction: sixteen table look-ups per sixteen
// bytes.
#include <array>
#include <cstring>

#include "kernels.h"
#include "polynomial.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "the shard format and these kernels are little-endian");

namespace flashckpt {
namespace {

using Tables = std::array<std::array<uint32_t, 256>, 16>;

// kTables[k][b]: the CRC state of byte b followed by k zero bytes.
constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t state = byte;
        for (int bit = 0; bit < 8; ++bit) state = times_x(state);
        tables[0][byte] = state;
    }
    for (size_t k = 1; k < tables.size(); ++k) {
        for (uint32_t byte = 0; byte < 256; ++byte) {
            const uint32_t before = tables[k - 1][byte];
            tables[k][byte] = (before >> 8) ^ tables[0][before & 255];
        }
    }
    return tables;
}
constexpr Tables kTables = make_tables();

uint32_t four(const uint8_t* word, size_t first_table) {
    return kTables[first_table + 3][word[0]] ^ kTables[first_table + 2][word[1]] ^
           kTables[first_table + 1][word[2]] ^ kTables[first_table][word[3]];
}

uint32_t update(uint32_t state, const uint8_t* data, size_t length) {
    for (; length >= 16; data += 16, length -= 16) {
        uint8_t head[4];
        std::memcpy(head, data, 4);
        uint32_t word;
        std::memcpy(&word, head, 4);
        word ^= state;
        std::memcpy(head, &word, 4);
        state = four(head, 12) ^ four(data + 4, 8) ^ four(data + 8, 4) ^ four(data + 12, 0);
    }
    for (; length != 0; ++data, --length) state = (state >> 8) ^ kTables[0][(state ^ *data) & 255];
    return state;
}

bool supported() { return true; }

}  // namespace

const Kernel kPortableKernel{"portable", supported, update, copy_by_tiles<update>, copy_then_update<update>};

}  // namespace flashckpt
