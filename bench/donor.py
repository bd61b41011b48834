"""The healthy replica of torchft: `python -m bench.donor http|pg TENSORS BYTES DIRECTORY`.

Commands are lines on stdin ("have 7": its state is that of step 7; "send": to the other rank; "close"), each answered.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

import torch
from torch.distributed import TCPStore
from torchft.checkpointing.http_transport import HTTPTransport  # type: ignore[import-not-found]
from torchft.checkpointing.pg_transport import PGTransport  # type: ignore[import-not-found]
from torchft.process_group import ProcessGroupGloo, reconfigure_with_store  # type: ignore[import-not-found]

from bench.contenders.torchft_transport import DONOR, HEALED, TIMEOUT
from bench.spec import StateSpec
from bench.state import change, make_state


def main(kind: str, spec: StateSpec) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)

    def answer(text: str) -> None:
        answers.write(text + "\n")
        answers.flush()

    state = make_state(spec)
    if kind == "http":
        transport = HTTPTransport(TIMEOUT, num_chunks=0)
        answer(transport.metadata())
    else:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address = f"127.0.0.1:{store.port}/bench"
        answer(address)
        group = ProcessGroupGloo(timeout=TIMEOUT)
        reconfigure_with_store(group, address, DONOR, 2)
        transport = PGTransport(group, TIMEOUT, torch.device("cpu"))
    step = 0
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "have":
            step = int(argument)
            if kind == "http":
                transport.disallow_checkpoint()
            change(state, step)
            if kind == "http":
                transport.send_checkpoint([HEALED], step, state, TIMEOUT)
        elif command == "send":
            transport.send_checkpoint([HEALED], step, state, TIMEOUT)
        answer("ok")
        if command == "close":
            break
    os._exit(0)  # its server threads do not end by themselves


if __name__ == "__main__":
    main(sys.argv[1], StateSpec(int(sys.argv[2]), int(sys.argv[3])))
