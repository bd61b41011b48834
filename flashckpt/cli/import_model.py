"""Implements `flashckpt import`: writes a model of another program as a checkpoint that a job can start from."""

from __future__ import annotations

import click

from flashckpt.cli.output import format_bytes, note, print_json, printable
from flashckpt.cli.rename import key_map_option, read_key_map

_DTYPES = ("float32", "float16", "bfloat16", "float64")


@click.command("import")
@click.argument("path", metavar="SOURCE")
@click.argument("out", metavar="DIRECTORY")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Convert floating point tensors.")
@key_map_option
@click.option("--overwrite", is_flag=True, help="Replace DIRECTORY.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; sizes are bytes.")
def command(path: str, out: str, dtype: str | None, key_map: str | None, overwrite: bool, as_json: bool) -> None:
    """Write the model in SOURCE (a Hugging Face directory, or a DCP checkpoint) as a DCP checkpoint to DIRECTORY.

    Name DIRECTORY persist_dir/step-0 to make it a seed that the job starts from, or point initial_load_path to it.
    """
    from flashckpt.export.source import PathSource
    from flashckpt.export.write import DTYPES, export

    renaming = read_key_map(key_map)
    done = export(
        PathSource(path),
        out,
        form="dcp",
        dtype=None if dtype is None else DTYPES[dtype],
        overwrite=overwrite,
        rename=None if renaming is None else renaming.reversed().saved_name,
        keep_part=True,
    )
    if as_json:
        print_json("import/v1", {"directory": out, "tensors": done.tensors, "size_bytes": done.size_bytes})
        return
    note(f"{done.tensors} tensors, {format_bytes(done.size_bytes)} in {printable(out)}")
