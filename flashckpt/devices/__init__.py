"""Copies between accelerators and host memory, and within host memory if the native core can't (odd strides)."""

from flashckpt.devices.bits import DeviceCopy, as_bits, clone_on_device, native_address
from flashckpt.devices.copier import Copier, QueuedCopy
from flashckpt.devices.registrar import Registrar, add_registrar
from flashckpt.devices.streams import event_of, has_accelerator, side_stream
from flashckpt.devices.sums import weighted_sum, weighted_sum_of_bytes
from flashckpt.devices.upload import Upload, copy_into

__all__ = [
    "Copier",
    "DeviceCopy",
    "QueuedCopy",
    "Registrar",
    "Upload",
    "add_registrar",
    "as_bits",
    "clone_on_device",
    "copy_into",
    "event_of",
    "has_accelerator",
    "native_address",
    "side_stream",
    "weighted_sum",
    "weighted_sum_of_bytes",
]
