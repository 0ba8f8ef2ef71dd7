"""The lockstep engine on a clock of our own: who gets an event at which tick."""

from hypothesis import given
from hypothesis import strategies as st

from fastload.sim.engine import Lockstep

STEP = 20
TTFT = 50


class Told:
    """An answer that writes down what the engine gave it."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self.given: list[int] = []

    def emit(self, tokens: int) -> None:
        self.left -= tokens
        self.given.append(tokens)


def run(engine: Lockstep, now: int) -> list[int]:
    """Tick until nobody is left; gives the ticks."""
    ticks = []
    while (tick := engine.next_tick_ns(now)) is not None:
        engine.tick(tick)
        ticks.append(tick)
        now = tick
    return ticks


def test_first_event_comes_at_the_first_tick_after_ttft() -> None:
    engine, answer = Lockstep(TTFT, STEP, 1, origin_ns=0), Told(3)
    engine.admit(answer, arrived_ns=5)
    assert run(engine, now=5) == [60, 80, 100]  # ready at 55
    assert answer.given == [1, 1, 1]


def test_ready_exactly_at_a_tick_takes_that_tick() -> None:
    engine, answer = Lockstep(TTFT, STEP, 1, origin_ns=10), Told(1)
    engine.admit(answer, arrived_ns=20)
    assert run(engine, now=20) == [70]


def test_last_event_holds_what_is_left() -> None:
    engine, answer = Lockstep(TTFT, STEP, 2, origin_ns=0), Told(5)
    engine.admit(answer, arrived_ns=0)
    run(engine, now=0)
    assert answer.given == [2, 2, 1]


def test_late_tick_is_not_made_up_for() -> None:
    engine, answer = Lockstep(TTFT, STEP, 1, origin_ns=0), Told(2)
    engine.admit(answer, arrived_ns=0)
    engine.tick(60)
    assert engine.next_tick_ns(now_ns=133) == 140  # 80, 100 and 120 went by
    engine.tick(140)
    assert answer.given == [1, 1]
    assert engine.in_flight == 0


def test_dropped_answer_gets_nothing_more() -> None:
    engine, gone, stays = Lockstep(TTFT, STEP, 1, origin_ns=0), Told(9), Told(2)
    engine.admit(gone, arrived_ns=0)
    engine.admit(stays, arrived_ns=0)
    engine.tick(60)
    engine.drop(gone)
    run(engine, now=60)
    assert gone.given == [1]
    assert stays.given == [1, 1]
    waiting = Told(1)
    engine.admit(waiting, arrived_ns=100)
    engine.drop(waiting)
    assert engine.next_tick_ns(100) is None


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 30)), min_size=1, max_size=20),
    per_event=st.integers(1, 5),
    origin=st.integers(0, 500),
)
def test_every_answer_is_given_exactly_its_tokens_on_the_grid(
    arrivals: list[tuple[int, int]], per_event: int, origin: int
) -> None:
    engine = Lockstep(TTFT, STEP, per_event, origin)
    answers = [Told(tokens) for _, tokens in arrivals]
    for answer, arrived in zip(answers, sorted(arrived for arrived, _ in arrivals), strict=True):
        engine.admit(answer, arrived)
    ticks = run(engine, now=0)
    assert all((tick - origin) % STEP == 0 for tick in ticks)
    assert all(later - earlier >= STEP for earlier, later in zip(ticks, ticks[1:], strict=False))
    for answer, (_, tokens) in zip(answers, arrivals, strict=True):
        assert sum(answer.given) == tokens
        assert all(count == per_event for count in answer.given[:-1])
