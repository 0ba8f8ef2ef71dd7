"""The lockstep engine on a clock of our own: who gets an event at which tick."""

from hypothesis import given
from hypothesis import strategies as st

from fastload.sim.engine import Sequence
from fastload.sim.lockstep import Lockstep

STEP = 20
TTFT = 50


def run(engine: Lockstep) -> list[tuple[int, list[int]]]:
    """Tick until nobody is left; gives each tick and the tokens given at it."""
    ticks = []
    while (tick := engine.next_ns()) is not None:
        ticks.append((tick, [tokens for _, tokens in engine.advance(tick)]))
    return ticks


def test_first_event_comes_at_the_first_tick_after_ttft() -> None:
    engine = Lockstep(TTFT, STEP, 1)
    engine.admit(Sequence(1, 3), 5)
    assert run(engine) == [(60, [1]), (80, [1]), (100, [1])]  # ready at 55


def test_ready_exactly_at_a_tick_takes_that_tick() -> None:
    engine = Lockstep(TTFT, STEP, 1)
    engine.admit(Sequence(1, 1), 10)
    assert run(engine) == [(60, [1])]


def test_last_event_holds_what_is_left() -> None:
    engine = Lockstep(TTFT, STEP, 2)
    engine.admit(Sequence(1, 5), 0)
    assert [tokens for _, tokens in run(engine)] == [[2], [2], [1]]


def test_late_tick_is_not_made_up_for() -> None:
    engine = Lockstep(TTFT, STEP, 1)
    engine.admit(Sequence(1, 3), 0)
    assert len(engine.advance(60)) == 1
    assert len(engine.advance(133)) == 1  # 80, 100 and 120 are one
    assert engine.next_ns() == 140


def test_who_leaves_gets_nothing_and_keeps_nobody() -> None:
    engine = Lockstep(TTFT, STEP, 1)
    gone, other = Sequence(1, 9), Sequence(1, 2)
    engine.admit(gone, 0)
    engine.admit(other, 0)
    assert len(engine.advance(60)) == 2
    engine.drop(gone)
    assert [sequence for sequence, _ in engine.advance(80)] == [other]
    assert (engine.next_ns(), engine.running, engine.waiting) == (None, 0, 0)


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 20)), min_size=1, max_size=20),
    st.integers(1, 5),
)
def test_everyone_gets_all_tokens_once_at_ticks_of_the_grid(asked: list[tuple[int, int]], bundle: int) -> None:
    engine = Lockstep(TTFT, STEP, bundle)
    sequences = []
    for at, limit in sorted(asked):
        while (tick := engine.next_ns()) is not None and tick <= at:
            engine.advance(tick)
        sequences.append(Sequence(1, limit))
        engine.admit(sequences[-1], at)
    assert all(tick % STEP == 0 for tick, _ in run(engine))
    assert [sequence.given for sequence in sequences] == [limit for _, limit in sorted(asked)]
    assert engine.running == engine.waiting == 0
