"""How nodes find each other's parts of a step, and how long they wait for them."""

from __future__ import annotations

import threading

import pytest

from flashckpt.errors import DeadlineError
from flashckpt.persist.meta import FileInfo
from flashckpt.persist.plan import Contribution
from flashckpt.persist.storage import open_storage
from flashckpt.persist.write import Placed, WrittenFiles
from tests.unit.test_persist_plan import entry, exchange


def test_nodes_see_what_the_others_offer_and_wrote(tmp_path):
    one, two = exchange(tmp_path, "n0", 60), exchange(tmp_path, "n1", 60)
    mine, other = (
        Contribution(0, (entry("a", (4,), (0,), (2,)),), ("v",), ()),
        Contribution(1, (entry("a", (4,), (2,), (2,)),), (), ("w",)),
    )
    one.offer([mine])
    late = threading.Timer(0.3, two.offer, [[other]])
    late.start()
    assert one.offered() == [mine, other]
    late.join()
    written = WrittenFiles(
        {"f": FileInfo(3, 4)}, [Placed("a", (2,), "f", 0, 3, 9), Placed("v", None, "f", 3, 1, 2)], {1: "v1"}
    )
    two.report(written, {"v": ("x", 1)}, 5.0)
    one.report(WrittenFiles(), {}, 6.0)
    assert one.reported()[1] == (written, {"v": ("x", 1)}, 5.0)
    one.clean()
    assert open_storage(str(tmp_path)).list("step-1.tmp-" + "0" * 16) == {}


def test_a_directory_that_nodes_do_not_share_is_called_so(tmp_path):
    one, two = exchange(tmp_path / "a", "n0", 0.3), exchange(tmp_path / "b", "n1", 0.3)
    one.offer([])
    two.offer([])
    with pytest.raises(DeadlineError, match=r"none of \['n1'\]") as raised:
        one.offered()
    assert "same directory on every node" in raised.value.hint
