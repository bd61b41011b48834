"""The shape of the project: what imports what, and which names are public."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import flashckpt

ROOT = Path(flashckpt.__file__).parent

# package or module of flashckpt → what it may import from outside the standard library and flashckpt's base.
# A new edge here is a decision, not an accident.
OUTSIDE = {
    "persist": {"torch", "numpy", "fsspec", "format", "store", "native", "save", "load", "transport", "discover"},
    "agent": {"persist", "rpc", "lanes", "transport", "store", "format", "placement", "credentials", "address"},
    "rpc": {"grpc", "google", "v1", "store", "credentials", "address", "lanes"},  # protobuf types stop here
    "lanes": {"credentials"},
    "transport": {"store", "format", "native"},
    "placement": set(),
    "credentials": {"cryptography"},
    "address": set(),
    "testing": {"torch", "native", "store", "format", "agent", "checkpointer"},
    "state": {"torch", "format"},
    "save": {"torch", "state", "format", "store", "native", "agent", "rpc", "credentials", "placement"},
    "load": {
        "torch",
        "numpy",
        "rich",
        "state",
        "format",
        "store",
        "native",
        "save",
        "agent",
        "transport",
        "rpc",
        "placement",
    },
    "closing": {"save", "store"},
    "checkpointer": {"closing", "persist", "torch", "state", "save", "load", "store", "opening"},
    "opening": {"torch", "save", "load", "store", "join", "rpc", "agent"},  # which starts while join is imported
    "training": {"torch", "numpy", "format", "state", "save", "load", "manager", "persist"},
    "discover": {"persist"},
    "export": {"torch", "safetensors", "format", "load", "store", "persist", "save"},
    "manager": {"closing", "torch", "checkpointer", "training", "save", "load"},
    "dcp": {"torch", "checkpointer", "opening", "join", "state", "save", "load", "format", "store"},
    "devices": {"torch", "numpy", "native", "transport"},  # of transport the throttle
    "group": {"torch"},
    "launch": set(),
    "join": {"agent", "save", "load", "store", "placement", "credentials", "address"},
    "topology": set(),
    "wire": set(),
    "format": {"google", "numpy", "torch", "native", "v1"},  # torch and numpy only inside functions: see below
    "store": {"native"},
    "native": {"numpy"},
    "config": {"store"},  # which knows the default directory
    "errors": set(),
    "types": set(),
    "failpoints": set(),
    "niceness": set(),
    "collector": set(),
    "workers": set(),
    "turns": set(),
    "roll": set(),
    "cli": {
        *("click", "rich", "agent", "demo", "format", "store", "save", "native", "bench", "load", "export"),
        *("persist", "training", "doctor"),
    },
    "doctor": {"store", "agent", "native", "credentials", "cryptography", "address", "persist"},
    "demo": {"torch", "rich", "checkpointer", "store", "testing"},
}
BASE = {
    "wire",
    "config",
    "errors",
    "types",
    "failpoints",
    "niceness",
    "collector",
    "workers",
    "turns",
    "roll",
    "topology",
    "launch",
    "group",
    "devices",
}
PURE = [
    "persist/plan.py",
    "persist/retain.py",
    "persist/meta.py",
    "persist/names.py",
    "protocol/flush_spec.py",
    "training/policy.py",
    "training/compat.py",
    "training/names.py",
    "save/dedup.py",
    "save/retention.py",
    "state/assumed.py",
    "load/choose.py",
    "start/claimants.py",
    "state/cover.py",
    "load/plan.py",
    "load/sources.py",
    "load/inventory.py",
    "topology.py",
    "placement.py",
    "wire.py",
    "move/transports/tcp/strangers.py",
    "protocol/core.py",
    "protocol/admit.py",
    "protocol/commit.py",
    "protocol/copying.py",
    "protocol/holdings.py",
    "protocol/members.py",
    "protocol/epochs.py",
    "protocol/flush.py",
    "protocol/granting.py",
    "protocol/ledger.py",
    "protocol/replicate.py",
    "protocol/outbox.py",
    "protocol/replicate.py",
    "protocol/releasing.py",
    "protocol/replicate.py",
    "protocol/current_launch.py",
    "protocol/talking.py",
    "protocol/flush.py",
    "protocol/flush.py",
    "protocol/commit.py",
    "protocol/commit.py",
    "protocol/heal.py",
    "protocol/heal.py",
    "protocol/survival.py",
    "protocol/verdict.py",
    "protocol/seeing.py",
    "protocol/members.py",
    "protocol/replicate.py",
    "protocol/events.py",
    "protocol/session.py",
    "move/fetch.py",
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


def test_layers():
    for path in sorted(ROOT.rglob("*.py")):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if part in ("__init__", "v1"):
            continue
        extra = outside(path) - BASE - {part} - OUTSIDE[part]
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}: a new edge between layers"


def test_decisions_are_pure():
    for name in PURE:
        used = outside(ROOT / name) & {"torch", "store", "native", "group", "devices"}
        standard = {n.split(".")[0] for n in imports(ROOT / name)} & {
            "os",
            "time",
            "random",
            "secrets",
            "socket",
            "threading",
        }
        assert not used | standard, f"{name} is a decision, but imports {sorted(used | standard)}"


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
            assert (path.name, given) == ("group.py", ["self._group"]), f"{path}:{call.lineno}"


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
        *("UnsupportedValueError", "UnusableError", "Whole", "dcp"),
        *("AgentError", "DeniedError", "PeerError", "RetrieveError"),
        *("CheckpointManager", "ExistsError", "LiveJobError", "MismatchError", "install_signal_handlers"),
        *("checkpoint_dirname", "contains_checkpoint", "dir_is_checkpoint", "find_checkpoints", "latest_checkpoint"),
        *("load_keys", "peek"),
    }


def test_importing_the_store_and_the_format_takes_neither_torch_nor_numpy():
    code = (
        "import sys, flashckpt, flashckpt.store.slots, flashckpt.format.shard, flashckpt.format.values\n"
        "sys.exit(' '.join({'torch', 'numpy', 'grpc', 'rich', 'fsspec'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
