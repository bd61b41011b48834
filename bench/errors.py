"""The one error of the harness itself."""

from __future__ import annotations


class BenchError(Exception):
    """A measurement that could not be made, or whose result was wrong."""
