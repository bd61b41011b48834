"""Defines the command group, and turns every error into a message and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

import click

from flashckpt.errors import ConfigError, CorruptShardError, FlashError, NotFoundError

if TYPE_CHECKING:
    from typing import NoReturn

OK, FAILED, USAGE, NOTHING_FOUND, ERRORS_FOUND = 0, 1, 2, 3, 5
_INTERRUPTED = 130

# name → (module, help). The help is repeated here, so that the listing imports no command.
_COMMANDS = {
    "agent": ("flashckpt.cli.agent", "Run, start, stop or show this node's agent."),
    "bench": ("flashckpt.cli.bench", "Measure save and load on this machine."),
    "demo": ("flashckpt.cli.demo", "Lose a node of a training job and resume it, bit for bit."),
    "doctor": ("flashckpt.cli.doctor", "Check that this node is fit for saving, and say what to do if not."),
    "export": ("flashckpt.cli.export", "Write the model of a saved step for other programs."),
    "flush": ("flashckpt.cli.flush", "Write a step from memory to persist_dir now."),
    "histories": (
        "flashckpt.cli.histories",
        "Show how the job's launches continue each other; choose between two histories.",
    ),
    "import": ("flashckpt.cli.import_model", "Write another program's model as a checkpoint to start from."),
    "inspect": ("flashckpt.cli.inspect", "Show what one saved step holds."),
    "ls": ("flashckpt.cli.ls", "List the generations in this node's memory."),
    "status": ("flashckpt.cli.status", "Show this node: its agent, peers, generations and memory."),
    "verify": ("flashckpt.cli.verify", "Check every byte of the shards in memory."),
}

_EPILOG = "Exit codes: 0 ok, 1 failed, 2 wrong usage, 3 nothing found, 5 errors found in the data."


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(_COMMANDS[cmd_name][0]).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{cmd_name}: expected a click command, found {type(command).__name__}")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(_COMMANDS.items())])


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from flashckpt import __version__

        click.echo(f"flashckpt {__version__}")
        ctx.exit()


@click.group(cls=_LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Show the version."
)
def group() -> None:
    """In-memory checkpoints for PyTorch training: show them, check them, try them."""


def run() -> NoReturn:
    """Run the command line and exit. Errors are printed as code, message and hint, never as a traceback."""
    try:
        code = group.main(prog_name="flashckpt", standalone_mode=False)
    except click.exceptions.Abort:
        _say("interrupted")
        code = _INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except FlashError as error:
        print_error(error)
        code = exit_code(error)
    except BrokenPipeError:
        # For `flashckpt ls | head`. Otherwise the interpreter reports the closed pipe again while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = FAILED
    except KeyboardInterrupt:
        _say("interrupted")
        code = _INTERRUPTED
    sys.exit(code if isinstance(code, int) else OK)


def exit_code(error: FlashError) -> int:
    if isinstance(error, NotFoundError):
        return NOTHING_FOUND
    if isinstance(error, ConfigError):
        return USAGE
    return ERRORS_FOUND if isinstance(error, CorruptShardError) else FAILED


def print_error(error: FlashError) -> None:
    from flashckpt.cli.output import printable

    _say(f"error {error.code}: {printable(error.message, keep_lines=True)}")
    if error.hint:
        _say(f"hint: {printable(error.hint, keep_lines=True)}")


def _say(text: str) -> None:
    click.echo(text, err=True)
