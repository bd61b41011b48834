"""Keeps the credentials that an agent works with, for its successor and for the ranks of its node."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashckpt.rpc.credentials import Bundle
    from flashckpt.store.slots import SlotStore

_NAME = "credentials"


def write_bundle(store: SlotStore, bundle: Bundle, address: str) -> None:
    """Write the credentials. `address`: where the agent listens for other nodes."""
    # One file, so that no reader finds one launch's key beside another's certificate.
    parts = [bundle.certificate_pem, bundle.key_pem, bundle.ca_pem, address.encode()]
    store.write_secret(_NAME, json.dumps([part.decode() for part in parts]).encode())


def read_bundle(store: SlotStore) -> tuple[Bundle, str] | None:
    """Return the credentials and the address. None if no launch has brought any."""
    # Imported here: the import takes as long as the rest of a start.
    from flashckpt.rpc.credentials import Bundle

    kept = store.read_secret(_NAME)
    if kept is None:
        return None
    certificate, key, ca, address = json.loads(kept)
    return Bundle(certificate.encode(), key.encode(), ca.encode()), address
