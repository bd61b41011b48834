#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace simdev {
namespace {

using c10::CachingAllocator::Stat;

constexpr size_t kPageBytes = 4096;
// Address space, not memory. No address is ever used twice, so a stale pointer finds poison and not somebody else's data.
constexpr size_t kArenaBytes = size_t{1} << 40;
// Poisoned blocks beyond this give their pages back, oldest first; a stale pointer into them then finds zeros.
constexpr size_t kPoisonedBytes = size_t{64} << 20;

size_t round_up_to_page(size_t size_bytes) { return (size_bytes + kPageBytes - 1) & ~(kPageBytes - 1); }

char* map_arena(int descriptor, int protection) {
    void* address = ::mmap(nullptr, kArenaBytes, protection, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    TORCH_CHECK(address != MAP_FAILED, "mapping the memory of a simulated device failed: ", std::strerror(errno));
    ::madvise(address, kArenaBytes, MADV_DONTDUMP);
    return static_cast<char*>(address);
}

// The memory of one device: one file without a name, mapped twice. Torch sees the mapping that nobody can touch;
// workers use the other one.
class Arena {
  public:
    explicit Arena(c10::DeviceIndex index) : index_(index) {
        const int descriptor = ::memfd_create("simdev", MFD_CLOEXEC);
        TORCH_CHECK(descriptor >= 0, "memfd_create failed: ", std::strerror(errno));
        TORCH_CHECK(::ftruncate(descriptor, static_cast<off_t>(kArenaBytes)) == 0,
                    "sizing the memory of a simulated device failed: ", std::strerror(errno));
        device_base_ = map_arena(descriptor, PROT_NONE);
        worker_base_ = map_arena(descriptor, PROT_READ | PROT_WRITE);
        ::close(descriptor);
    }

    bool contains(const void* device_address) const { return within(device_base_, device_address); }
    bool contains_for_workers(const void* address) const { return within(worker_base_, address); }
    char* for_workers(const void* device_address) const {
        return worker_base_ + (static_cast<const char*>(device_address) - device_base_);
    }

    void* allocate(size_t size_bytes) {
        const size_t rounded = round_up_to_page(size_bytes);
        if (!fits(rounded)) drain_reaper();  // blocks whose last users are still at work may make room
        const c10::Stream home = current_stream(index_);
        std::lock_guard<std::mutex> lock(mutex_);
        if (!fits_locked(rounded)) {
            ++out_of_memory_count_;
            raise_out_of_memory(rounded);
        }
        const size_t offset = next_;
        TORCH_CHECK(rounded <= kArenaBytes - offset, "the simulated device has used up its address space");
        next_ += rounded;
        blocks_.emplace(offset, Block{rounded, home, {}});
        count_.increase(1);
        bytes_.increase(rounded);
        // A caching allocator hands out what another tensor had until now, and what is queued on the home stream
        // may still use it. Poisoning in that stream's order shows whoever writes from another stream too early.
        char* const worker_memory = worker_base_ + offset;
        enqueue(home, [worker_memory, rounded] { std::memset(worker_memory, kPoison, rounded); });
        return device_base_ + offset;
    }

    void free(void* device_address) {
        const size_t offset = offset_of(device_address);
        std::unique_lock<std::mutex> lock(mutex_);
        auto node = blocks_.extract(offset);
        TORCH_INTERNAL_ASSERT(!node.empty(), "freed an address that is not the start of a block of sim");
        lock.unlock();
        const Block& block = node.mapped();
        const size_t size_bytes = block.size_bytes;
        if (block.users.empty()) {
            count_freed(size_bytes);
            enqueue(block.home, [this, offset, size_bytes] { poison(offset, size_bytes); });
            return;
        }
        std::vector<MomentPtr> uses{mark(block.home)};
        for (const c10::Stream& user : block.users) uses.push_back(mark(user));
        enqueue_reaper([this, offset, size_bytes, uses = std::move(uses)] {
            for (const MomentPtr& use : uses) use->wait();
            poison(offset, size_bytes);
            count_freed(size_bytes);
        });
    }

    void record_use(const void* device_address, const c10::Stream& stream) {
        const size_t offset = offset_of(device_address);
        std::lock_guard<std::mutex> lock(mutex_);
        auto found = blocks_.upper_bound(offset);
        if (found == blocks_.begin()) return;
        Block& block = (--found)->second;
        if (block.home == stream) return;
        for (const c10::Stream& user : block.users) {
            if (user == stream) return;
        }
        block.users.push_back(stream);
    }

    void set_limit(size_t limit_bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        limit_bytes_ = limit_bytes;
    }

    c10::CachingDeviceAllocator::DeviceStats stats() {
        std::lock_guard<std::mutex> lock(mutex_);
        c10::CachingDeviceAllocator::DeviceStats stats;
        constexpr auto kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
        stats.allocation[kAggregate] = count_;
        stats.active[kAggregate] = count_;
        stats.allocated_bytes[kAggregate] = bytes_;
        stats.active_bytes[kAggregate] = bytes_;
        stats.reserved_bytes[kAggregate] = bytes_;
        stats.requested_bytes[kAggregate] = bytes_;
        stats.num_ooms = out_of_memory_count_;
        return stats;
    }

    void reset_accumulated() {
        std::lock_guard<std::mutex> lock(mutex_);
        count_.reset_accumulated();
        bytes_.reset_accumulated();
        out_of_memory_count_ = 0;
    }

    void reset_peak() {
        std::lock_guard<std::mutex> lock(mutex_);
        count_.reset_peak();
        bytes_.reset_peak();
    }

    // Free and total bytes.
    std::pair<size_t, size_t> info() {
        std::lock_guard<std::mutex> lock(mutex_);
        const size_t total = limit_bytes_ > 0 ? limit_bytes_ : kArenaBytes;
        const auto used = static_cast<size_t>(bytes_.current);
        return {used < total ? total - used : 0, total};
    }

  private:
    struct Block {
        size_t size_bytes;
        c10::Stream home;                // current when it was allocated; it is freed in the order of this one
        std::vector<c10::Stream> users;  // others, by record_stream
    };

    static bool within(const char* base, const void* address) {
        const char* at = static_cast<const char*>(address);
        return at >= base && at < base + kArenaBytes;
    }

    size_t offset_of(const void* device_address) const {
        return static_cast<size_t>(static_cast<const char*>(device_address) - device_base_);
    }

    bool fits(size_t size_bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        return fits_locked(size_bytes);
    }

    bool fits_locked(size_t size_bytes) const {
        return limit_bytes_ == 0 || static_cast<size_t>(bytes_.current) + size_bytes <= limit_bytes_;
    }

    [[noreturn]] void raise_out_of_memory(size_t size_bytes) const {
        TORCH_CHECK_WITH(OutOfMemoryError, false, "sim:", static_cast<int>(index_), " out of memory: tried to allocate ",
                         size_bytes, " bytes; ", bytes_.current, " of ", limit_bytes_, " bytes are in use");
        std::abort();  // not reached: the check above throws
    }

    void count_freed(size_t size_bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        count_.decrease(1);
        bytes_.decrease(size_bytes);
    }

    // Called by workers, when nobody has a right to the block any more.
    void poison(size_t offset, size_t size_bytes) {
        std::memset(worker_base_ + offset, kPoison, size_bytes);
        std::lock_guard<std::mutex> lock(mutex_);
        poisoned_.emplace_back(offset, size_bytes);
        poisoned_bytes_ += size_bytes;
        while (poisoned_bytes_ > kPoisonedBytes && poisoned_.size() > 1) {
            const auto [oldest, oldest_bytes] = poisoned_.front();
            poisoned_.pop_front();
            poisoned_bytes_ -= oldest_bytes;
            ::madvise(worker_base_ + oldest, oldest_bytes, MADV_REMOVE);
        }
    }

    const c10::DeviceIndex index_;
    char* device_base_ = nullptr;
    char* worker_base_ = nullptr;

    std::mutex mutex_;  // of all that follows
    size_t next_ = 0;
    size_t limit_bytes_ = 0;
    std::map<size_t, Block> blocks_;  // by offset
    std::deque<std::pair<size_t, size_t>> poisoned_;
    size_t poisoned_bytes_ = 0;
    Stat count_;
    Stat bytes_;
    int64_t out_of_memory_count_ = 0;
};

// Leaked, as everything that workers touch.
std::array<Arena, kDeviceCount>& arenas() {
    static auto* all = new std::array<Arena, kDeviceCount>{Arena(0), Arena(1)};
    return *all;
}
static_assert(kDeviceCount == 2, "arenas() names one arena per device");

Arena& arena(c10::DeviceIndex index) { return arenas()[static_cast<size_t>(checked_device(index).index())]; }

Arena& arena_with(const void* device_address) {
    for (Arena& one : arenas()) {
        if (one.contains(device_address)) return one;
    }
    TORCH_CHECK(false, "expected an address in the memory of a simulated device, found ", device_address);
}

void free_block(void* device_address) {
    if (device_address != nullptr) arena_with(device_address).free(device_address);
}

class DeviceMemory final : public c10::DeviceAllocator {
  public:
    c10::DataPtr allocate(size_t size_bytes) override {
        const c10::Device device = checked_device(current_device());
        if (size_bytes == 0) return {nullptr, device};
        void* const address = arena(device.index()).allocate(size_bytes);
        return {address, address, &free_block, device};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
    void copy_data(void* to, const void* from, size_t size_bytes) const override {
        char* const target = worker_address(to);
        const char* const source = worker_address(from);
        run_and_wait(current_stream(device_of(to)), [=] { std::memcpy(target, source, size_bytes); });
    }

    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override { drain_reaper(); }
    void recordStream(const c10::DataPtr& block, c10::Stream stream) override {
        if (block.get() != nullptr) record_use(block.get(), stream);
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
        return arena(index).stats();
    }
    void resetAccumulatedStats(c10::DeviceIndex index) override { arena(index).reset_accumulated(); }
    void resetPeakStats(c10::DeviceIndex index) override { arena(index).reset_peak(); }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override { return arena(index).info(); }
};

DeviceMemory& device_memory() {
    static auto* allocator = new DeviceMemory();
    return *allocator;
}

// Host memory that copies may use asynchronously: allocated as pinned, or registered by its owner.
class PinnedRanges {
  public:
    void* allocate(size_t size_bytes) {
        void* address = nullptr;
        const size_t rounded = round_up_to_page(size_bytes > 0 ? size_bytes : 1);
        TORCH_CHECK_WITH(OutOfMemoryError, ::posix_memalign(&address, kPageBytes, rounded) == 0,
                         "allocating ", rounded, " bytes of pinned memory failed");
        std::lock_guard<std::mutex> lock(mutex_);
        ranges_[static_cast<char*>(address)] = Range{rounded, /*registered=*/false, {}};
        return address;
    }

    void free(void* address) {
        std::unique_lock<std::mutex> lock(mutex_);
        auto node = ranges_.extract(static_cast<char*>(address));
        lock.unlock();
        if (node.empty()) return;
        enqueue_reaper([address, uses = std::move(node.mapped().uses)] {
            for (const MomentPtr& use : uses) use->wait();
            std::free(address);
        });
    }

    int add(void* address, size_t size_bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (address == nullptr || size_bytes == 0) return static_cast<int>(Error::kInvalidValue);
        if (const int code = fault_for(size_bytes)) return code;
        char* const begin = static_cast<char*>(address);
        auto after = ranges_.lower_bound(begin);
        if (after != ranges_.end() && after->first < begin + size_bytes) {
            return static_cast<int>(Error::kAlreadyRegistered);
        }
        if (after != ranges_.begin()) {
            auto before = std::prev(after);
            if (before->first + before->second.size_bytes > begin) return static_cast<int>(Error::kAlreadyRegistered);
        }
        ranges_[begin] = Range{size_bytes, /*registered=*/true, {}};
        return static_cast<int>(Error::kSuccess);
    }

    int remove(void* address) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto found = ranges_.find(static_cast<char*>(address));
        if (found == ranges_.end() || !found->second.registered) return static_cast<int>(Error::kNotRegistered);
        ranges_.erase(found);
        return static_cast<int>(Error::kSuccess);
    }

    void set_fault(const RegistrationFault& fault) {
        std::lock_guard<std::mutex> lock(mutex_);
        fault_ = fault;
    }

    size_t registered_bytes() {
        std::lock_guard<std::mutex> lock(mutex_);
        size_t total = 0;
        for (const auto& [begin, range] : ranges_) {
            if (range.registered) total += range.size_bytes;
        }
        return total;
    }

    bool contains(const void* address) {
        std::lock_guard<std::mutex> lock(mutex_);
        return find(address) != ranges_.end();
    }

    bool contains_all(const void* address, size_t size_bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        const char* const begin = static_cast<const char*>(address);
        const char* at = begin;
        auto found = find(at);
        // One copy may cross the border of two registrations that touch.
        while (found != ranges_.end() && at < begin + size_bytes) {
            at = found->first + found->second.size_bytes;
            found = find(at);
        }
        if (at >= begin + size_bytes) return true;
        TORCH_CHECK(at == begin, "expected a copy whose host memory is pinned or not, found one of ", size_bytes,
                    " bytes of which only the first ", at - begin, " are");
        return false;
    }

    void record_use(const void* address, const c10::Stream& stream) {
        MomentPtr use = mark(stream);
        std::lock_guard<std::mutex> lock(mutex_);
        auto found = find(address);
        if (found == ranges_.end() || found->second.registered) return;
        auto& uses = found->second.uses;
        while (!uses.empty() && uses.front()->passed()) uses.pop_front();
        uses.push_back(std::move(use));
    }

  private:
    struct Range {
        size_t size_bytes;
        bool registered;
        std::deque<MomentPtr> uses;  // of ranges that were allocated here: copies that are not done yet
    };
    using Ranges = std::map<char*, Range>;

    Ranges::iterator find(const void* address) {
        char* const at = static_cast<char*>(const_cast<void*>(address));
        auto found = ranges_.upper_bound(at);
        if (found == ranges_.begin()) return ranges_.end();
        --found;
        return at < found->first + found->second.size_bytes ? found : ranges_.end();
    }

    int fault_for(size_t size_bytes) {
        if (fault_.code == 0 || size_bytes <= fault_.above_bytes) return 0;
        if (fault_.after_calls > 0) {
            --fault_.after_calls;
            return 0;
        }
        return fault_.code;
    }

    std::mutex mutex_;
    Ranges ranges_;
    RegistrationFault fault_;
};

PinnedRanges& pinned_ranges() {
    static auto* ranges = new PinnedRanges();
    return *ranges;
}

void free_pinned(void* address) { pinned_ranges().free(address); }

class PinnedMemory final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t size_bytes) override {
        void* const address = pinned_ranges().allocate(size_bytes);
        return {address, address, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void* to, const void* from, size_t size_bytes) const override { std::memcpy(to, from, size_bytes); }
};

thread_local int this_threads_last_error = 0;

struct RegisterDeviceAllocator {
    RegisterDeviceAllocator() { c10::SetAllocator(kDeviceType, &device_memory()); }
} register_device_allocator;

}  // namespace

c10::DeviceAllocator& device_allocator() { return device_memory(); }

char* worker_address(const void* device_address) { return arena_with(device_address).for_workers(device_address); }

bool is_worker_address(const void* address) {
    for (const Arena& one : arenas()) {
        if (one.contains_for_workers(address)) return true;
    }
    return false;
}

c10::DeviceIndex device_of(const void* device_address) {
    for (c10::DeviceIndex index = 0; index < kDeviceCount; ++index) {
        if (arena(index).contains(device_address)) return index;
    }
    TORCH_CHECK(false, "expected an address in the memory of a simulated device, found ", device_address);
}

void record_use(const void* device_address, const c10::Stream& stream) {
    arena_with(device_address).record_use(device_address, stream);
}

void resize_storage(c10::StorageImpl& storage, size_t size_bytes) {
    const c10::DeviceIndex index = storage.device().index();
    const c10::DeviceIndex before = current_device();
    set_current_device(index);
    c10::DataPtr fresh = device_memory().allocate(size_bytes);
    set_current_device(before);
    const size_t kept_bytes = std::min(size_bytes, storage.nbytes());
    if (kept_bytes > 0) {
        char* const target = worker_address(fresh.get());
        const char* const source = worker_address(storage.data());
        enqueue(current_stream(index), [=] { std::memcpy(target, source, kept_bytes); });
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(size_bytes);
}

void set_memory_limit(c10::DeviceIndex index, size_t limit_bytes) { arena(index).set_limit(limit_bytes); }

c10::Allocator& pinned_allocator() {
    static auto* allocator = new PinnedMemory();
    return *allocator;
}

int host_register(void* address, size_t size_bytes) {
    const int code = pinned_ranges().add(address, size_bytes);
    if (code != 0) set_last_error(code);
    return code;
}

int host_unregister(void* address) {
    const int code = pinned_ranges().remove(address);
    if (code != 0) set_last_error(code);
    return code;
}

void set_registration_fault(const RegistrationFault& fault) { pinned_ranges().set_fault(fault); }

size_t registered_bytes() { return pinned_ranges().registered_bytes(); }

bool is_pinned(const void* address) { return pinned_ranges().contains(address); }

bool is_pinned_range(const void* address, size_t size_bytes) {
    return pinned_ranges().contains_all(address, size_bytes);
}

void record_pinned_use(const void* address, const c10::Stream& stream) { pinned_ranges().record_use(address, stream); }

void set_last_error(int code) { this_threads_last_error = code; }

int take_last_error() { return std::exchange(this_threads_last_error, 0); }

void check_before_launch(c10::DeviceIndex index) {
    const int code = take_last_error();
    TORCH_CHECK(code == 0, "sim error ", code, ": an earlier call of this thread failed and its error was never read");
    raise_failure_of_work(index);
}

}  // namespace simdev
