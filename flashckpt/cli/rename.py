"""Implements `--key-map`: other names for a model's tensors, in a JSON file."""

from __future__ import annotations

import json

import click

from flashckpt.errors import ConfigError, NotFoundError
from flashckpt.training.names import Renaming

key_map_option = click.option(
    "--key-map",
    "key_map",
    metavar="FILE",
    help="JSON with names of the model → names outside, as load(key_mapping=…) takes them.",
)


def read_key_map(path: str | None) -> Renaming | None:
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: expected a JSON file, found none") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a JSON file, found: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a JSON object, found a {type(found).__name__}")
    return Renaming(found)
