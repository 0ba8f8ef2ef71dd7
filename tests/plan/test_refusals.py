"""Fields a server refuses to know: which they are by its words, and the plan without them."""

import orjson
import pytest

from fastload.plan import ENDPOINTS, Lengths, Plan, build, fit, levels, refused_field, without

LEVELS = levels((1,), 1, 1, None, None, 0)


@pytest.fixture(scope="module")
def lengths() -> Lengths:
    return fit(lambda texts: [len(text.split()) + 9 for text in texts], 32, 7, True)


def body(plan: Plan) -> dict[str, object]:
    made: dict[str, object] = orjson.loads(plan.body(0))
    return made


@pytest.mark.parametrize(
    ("error", "field"),
    [
        ("Unexpected fields in the request: {'min_tokens'}", "min_tokens"),  # transformers serve
        ("body.ignore_eos: Extra inputs are not permitted", "ignore_eos"),
        ("Unrecognized request arguments supplied: ignore_eos, min_tokens", "ignore_eos"),
        ("Unrecognized request argument supplied: stream_options", "stream_options"),
        ("unknown field `continuous_usage_stats`, expected `include_usage`", "continuous_usage_stats"),
        (
            "Unsupported parameter: 'max_tokens' is not supported here. Use 'max_completion_tokens' instead.",
            "max_tokens",
        ),
        ("use max_completion_tokens, since max_tokens is not supported", "max_tokens"),
        ("got an unexpected keyword argument 'ignore_eos'", "ignore_eos"),
        ("1 validation error: {'type': 'extra_forbidden', 'loc': ('body', 'min_tokens')}", "min_tokens"),
        ('json: unknown field "ignore_eos"', "ignore_eos"),
        # no refusal to know a field
        ("'max_tokens' or 'max_completion_tokens' is too large: 5000. The maximum context length is 1024", None),
        ("min_tokens must be less than or equal to max_tokens=16, got 64", None),
        ("max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", None),
        ("The model `x` does not exist", None),
        ("temperature is not supported with this model", None),
        ("unknown field max_tokens_to_sample", None),
        ("", None),
    ],
)
def test_the_field_refused(error: str, field: str | None) -> None:
    assert refused_field(error) == field


def test_a_plan_without_a_field(lengths: Lengths) -> None:
    plan = build(LEVELS, "m", "chat", 8, lengths, ignore_eos=True, extra_body={"min_tokens": 8})
    for field in ("ignore_eos", "min_tokens", "stream_options"):
        fewer = without(plan, field)
        assert body(fewer) == {name: value for name, value in body(plan).items() if name != field}
        assert without(fewer, field) is fewer
        plan = fewer
    assert plan.describe()["left_out"] == ["ignore_eos", "min_tokens", "stream_options"]
    assert not plan.include_usage and not plan.ignore_eos


def test_max_tokens_and_its_newer_name_stand_in_for_each_other_once(lengths: Lengths) -> None:
    plan = build(LEVELS, "m", "chat", 8, lengths)
    newer = without(plan, "max_tokens")
    assert body(newer)["max_completion_tokens"] == 8 and "max_tokens" not in body(newer)
    assert without(newer, "max_tokens") is newer and without(newer, "max_completion_tokens") is newer
    for endpoint in ("completions", "responses", "messages"):
        other = build(LEVELS, "m", endpoint, 8, lengths)
        assert without(other, "max_tokens") is other


def test_what_is_not_sent_cannot_be_left_out(lengths: Lengths) -> None:
    plan = build(LEVELS, "m", "chat", 8, lengths, include_usage=False)
    for field in ("ignore_eos", "min_tokens", "stream_options", "continuous_usage_stats", "temperature"):
        assert without(plan, field) is plan


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_bodies_of_each_endpoint(lengths: Lengths, endpoint: str) -> None:
    plan = build(LEVELS, "m", endpoint, 8, lengths, sampling={"stop": ["x"]})
    text = plan.prompt(0)
    asked = {"role": "user", "content": text}
    wanted: dict[str, dict[str, object]] = {
        "chat": {"messages": [asked], "max_tokens": 8, "stream_options": {"include_usage": True}, "stop": ["x"]},
        "completions": {"prompt": text, "max_tokens": 8, "stream_options": {"include_usage": True}, "stop": ["x"]},
        "responses": {"input": text, "max_output_tokens": 8, "stop": ["x"]},
        "messages": {"messages": [asked], "max_tokens": 8, "stop_sequences": ["x"]},
    }
    assert body(plan) == {"model": "m", "stream": True, **wanted[endpoint]}
