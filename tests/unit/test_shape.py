"""The shape of the project: what imports what, and which names are public."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import flashckpt

ROOT = Path(flashckpt.__file__).parent

# What every part may import. These modules import each other at most.
BASE = {"errors", "types", "failpoints", "workers", "collector"}
# Package or loose module → what else it may import from flashckpt and from outside the standard library.
# A new edge here is a decision, not an accident. Listed from the bottom up.
MAY_IMPORT = {
    "native": {"numpy"},
    "protocol": set(),
    "ranks": {"torch"},
    "format": {"google", "numpy", "torch", "native", "v1"},  # torch and numpy only inside functions: see below
    "store": {"native", "protocol"},  # of protocol the lines that it keeps
    "config": {"store", "protocol"},  # the default directory; the placements that there are
    "rpc": {"grpc", "google", "v1", "cryptography", "protocol", "store"},
    "state": {"torch", "numpy", "format"},
    "move": {"grpc", "v1", "rpc", "protocol", "store", "format", "native"},
    "agent": {"config", "protocol", "move", "rpc", "store"},
    "devices": {"torch", "numpy", "native", "move"},  # of move the throttle
    "save": {"config", "torch", "state", "devices", "agent", "rpc", "protocol", "ranks", "format", "store", "native"},
    "persist": {"torch", "numpy", "fsspec", "save", "state", "move", "protocol", "format", "store", "native"},
    "discover": {"persist"},
    "load": {
        *("torch", "numpy", "rich", "discover", "persist", "save", "state", "devices", "agent", "move", "rpc"),
        *("protocol", "ranks", "format", "store", "native"),
    },
    "start": {"config", "torch", "load", "save", "agent", "rpc", "protocol", "ranks", "store"},
    "checkpointer": {"config", "torch", "start", "load", "save", "state", "ranks", "protocol", "store"},
    "dcp": {"torch", "checkpointer", "start", "load", "save", "state", "format", "store"},
    "training": {"config", "torch", "numpy", "manager", "load", "persist", "save", "state", "ranks", "format"},
    "manager": {"config", "torch", "checkpointer", "training", "start", "load", "save"},
    "export": {"torch", "safetensors", "load", "persist", "save", "state", "format", "store"},
    "testing": {"torch", "agent", "protocol", "format", "store", "native"},
    "demo": {"torch", "rich", "testing", "store"},
    "doctor": {"config", "cryptography", "agent", "persist", "rpc", "store", "native"},
    "cli": {
        *("click", "rich", "demo", "doctor", "export", "training", "load", "persist", "save", "state", "agent"),
        *("config", "rpc", "protocol", "format", "store", "native"),  # of rpc what an agent keeps of a session
    },
}
IMPURE = {"os", "io", "time", "random", "secrets", "socket", "threading", "subprocess", "asyncio"}
TYPES_ONLY = {("training", "manager")}  # the one edge upwards: install_signal_handlers takes a manager
# Decisions outside protocol/, which is pure as a whole.
PURE = [
    "load/choose.py",
    "load/inventory.py",
    "load/plan.py",
    "load/sources.py",
    "move/transports/tcp/strangers.py",
    "persist/meta.py",
    "persist/names.py",
    "persist/plan.py",
    "persist/retain.py",
    "ranks/topology.py",
    "save/dedup.py",
    "save/retention.py",
    "start/claimants.py",
    "state/assumed.py",
    "state/cover.py",
    "state/runs.py",
    "training/compat.py",
    "training/names.py",
    "training/policy.py",
]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def outside(path):
    """Top-level packages, or first-level modules of flashckpt, that a file imports."""
    found = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "flashckpt":
            if len(parts) > 1 and ((ROOT / parts[1]).is_dir() or (ROOT / f"{parts[1]}.py").exists()):
                found.add(parts[1])
        elif parts[0] not in sys.stdlib_module_names | {"typing_extensions"}:
            found.add(parts[0])
    return found


def part_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_layers():
    for path in sorted(ROOT.rglob("*.py")):
        part = part_of(path)
        if part in ("__init__", "v1"):
            continue
        extra = outside(path) - {part} - (set() if part in BASE else BASE | MAY_IMPORT[part])
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}: a new edge between parts"


def test_no_two_parts_import_each_other():
    below = {part: needs & MAY_IMPORT.keys() for part, needs in MAY_IMPORT.items()}
    for part, above in TYPES_ONLY:
        below[part].remove(above)
    while below:
        floor = {part for part, needs in below.items() if not needs & below.keys()}
        assert floor, f"a cycle between some of {sorted(below)}"
        below = {part: needs for part, needs in below.items() if part not in floor}


def test_only_calls_and_transports_know_grpc():
    for path in sorted(ROOT.rglob("*.py")):
        if part_of(path) != "v1" and "grpc" in outside(path):
            where = path.relative_to(ROOT)
            assert where.is_relative_to("rpc") or where.is_relative_to("move/transports"), f"{where} imports grpc"


def test_few_modules_lie_loose():
    assert len([path for path in ROOT.glob("*.py") if path.name != "__init__.py"]) <= 10


def test_no_two_classes_share_a_name():
    """Private classes, and those of flashckpt.testing, whose names are public, may."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        if part_of(path) in ("testing", "v1"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert node.name not in found, f"{node.name}: in {path} and {found[node.name]}"
                found[node.name] = path


def test_protocol_is_pure():
    """It imports itself, errors and types; of the standard library nothing that sees the outside."""
    for path in sorted((ROOT / "protocol").rglob("*.py")):
        check_pure(path)
        extra = outside(path) - {"protocol", "errors", "types"}
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


def test_decisions_are_pure():
    for name in PURE:
        check_pure(ROOT / name)


def check_pure(path):
    used = outside(path) & {"torch", "store", "native", "devices", "grpc", "v1"}
    standard = {name.split(".")[0] for name in imports(path)} & IMPURE
    assert not used | standard, f"{path.relative_to(ROOT)} is a decision, but imports {sorted(used | standard)}"


def test_collectives_are_on_the_private_group():
    """None of ours runs on a group of the user's: each call of one names the group that group.py has made."""
    questions = {"get_rank", "get_world_size", "get_process_group_ranks", "is_available", "is_initialized", "new_group"}
    script = {"demo", "testing"}  # trainings, which are users
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] in script:
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            if ast.unparse(call.func.value) not in ("dist", "torch.distributed") or call.func.attr in questions:
                continue
            given = [ast.unparse(one.value) for one in call.keywords if one.arg == "group"]
            given += [ast.unparse(one) for one in call.args] if call.func.attr == "destroy_process_group" else []
            where = str(path.relative_to(ROOT))
            assert (where, given) == ("ranks/group.py", ["self._group"]), f"{path}:{call.lineno}"


# Threads without a handler of their own → why no exception ends them silently.
THREADS_THAT_DELEGATE = {
    "rpc/watchdog.py": "Watched.cancel_if_due catches what cancelling raises",
    "workers.py": "Pending.carry_out keeps the exception for the caller",
    "persist/__main__.py": "its end is the end of the process",
}


def test_no_thread_dies_silently():
    """What a thread runs catches every exception: to go on, or to tell those who rely on it."""
    for path in ROOT.rglob("*.py"):
        name = str(path.relative_to(ROOT))
        if name.startswith("testing/") or name in THREADS_THAT_DELEGATE:
            continue
        tree = ast.parse(path.read_text())
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for call in ast.walk(tree):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func).endswith("Thread")):
                continue
            target = next(ast.unparse(one.value) for one in call.keywords if one.arg == "target")
            body = ast.walk(functions[target.removeprefix("self.")])
            caught = {ast.unparse(node.type) for node in body if isinstance(node, ast.ExceptHandler) and node.type}
            assert caught & {"Exception", "BaseException"}, f"{name}:{call.lineno}: thread of {target}"


def test_public_names():
    assert sorted(flashckpt.__all__) == flashckpt.__all__
    for name in flashckpt.__all__:
        assert getattr(flashckpt, name) is not None
    assert set(flashckpt.__all__) == {
        *(
            "AmbiguousHistoryError",
            "BusyError",
            "ChangedError",
            "CheckpointConfig",
            "Checkpointer",
            "ClosedError",
            "ConfigError",
        ),
        *("ConflictError", "CorruptShardError", "DeadlineError", "FencedError", "FlashError", "Generation"),
        *("IncompatibleError", "InternalError", "Level", "LoadResult", "MissingKeyError", "NoSpaceError"),
        *(
            "NotFoundError",
            "OtherRankError",
            "Outcome",
            "PersistError",
            "ForeignStepError",
            "PerRank",
            "SaveHandle",
            "StorageError",
            "StructureError",
            "UnsafeDirectoryError",
        ),
        *("InitialLoad", "Memory", "Network", "Persist", "Replication", "Saving"),
        *("UnsupportedValueError", "UnusableError", "Whole", "dcp"),
        *("AgentError", "DeniedError", "PeerError", "RetrieveError"),
        *("CheckpointManager", "ExistsError", "LiveJobError", "MismatchError", "install_signal_handlers"),
        *("checkpoint_dirname", "contains_checkpoint", "dir_is_checkpoint", "find_checkpoints", "latest_checkpoint"),
        *("load_keys", "peek"),
    }
