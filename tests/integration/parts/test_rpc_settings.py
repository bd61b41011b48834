"""What importing the clients costs, in a fresh interpreter."""

from __future__ import annotations


def test_settings_can_be_had_before_grpc(run_python):
    code = "import sys, flashckpt.rpc.settings; sys.exit('grpc' in sys.modules)"
    assert run_python(code).returncode == 0


def test_the_clients_import_nothing_heavy(run_python):
    code = (
        "import sys, flashckpt.rpc.agent_client, flashckpt.rpc.agent_server, flashckpt.move.transports.grpc.client\n"
        "import flashckpt.move.transports.grpc.server\n"
        "sys.exit(' '.join({'torch', 'numpy', 'rich', 'fsspec'} & set(sys.modules)) or 0)"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr
