"""Traces made by hand, with what each tool would print of them worked out beside."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastload.analysis import bootstrap, reconcile
from fastload.analysis.levels import level_figures
from fastload.analysis.reconcile_tools import TOOLS

CHOICES, FINISH, USAGE, DONE = 8, 16, 32, 16  # flags; the channel of [DONE]


def answer(make: Any, texts: list[float], role: float | None = None, end: float | None = None, **more: Any) -> Any:
    """Events: a role, a token at each of `texts`, a finish event without text, usage and [DONE] 1 and 2 ms after it."""
    events = [make.event(role, 0, 0, CHOICES)] if role is not None else []
    events += [make.event(at, more.get("tokens", 1), more.get("channel", 1), CHOICES) for at in texts]
    if end is not None:
        events += [
            make.event(end, 0, 0, CHOICES | FINISH),
            make.event(end + 1, 0, 0, USAGE),
            make.event(end + 2, 0, DONE, 0),
        ]
    return events


def figures(requests: list[Any], make: Any) -> Any:
    table, tokens = make.tables(requests)
    return reconcile.reconcile_level(reconcile.read_level(table, [tokens]))["figures"]


def changes(entry: Any, *words: str) -> dict[str, float]:
    """The sizes of the steps whose text has one of the words."""
    return {word: one["change"] for word in words for one in entry["steps"] if word in one["says"]}


@pytest.fixture
def plain(make: Any) -> Any:
    """Role at 5 ms, tokens at 10, 20, 30, 40, finish at 45, [DONE] at 47, HTTP's end at 48; 8 tokens were asked for."""
    requests = []
    for slot in (0, 1):
        for wave in (0, 1):
            sent = 47.0 * wave
            columns = {"max_tokens": 8, "framing_end_ns": 5_000_000_000_000 + round((sent + 48) * 1e6)}
            events = answer(make, [10, 20, 30, 40], role=5, end=45)
            requests.append(make.request(sent, sent + 47, events, slot, columns=columns))
    return figures(requests, make)


def test_the_role_and_the_finish_event_bias_vllm(plain: Any) -> None:
    ttft = plain["ttft_ms"]["mean"]
    assert (ttft["fastload"], ttft["vllm"]["value"]) == (10, 5)
    assert [(one["says"], one["change"]) for one in ttft["vllm"]["steps"]] == [
        ("the role event is taken as the first token", -5)
    ]
    itl = plain["icl_ms"]["mean"]["vllm"]  # gaps 5 10 10 10 5
    assert (itl["name"], itl["value"]) == ("ITL", 8)
    assert changes(itl, "role", "finish") == {"role": -1.25, "finish": -0.75}
    tpot = plain["itl_ms"]["mean"]["vllm"]  # (45 - 5) / 3
    assert (tpot["name"], tpot["value"]) == ("TPOT", pytest.approx(40 / 3))
    assert changes(tpot, "role", "finish") == pytest.approx({"role": 5 / 3, "finish": 5 / 3})
    assert plain["latency_s"]["mean"]["vllm"]["value"] == pytest.approx(0.045)
    named = plain["named_itl_ms"]["mean"]
    assert (named["fastload"], named["vllm"]["value"], named["sglang"]["value"]) == (10, 8, 10)


def test_sglang_ends_at_done_and_takes_the_length_asked_for(plain: Any) -> None:
    assert plain["ttft_ms"]["mean"]["sglang"]["value"] == 10
    assert plain["latency_s"]["mean"]["sglang"]["value"] == pytest.approx(0.047)
    tpot = plain["itl_ms"]["mean"]["sglang"]  # (47 - 10) / 3, then / 7
    assert tpot["value"] == pytest.approx(37 / 7)
    assert changes(tpot, "behind the last token", "asked for") == pytest.approx(
        {"behind the last token": 37 / 3 - 10, "asked for": 37 / 7 - 37 / 3}
    )
    assert plain["aggregate_tok_s"]["value"]["sglang"]["value"] == pytest.approx(4 * 8 / 0.094)
    assert plain["aggregate_tok_s"]["value"]["guidellm"]["value"] == pytest.approx(4 * 4 / 0.094)


def test_aiperf_guidellm_and_cordatus(plain: Any) -> None:
    assert plain["latency_s"]["mean"]["aiperf"]["value"] == pytest.approx(0.040)
    assert plain["decode_tps"]["mean"]["aiperf"]["value"] == pytest.approx(100)
    assert plain["tps"]["mean"]["aiperf"]["value"] == pytest.approx(4 / 0.040)
    assert plain["tps"]["mean"]["fastload"] == pytest.approx(4 / 0.047)
    assert plain["system_rps"]["value"]["aiperf"]["value"] == pytest.approx(4 / 0.087)  # to the last chunk, at 47 + 40
    assert plain["itl_ms"]["mean"]["guidellm"]["value"] == pytest.approx(10)
    assert plain["latency_s"]["mean"]["cordatus"]["value"] == pytest.approx(0.048)
    assert plain["system_rps"]["value"]["cordatus"]["value"] == pytest.approx(1 / 0.048)
    assert "icl_ms" not in TOOLS["guidellm"].names and "guidellm" not in plain["icl_ms"]["mean"]
    assert set(plain["named_itl_ms"]["mean"]) == {"fastload", "vllm", "sglang"}


def test_events_of_two_tokens_and_held_back_ones(make: Any) -> None:
    """Chunks as tokens: 20 ms a chunk, 10 ms a token. vLLM also counts an empty chunk between (at 30 ms)."""
    events = answer(make, [20, 40, 60], tokens=2)
    events.insert(1, make.event(30, 0, 0, CHOICES))
    found = figures([make.request(0, 60, events)], make)
    named = found["named_itl_ms"]["mean"]
    assert named["fastload"] == 10  # 40 ms for the 4 tokens after the first event
    assert changes(named["vllm"], "gap between chunks", "between tokens") == pytest.approx(
        {"gap between chunks": 10, "between tokens": 40 / 3 - 20}
    )
    tpot = found["itl_ms"]["mean"]["vllm"]  # 40 / 5
    assert tpot["value"] == pytest.approx(8) and changes(tpot, "n - 1") == pytest.approx({"n - 1": -2})


def test_reasoning_counts_everywhere_tool_calls_not(make: Any) -> None:
    reasoned = figures([make.request(0, 30, answer(make, [10, 20, 30], channel=2))], make)
    assert {key: entry["value"] for key, entry in reasoned["ttft_ms"]["mean"].items() if key != "fastload"} == (
        dict.fromkeys(TOOLS, 10)
    )
    called = figures([make.request(0, 30, answer(make, [10, 20, 30], channel=3))], make)["ttft_ms"]["mean"]
    assert (called["vllm"]["value"], called["aiperf"]["value"], called["guidellm"]["value"]) == (10, 10, 10)
    assert called["sglang"]["value"] is called["cordatus"]["value"] is None
    assert called["sglang"]["steps"] == [{"says": "tool calls and refusals are no chunks", "change": None}]


def test_one_token_answers(make: Any) -> None:
    one = figures([make.request(0, 12, answer(make, [10], role=4, end=11))], make)
    assert one["itl_ms"]["mean"]["fastload"] is None
    assert one["itl_ms"]["mean"]["cordatus"]["value"] == 0
    assert one["itl_ms"]["mean"]["vllm"]["value"] is None
    assert one["icl_ms"]["mean"]["vllm"]["value"] == pytest.approx(3.5)  # 4 -> 10 -> 11: no token gap at all


def test_an_answer_that_ended_early_is_a_success_elsewhere(make: Any) -> None:
    whole = make.request(0, 40, answer(make, [10, 20, 30, 40]))
    cut = make.request(0, 22, answer(make, [20, 22]), slot=1, status="incomplete")
    silent = make.request(0, 22, [], slot=2, status="incomplete")
    found = figures([whole, cut, silent], make)
    ttft = found["ttft_ms"]["mean"]
    assert (ttft["fastload"], ttft["vllm"]["value"], ttft["aiperf"]["value"]) == (10, 15, 10)
    assert changes(ttft["guidellm"], "finish_reason") == {"finish_reason": 5}


def test_a_connection_made_for_the_request_is_in_their_clock(make: Any) -> None:
    found = figures([make.request(0, 20, answer(make, [10, 20]), columns={"connect_ns": 3_000_000})], make)
    assert [found["ttft_ms"]["mean"][key]["value"] for key in TOOLS] == [13, 13, 13, 10, 13]
    assert found["latency_s"]["mean"]["cordatus"]["value"] == pytest.approx(0.023)
    assert found["itl_ms"]["mean"]["vllm"]["value"] == 10


def test_ranks(make: Any) -> None:
    """Of TTFTs 1..10 ms: nearest P90 9, P50 5; interpolated 9.1 and 5.5; Cordatus mixes them."""
    requests = [make.request(20.0 * at, 20.0 * at + 15, answer(make, [at + 1.0])) for at in range(10)]
    ttft = figures(requests, make)["ttft_ms"]
    p90 = {key: round(entry["value"], 9) for key, entry in ttft["p90"].items() if key != "fastload"}
    p50 = {key: entry["value"] for key, entry in ttft["p50"].items() if key != "fastload"}
    assert p90 == {"vllm": 9.1, "sglang": 9.1, "aiperf": 9.1, "guidellm": 9, "cordatus": 9}
    assert p50 == {"vllm": 5.5, "sglang": 5.5, "aiperf": 5.5, "guidellm": 5, "cordatus": 5.5}
    assert (ttft["p90"]["fastload"], ttft["p50"]["fastload"]) == (9, 5)


def test_the_window(make: Any) -> None:
    """Slot 1 begins 40 ms late and a fill request keeps the load: ours is one window, theirs all that is measured."""
    requests = [
        *make.steady(0, 3, 0.0),  # 4 tokens in 40 ms each, to 120
        *make.steady(1, 2, 40.0),  # to 120
        *make.steady(1, 1, 120.0, role="fill"),
    ]
    found = figures(requests, make)["aggregate_tok_s"]["value"]
    assert found["fastload"] == pytest.approx(16 / 0.08)  # from 40 to 120 ms
    assert found["vllm"]["value"] == pytest.approx(20 / 0.12)
    assert [one["change"] for one in found["vllm"]["steps"]] == pytest.approx([20 / 0.12 - 200])


def test_nothing_measured(make: Any) -> None:
    found = figures([make.request(0, 10, [], status="reset")], make)
    assert found["ttft_ms"]["mean"]["vllm"] == {"value": None, "name": "TTFT", "steps": []}
    assert found["system_rps"]["value"]["vllm"]["value"] is None
    empty = make.tables([])
    assert reconcile.reconcile_level(reconcile.read_level(empty[0], [empty[1]]))["n"] == 0


def test_ours_are_the_summarys(make: Any, sim_like: Any) -> None:
    table, tokens = make.tables(sim_like)
    found = reconcile.reconcile_level(reconcile.read_level(table, [tokens]))
    level = level_figures(table, tokens, make.facts(2))
    for figure in ("ttft_ms", "itl_ms", "icl_ms", "latency_s", "tps", "decode_tps"):
        ours = {statistic: entry["fastload"] for statistic, entry in found["figures"][figure].items()}
        assert ours == {statistic: level[figure][statistic] for statistic in ours}
    assert found["figures"]["aggregate_tok_s"]["value"]["fastload"] == level["aggregate_tok_s"]
    assert found["figures"]["system_rps"]["value"]["fastload"] == level["system_rps"]
    assert found["n"] == level["ok"]


def test_the_pieces_do_not_matter(make: Any, sim_like: Any) -> None:
    table, tokens = make.tables(sim_like)
    whole = reconcile.reconcile_level(reconcile.read_level(table, [tokens]))
    shuffled = pa.concat_tables([tokens.slice(at, 1) for at in range(tokens.num_rows)][::-1])
    single = reconcile.read_level(table, [shuffled.slice(at, 1) for at in range(shuffled.num_rows)])
    for figure, statistics in reconcile.reconcile_level(single)["figures"].items():
        for statistic, entry in statistics.items():
            for key, found in entry.items():
                wanted = whole["figures"][figure][statistic][key]
                if key == "fastload":
                    assert found == pytest.approx(wanted)
                else:
                    assert found["value"] == pytest.approx(wanted["value"])


@pytest.fixture
def sim_like(make: Any) -> list[Any]:
    """Two slots, tokens at a jittering pace, roles, finishes, one failure, one fill."""
    requests: list[Any] = []
    for slot in (0, 1):
        for wave in range(4):
            texts = [12.0 + slot + wave + step * (10 + slot) for step in range(3 + wave)]
            end = texts[-1] + 0.5
            sent = 90.0 * wave + slot
            more = {"status": "truncated"} if (slot, wave) == (1, 2) else {"role": "fill"} if wave == 3 else {}
            requests.append(
                make.request(
                    sent, sent + end + 2, answer(make, texts, role=7, end=end), slot, columns={"max_tokens": 6}, **more
                )
            )
    return requests


TIMES = st.lists(st.floats(0.1, 50), min_size=1, max_size=6)
STATUSES = st.sampled_from(["ok", "ok", "incomplete"])
ANSWERS = st.lists(
    st.tuples(TIMES, st.booleans(), st.booleans(), st.sampled_from([1, 1, 2, 3]), STATUSES), min_size=1, max_size=8
)


@given(made=ANSWERS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_steps_add_up_to_the_difference(make: Any, made: list[Any]) -> None:
    requests = []
    for at, (gaps, role, finish, channel, status) in enumerate(made):
        texts = [5 + sum(gaps[: each + 1]) for each in range(len(gaps))]
        end = texts[-1] + 1
        events = answer(make, texts, 3 if role else None, end if finish else None, channel=channel, tokens=1 + at % 2)
        requests.append(make.request(400.0 * at, 400.0 * at + end + 3, events, at % 2, status=status))
    for statistics in figures(requests, make).values():
        for entry in statistics.values():
            for key in TOOLS.keys() & entry.keys():
                sizes = [one["change"] for one in entry[key]["steps"]]
                if None not in (entry["fastload"], entry[key]["value"], *sizes):
                    assert entry["fastload"] + sum(sizes) == pytest.approx(entry[key]["value"])


def test_beside_another_tools_figures(make: Any) -> None:
    requests = [
        make.request(50.0 * at, 50.0 * at + 47, answer(make, [10 + at % 3, 20, 30, 40], role=5, end=45))
        for at in range(40)
    ]
    table, tokens = make.tables(requests)
    level = reconcile.read_level(table, [tokens])
    found = reconcile.reconcile_level(level)["figures"]
    told = {"ttft_ms": {"mean": 5.5, "p90": None}, "icl_ms": {"mean": 8.0}, "system_rps": {"value": 20.0}}
    rows = reconcile.gaps_to(level, found, TOOLS["vllm"], told)
    ttft, icl, rps = rows
    assert (ttft["figure"], ttft["statistic"], ttft["name"]) == ("ttft_ms", "mean", "TTFT")
    assert ttft["ours"] == pytest.approx(10.975) and ttft["by_definition"] == 5
    assert ttft["gap"] == pytest.approx(5.5 - 10.975) == pytest.approx(ttft["explained"] + ttft["rest"])
    assert ttft["rest"] == 0.5 and ttft["rest_share"] == pytest.approx(0.1)
    assert ttft["chance"] == [5, 5] and ttft["by_chance"] is False  # by its definition every TTFT is 5 ms
    assert icl["chance"] is None and icl["by_chance"] is None and rps["figure"] == "system_rps"


def test_resampled_percentiles_are_those_of_resamples() -> None:
    """The shortcut by a beta distribution against resampling in earnest: 2000 of each agree to a few per mille."""
    values = np.sort(np.random.default_rng(1).exponential(100, 200))
    random = np.random.default_rng(2)
    slow = np.sort(random.choice(values, (2000, 200)), axis=1)[:, 180 - 1]
    quick = bootstrap.percentiles(values, 90)
    assert quick.mean() == pytest.approx(slow.mean(), rel=0.02)
    assert bootstrap.interval(quick) == pytest.approx((np.percentile(slow, 2.5), np.percentile(slow, 97.5)), rel=0.05)
    low = bootstrap.percentiles(values, 10, low=True)
    assert low.mean() == pytest.approx(np.sort(values)[21 - 1], rel=0.1)  # rank n + 1 - ceil(0.9 n) = 21
    assert bootstrap.means(values).std() == pytest.approx(values.std() / 200**0.5, rel=0.1)
    many = np.tile(values, 30)
    assert bootstrap.means(many).std() == pytest.approx(values.std() / 6000**0.5, rel=0.1)
    assert (bootstrap.means(values) == bootstrap.means(values)).all()
