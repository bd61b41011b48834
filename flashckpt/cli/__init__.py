"""The command line. `flashckpt --help` imports click and nothing else; each sub-command loads when it is used."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the `flashckpt` command."""
    from flashckpt.cli.entry import run

    run()
