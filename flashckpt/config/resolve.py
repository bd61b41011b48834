"""Adds the settings of the environment. An argument beats the environment, which beats the default, except
FLASHCKPT_DISABLE."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashckpt.errors import ConfigError
from flashckpt.store.default_place import default_memory_dir

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashckpt.config.fields import CheckpointConfig

DEFAULT_MEMORY_DIR = "/dev/shm/flashckpt-<uid>"  # for messages and documents; see default_memory_dir()

# Field → environment variable. Fields that are not listed here have no variable.
ENVIRONMENT = {
    "job": "FLASHCKPT_JOB",
    "memory_dir": "FLASHCKPT_MEMORY_DIR",
    "node_id": "FLASHCKPT_NODE_ID",
    "domain": "FLASHCKPT_DOMAIN",
    "advertise": "FLASHCKPT_ADVERTISE",
    "port": "FLASHCKPT_PORT",
    "agent": "FLASHCKPT_AGENT",
    "verify": "FLASHCKPT_VERIFY",
    "single_process": "FLASHCKPT_SINGLE_PROCESS",
    "tls_cert": "FLASHCKPT_TLS_CERT",
    "tls_key": "FLASHCKPT_TLS_KEY",
    "tls_ca": "FLASHCKPT_TLS_CA",
}

# Ids that stay the same when the launcher restarts the job, best first.
# Slurm gives each task of an array a job id of its own, and keeps it over a requeue.
_STICKY_LAUNCHER_IDS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "TORCHELASTIC_RUN_ID")
_UUID = re.compile(r"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Settings:
    """Holds a configuration, with every default filled in from one environment."""

    config: CheckpointConfig
    job: str
    memory_dir: str
    node_id: str
    domain: str
    advertise: str | None  # None: found at the start
    port: int  # 0: any
    tls_files: tuple[str, str, str] | None  # certificate, key, CA; None: each launch makes its own
    uses_agent: bool
    verifies: bool  # True: a load compares checksums
    rechecks: bool  # True: every overlapped save compares checksums
    launcher_world: int  # the number of ranks that the launcher has started; 1: no launcher, or only this one
    single_process: bool  # this process is alone in spite of that
    disabled: bool

    @property
    def why_no_saves(self) -> str:
        """Return why every save is skipped, or "" if saves are made."""
        if self.disabled:
            return "FLASHCKPT_DISABLE is set"
        return "load_only is set" if self.config.load_only else ""

    @property
    def persists(self) -> bool:
        """Return True if an agent writes to persist_dir."""
        return self.config.persist_dir is not None and self.uses_agent

    @property
    def encrypts_data(self) -> bool:
        """Return True if lanes use TLS: because `encrypt_data` says so, or else because the operator provides
        certificates."""
        asked = self.config.encrypt_data
        return self.tls_files is not None if asked is None else asked


def resolve(config: CheckpointConfig, environ: Mapping[str, str] = os.environ) -> Settings:
    """Fill in what the environment decides. Raises ConfigError if nothing names the job."""

    def given(field: str) -> Any:
        value = getattr(config, field)
        return value if value is not None else environ.get(ENVIRONMENT[field]) or None

    disabled = environ.get("FLASHCKPT_DISABLE", "") not in ("", "0")
    job = given("job") or _launcher_job(environ)
    if job is None and config.persist_dir is not None:
        job = "dir-" + hashlib.blake2b(config.persist_dir.encode(), digest_size=8).hexdigest()
    if job is None:
        if not disabled:
            raise ConfigError(
                "no job name: expected CheckpointConfig(job=…), FLASHCKPT_JOB, a sticky launcher id or persist_dir",
                hint="give the run a name that stays the same when it is restarted, e.g. FLASHCKPT_JOB=run1",
            )
        job = "disabled"
    agent = given("agent") or "auto"
    if agent not in ("auto", "off"):
        raise ConfigError(f"FLASHCKPT_AGENT: expected auto or off, found {agent!r}")
    flushes = config.persist_on_exit or config.persist_interval or config.persist_interval_minutes
    if agent == "off" and config.persist_dir is not None and flushes and not (config.load_only or disabled):
        raise ConfigError(
            "persist_dir with agent='off': expected an agent, which writes there, found that it is off",
            hint="leave CheckpointConfig(agent=…) and FLASHCKPT_AGENT at their defaults; or leave persist_dir out; "
            "load_only=True, or persist_on_exit=False without an interval, only loads from it",
        )
    verify = _verify(given("verify"))
    return Settings(
        config=config,
        job=job,
        memory_dir=given("memory_dir") or default_memory_dir(job),
        node_id=given("node_id") or socket.gethostname(),
        domain=given("domain") or "",
        advertise=given("advertise"),
        port=_port(given("port")),
        tls_files=_tls_files(given("tls_cert"), given("tls_key"), given("tls_ca")),
        uses_agent=agent == "auto",
        verifies=verify is not False,
        rechecks=verify == "recheck",
        launcher_world=_launcher_world(environ),
        single_process=_switch("FLASHCKPT_SINGLE_PROCESS", given("single_process")),
        disabled=disabled,
    )


def _verify(value: bool | str | None) -> bool | str:
    if value is None or isinstance(value, bool):
        return value is not False
    known: dict[str, bool | str] = {"recheck": "recheck", "on": True, "1": True, "off": False, "0": False}
    if value not in known:
        raise ConfigError(f"FLASHCKPT_VERIFY: expected recheck, on or off, found {value!r}")
    return known[value]


def _switch(name: str, value: bool | str | None) -> bool:
    known: dict[bool | str | None, bool] = {None: False, "0": False, "1": True, False: False, True: True}
    if value not in known:
        raise ConfigError(f"{name}: expected 1 or 0, found {value!r}")
    return known[value]


def _launcher_world(environ: Mapping[str, str]) -> int:
    """Return the number of ranks that the launcher started. torchrun tells it to its workers in WORLD_SIZE."""
    text = environ.get("WORLD_SIZE", "")
    return int(text) if text.isascii() and text.isdigit() else 1


def _port(value: int | str | None) -> int:
    try:
        port = int(value or 0)
    except ValueError:
        port = -1
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"FLASHCKPT_PORT: expected 0 to 65535, found {value!r}")
    return port


def _tls_files(cert: str | None, key: str | None, ca: str | None) -> tuple[str, str, str] | None:
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        missing = [name for name, value in (("CERT", cert), ("KEY", key), ("CA", ca)) if value is None]
        raise ConfigError(
            f"expected all of FLASHCKPT_TLS_CERT, _KEY and _CA, found none of {missing}",
            hint="give the three files, or none: then each launch makes certificates of its own",
        )
    return cert, key, ca


def _launcher_job(environ: Mapping[str, str]) -> str | None:
    for name in _STICKY_LAUNCHER_IDS:
        value = environ.get(name, "")
        # torchrun's run id is "none" by default and a fresh uuid with --standalone: not sticky.
        if value and value != "none" and not _UUID.fullmatch(value):
            return f"{name.lower().split('_')[0]}-{value}"
    return None
