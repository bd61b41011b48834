"""The fixed numbers of the format. A reader refuses what exceeds a cap before it allocates memory."""

from __future__ import annotations

FORMAT_VERSION = 1

PREAMBLE_BYTES = 64
# Room that geometry() keeps for the header's fields other than the layout and the chunk table. With a job of 256 bytes
# and full-length varints they take 385 bytes.
IDENTITY_ROOM_BYTES = 512

DATA_ALIGNMENT_BYTES = 4096  # a page: the data area can be mapped and read directly
ENTRY_ALIGNMENT_BYTES = 64  # a cache line and the widest vector store

MIN_CHUNK_BYTES = 4 << 10
MAX_CHUNK_BYTES = 64 << 20
DEFAULT_CHUNK_BYTES = 256 << 10
CRC_BYTES = 4

MAX_HEADER_BYTES = 64 << 20
MAX_ENTRIES = 1 << 20
MAX_ENTRY_BYTES = 16 << 10  # one encoded entry: bounds the memory that decoding a hostile one takes
MAX_NAME_BYTES = 4 << 10  # an fqn, or one string key of a path
MAX_PATH_PARTS = 64
MAX_DIMS = 64
MAX_JOB_BYTES = 256
MAX_WORLD = 1 << 24
MAX_INTEGER = (1 << 63) - 1  # every count, offset and length fits a signed 64-bit integer
MAX_NONCE = (1 << 64) - 1
FINGERPRINT_BYTES = 16

MAX_VALUES_BYTES = 1 << 30
MAX_VALUE_DEPTH = 64
MAX_VALUE_ITEMS = 1 << 24  # values in one blob, nested ones included
MAX_VALUE_INT_BYTES = 64 << 10
MAX_VALUE_DIMS = 32  # supported by every version of numpy
# Keys of one dict or set with the same hash. Python's hash of numbers is not keyed, so that without a cap a hostile
# blob makes insertion quadratic. At most two or three real keys have the same hash (-1 and -2).
MAX_SAME_HASH = 64
