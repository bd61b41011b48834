// Makes the pages of a mapping present and writable before anyone copies into them.
#pragma once

#include <cstddef>

#include "status.h"

namespace flashckpt {

// Faults all pages that [address, address + length) touches, for writing, without changing a byte. Other
// threads may write to them meanwhile. If a page is not available (the file is too short, no memory), this
// returns an I/O status; it never raises a signal.
Status prefault(void* address, size_t length, int threads) noexcept;

// Does the work of prefault() on kernels without MADV_POPULATE_WRITE (before 5.14). Declared here for its
// test. Returns 0 or an errno.
int touch_pages(void* address, size_t length) noexcept;

}  // namespace flashckpt
