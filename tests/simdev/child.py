"""The process that `tests.simdev.runner` starts: loads the simulated accelerator and runs test code on it."""

from __future__ import annotations

import faulthandler
import importlib
import json
import reprlib
import sys
import threading
import traceback

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 300


def main() -> int:
    timeout, mode, what, *rest = sys.argv[1:]
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(timeout), exit=True)

    from tests import simdev

    simdev.load()
    if mode == "cases":
        names, report = rest
        _run_cases(what, json.loads(names), report)
        return 0
    try:
        _run(what, json.loads(rest[0]))
    except BaseException as error:
        print(_explain(error), file=sys.stderr)
        return 1
    return 0


def _run(what: str, arguments: list[object]) -> None:
    module, _, function = what.partition(":")
    if function.isidentifier() and "\n" not in module:
        getattr(importlib.import_module(module), function)(*arguments)
    else:
        exec(compile(what, "<snippet>", "exec"), {"__name__": "__main__", "arguments": arguments})


def _run_cases(module: str, names: list[str], report: str) -> None:
    """Write a line to the report after each case: a crash or a hang then takes only the later ones with it."""
    from tests import simdev

    found = importlib.import_module(module)
    with open(report, "a", encoding="utf-8") as lines:
        for name in names:
            print(f"case {name}", file=sys.stderr, flush=True)
            outcome = _in_thread(getattr(found, name))
            try:
                simdev.reset()
            except RuntimeError as error:
                outcome = outcome or f"the case left an error behind: {error}"
            lines.write(json.dumps([name, outcome]) + "\n")
            lines.flush()


def _in_thread(case: object) -> str | None:
    """Run the case in a thread: current device, current streams and the last error are a thread's."""
    outcome: list[str] = []

    def run() -> None:
        try:
            case()
        except BaseException as error:
            outcome.append(_explain(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    return outcome[0] if outcome else None


def _explain(error: BaseException) -> str:
    """The traceback without this file, and the values that the failing frame's local names had."""
    frames = list(traceback.walk_tb(error.__traceback__))
    while len(frames) > 1 and frames[0][0].f_code.co_filename == __file__:
        del frames[0]
    lines = ["Traceback (most recent call last):\n", *traceback.StackSummary.extract(iter(frames)).format()]
    lines += traceback.format_exception_only(error)
    if isinstance(error, AssertionError):
        for name, value in frames[-1][0].f_locals.items():
            if not callable(value) and not name.startswith("__"):
                lines.append(f"    {name} = {_safe_repr(value)}\n")
    return "".join(lines)


def _safe_repr(value: object) -> str:
    try:
        return _repr.repr(value)
    except Exception as error:
        return f"<no repr: {error}>"


if __name__ == "__main__":
    sys.exit(main())
