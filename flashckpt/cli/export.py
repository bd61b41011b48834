"""Implements `flashckpt export`: writes the model of a saved step for other programs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from flashckpt.cli.memory import memory_dir_of, open_store, pick, selected_job, view
from flashckpt.cli.options import where
from flashckpt.cli.output import format_bytes, note, print_json, printable
from flashckpt.cli.rename import key_map_option, read_key_map

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashckpt.export.source import SavedStep

_FORMS = ("hf", "torch", "dcp")
_DTYPES = ("float32", "float16", "bfloat16", "float64")


@click.command("export")
@click.argument("out", metavar="DIRECTORY")
@click.option("--from", "path", metavar="PATH", help="Read a persisted step, DCP or safetensors, not memory.")
@click.option("--step", type=click.IntRange(min=0), help="Default: the newest complete one.")
@click.option(
    "--to", "form", type=click.Choice(_FORMS), default="hf", show_default=True, help="safetensors, torch, DCP."
)
@click.option("--dtype", type=click.Choice(_DTYPES), help="Convert floating point tensors.")
@click.option("--part", default="model", show_default=True, help="Part of the state to export.")
@click.option(
    "--shard-size",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Largest file, in gigabytes.",
)
@key_map_option
@click.option("--overwrite", is_flag=True, help="Replace DIRECTORY.")
@where
def command(
    out: str,
    path: str | None,
    step: int | None,
    form: str,
    dtype: str | None,
    part: str,
    shard_size: float,
    key_map: str | None,
    overwrite: bool,
    job: str | None,
    memory_dir: str | None,
    as_json: bool,
) -> None:
    """Write the model of a saved step to DIRECTORY: safetensors as Hugging Face reads them, a torch file, or DCP."""
    from flashckpt.export.write import DTYPES, export

    if path is not None and step is not None:
        raise click.UsageError("--from and --step: name the directory of the step")
    renaming = read_key_map(key_map)
    with _source(path, step, job, memory_dir) as source:
        done = export(
            source,
            out,
            form=form,  # type: ignore[arg-type]
            dtype=None if dtype is None else DTYPES[dtype],
            part=part,
            shard_bytes=int(shard_size * 1e9),
            overwrite=overwrite,
            rename=None if renaming is None else renaming.saved_name,
        )
    if as_json:
        content = {"step": done.step, "tensors": done.tensors, "size_bytes": done.size_bytes, "files": list(done.files)}
        print_json("export/v1", {"directory": out, "form": form, **content})
        return
    note(f"step {done.step}: {done.tensors} tensors, {format_bytes(done.size_bytes)} in {printable(out)}")


@contextlib.contextmanager
def _source(path: str | None, step: int | None, job: str | None, memory_dir: str | None) -> Iterator[SavedStep]:
    from flashckpt.export.source import PathSource, memory_source

    if path is not None:
        yield PathSource(path)
        return

    directory = memory_dir_of(memory_dir, job)
    name = selected_job(directory, job)
    with open_store(directory, name) as store:
        found = pick(view(store, name), step)
        with memory_source(store, name, found.generation) as source:
            yield source
