"""Defines the command line. `flashckpt --help` imports click and nothing else; each command is imported when it is
used.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the `flashckpt` command."""
    from flashckpt.cli.entry import run

    run()
