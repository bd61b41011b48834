// Arithmetic modulo the CRC32C polynomial, bit-reflected: bit 31 is the coefficient of x^0.
#pragma once

#include <array>
#include <cstdint>

namespace flashckpt {

inline constexpr uint32_t kPolynomial = 0x82f63b78u;
inline constexpr uint32_t kOne = 0x80000000u;

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ ((a & 1) != 0 ? kPolynomial : 0); }

constexpr uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
        if ((a & bit) != 0) product ^= b;
        b = times_x(b);
    }
    return product;
}

// x^(2^k) for every k that a 64-bit exponent can need.
constexpr std::array<uint32_t, 64> make_squares() {
    std::array<uint32_t, 64> squares{};
    uint32_t square = times_x(kOne);
    for (auto& entry : squares) {
        entry = square;
        square = multiply(square, square);
    }
    return squares;
}
inline constexpr std::array<uint32_t, 64> kSquares = make_squares();

// x^exponent.
constexpr uint32_t power_of_x(uint64_t exponent) {
    uint32_t power = kOne;
    for (unsigned k = 0; exponent != 0; exponent >>= 1, ++k) {
        if ((exponent & 1) != 0) power = multiply(power, kSquares[k]);
    }
    return power;
}

// x^(8 * bytes): what a CRC state is multiplied by when `bytes` zero bytes follow. The order of x modulo this
// polynomial is 2^31-1, so the length can be reduced first, which keeps 8 * bytes within 64 bits.
constexpr uint32_t zero_bytes_factor(uint64_t bytes) {
    constexpr uint64_t kOrder = (uint64_t{1} << 31) - 1;
    return power_of_x((bytes % kOrder) * 8);
}

// Multiplication by one fixed factor, by tables: for shifts that are done often.
struct ShiftTable {
    uint32_t entries[4][256];

    explicit constexpr ShiftTable(uint32_t factor) : entries{} {
        for (unsigned byte = 0; byte < 4; ++byte) {
            for (uint32_t value = 0; value < 256; ++value) {
                entries[byte][value] = multiply(factor, value << (8 * byte));
            }
        }
    }
    constexpr uint32_t operator()(uint32_t state) const {
        return entries[0][state & 255] ^ entries[1][(state >> 8) & 255] ^ entries[2][(state >> 16) & 255] ^
               entries[3][state >> 24];
    }
};

// The constant that folds over `bits`: see fold() in crc32c_pclmul.cpp.
constexpr uint64_t fold_constant(uint64_t exponent) { return uint64_t{power_of_x(exponent)} << 1; }

}  // namespace flashckpt
