"""Bodies: the fields that are sent and those that are not, and that they can be made quickly enough."""

import pickle
import timeit
from dataclasses import replace

import orjson
import pytest

from fastload.errors import PlanError
from fastload.plan import Lengths, Plan, build, encode, fit, levels

LEVELS = levels((1, 8), 10, 30, None, None, 0)


@pytest.fixture(scope="module")
def lengths() -> Lengths:
    return fit(lambda texts: [len(text.split()) + 9 for text in texts], 128, 7, True)


@pytest.fixture
def plan(lengths: Lengths) -> Plan:
    return build(LEVELS, "m", "chat", 64, lengths)


def test_a_chat_body_has_just_these_fields(plan: Plan) -> None:
    assert orjson.loads(plan.body(3)) == {
        "model": "m",
        "messages": [{"role": "user", "content": plan.prompt(3)}],
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_completions_body_has_just_these_fields(lengths: Lengths) -> None:
    plan = build(LEVELS, "m", "completions", 64, lengths)
    assert orjson.loads(plan.body(3)) == {
        "model": "m",
        "prompt": plan.prompt(3),
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_fields_are_sent_only_if_asked_and_extra_body_has_the_last_word(lengths: Lengths) -> None:
    plan = build(
        LEVELS,
        "m",
        "chat",
        64,
        lengths,
        ignore_eos=True,
        sampling={"temperature": 0.0, "top_p": 0.9},
        extra_body={"top_p": 0.5, "max_tokens": 7, "chat_template_kwargs": {"enable_thinking": False}},
        include_usage=False,
    )
    body = orjson.loads(plan.body(0))
    assert body["ignore_eos"] is True and body["temperature"] == 0.0 and body["top_p"] == 0.5
    assert body["max_tokens"] == 7 and body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "stream_options" not in body


def test_bodies_are_deterministic_distinct_and_survive_a_pickle(plan: Plan) -> None:
    bodies = {plan.body(request) for request in range(100_000)}
    assert len(bodies) == 100_000
    thawed = pickle.loads(pickle.dumps(plan))
    assert all(thawed.body(request) == plan.body(request) for request in range(200))
    assert plan.body(5) == plan.body(5)


def test_a_body_takes_well_under_the_time_between_two_requests(plan: Plan) -> None:
    best = min(timeit.repeat(lambda: [plan.body(request) for request in range(1000)], number=1, repeat=7))
    assert best / 1000 < 30e-6, f"{best * 1000:.1f} us a body"


def test_the_manifest_can_hold_the_description(plan: Plan) -> None:
    described = orjson.loads(orjson.dumps(plan.describe()))
    assert described["sampling"] == "server default" and described["prompts"]["tokens_planned"] == 128
    assert [level["measured"] for level in described["levels"]] == [30, 80]
    assert plan.prompt_tokens_planned(0) == 128


def test_a_warm_up_body_may_have_fewer_tokens(plan: Plan) -> None:
    assert orjson.loads(encode(plan, "hello", max_tokens=1))["max_tokens"] == 1


def test_mistakes_name_their_flag(lengths: Lengths) -> None:
    with pytest.raises(PlanError, match="--endpoint embeddings"):
        build(LEVELS, "m", "embeddings", 64, lengths)
    with pytest.raises(PlanError, match="--osl 0"):
        build(LEVELS, "m", "chat", 0, lengths)
    with pytest.raises(PlanError, match="--isl 128 and --osl 64 make 192 tokens, more than the 150"):
        build(LEVELS, "m", "chat", 64, lengths, max_model_len=150)
    with pytest.raises(PlanError, match="temperature=nan"):
        build(LEVELS, "m", "chat", 64, lengths, sampling={"temperature": float("nan")})
    with pytest.raises(PlanError, match="--extra-body: not JSON"):
        build(LEVELS, "m", "chat", 64, lengths, extra_body={"x": object()})
    with pytest.raises(PlanError, match="different prompts"):
        build(LEVELS, "m", "chat", 64, replace(lengths, distinct=50))
