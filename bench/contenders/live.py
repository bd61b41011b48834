"""From what a library returned into the tensors that the training uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.state import tensors_of

if TYPE_CHECKING:
    from bench.state import StateDict


def copy_into(state: StateDict, loaded: dict[str, Any]) -> None:
    """Part of every load whose library returns tensors of its own: only then has the training its state back."""
    for live, stored in zip(tensors_of(state), tensors_of(loaded), strict=True):
        live.copy_(stored)
    state["trainer"].update(loaded["trainer"])
