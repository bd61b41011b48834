"""The agent as a real process: started, found, refused, stopped, killed, left alone."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashckpt import AgentError, CheckpointConfig, ConfigError, IncompatibleError
from flashckpt.agent import process
from flashckpt.agent.lock import LOCK_NAME, AgentLock
from flashckpt.agent.process import LOG_NAME, Options, parse
from flashckpt.agent.start import FoundAgent, ensure_agent, environment_of_agent, look, options_of, stop_agent
from flashckpt.cli.entry import group
from flashckpt.config import resolve
from flashckpt.move.transports.tcp.policy import usual_count
from flashckpt.rpc.agent_client import AgentClient
from flashckpt.rpc.settings import VERSION
from flashckpt.store.directory import open_directory
from flashckpt.store.owner import Owner, is_dead

ROOT = Path(__file__).resolve().parents[2]
JOB = "run 1"


def options(memory_dir, **changes):
    return Options(**{"job": JOB, "memory_dir": memory_dir, "node_id": "node-a", "beat_interval": 0.1, **changes})


def wait_until(condition, timeout=20):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


# -- options and environment -----------------------------------------------------------------------------


def test_options_survive_the_command_line():
    given = options(
        "/dev/shm/a b",
        linger=1.5,
        budget_bytes=1 << 40,
        replicate_max_mbps=0.5,
        nice=0,
        lanes=3,
        peer_timeout=3,
        scrub_interval=7,
        drain_timeout=0,
        job="--json = 'ü'",
    )
    assert parse(["run", *given.arguments()]) == (given, False, 30.0)
    assert parse(["run", "--daemon", "--start-timeout=2.5", *options("/m").arguments()]) == (options("/m"), True, 2.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("linger", -1),
        ("linger", float("nan")),
        ("peer_timeout", float("inf")),
        ("drain_timeout", -0.1),
        ("beat_interval", 0),
        ("peer_timeout", 0.05),
        ("scrub_interval", 0),
        ("budget_bytes", 0),
        ("replicate_max_mbps", 0),
        ("nice", 20),
        ("lanes", 0),
        ("lanes", 9),
        ("node_id", ""),
    ],
)
def test_options_that_make_no_sense_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        options("/m", **{field: value})


def test_lanes_by_the_number_of_cores():
    assert [usual_count(cores) for cores in (1, 2, 3, 4, 96)] == [1, 1, 1, 2, 2]
    assert options("/m").lane_policy.count == usual_count(os.cpu_count())
    assert options("/m", lanes=3).lane_policy.count == 3


def test_a_trainers_settings_become_the_agents():
    config = CheckpointConfig(
        job=JOB, memory_dir="/m", node_id="n", agent_linger=5, memory_budget_bytes=7, peer_timeout=0.4
    )
    assert options_of(resolve(config, {})) == Options(
        job=JOB, memory_dir="/m", node_id="n", linger=5, budget_bytes=7, peer_timeout=0.4, beat_interval=0.1
    )
    endless = options("/m", linger=float("inf"))
    assert parse(["run", *endless.arguments()])[0] == endless


@pytest.mark.parametrize(
    ("arguments", "certificates", "expected"),
    [
        ([], False, 0),
        ([], True, 1),
        (["--encrypt-data"], False, 1),
        (["--no-encrypt-data"], True, 0),
    ],
)
def test_an_operators_agent_encrypts_as_trainers_would(monkeypatch, arguments, certificates, expected):
    for name in ("CERT", "KEY", "CA"):
        monkeypatch.setenv(f"FLASHCKPT_TLS_{name}", f"/{name}" if certificates else "")
    started = []
    monkeypatch.setattr(process, "run", lambda options: started.append(options) or 0)
    ours = ["agent", "run", "--job", JOB, "--memory-dir", "/m", "--transport", "tcp", "--lanes", "3"]
    assert CliRunner().invoke(group, [*ours, *arguments]).exit_code == 0
    (found,) = started
    assert found.encrypt_data == expected
    assert (found.transport, found.lanes) == ("tcp", 3)


@pytest.mark.parametrize(("option", "value"), [("transport", "udp"), ("lanes", "9")])
def test_an_operator_hears_what_is_expected(run_python, option, value):
    told = run_python("from flashckpt.cli import main; main()", "agent", "run", "--job", JOB, f"--{option}", value)
    assert told.returncode == 2
    assert f"{option}: expected" in told.stderr


def test_what_is_unknown_or_missing_on_the_command_line_is_refused(capsys):
    for arguments in (["run"], ["run", "--jo=x"], ["walk"], []):
        with pytest.raises(SystemExit) as refused:
            parse(arguments)
        assert refused.value.code == 2
    capsys.readouterr()
    assert process.main(["run", "--nice=-1", "--job=x", "--memory-dir=/m", "--node-id=n"]) == 2
    assert "nice: expected 0 to 19" in capsys.readouterr().err


def test_the_environment_is_a_fixed_list():
    environ = {
        "PATH": "/bin",
        "TZ": "UTC",
        "FLASHCKPT_LOG": "debug",
        "FLASHCKPT_TOKEN": "secret",
        "FLASHCKPT_JOB": "another",
        "FLASHCKPT_FAILPOINTS": "before_seal=kill",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "https_proxy": "http://proxy",
        "LD_PRELOAD": "/tmp/x.so",
        "PYTHONPATH": "/tmp",
    }
    assert environment_of_agent(environ) == {
        "PATH": "/bin",
        "TZ": "UTC",
        "FLASHCKPT_LOG": "debug",
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
    armed = environment_of_agent({**environ, "FLASHCKPT_AGENT_FAILPOINTS": "before_grant=kill"})
    assert armed["FLASHCKPT_FAILPOINTS"] == "before_grant=kill"


# -- detaching -------------------------------------------------------------------------------------------


def detached(body, *arguments, timeout=20):
    """Runs `target(ready)` with that body detached. Returns exit code, output and seconds until the caller was back."""
    code = (
        "import json, os, sys, time\n"
        "from flashckpt.agent.process import detach\n"
        "def target(ready):\n" + textwrap.indent(textwrap.dedent(body), "    ") + "\n"
        f"sys.exit(detach(target, {timeout}))\n"
    )
    # Descriptors that a careless starter leaves open.
    leaked = [os.open("/", os.O_RDONLY) for _ in range(3)]
    began = time.monotonic()
    try:
        result = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            pass_fds=leaked,
            check=False,
        )
    finally:
        for fd in leaked:
            os.close(fd)
    return result.returncode, result.stderr, time.monotonic() - began


def test_detached_is_nobodys_child_and_leads_no_session(tmp_path):
    report, go = tmp_path / "report", tmp_path / "go"
    os.mkfifo(go)
    body = """
        sys.stderr.close(); os.close(2)  # the test waits for its end
        fds = sorted(int(name) for name in os.listdir("/proc/self/fd"))
        said = dict(pid=os.getpid(), sid=os.getsid(0), fds=fds, stdin=os.readlink("/proc/self/fd/0"))
        with open(sys.argv[1] + ".new", "w") as file:
            json.dump(said, file)
        os.rename(sys.argv[1] + ".new", sys.argv[1])
        ready()
        with open(sys.argv[2]) as file:
            file.read()
        return 0
    """
    code, _, _ = detached(body, report, go)
    assert code == 0
    said = json.loads(report.read_text())
    pid = said["pid"]
    pidfd = os.pidfd_open(pid)  # ready() was called and it lives on
    try:
        assert said["stdin"] == "/dev/null"
        assert said["sid"] not in (pid, os.getsid(0)), "a session of its own, and not its leader: never a terminal"
        assert len([fd for fd in said["fds"] if fd > 2]) <= 2, "its pipe and the listing, nothing that leaked"
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent != os.getpid()
        with go.open("w"):
            pass
        assert select.select([pidfd], [], [], 20)[0]
    finally:
        os.close(pidfd)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return 4", 4),
        ("return 0", 0),
        ("raise ValueError('broken')", 1),
        ("os.kill(os.getpid(), 9)", 1),
        ("os._exit(0)", 1),  # ended without a word: whatever its code, it never was ready
    ],
)
def test_the_starter_learns_how_it_ended(body, expected):
    code, errors, _ = detached(body)
    assert code == expected, errors


def test_the_starter_does_not_wait_for_ever(tmp_path):
    pid_file = tmp_path / "pid"
    body = "os.close(2); open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    code, errors, seconds = detached(body, pid_file, timeout=0.5)
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert code == 1
    assert "not ready within 0.5 s" in errors
    assert seconds < 20


def test_asked_twice_it_ends_at_once(run_python):
    code = (
        "import os, signal, threading\n"
        "from flashckpt.agent.process import _handle_signals\n"
        "stop = threading.Event()\n"
        "_handle_signals(stop)\n"
        "stop.set()  # draining already, because of linger\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('draining', flush=True)\n"
        "stop.clear()\n"
        "_handle_signals(stop)\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print(stop.wait(0), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('still there', flush=True)\n"
    )
    result = run_python(code)
    assert (result.returncode, result.stdout) == (128 + signal.SIGTERM, "draining\nTrue\n")


# -- the log ---------------------------------------------------------------------------------------------


def test_the_log_is_bounded_and_has_what_libraries_print(memory_dir, run_python):
    code = (
        "import logging, os, sys\n"
        "from flashckpt.agent import process\n"
        "from flashckpt.store.directory import open_directory\n"
        "directory = open_directory(sys.argv[1], 'log')\n"
        "process._log_to(process._LogFile(directory))\n"
        "log = logging.getLogger('flashckpt.agent.x')\n"
        "for number in range(3000):\n"
        "    log.info('line %d %s', number, 'x' * 1000)\n"
        "log.debug('not shown')\n"
        "log.error('y' * 100_000)\n"
        "os.write(2, b'from a library\\n')\n"
        "print('printed', flush=True)\n"
    )
    assert run_python(code, memory_dir).returncode == 0
    folder = Path(memory_dir) / "log"
    assert sorted(path.name for path in folder.glob("agent.log*")) == ["agent.log", "agent.log.1"]
    for path in folder.glob("agent.log*"):
        assert path.stat().st_size < (1 << 20) + (32 << 10)
        assert path.stat().st_mode & 0o777 == 0o600
    text = (folder / LOG_NAME).read_text()
    assert text.endswith("from a library\nprinted\n")
    assert " INFO line 2999 xxx" in text
    assert "not shown" not in text
    assert max(map(len, text.splitlines())) <= 16 << 10


# -- real agents -----------------------------------------------------------------------------------------


@pytest.fixture
def agents(memory_dir):
    """The memory directory; whatever agent is left in it ends with the test."""
    yield memory_dir
    for note in Path(memory_dir).glob(f"*/{LOCK_NAME}"):
        with contextlib.suppress(ValueError, KeyError, ProcessLookupError):
            pid = json.loads(note.read_text())["pid"]
            if b"flashckpt" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def holder_of(memory_dir, job=JOB):
    directory = open_directory(memory_dir, job)
    try:
        return AgentLock(directory).holder()
    finally:
        directory.close()


def log_of(memory_dir):
    return next(Path(memory_dir).glob(f"*/{LOG_NAME}")).read_text()


def gone(owner):
    return lambda: is_dead(owner)


def starter(body, *arguments, **settings):
    """A process that does what a trainer does, in a process group of its own."""
    code = (
        "import json, os, sys, threading, time\n"
        "from flashckpt.agent.process import Options\n"
        "from flashckpt.agent.start import ensure_agent\n"
        f"options = Options(job={JOB!r}, memory_dir=sys.argv[1], node_id='node-a')\n" + textwrap.dedent(body)
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASHCKPT_")}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=settings.pop("cwd", ROOT),
        env={**environment, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def foreground(memory_dir, **changes):
    return subprocess.Popen(
        [sys.executable, "-I", "-m", "flashckpt.agent", "run", *options(memory_dir, **changes).arguments()],
        cwd="/",
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_is_started_found_and_stopped(agents):
    found = ensure_agent(options(agents))
    assert found.started
    assert ensure_agent(options(agents)) == FoundAgent(found.pid, False, found.log_path)
    seen = look(agents, JOB)
    assert (seen.holder.pid, seen.problem) == (found.pid, "")
    assert (seen.status["job"], seen.status["node"], seen.status["pid"]) == (JOB, "node-a", found.pid)
    stopped = stop_agent(agents, JOB, 20)
    assert stopped.pid == found.pid
    assert is_dead(stopped.owner)
    assert look(agents, JOB) is None
    assert stop_agent(agents, JOB, 20) is None
    assert f"pid {found.pid}" in log_of(agents)
    assert log_of(agents).rstrip().endswith("INFO stopped")
    assert Path(found.log_path).stat().st_mode & 0o777 == 0o600


def test_another_nodes_agent_is_not_ours(agents):
    ensure_agent(options(agents))
    with pytest.raises(IncompatibleError, match="'node-a'"):
        ensure_agent(options(agents, node_id="node-b"))


def test_one_that_does_not_encrypt_is_not_taken_where_that_is_asked_for(agents):
    found = ensure_agent(options(agents))
    with pytest.raises(IncompatibleError, match="expected an agent that encrypts") as caught:
        ensure_agent(options(agents, encrypt_data=1))
    assert caught.value.fields["pid"] == found.pid
    assert "agent stop" in str(caught.value)
    stop_agent(agents, JOB, 20.0)
    encrypting = ensure_agent(options(agents, encrypt_data=1))
    assert ensure_agent(options(agents)).pid == encrypting.pid, "more than was asked for"


def test_of_several_starters_one_starts_it(agents):
    body = "found = ensure_agent(options)\nprint(json.dumps([found.pid, found.started]))\n"
    starters = [starter(body, agents) for _ in range(4)]
    outputs = [one.communicate(timeout=120) for one in starters]
    answers = [json.loads(output) for output, errors in outputs]
    assert len({pid for pid, _ in answers}) == 1
    assert sum(started for _, started in answers) == 1
    assert log_of(agents).count(" runs: pid ") == 1


def test_a_process_with_threads_starts_it_and_keeps_no_zombie(agents):
    body = """
        done = threading.Event()
        for _ in range(50):
            threading.Thread(target=done.wait).start()
        found = ensure_agent(options)
        done.set()
        try:
            print(os.waitpid(-1, os.WNOHANG))
        except ChildProcessError:
            print(json.dumps([found.started, len(os.listdir("/proc/self/fd"))]))
    """
    child = starter(body, agents)
    output, errors = child.communicate(timeout=120)
    assert errors == ""
    started, _ = json.loads(output)
    assert started


def test_killing_the_starters_process_group_leaves_it_alive(agents):
    body = "print(ensure_agent(options).pid, flush=True)\ntime.sleep(600)\n"
    child = starter(body, agents)
    pid = int(child.stdout.readline())
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    assert os.getsid(pid) != child.pid
    seen = look(agents, JOB)
    assert seen.status is not None
    assert seen.holder.pid == pid


def test_killed_it_is_started_anew(agents):
    first = ensure_agent(options(agents))
    owner = holder_of(agents).owner
    os.kill(first.pid, signal.SIGKILL)
    wait_until(gone(owner))
    assert look(agents, JOB) is None
    second = ensure_agent(options(agents), timeout=20)
    assert second.started
    assert second.pid != first.pid


def test_a_stopped_one_is_named_within_the_timeout(agents):
    found = ensure_agent(options(agents))
    owner = holder_of(agents).owner
    os.kill(found.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(AgentError, match="it is stopped") as refused:
        ensure_agent(options(agents), timeout=1)
    assert time.monotonic() - began < 10
    assert refused.value.pid == found.pid
    assert look(agents, JOB, timeout=0.2).status is None
    with pytest.raises(AgentError, match="it is stopped"):
        stop_agent(agents, JOB, 0.2)
    os.kill(found.pid, signal.SIGCONT)
    wait_until(gone(owner))  # it had been told to end


def test_one_that_does_not_drain_can_be_killed(agents):
    found = ensure_agent(options(agents))
    os.kill(found.pid, signal.SIGSTOP)
    assert stop_agent(agents, JOB, 0.2, kill=True).pid == found.pid
    assert look(agents, JOB) is None


def test_a_second_one_is_refused_with_the_pid_of_the_first(agents):
    found = ensure_agent(options(agents))
    second = foreground(agents)
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 4
    assert f"pid {found.pid}" in errors
    assert look(agents, JOB).holder.pid == found.pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_in_the_foreground_it_drains_and_ends_with_code_0(agents, number):
    child = foreground(agents)
    wait_until(lambda: (seen := look(agents, JOB, 0.2) if holder_of(agents) else None) and seen.status)
    child.send_signal(signal.SIGHUP)
    child.send_signal(number)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 0
    assert "INFO draining" in errors
    assert not list(Path(agents).glob(f"*/{LOG_NAME}")), "in the foreground it logs to stderr alone"


def test_it_dies_at_start(agents):
    directory = open_directory(agents, JOB)
    (directory.path / "agent.sock").mkdir()
    directory.close()
    with pytest.raises(AgentError, match="its log ends with") as failed:
        ensure_agent(options(agents), timeout=30)
    assert "ERROR" in failed.value.message
    assert holder_of(agents) is None


def test_it_lingers_and_then_ends(agents):
    found = ensure_agent(options(agents, linger=0.5))
    owner = holder_of(agents)
    wait_until(lambda: owner is None or is_dead(owner.owner))
    assert "WARNING stopping: no trainer for" in log_of(agents)
    assert found.started


def test_with_a_trainer_it_stays(agents):
    with trainer(agents, linger=0.5):
        owner = holder_of(agents).owner
        idle_for_twice_the_linger = threading.Event()
        assert not idle_for_twice_the_linger.wait(1.5)
        assert not is_dead(owner)
    wait_until(gone(owner))


@contextlib.contextmanager
def trainer(memory_dir, **changes):
    """A lease of this process."""
    ensure_agent(options(memory_dir, **changes))
    directory = open_directory(memory_dir, JOB)
    try:
        with AgentClient(f"/proc/self/fd/{directory.fd}/agent.sock") as client:
            lease = client.hello(Owner.current(), 0, VERSION, JOB)
            yield client
            client.bye(lease.ticket)
    finally:
        directory.close()


def test_hello_refuses_another_job_and_another_version(agents):
    with trainer(agents) as client:
        with pytest.raises(IncompatibleError, match="'other'"):
            client.hello(Owner.current(), 0, VERSION, "other")
        with pytest.raises(IncompatibleError, match="version"):
            client.hello(Owner.current(), 0, 99, JOB)


@pytest.mark.parametrize("what", ["lock", "directory"])
def test_it_ends_when_what_it_holds_was_taken_away(agents, what):
    ensure_agent(options(agents))
    owner = holder_of(agents).owner
    folder = next(path.parent for path in Path(agents).glob(f"*/{LOCK_NAME}"))
    if what == "lock":
        (folder / LOCK_NAME).unlink()
    else:
        folder.rename(Path(agents) / "elsewhere")
    wait_until(gone(owner))


def test_neither_the_working_directory_nor_the_environment_decides_what_is_imported(agents, tmp_path):
    marker = tmp_path / "hijacked"
    hijack = f"open({str(marker)!r}, 'a').write(__name__)\n"
    for name in ("grpc", "google", "cryptography", "sitecustomize", "usercustomize"):
        (tmp_path / f"{name}.py").write_text(hijack)
    # The trainer itself is not isolated, and has imported its modules before.
    body = f"""
        import grpc, google.protobuf
        os.chdir({str(tmp_path)!r})
        os.environ["PYTHONPATH"] = os.environ["PYTHONSTARTUP"] = {str(tmp_path)!r}
        print(ensure_agent(options).started)
    """
    child = starter(body, agents)
    output, errors = child.communicate(timeout=120)
    assert output == "True\n", errors
    assert not marker.exists()


@pytest.mark.alone
def test_it_is_small_quick_isolated_and_without_secrets(agents, capsys):
    environ = {"FLASHCKPT_TOKEN": "hush-1", "AWS_SECRET_ACCESS_KEY": "hush-2", "http_proxy": "http://hush-3"}
    body = """
        import flashckpt.rpc.agent_client
        from flashckpt.agent.start import stop_agent
        took = []
        for _ in range(2):  # the machine may have been busy
            stop_agent(sys.argv[1], options.job, 20) if took else None
            began = time.monotonic()
            found = ensure_agent(options)
            took.append(time.monotonic() - began)
        print(found.pid, min(took))
    """
    child = starter(body, agents, **environ)
    output, errors = child.communicate(timeout=120)
    assert errors == ""
    pid, seconds = int(output.split()[0]), float(output.split()[1])
    proc = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in proc.joinpath("status").read_text().splitlines())
    rss_kb = int(status["VmRSS"].split()[0])
    with capsys.disabled():
        print(
            f"\n  agent: {seconds:.2f} s until reachable, {rss_kb / 1024:.0f} MiB, {status['Threads'].strip()} threads"
        )
    assert rss_kb < 80 * 1000
    assert seconds < 3
    niceness = sorted(int(task.read_text().rpartition(")")[2].split()[16]) for task in proc.glob("task/*/stat"))
    assert niceness[0] == os.nice(0), "of the one thread that starts helpers, which may be hurried"
    assert set(niceness[1:]) == {min(10 + os.nice(0), 19)}, "of all other threads"
    assert len(niceness) > 2
    limits = next(line for line in proc.joinpath("limits").read_text().splitlines() if line.startswith("Max core"))
    assert limits.split()[4:6] == ["0", "0"]
    if os.geteuid() == 0:  # undumpable: nobody else may look
        assert "hush" not in proc.joinpath("environ").read_text()
        assert os.readlink(proc / "cwd") == "/"
        assert {os.readlink(proc / "fd" / str(fd)) for fd in (1, 2)} == {str(next(Path(agents).glob(f"*/{LOG_NAME}")))}
        maps = proc.joinpath("maps").read_text()
        assert "flashckpt" in maps
        assert "/torch/" not in maps
        assert "/numpy/" not in maps
    assert "hush" not in proc.joinpath("cmdline").read_text() + log_of(agents)


# -- the command line ------------------------------------------------------------------------------------


def cli(*arguments, memory_dir, code=0):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHCKPT_", "SLURM_"))}
    result = subprocess.run(
        [sys.executable, "-m", "flashckpt.cli", *arguments, "--memory-dir", memory_dir],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == code, f"{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.stderr
    return result


def test_the_commands(agents):
    name = ("--job", JOB, "--json")
    cli("agent", "status", "--job", JOB, memory_dir=agents, code=3)
    started = json.loads(cli("agent", "start", *name, "--linger", "60", memory_dir=agents).stdout)
    assert started["started"] is True
    again = cli("agent", "start", "--job", JOB, memory_dir=agents)
    assert again.stdout.startswith(f"agent of job {JOB} runs already: pid {started['pid']}, log ")
    shown = json.loads(cli("agent", "status", *name, memory_dir=agents).stdout)
    assert shown["schema"] == "flashckpt.agent-status/v1"
    assert (shown["agent"]["pid"], shown["agent"]["answers"]) == (started["pid"], True)
    assert str(started["pid"]) in cli("agent", "status", memory_dir=agents).stdout
    refused = cli("agent", "run", "--job", JOB, memory_dir=agents, code=4)
    assert f"pid {started['pid']}" in refused.stderr
    os.kill(started["pid"], signal.SIGSTOP)
    silent = cli("agent", "status", "--timeout", "0.2", "--job", JOB, memory_dir=agents, code=1)
    assert "it is stopped" in silent.stderr
    os.kill(started["pid"], signal.SIGCONT)
    assert json.loads(cli("agent", "stop", *name, memory_dir=agents).stdout)["pid"] == started["pid"]
    assert "no agent" in cli("agent", "stop", "--job", JOB, memory_dir=agents, code=3).stderr
    assert json.loads(cli("agent", "status", *name, memory_dir=agents, code=3).stdout)["agent"] is None
    assert "FC-CFG-001" in cli("agent", "start", "--job", JOB, "--linger", "-1", memory_dir=agents, code=2).stderr
