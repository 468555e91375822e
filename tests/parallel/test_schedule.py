"""The interleaved schedule and what it moves, against the papers' formulas and worked example."""

import itertools

import pytest

from depthjax.parallel.schedule import Rows, Schedule, formula

CASES = [(2, 2, 4), (4, 2, 8), (4, 4, 16), (2, 4, 8)]
SCHEDULES = [Schedule(2, 2, 4), Schedule(4, 1, 8), Schedule(4, 3, 12), Schedule(1, 2, 3)]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


def items(schedule):
    """{(microbatch, chunk): (tick, stage)}."""
    every = itertools.product(range(schedule.ticks), range(schedule.stages))
    return {schedule.item(*place): place for place in every if schedule.item(*place)}


@every_schedule
def test_every_microbatch_goes_through_all_chunks_without_waiting(schedule):
    places = items(schedule)
    assert len(places) == schedule.microbatches * schedule.chunks
    for (microbatch, chunk), (tick, stage) in places.items():
        assert stage == chunk % schedule.stages
        assert chunk == 0 or places[microbatch, chunk - 1][0] == tick - 1


@every_schedule
def test_bubble_is_what_interleaving_leaves_of_it(schedule):
    """(P - 1) / V ticks of a whole pass, beside M (Narayanan et al. 2021, section 2.2)."""
    idle = schedule.ticks - len(items(schedule)) / schedule.stages
    ratio = (schedule.stages - 1) / (schedule.virtual * schedule.microbatches)
    assert idle / (schedule.microbatches * schedule.virtual) == pytest.approx(ratio)
    assert schedule.bubble == pytest.approx(idle / schedule.ticks)


@pytest.mark.parametrize("layers", [8, 9, 11, 15])
def test_chunks_are_all_layers_in_order_and_even(layers):
    chunks = Schedule(4, 2, 4).layers(layers)
    assert [layer for chunk in chunks for layer in chunk] == list(range(layers))
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1


@pytest.mark.parametrize("keeps", ["nothing", "received", "all"])
@pytest.mark.parametrize(("stages", "virtual", "blocks"), CASES)
def test_rows_sent_are_the_formula(stages, virtual, blocks, keeps):
    each = blocks // (stages * virtual)
    rows = Rows(Schedule(stages, virtual, stages), tuple(range(0, blocks, each)), keeps)
    assert rows.sent() == formula(keeps, stages, virtual, each)


@pytest.mark.parametrize(("stages", "virtual", "blocks"), CASES)
def test_the_largest_hand_off_shrinks_by_the_passes(stages, virtual, blocks):
    """The open sum included, which at a block's end is the newest block: C against P blocks."""

    def peak(keeps):
        schedule = Schedule(stages, virtual, stages)
        return Rows(schedule, tuple(range(blocks)), keeps).peak() + 1

    assert blocks == stages * virtual
    assert peak("nothing") == virtual * peak("all")


def test_the_papers_worked_example():
    """Attention Residuals, cross-stage caching: P = 4, V = 2, a block on two ranks. In the second
    pass the ranks are sent [b1, b2], [b1, b2], [b2, b3], [b2, b3]; 6 block transfers are saved."""
    schedule, written = Schedule(4, 2, 4), (1, 1, 2, 2, 3, 3, 4, 4)  # the embedding is b0
    cached, naive = (Rows(schedule, written, keeps) for keeps in ("received", "nothing"))
    second = [range(cached.held(chunk), written[chunk]) for chunk in range(4, 8)]
    assert [list(rows) for rows in second] == [[1, 2], [1, 2], [2, 3], [2, 3]]
    assert naive.sent() - cached.sent() == sum(written[:4]) == 6


@pytest.mark.parametrize(("virtual", "waiting"), [(1, 0), (2, 32), (3, 64)])
def test_rows_that_wait_for_the_backward_pass(virtual, waiting):
    """Eight rows a chunk, four stages: all rows but those of the last chunk, and cotangents of what
    is in front of the last pass."""
    schedule = Schedule(4, virtual, 4)
    rows = Rows(schedule, tuple(8 * chunk for chunk in range(schedule.chunks)))
    assert rows.kept == 8 * (schedule.chunks - 1)
    assert rows.pending == waiting
    assert Rows(schedule, rows.written, "nothing").pending == 0


@pytest.mark.parametrize(("microbatches", "held"), [(4, 480), (8, 704)])
def test_rows_of_a_stage_at_its_peak(microbatches, held):
    """64 sources over 4 stages of 2 passes, by hand: M 56 + 4 x 32 + 2 x 64."""
    rows = Rows(Schedule(4, 2, microbatches), tuple(range(0, 64, 8)))
    assert rows.at_peak(64) == held


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((0, 1, 1), "stages is 0: give 1 or more"),
        ((4, 1, 6), "microbatches is 6, which 4 stages do not divide: use 4"),
    ],
)
def test_what_does_not_fit_is_refused(sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        Schedule(*sizes)
    with pytest.raises(ValueError, match="3 layers are too few for 2 stages of 2 passes"):
        Schedule(2, 2, 2).layers(3)
