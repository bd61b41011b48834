"""Names ↔ types: round trip, one name for one thing, one thing for one name."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from flashckpt.store import names
from flashckpt.store.owner import Owner
from flashckpt.types import Generation, Launch, ShardId

u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
owners = st.builds(
    Owner,
    pid=st.integers(1, (1 << 31) - 1),
    start_ticks=u64,
    boot_id8=u32.map("{:08x}".format),
    pid_namespace=u64,
)
generations = st.builds(Generation, u64, u64, u64, u64)
shards = st.builds(ShardId, generations, u32, u32)
jobs = st.text(st.characters(codec=None), min_size=1, max_size=64) | st.text("./~%-_aA0é", min_size=1, max_size=120)
number = "[0-9]{1,21}"
texts = st.from_regex(
    rf"(e{number}-[0-9a-f]{{16}}-{number}-{number}\.r{number}-{number}\.t[0-9a-f]{{8}}\.)?"
    rf"s[0-9a-f]{{16}}\.w{number}-{number}-[0-9a-f]{{8}}-{number}\n?",
    fullmatch=True,
)


@given(u64, owners)
def test_slot_round_trip(slot_id, owner):
    name = names.slot_name(slot_id, owner)
    assert names.parse_slot_name(name) == names.SlotName(slot_id, owner)
    assert len(name) <= 255


@given(shards, u32, u64, owners)
def test_sealed_round_trip(shard, tag, slot_id, owner):
    name = names.sealed_name(shard, tag, slot_id, owner)
    assert names.parse_sealed_name(name) == names.SealedName(shard, tag, slot_id, owner)
    assert name.startswith(names.sealed_prefix(shard))
    assert len(name) <= 255


@given(shards, shards)
def test_prefix_belongs_to_one_shard(a, b):
    assert names.sealed_prefix(a).startswith(names.sealed_prefix(b)) == (a == b)


@given(texts)
def test_what_is_parsed_is_written_the_same(name):
    slot = names.parse_slot_name(name)
    if slot is not None:
        assert names.slot_name(slot.slot_id, slot.writer) == name
    sealed = names.parse_sealed_name(name)
    if sealed is not None:
        assert names.sealed_name(sealed.shard, sealed.tag, sealed.slot_id, sealed.writer) == name


@given(st.builds(Launch, epoch=u64, nonce=u64))
def test_line_round_trip(head):
    name = names.line_name(head)
    assert names.parse_line_name(name) == head
    assert names.parse_damaged_line_name(names.damaged_line_name(name)) == name
    assert len(names.damaged_line_name(name)) <= 255


@given(u64, owners, generations)
def test_draft_and_void_round_trip(random64, owner, generation):
    for kind in names.Draft:
        assert names.parse_draft_name(names.draft_name(kind, owner, random64)) == names.DraftName(kind, owner)
    assert names.parse_void_name(names.void_name(generation, owner)) == names.VoidName(generation, owner)


def is_job(job: str) -> bool:
    return len(job.encode("utf-8", "surrogatepass")) <= names.MAX_JOB_BYTES


@given(jobs.filter(is_job), jobs.filter(is_job))
@example("\udcc3\udca9", "é")
@example("%2E", ".")
@example("a" * 256, "a" * 255)
def test_jobs_get_directories_of_their_own(a, b):
    name_a, name_b = names.job_directory_name(a), names.job_directory_name(b)
    assert (name_a == name_b) == (a == b)
    for name in (name_a, name_b):
        assert 1 <= len(name.encode()) <= 255
        assert name[0] not in ".-"
        assert "/" not in name
        assert "\0" not in name
