"""Defines options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from flashckpt.config import DEFAULT_MEMORY_DIR

F = TypeVar("F", bound=Callable[..., Any])


def where(function: F) -> F:
    """Add --job, --memory-dir and --json."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object; sizes are bytes."),
        click.option(
            "--memory-dir",
            metavar="DIR",
            help=f"Directory on a tmpfs. Default: FLASHCKPT_MEMORY_DIR, else {DEFAULT_MEMORY_DIR}.",
        ),
        click.option(
            "--job", metavar="NAME", help="Default: FLASHCKPT_JOB or the launcher's id; else every job found."
        ),
    ):
        function = option(function)
    return function
