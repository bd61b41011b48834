// Defines what every call of the core returns. The core throws nothing across its API.
#pragma once

#include <cerrno>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace flashckpt {

enum class Code {
    kOk,
    kInvalidArgument,  // the caller's mistake; nothing was written
    kIo,               // the system refused; `errno_value` says why
};

class [[nodiscard]] Status {
  public:
    static Status ok() noexcept { return Status(Code::kOk, 0, {}); }
    static Status invalid(std::string message) {
        return Status(Code::kInvalidArgument, EINVAL, std::move(message));
    }
    static Status io(int errno_value, std::string message) {
        return Status(Code::kIo, errno_value, std::move(message));
    }

    bool is_ok() const noexcept { return code_ == Code::kOk; }
    Code code() const noexcept { return code_; }
    int errno_value() const noexcept { return errno_value_; }
    const std::string& message() const noexcept { return message_; }

  private:
    Status(Code code, int errno_value, std::string message) noexcept
        : code_(code), errno_value_(errno_value), message_(std::move(message)) {}

    Code code_;
    int errno_value_;
    std::string message_;
};

// Runs `body` and turns a failed allocation, the only thing the core's own code can throw, into a Status.
template <typename Body>
Status without_exceptions(Body&& body) noexcept {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return Status::io(ENOMEM, {});
    } catch (const std::length_error&) {
        return Status::io(ENOMEM, {});
    }
}

}  // namespace flashckpt
