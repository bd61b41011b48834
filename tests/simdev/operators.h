// Operators of the simulated devices.
#pragma once

#include <string>

namespace simdev {

// Queues `seconds` of work on the current stream.
void busy(double seconds);

// Operators that made the host wait since the last reset, one per line, each with its number of calls.
std::string operators_that_waited();
void reset_operators_that_waited();

}  // namespace simdev
