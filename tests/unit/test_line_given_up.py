"""What was given up stays abandoned after many restarts; found by the simulator (tests/sim)."""

from flashckpt.load.histories import anew, pick
from flashckpt.protocol.line import GIVEN_UP, NOTHING, begun, decode, encode
from flashckpt.types import Generation, Launch


def launch(epoch):
    return Launch(epoch, 1000 + epoch)


def step(number, epoch):
    return Generation(*(epoch, 1000 + epoch), number, 1)


def restarted(line, restarts, first_epoch, most=2):
    """The line after restarts of which nothing is left but the newest launch's generations."""
    for epoch in range(first_epoch, first_epoch + restarts):
        base = Generation(line.head.epoch, line.head.nonce, epoch, 1)
        line = line.continued(launch(epoch), base).compacted({line.head}, most)
    return line


def test_a_history_that_a_person_chose_against_stays_abandoned():
    mine, branch = begun(launch(1)), begun(launch(2)).continued(launch(3), step(4, 2))
    whole = [step(5, 1), step(4, 2), step(6, 3)]
    picked = pick([mine, begun(launch(2)), branch], whole, {launch(1), launch(2), launch(3)}, history=f"{1001:016x}")
    line = restarted(picked.line_for(launch(4), step(5, 1)), 30, 5)
    assert line.cut(launch(2)) == GIVEN_UP
    assert line.kills(step(6, 3), root=launch(2))
    assert len(line.listed) <= 4
    assert decode(encode(line)) == line


def test_what_was_left_behind_by_starting_anew_stays_abandoned():
    old = restarted(begun(launch(1)), 5, 2)
    line = restarted(anew([old], {launch(6)}).line_for(launch(7), None), 30, 8)
    assert line.kills(step(9, 6), root=launch(1))


def test_the_floor_spares_a_history_that_nobody_gave_up():
    line = restarted(begun(launch(1)), 30, 3)
    assert line.cut(launch(2), root=launch(2)) is None
    assert line.cut(launch(2), root=launch(1)) == NOTHING


def test_an_older_line_does_not_take_the_floor_away():
    root = begun(launch(1))
    line = root.continued(launch(2), step(1, 1)).continued(launch(3), step(1, 1)).continued(launch(4), step(1, 1))
    short = line.compacted({launch(1)}, 1)
    assert short.floor is not None
    assert short.with_older(root).kills(step(2, 2), root=launch(1))
    assert short.with_older(line).cut(launch(2)) == NOTHING


def test_a_line_that_goes_on_from_step_0_vouches_for_the_older_one():
    older = begun(launch(1)).continued(launch(2), step(3, 1))
    line = older.continued(launch(3), step(0, 2)).compacted({launch(2)}, 1)
    assert line.floor is not None
    assert line.with_older(older).cut(launch(1)) == 3
