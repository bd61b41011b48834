"""`python -m tests.simdev` builds the simulated accelerator's library, unless it is there; `make simdev` runs this."""

import time

from tests.simdev import build

started = time.monotonic()
print(f"{build.library()} ({time.monotonic() - started:.1f} s)")
