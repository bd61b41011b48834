// Threads that live for one call. No pool outlives the call, so a fork finds no thread of ours at work.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace flashckpt {

// Below this much work a call runs in the caller's thread: starting a thread costs as much as copying a
// megabyte.
inline constexpr int64_t kInlineBytes = int64_t{2} << 20;

// Returns how many threads pay off for `bytes` of work, at most `wanted`.
inline int useful_threads(int wanted, int64_t bytes, int64_t inline_bytes = kInlineBytes) noexcept {
    if (bytes < inline_bytes) return 1;
    const int64_t shares = inline_bytes > 0 ? std::max<int64_t>(1, bytes / (inline_bytes / 2 + 1)) : bytes;
    return static_cast<int>(std::clamp<int64_t>(shares, 1, std::max(wanted, 1)));
}

// Hands out the numbers below `total` in runs of `batch`, so that a thread with easy ones takes more of them.
class Claims {
  public:
    Claims(int64_t total, int64_t batch) noexcept : total_(total), batch_(std::max<int64_t>(batch, 1)) {}

    // Returns the next run in `first` and `last`, or false if none is left.
    bool take(int64_t* first, int64_t* last) noexcept {
        *first = next_.fetch_add(batch_, std::memory_order_relaxed);
        if (*first >= total_) return false;
        *last = total_ - *first < batch_ ? total_ : *first + batch_;
        return true;
    }

  private:
    const int64_t total_;
    const int64_t batch_;
    std::atomic<int64_t> next_{0};
};

// Returns the batch size for `total` chunks: about a megabyte, so that the memory is walked in order, but
// small enough that every thread gets several.
inline int64_t chunk_batch(int64_t total, int64_t chunk_bytes, int threads) noexcept {
    constexpr int64_t kBatchBytes = int64_t{1} << 20;
    const int64_t by_size = std::max<int64_t>(1, kBatchBytes / chunk_bytes);
    const int64_t by_share = std::max<int64_t>(1, total / (int64_t{threads} * 4));
    return std::min(by_size, by_share);
}

// Runs `body` in `threads` threads, the caller's being one, and returns when all are done. `body` must not
// throw. If the system gives fewer threads, fewer do the work.
template <typename Body>
void run_in_threads(int threads, Body&& body) {
    std::vector<std::thread> helpers;
    helpers.reserve(static_cast<size_t>(std::max(threads - 1, 0)));
    for (int i = 1; i < threads; ++i) {
        try {
            helpers.emplace_back([&body] { body(); });
        } catch (const std::system_error&) {
            break;
        } catch (const std::bad_alloc&) {
            break;
        }
    }
    body();
    for (std::thread& helper : helpers) helper.join();
}

// Holds the first error of any thread; the others see it and stop.
class FirstError {
  public:
    void set(int errno_value) noexcept {
        int expected = 0;
        value_.compare_exchange_strong(expected, errno_value, std::memory_order_relaxed);
    }
    int get() const noexcept { return value_.load(std::memory_order_relaxed); }

  private:
    std::atomic<int> value_{0};
};

}  // namespace flashckpt
