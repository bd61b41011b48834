"""How a helper process steps back behind the training.

Niceness alone does nothing where the kernel schedules by session (autogroups, the default of most distributions): a
process in a session of its own then competes with the whole training as one to one, however nice it is. Its session
has to be nice as well.
"""

from __future__ import annotations

import contextlib


def be_nice_as_session(pid: int | str, niceness: int) -> None:
    """The session of that process ("self": of this one). Only for a session that is ours alone. Where the kernel knows
    no such groups, or control groups decide, nothing changes."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/autogroup", "w", encoding="ascii") as file:
        file.write(str(niceness))
