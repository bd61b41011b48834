"""Every region is stored exactly once by the ranks that hold it, and the work is spread evenly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashckpt.save.dedup import SPLIT_BYTES, HeldRegion, Share, share

holders = st.sets(st.integers(0, 7), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
held_regions = st.lists(
    st.builds(
        HeldRegion,
        size_bytes=st.sampled_from([1, 100, 4096, SPLIT_BYTES, 3 * SPLIT_BYTES]),
        rows=st.integers(1, 40),
        holders=holders,
        certain=st.booleans(),
    )
)


@given(held_regions)
def test_each_row_is_stored_once(regions):
    # A rank only knows the regions that it holds itself, in the same order as everybody else.
    stored = [[0] * region.rows for region in regions]
    for rank in range(8):
        known = [i for i, region in enumerate(regions) if rank in region.holders]
        for i, mine in zip(known, share([regions[i] for i in known], rank), strict=True):
            if mine is not None:
                for row in range(mine.start, mine.stop):
                    stored[i][row] += 1
    assert all(count == 1 for rows in stored for count in rows)


@given(held_regions)
def test_what_is_not_certain_comes_whole_from_the_lowest_holder(regions):
    """So no two of them that the same ranks hold are ever dealt to different ranks, or cut."""
    for rank in range(8):
        known = [region for region in regions if rank in region.holders]
        for region, mine in zip(known, share(known, rank), strict=True):
            if not region.certain:
                assert mine == (Share(0, region.rows) if rank == region.holders[0] else None)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(2, 8))
def test_what_is_certain_makes_up_for_it(sizes, ranks):
    """The rank that stores what is not certain is given less of the rest."""
    everybody = tuple(range(ranks))
    regions = [HeldRegion(sum(sizes), 1, everybody, certain=False), *(HeldRegion(n, 1, everybody) for n in sizes)]
    assert share(regions, 0) == [Share(0, 1)] + [None] * len(sizes)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(2, 8))
def test_small_regions_are_balanced(sizes, ranks):
    regions = [HeldRegion(size, 1, tuple(range(ranks))) for size in sizes]
    loads = [sum(size for size, mine in zip(sizes, share(regions, rank), strict=True) if mine) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(sizes)


def test_a_large_region_is_cut_into_rows():
    region = HeldRegion(SPLIT_BYTES, 10, (0, 1, 4))
    assert [(s.start, s.stop) for s in (share([region], rank)[0] for rank in (0, 1, 4))] == [(0, 3), (3, 6), (6, 10)]
