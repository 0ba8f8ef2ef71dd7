"""The engine model in simulated time: every figure here can be worked out by hand from the profile."""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.sim.cache import chain
from fastload.sim.engine import Engine, Sequence
from fastload.sim.profiles import Decode, Knots, Memory, Prefill, Profile, Scheduler, Speculation
from fastload.sim.simulate import APART_NS, TURNAROUND_NS, Times, closed_loop, open_loop
from fastload.sim.speculation import mean_tokens

MS = 1_000_000
PLAIN = Profile(
    name="plain",
    source="these tests",
    prefill=Prefill(Knots((1,), (50.0,))),
    decode=Decode(Knots((1, 4), (10.0, 20.0))),
)
SPECULATION = Speculation((0.8, 0.5, 0.5), Knots((1,), (2.0,)))


def ask(prompt: int = 100, answer: int = 11) -> Callable[[], Sequence]:
    return lambda: Sequence(prompt, answer)


def one(profile: Profile, sequence: Sequence) -> Times:
    return open_loop(Engine(profile), lambda: sequence, [0])[0]


def test_one_request_alone() -> None:
    times = one(PLAIN, Sequence(100, 11))
    assert (times.ttft_ms, times.itl_ms, times.latency_s, times.events) == (50, 10, 0.15, 11)


def test_knots_are_linear_in_log2_and_go_on_in_proportion() -> None:
    knots = Knots((1, 4, 8), (10, 20, 40))
    assert [knots.at(batch) for batch in (1, 2, 4, 8, 16)] == [10, 15, 20, 40, 80]
    assert Knots((1, 2), (10, 5)).at(100) == 5  # never falls beyond the last


def test_batch_decodes_together_and_the_first_comer_waits_for_the_others_prefill() -> None:
    """The first is prefilled alone; the three that came meanwhile together, while the first decodes."""
    times = open_loop(Engine(PLAIN), ask(), [0, 1, 2, 3])
    assert times[0].ttft_ms == 50
    assert [round(each.ttft_ms) for each in times[1:]] == [110] * 3  # 50, then a decode step of 10 and a prefill of 50
    assert times[0].itl_ms == pytest.approx((60 + 9 * 20) / 10)  # that step, then steps of four


def test_exclusive_prefill_makes_those_who_decode_wait() -> None:
    profile = replace(PLAIN, scheduler=Scheduler(mixed=False))
    first, second = open_loop(Engine(profile), ask(answer=2), [0, 1 * MS])
    assert (first.ttft_ms, second.ttft_ms) == (50, 99)
    assert first.itl_ms == 50 + 15  # the other's prefill, then a step of both


def test_late_results_leave_when_the_next_prefill_is_launched() -> None:
    profile = replace(PLAIN, scheduler=Scheduler(mixed=False, late_results=True))
    first, second = open_loop(Engine(profile), ask(answer=2), [0, 1 * MS])
    assert (first.ttft_ms, second.ttft_ms) == (100, 99)
    assert one(profile, Sequence(100, 2)).ttft_ms == 50


def test_front_end_takes_requests_one_by_one() -> None:
    profile = replace(PLAIN, scheduler=Scheduler(front_ms=4, mixed=False))
    assert one(profile, Sequence(100, 2)).ttft_ms == 54
    times = open_loop(Engine(profile), ask(answer=1), [0] * 14)
    # 4 to 54 the first alone; by 54 the next 12 are through, the last is not
    assert [round(each.ttft_ms) for each in times] == [54] + [104] * 12 + [154]


def test_queue_at_the_cap_is_first_come_first_served() -> None:
    profile = replace(PLAIN, scheduler=Scheduler(max_num_seqs=2))
    engine = Engine(profile)
    times = open_loop(engine, ask(), range(6))
    assert [each.first_ns for each in times] == sorted(each.first_ns for each in times)
    latencies = [each.latency_s for each in times]
    assert latencies[2] > 2 * latencies[0] * 0.9 and latencies[4] > 3 * latencies[0] * 0.9


def test_full_batch_refills_only_when_so_many_places_are_free() -> None:
    profile = replace(PLAIN, scheduler=Scheduler(max_num_seqs=2, refill=2))
    short, long, third = Sequence(1, 2), Sequence(1, 30), Sequence(1, 2)
    asked = iter((short, long, third))
    times = open_loop(Engine(profile), lambda: next(asked), range(3))
    assert times[2].first_ns > times[1].last_ns  # not when `short` left


def test_prefill_gap_lets_decode_steps_in_between() -> None:
    engines = [Engine(replace(PLAIN, scheduler=Scheduler(mixed=False, prefill_gap_ms=gap))) for gap in (0, 25)]
    plain, gapped = ([each.ttft_ms for each in open_loop(engine, ask(), [0, 1 * MS])] for engine in engines)
    assert plain == [50, 99]
    assert gapped == [50, 99 + 3 * 10]


def test_long_prompts_are_cut_or_have_a_step_of_their_own() -> None:
    profile = replace(PLAIN, prefill=Prefill(Knots((1,), (10.0,)), token_us=10.0))
    cut = replace(profile, scheduler=Scheduler(max_batched_tokens=8192))
    assert one(cut, Sequence(32_768, 2)).ttft_ms == pytest.approx(4 * (10 + 81.92))
    whole = replace(profile, scheduler=Scheduler(max_batched_tokens=8192, chunked=False))
    assert one(whole, Sequence(32_768, 2)).ttft_ms == pytest.approx(10 + 327.68)
    # who decodes goes on meanwhile, a token a chunk: its longest wait is a chunk, not the prompt
    asked = iter((Sequence(10, 20), Sequence(32_768, 2)))
    first, _ = open_loop(Engine(cut), lambda: next(asked), [0, 1 * MS])
    assert first.itl_ms is not None and first.itl_ms < 60


def test_cached_prefixes_cut_ttft() -> None:
    profile = replace(PLAIN, prefill=Prefill(Knots((1,), (10.0,)), token_us=10.0))
    shared = list(range(32_000))
    first, second, other = (
        Sequence(32_100, 2, chain([*shared[start:], *range(-100 * tail, 100 - 100 * tail)], 16))
        for start, tail in ((0, 1), (0, 2), (100, 3))
    )
    asked = iter((first, second, other))
    times = open_loop(Engine(profile), lambda: next(asked), [0, 5000 * MS, 10_000 * MS])
    assert second.cached_tokens == 32_000 and first.cached_tokens == other.cached_tokens == 0
    assert times[0].ttft_ms == pytest.approx(4 * 10 + 321)
    assert times[1].ttft_ms == pytest.approx(10 + 1)
    assert times[2].ttft_ms > 300


def test_the_whole_prompt_in_the_cache_still_takes_a_token() -> None:
    hashes = chain(range(64), 16)
    asked = iter((Sequence(64, 1, hashes), again := Sequence(64, 1, hashes)))
    open_loop(Engine(PLAIN), lambda: next(asked), [0, 1000 * MS])
    assert again.cached_tokens == 63


def test_memory_that_is_full_makes_the_latest_comer_give_way() -> None:
    """4 blocks of 16: two prompts of 16 with room for 16 tokens each; both want 33."""
    profile = replace(PLAIN, memory=Memory(blocks=4, block_tokens=16, prefix=False))
    engine = Engine(profile)
    times = open_loop(engine, ask(16, 30), [0, 1])
    assert engine.counters.preemptions > 0
    assert times[0].sequence.preemptions == 0 and times[1].sequence.preemptions > 0
    assert all(each.done for each in times) and engine.blocks.used == 0
    assert times[1].latency_s > times[0].latency_s + 0.05


def test_what_can_never_fit_is_refused() -> None:
    engine = Engine(replace(PLAIN, memory=Memory(blocks=4, block_tokens=16)))
    with pytest.raises(ValueError, match="more than KV memory"):
        engine.admit(Sequence(50, 10), 0)


def test_who_leaves_frees_place_and_blocks() -> None:
    engine = Engine(replace(PLAIN, scheduler=Scheduler(max_num_seqs=1)))
    gone, queued, never = Sequence(100, 50), Sequence(100, 3), Sequence(100, 3)
    for at, sequence in enumerate((gone, queued, never)):
        engine.admit(sequence, at)
    engine.advance(0)
    for _ in range(3):
        at_ns = engine.next_ns()
        assert at_ns is not None
        assert [each for each, _ in engine.advance(at_ns)] == [gone]
    engine.drop(gone)
    engine.drop(never)
    seen = []
    while (at_ns := engine.next_ns()) is not None:
        seen += [each for each, _ in engine.advance(at_ns)]
    assert seen == [queued] * 3
    assert (engine.running, engine.waiting, engine.blocks.used) == (0, 0, 0)


def test_speculation_gives_one_and_the_sum_of_its_chances() -> None:
    profile = replace(PLAIN, speculation=SPECULATION)
    expected = 1 + 0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 0.5
    assert mean_tokens(SPECULATION) == pytest.approx(expected)
    engine = Engine(profile)
    times = open_loop(engine, ask(answer=20_001), [0])[0]
    assert 20_000 / (times.events - 1) == pytest.approx(expected, rel=0.002)
    assert times.itl_ms == pytest.approx(12 / expected, rel=0.002)
    counters = engine.counters
    assert counters.accepted is not None and counters.draft_tokens == 3 * counters.drafts
    for count, chance in zip(counters.accepted, (0.8, 0.4, 0.2), strict=True):
        assert count / counters.drafts == pytest.approx(chance, abs=0.002)


def test_spread_of_acceptance_is_between_requests() -> None:
    spread = replace(PLAIN, speculation=replace(SPECULATION, spread=0.8))
    means = []
    for profile in (replace(PLAIN, speculation=SPECULATION), spread):
        times = closed_loop(Engine(profile), ask(answer=2000), 1, 10)
        means.append([2000 / each.events for each in times])
    assert max(means[0]) / min(means[0]) < 1.02
    assert max(means[1]) / min(means[1]) > 1.5


def test_stream_interval_bundles_what_follows_the_first_token() -> None:
    times = one(replace(PLAIN, stream_interval=4), Sequence(100, 11))
    assert (times.events, times.first_tokens) == (1 + 3, 1)  # 1, 4, 4, 2
    assert (times.ttft_ms, times.latency_s) == (50, 0.15)


def test_queue_grows_without_bound_above_capacity() -> None:
    profile = replace(PLAIN, prefill=Prefill(Knots((1,), (1.0,))), scheduler=Scheduler(max_num_seqs=4))
    most = closed_loop(Engine(profile), ask(), 50, 400)
    capacity = 400 / (max(each.last_ns for each in most) / 1e9)

    def waits(rate: float, count: int) -> list[float]:
        times = open_loop(Engine(profile), ask(), [round(number / rate * 1e9) + 300 * MS for number in range(count)])
        return [each.ttft_ms for each in times]

    below, above = waits(0.8 * capacity, 1000), waits(1.25 * capacity, 1000)
    assert fmean(below[750:]) < 2 * fmean(below[250:500])
    # each second brings a quarter of a second of work too many: the wait grows in proportion to time
    assert fmean(above[750:]) / fmean(above[250:500]) == pytest.approx(875 / 375, rel=0.1)


def test_a_thousand_users_share_the_batch() -> None:
    profile = replace(PLAIN, scheduler=Scheduler(max_num_seqs=64, max_batched_tokens=100_000))
    times = closed_loop(Engine(profile), ask(answer=64), 1000, 10_000)
    assert len(times) == 10_000 and all(each.done for each in times)
    # Little's law with all 1000 in the system: mean latency = 1000 / throughput, after the first wave
    later = times[1000:]
    rate = len(later) / ((later[-1].last_ns - later[0].sent_ns) / 1e9)
    assert fmean(each.latency_s for each in later) == pytest.approx(1000 / rate, rel=0.15)


@given(
    gaps=st.lists(st.integers(0, 200 * MS), min_size=1, max_size=40),
    lengths=st.lists(st.integers(1, 40), min_size=40, max_size=40),
    cap=st.integers(1, 8),
    mixed=st.booleans(),
    late=st.booleans(),
    speculate=st.booleans(),
    blocks=st.integers(12, 60),
)
def test_littles_law_and_nothing_is_lost(
    gaps: list[int],
    lengths: list[int],
    cap: int,
    mixed: bool,
    late: bool,
    speculate: bool,
    blocks: int,
) -> None:
    """From empty to empty the integral of who is in the engine is the sum of all latencies, whatever the profile."""
    profile = replace(
        PLAIN,
        scheduler=Scheduler(cap, 128, mixed=mixed, late_results=late and not mixed, front_ms=1.5),
        speculation=SPECULATION if speculate else None,
        memory=Memory(blocks=blocks, block_tokens=16),
    )
    engine = Engine(profile, seed=1)
    due = [sum(gaps[: place + 1]) for place in range(len(gaps))]
    sequences = [Sequence(1 + 3 * length, length) for length in lengths[: len(gaps)]]
    latency_ns, integral_ns, before_ns, inside = 0, 0, 0, 0
    coming = list(zip(due, sequences, strict=True))
    while coming or engine.next_ns() is not None:
        next_ns = engine.next_ns()
        arrives = bool(coming) and (next_ns is None or coming[0][0] <= next_ns)
        now_ns = coming[0][0] if arrives else next_ns
        assert now_ns is not None and now_ns >= before_ns
        integral_ns += inside * (now_ns - before_ns)
        before_ns = now_ns
        if arrives:
            engine.admit(coming.pop(0)[1], now_ns)
            inside += 1
            continue
        given = engine.advance(now_ns)
        assert engine.running <= cap and engine.blocks.used <= blocks
        for sequence, tokens in given:
            assert tokens > 0
            if sequence.given == sequence.limit:
                latency_ns += now_ns - sequence.arrived_ns
                inside -= 1
    assert inside == 0 and integral_ns == latency_ns
    assert [sequence.given for sequence in sequences] == [sequence.limit for sequence in sequences]
    assert engine.blocks.used == 0


def test_same_seed_same_run() -> None:
    profile = replace(
        PLAIN, prefill=Prefill(Knots((1,), (50.0,)), jitter=0.3), speculation=replace(SPECULATION, spread=0.5)
    )
    runs = [[each.last_ns for each in closed_loop(Engine(profile, seed), ask(), 4, 40)] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_closed_loop_keeps_its_concurrency() -> None:
    times = closed_loop(Engine(PLAIN), ask(), 4, 40)
    assert len(times) == 40
    for number, each in enumerate(times):
        flying = sum(other.sent_ns <= each.sent_ns < other.last_ns for other in times[: number + 1])
        assert flying <= 4
    sent = sorted(each.sent_ns for each in times)
    done = sorted(each.last_ns for each in times)
    assert all(late - early <= TURNAROUND_NS + 4 * APART_NS for early, late in zip(done, sent[4:], strict=False))
