// Makes the pages of a mapping present and writable before anyone copies into them.
#pragma once

#include <cstddef>

#include "status.h"

namespace flashckpt {

// Faults all pages that [address, address + length) touches, for writing, without changing a byte; other
// threads may write to them meanwhile. A page that can't be had (the file is too short, no memory) is an I/O
// status, never a signal.
Status prefault(void* address, size_t length, int threads) noexcept;

// What prefault() falls back to on kernels without MADV_POPULATE_WRITE (before 5.14). Here for its test.
// Returns 0 or an errno.
int touch_pages(void* address, size_t length) noexcept;

}  // namespace flashckpt
