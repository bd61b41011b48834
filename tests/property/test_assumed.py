"""Of what is only assumed to be the same on all ranks, each rank gets what one rank stored, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashckpt import native
from flashckpt.load.plan import Want, plan
from flashckpt.state.assumed import AssumedTensors, Reader, is_equal, make_table, only_from_one
from flashckpt.state.cover import index
from flashckpt.types import Box, Layout, TensorEntry

CHUNK = 4096
ALIGN = 64

# Keys of some bytes each, and for each rank which of them it stores and how it filled them.
keys = st.dictionaries(st.sampled_from([f"k{i}" for i in range(8)]), st.integers(1, 3 * CHUNK), min_size=1)


@st.composite
def stored_by_ranks(draw):
    sizes = draw(keys)
    ranks = draw(st.integers(1, 6))
    stores = []
    for _ in range(ranks):
        has = draw(st.sets(st.sampled_from(sorted(sizes)))) if draw(st.booleans()) else set(sizes)
        fills = {key: draw(st.integers(0, 1)) for key in has}
        stores.append({key: bytes([fills[key]]) * sizes[key] for key in sorted(has)})
    return stores


class Shards:
    """What ranks stored, as a catalogue tells it."""

    def __init__(self, stores):
        self.areas, self.layouts, self.tables, self.ends = [], [], [], []
        for store in stores:
            entries, area = [], b""
            for key, data in store.items():
                area += bytes(-len(area) % ALIGN)
                box = Box((0,), (len(data),))
                entries.append(TensorEntry(key, (key,), "uint8", (len(data),), box, len(area), len(data)))
                area += data
            end = len(area)
            area += b"something else of this rank's"
            crcs = b"".join(native.crc32c(area[at : at + CHUNK]).to_bytes(4, "little") for at in range(0, end, CHUNK))
            self.areas.append(area)
            self.layouts.append(Layout(tuple(entries)))
            self.ends.append(end)
            self.tables.append(make_table(CHUNK, crcs, end, native.crc32c(area[end - end % CHUNK : end])))
        digests = [hash(table) & 0xFFFF_FFFF or 1 for table in self.tables]
        owners = [(rank,) for rank in range(len(stores))]
        self.assumed = AssumedTensors(self.layouts, owners, self.ends, digests)
        self.stored = index(self.layouts, owners)

    def read(self, rank, key):
        entry = next(one for one in self.layouts[rank].entries if one.fqn == key)
        return self.areas[rank][entry.offset_bytes : entry.offset_bytes + entry.length_bytes]


@given(stored_by_ranks(), st.data())
def test_what_a_rank_reads_is_one_ranks(stores, data):
    shards = Shards(stores)
    everything = sorted({key for store in stores for key in store})
    if not everything:
        return
    wanted = data.draw(st.sets(st.sampled_from(everything), min_size=1).map(sorted))
    near = tuple(sorted(data.draw(st.sets(st.integers(0, len(stores) - 1)))))
    reader = Reader(data.draw(st.integers(0, 7)), None, near)
    references = {group.ranks[0]: shards.tables[group.ranks[0]] for group in shards.assumed.differing()}

    def table_of(rank):
        assert rank in near
        return shards.tables[rank] if data.draw(st.booleans()) else None

    sources = shards.assumed.sources(wanted, reader, references, table_of)
    assert set(sources) == set(wanted)
    wants = [Want(key, False, "uint8", _shape(stores, key), Box((0,), _shape(stores, key)), 0) for key in wanted]
    transfers = plan(wants, shards.stored, reader, sources, cast=False)
    got = {one.want.fqn: shards.read(one.shard, one.want.fqn) for one in transfers}
    whole = [rank for rank, store in enumerate(stores) if set(wanted) <= set(store)]
    if whole:
        assert got == {key: stores[whole[0]][key] for key in wanted}
    # Where no rank has all of it, each part is still one rank's, and the same for every reader.
    for choice in shards.assumed.choose(wanted):
        assert {key: got[key] for key in choice.keys} == {key: stores[choice.rank][key] for key in choice.keys}


@given(stored_by_ranks())
def test_whoever_reads_all_shards_gets_the_same(stores):
    shards = Shards(stores)
    reduced = only_from_one(shards.stored, shards.assumed)
    assert set(reduced) == set(shards.stored)
    for choice in shards.assumed.choose(key for key, _ in shards.stored):
        for key in choice.keys:
            assert [piece.ranks for piece in reduced[key, None]] == [(choice.rank,)]


@given(stored_by_ranks())
def test_a_near_copy_counts_as_equal_only_if_it_is(stores):
    shards = Shards(stores)
    for group in shards.assumed.groups:
        first = group.ranks[0]
        for rank in group.ranks:
            for key, entry in group.entries.items():
                if is_equal(entry, shards.tables[rank], shards.tables[first]):
                    assert shards.read(rank, key) == shards.read(first, key)
        for rank in shards.assumed.equals(group):
            assert stores[rank] == stores[first]


def test_the_near_copy_is_taken_where_all_is_equal_and_key_by_key_where_it_is_not():
    same = {"a": bytes(CHUNK), "b": bytes(CHUNK), "c": bytes(100)}
    shards = Shards([same, same])
    assert set(shards.assumed.sources(same, Reader(1, 1, (1,)), {}, lambda _: None).values()) == {1}
    shards = Shards([same, {**same, "c": b"x" * 100}])
    references = {0: shards.tables[0]}
    near = shards.assumed.sources(same, Reader(1, 1, (1,)), references, shards.tables.__getitem__)
    assert near == {"a": 1, "b": 1, "c": 0}


def test_tables_of_other_chunks_prove_nothing():
    entry = TensorEntry("a", ("a",), "uint8", (100,), Box((0,), (100,)), 0, 100)
    one, other = make_table(4096, b"", 100, 7), make_table(8192, b"", 100, 7)
    assert is_equal(entry, one, one)
    assert not is_equal(entry, one, other)
    assert not is_equal(entry, one[:4], one[:4])


def _shape(stores, key):
    return (len(next(store[key] for store in stores if key in store)),)
