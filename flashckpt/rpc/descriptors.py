"""How many connections an agent lets in: strangers must not use up the descriptors that it keeps its decisions with."""

from __future__ import annotations

import contextlib
import resource

_MOST = 1 << 16


def connections_allowed() -> int:
    """Half of this process's descriptors, of which there are from now on as many as its hard limit allows.

    The other half is for its own connections to other nodes, its shards and the small files without which it has to
    end. A connection without credentials goes after the handshake's timeout, so that a place comes free again.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard or (hard == resource.RLIM_INFINITY and soft != hard):
        with contextlib.suppress(ValueError, OSError):  # a kernel or a sandbox that wants it lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(1, min(_MOST, soft // 2))
