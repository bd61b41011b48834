"""Gives ranks that are new in a larger world the position of rank 0's data loader."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flashckpt.save.values import pack, unpack
from flashckpt.state.flatten import Flat, OneValue

if TYPE_CHECKING:
    from flashckpt.ranks.group import PrivateGroup
    from flashckpt.training.assemble import Opaque

log = logging.getLogger(__name__)

_KEY = "dataloader"


def dataloader_of_rank_0(dataloader: Opaque, group: PrivateGroup, saved_world: int) -> None:
    """Loads the state of rank 0's loader on ranks from `saved_world` on, which have none of their own. Collective."""
    mine = b""
    if group.rank == 0 and dataloader.filled:
        mine = pack(Flat(values={_KEY: dataloader.value}), None, False)
    shared = group.gather(mine, "handing on the data loader's state")[0]
    if group.rank >= saved_world and shared:
        log.warning(
            "rank %d is new (saved by %d ranks): its data loader continues at the position of rank 0's",
            group.rank,
            saved_world,
        )
        dataloader.load_state_dict(OneValue(unpack(shared).values[_KEY]))
