"""Which history a load goes on with: one, or a question to a person, never a guess."""

from __future__ import annotations

import pytest

from flashckpt.errors import AmbiguousHistoryError, NotFoundError
from flashckpt.load.histories import Pick, anew, pick
from flashckpt.protocol.line import GIVEN_UP, NOTHING, Ancestor, Line, begun, from_fence, name_of
from flashckpt.types import Generation, Launch

A, B, C, D = (Launch(10 * number, number << 56) for number in range(1, 5))
STRANGER = Launch(15, 0xEE << 56)
NEXT = Launch(1000, 7)

ALONE = begun(A)
A_B = begun(A).continued(B, Generation(*[A.epoch, A.nonce, 10, 1]))
A_B_C = A_B.continued(C, Generation(*[B.epoch, B.nonce, 25, 1]))
STRAY = begun(STRANGER)


def at(launch, step, seq=1):
    return Generation(launch.epoch, launch.nonce, step, seq)


def candidates(picked, whole):
    return [one for one in whole if not picked.why_not(one)]


def test_nothing_at_all():
    assert pick((), ()) == Pick(None, {})
    assert pick((), ()).line_for(NEXT, None) == begun(NEXT)


@pytest.mark.parametrize("lines", [[A_B_C], [A_B, A_B_C], [ALONE, A_B, A_B_C], [A_B_C, ALONE], [A_B_C, A_B_C]])
def test_one_history_whichever_of_its_lines_are_left(lines):
    whole = [at(A, 9), at(A, 10), at(B, 25), at(C, 26)]
    picked = pick(lines, whole)
    assert picked.line == A_B_C
    assert picked.given_up == ()
    assert candidates(picked, whole) == whole


def test_what_was_rolled_back_is_no_candidate_and_says_why():
    whole = [at(A, 10), at(A, 11), at(B, 25), at(B, 26), at(C, 26)]
    picked = pick([ALONE, A_B, A_B_C], whole)
    assert candidates(picked, whole) == [at(A, 10), at(B, 25), at(C, 26)]
    assert picked.why_not(at(A, 11)) == f"abandoned: the job went on from step 10 of launch {name_of(A)}"


def test_a_rollback_that_has_saved_nothing_yet_stands():
    """Its line is known, nothing of its own is whole: what it went back to is the newest, not what it left."""
    back = A_B_C.continued(D, at(A, 7))
    whole = [at(A, 7), at(A, 10), at(B, 25), at(C, 30)]
    picked = pick([ALONE, A_B, A_B_C, back], whole)
    assert picked.line == back
    assert candidates(picked, whole) == [at(A, 7)]


def test_a_rollback_of_which_only_abandoned_steps_are_left_offers_none_of_them():
    back = A_B_C.continued(D, at(A, 7))
    whole = [at(A, 10), at(B, 25)]
    picked = pick([ALONE, A_B, A_B_C, back], whole)
    assert picked.line == back
    assert candidates(picked, whole) == []


def test_two_that_went_on_from_the_same_step_are_two_histories():
    other = begun(A).continued(C, at(A, 10))
    whole = [at(A, 10), at(B, 11), at(C, 12)]
    with pytest.raises(AmbiguousHistoryError) as caught:
        pick([ALONE, A_B, other], whole)
    assert caught.value.histories == (name_of(B), name_of(C))
    assert caught.value.steps == (11, 12)
    told = str(caught.value)
    assert f"{name_of(B)}: newest" in told
    assert f"{name_of(C)}: newest" in told
    assert told.count(f"went on from step 10 of {name_of(A)}") == 2


def test_a_stray_launch_with_something_of_its_own_is_asked_about_by_both_names():
    whole = [at(A, 10), at(B, 25), at(STRANGER, 3)]
    for lines in ([ALONE, A_B, STRAY], [STRAY, A_B], [A_B]):
        with pytest.raises(AmbiguousHistoryError) as caught:
            pick(lines, whole)
        assert caught.value.histories == (name_of(STRANGER), name_of(B))
        assert caught.value.steps == (3, 25)
        assert "began with nothing" in str(caught.value)
        assert "nothing was changed" in caught.value.hint


def test_a_stray_launch_with_nothing_whole_is_no_rival():
    whole = [at(A, 10), at(B, 25)]
    picked = pick([ALONE, A_B, STRAY], whole, [A, B, STRANGER])
    assert picked.line == A_B
    assert picked.given_up == (), "nobody has chosen: it is left as it is"
    assert candidates(picked, whole) == whole
    assert "belongs to another history" in picked.why_not(at(STRANGER, 3))


def test_a_later_launch_that_began_with_nothing_is_no_heir():
    """It saved without a load, on nodes that knew nothing: whether that was meant, only a person knows."""
    with pytest.raises(AmbiguousHistoryError):
        pick([ALONE, begun(B)], [at(A, 10), at(B, 1)])
    assert pick([ALONE, begun(B, [A])], [at(A, 10), at(B, 1)]).line == begun(B, [A])


def test_what_two_know_without_anything_of_their_own_is_one_history():
    """Two launches loaded the same step and died: the later one's line is as good."""
    one, other = A_B, begun(A).continued(C, at(A, 10))
    picked = pick([ALONE, one, other], [at(A, 9), at(A, 10)])
    assert picked.line == other
    assert candidates(picked, [at(A, 9), at(A, 10)]) == [at(A, 9), at(A, 10)]


def test_of_two_the_one_that_holds_less_is_no_rival():
    one, other = A_B, begun(A).continued(C, at(A, 9))
    assert pick([ALONE, one, other], [at(A, 9), at(A, 10)]).line == one


# --- a person chooses -------------------------------------------------------------------------------------------


WHOLE = [at(A, 10), at(B, 25), at(STRANGER, 3), at(STRANGER, 25)]


@pytest.mark.parametrize("name", [name_of(STRANGER), "ee", "e", "EE", "0xee", "0xEE0"])
def test_a_history_is_chosen_by_the_first_letters_of_its_name(name):
    picked = pick([ALONE, A_B, STRAY], WHOLE, [A, B, STRANGER], history=name)
    assert picked.line == STRAY
    assert picked.given_up == (A, B)
    assert candidates(picked, WHOLE) == [at(STRANGER, 3), at(STRANGER, 25)]


def test_the_others_are_given_up_for_good():
    picked = pick([ALONE, A_B, STRAY], WHOLE, [A, B, STRANGER], history=name_of(STRANGER))
    line = picked.line_for(NEXT, at(STRANGER, 25))
    assert line.root == STRANGER
    assert line.listed == (Ancestor(A, GIVEN_UP), Ancestor(STRANGER, 25), Ancestor(B, NOTHING))
    assert pick([ALONE, A_B, STRAY, line], WHOLE).line == line
    assert candidates(pick([ALONE, A_B, STRAY, line], WHOLE), WHOLE) == [at(STRANGER, 3), at(STRANGER, 25)]


def test_launches_without_a_line_or_anything_whole_are_given_up_too():
    picked = pick([ALONE, A_B, STRAY], WHOLE, [A, B, C, STRANGER], history=name_of(B))
    assert picked.given_up == (STRANGER, C)


def test_an_abandoned_history_is_taken_up_again_by_its_name():
    back = A_B_C.continued(D, at(A, 7))
    whole = [at(A, 7), at(B, 25), at(C, 30), at(D, 8)]
    picked = pick([ALONE, A_B, A_B_C, back], whole, history=name_of(C))
    assert picked.line == A_B_C
    assert picked.given_up == (D,)
    assert candidates(picked, whole) == [at(A, 7), at(B, 25), at(C, 30)]
    line = picked.line_for(NEXT, at(C, 30))
    assert line.kills(at(D, 8))
    assert pick([ALONE, A_B, A_B_C, back, line], whole).line == line


@pytest.mark.parametrize(("name", "found"), [("77", "none"), ("", "none"), ("xyz", "none"), ("0", "2")])
def test_a_name_that_is_nobodys_or_more_than_one_is_refused_with_those_there_are(name, found):
    stray = begun(Launch(15, 0x0E << 56))
    with pytest.raises(NotFoundError, match=f"found {found} among") as caught:
        pick([begun(Launch(10, 0x0A << 56)), stray], [at(stray.head, 3)], history=name)
    assert f"{0x0A << 56:016x} (nothing complete)" in str(caught.value)
    assert f"{0x0E << 56:016x} (newest step 3)" in str(caught.value)


def test_a_name_where_there_is_nothing():
    with pytest.raises(NotFoundError, match="found none among none"):
        pick((), (), history="ee")


def test_a_step_that_one_of_them_has_decides_between_them():
    picked = pick([ALONE, A_B, STRAY], WHOLE, [A, B, STRANGER], step=3)
    assert picked.line == STRAY
    assert picked.given_up == (A, B)


def test_a_step_that_both_have_does_not():
    with pytest.raises(AmbiguousHistoryError, match="2 histories with step 25") as caught:
        pick([ALONE, A_B, STRAY], WHOLE, step=25)
    assert caught.value.steps == (25, 25)
    assert pick([ALONE, A_B, STRAY], WHOLE, step=25, history="ee").line == STRAY


def test_a_step_that_none_has_gives_up_nothing():
    picked = pick([ALONE, A_B, STRAY], WHOLE, [A, B, STRANGER], step=4)
    assert picked.given_up == ()


def test_a_step_below_a_fork_belongs_to_both():
    """Both hold step 10, which is all that was asked for."""
    other = begun(A).continued(C, at(A, 10))
    whole = [at(A, 10), at(B, 11), at(C, 12)]
    picked = pick([ALONE, A_B, other], whole, [A, B, C], step=10)
    assert picked.line == other
    assert picked.given_up == (B,)
    assert candidates(picked, whole) == [at(A, 10), at(C, 12)]


def test_an_abandoned_step_is_not_found_by_its_number():
    whole = [at(A, 10), at(A, 11), at(B, 12)]
    picked = pick([ALONE, A_B], whole, step=11)
    assert picked.why_not(at(A, 11))


# --- what is not known ------------------------------------------------------------------------------------------


def test_a_launch_without_a_line_is_a_history_of_its_own():
    """Its file was lost, or cannot be believed."""
    picked = pick((), [at(A, 10), at(A, 11)])
    assert picked.line == begun(A)
    assert candidates(picked, [at(A, 10), at(A, 11)]) == [at(A, 10), at(A, 11)]
    with pytest.raises(AmbiguousHistoryError):
        pick((), [at(A, 10), at(B, 11)])
    assert pick((), [at(A, 10), at(B, 11)], step=11).line == begun(B)


def test_a_damaged_line_of_an_ancestor_changes_nothing():
    whole = [at(A, 10), at(A, 11), at(B, 12)]
    assert pick([A_B], whole).line == pick([ALONE, A_B], whole).line == A_B


def test_a_damaged_line_in_force_is_not_guessed_at():
    """Of the head only shards are left: whether it went on from the others, nobody knows."""
    whole = [at(A, 10), at(B, 25), at(C, 26)]
    with pytest.raises(AmbiguousHistoryError) as caught:
        pick([ALONE, A_B], whole)
    assert caught.value.histories == (name_of(B), name_of(C))
    assert pick([ALONE, A_B], whole, step=26).line == begun(C)


def test_a_fence_of_an_earlier_version_decides_as_it_did():
    line = from_fence(5, B.epoch, B.nonce)
    whole = [at(A, 5), at(A, 9), at(B, 7)]
    assert candidates(pick([line], whole), whole) == [at(A, 5), at(B, 7)]


def test_what_a_person_put_there_is_of_every_history():
    """Epoch 0 is no launch's."""
    imported = Generation(0, 0, 100, 0)
    picked = pick([ALONE, A_B], [imported, at(A, 10), at(B, 11)])
    assert picked.line == A_B
    assert picked.why_not(imported) == ""
    assert pick((), [imported]).why_not(imported) == ""


def test_what_another_root_left_is_not_below_the_floor():
    line = Line(B, A, (), Ancestor(Launch(16, 0), NOTHING))
    whole = [at(STRANGER, 3), at(B, 25)]
    with pytest.raises(AmbiguousHistoryError):
        pick([line, STRAY], whole)
    assert pick([line, Line(STRANGER, A)], whole).line == line, "it was folded"


def test_a_longer_line_on_disk_gives_back_what_memory_has_folded():
    full = begun(Launch(1, 1))
    for epoch in range(2, 60):
        full = full.continued(Launch(epoch, epoch), Generation(epoch - 1, epoch - 1, epoch, 1))
    whole = [Generation(1, 1, 2, 1), Generation(59, 59, 70, 1)]
    assert candidates(pick([full.compacted()], whole), whole) == whole[1:]
    picked = pick([full.compacted(), full.continued(Launch(60, 60), whole[1])], whole)
    assert candidates(picked, whole) == whole


# --- starting anew ----------------------------------------------------------------------------------------------


def test_whoever_starts_anew_gives_up_all_that_is_known():
    picked = anew([A_B_C, STRAY], [D])
    assert picked.line is None
    assert picked.given_up == (A, STRANGER, B, C, D)
    line = picked.line_for(NEXT, None)
    whole = [at(A, 10), at(C, 30), at(STRANGER, 3), at(D, 5), at(NEXT, 1)]
    assert candidates(pick([A_B_C, STRAY, line], whole), whole) == [at(NEXT, 1)]


def test_a_launch_whose_own_line_is_gone_is_found_by_what_is_left_of_it():
    """On disk only the newest line is kept; what it has left behind is whole there all the same."""
    line = begun(A).continued(B, at(A, 10)).continued(NEXT, at(A, 10))
    picked = pick([line], [at(A, 10), at(A, 30), at(B, 20), at(NEXT, 11)], [A, B, NEXT], history=name_of(B))
    assert candidates(picked, [at(A, 10), at(A, 30), at(B, 20), at(NEXT, 11)]) == [at(A, 10), at(B, 20)]
    assert NEXT in picked.given_up
    picked = pick([line], [at(A, 10), at(A, 30)], [A], history=name_of(A))
    assert candidates(picked, [at(A, 10), at(A, 30)]) == [at(A, 10), at(A, 30)]
