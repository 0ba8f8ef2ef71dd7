"""What a user types: accepted forms, and one line naming flag, value and remedy for the others."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import click
import pytest

from fastload.cli import argv, inputs
from fastload.errors import PlanError


def read(made: dict[str, Any], text: str) -> Any:
    """What an option made by `inputs` makes of a text."""
    return made["callback"](None, click.Option(["--flag", "--alias"]), text)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("2h", 7200.0), ("500ms", 0.5)])
def test_durations(text: str, seconds: float) -> None:
    assert read(inputs.duration(), text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0", "-1s", "2 days", "inf", "nan", "1e3", "²s"])
def test_what_is_no_duration_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(PlanError, match=r"^--flag .*90s, 10m or 2h"):
        read(inputs.duration(), text)


@pytest.mark.parametrize(
    "text", ["0", "-1", "1.5", "x", "", "1_000", "99999999999999999999", "0x10", "²", "1001"]
)
def test_what_is_no_count_is_refused_with_the_range(text: str) -> None:
    with pytest.raises(PlanError, match="^--flag .*give a whole number from 1 to 1000"):
        read(inputs.whole(1, 1000), text)


@pytest.mark.parametrize("text", ["nan", "inf", "-0.1", "2.1", "hot", ""])
def test_what_is_no_fraction_is_refused_with_the_range(text: str) -> None:
    with pytest.raises(PlanError, match="^--flag .*give a number from 0 to 2"):
        read(inputs.real(0.0, 2.0), text)


def test_a_bound_can_be_excluded() -> None:
    assert read(inputs.real(0.0, 1.0, above=True), "1") == 1.0
    with pytest.raises(PlanError, match="above 0 to 1"):
        read(inputs.real(0.0, 1.0, above=True), "0")


def test_a_flag_not_given_stays_none() -> None:
    assert read(inputs.whole(1), None) is None  # type: ignore[arg-type]


def test_headers_keep_their_order_and_everything_after_the_first_equals_sign() -> None:
    found = inputs.headers(["X-Team=search", "Authorization = Basic abc==", "X-Empty="])
    assert list(found.items()) == [("X-Team", "search"), ("Authorization", "Basic abc=="), ("X-Empty", "")]


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["X-Team"], "not of the form NAME=VALUE"),
        (["X-Team: search"], "not of the form NAME=VALUE"),
        (["=search"], "not of the form NAME=VALUE"),
        (["X Team=search"], "not of the form NAME=VALUE"),
        (["Host=elsewhere"], "written by fastload itself"),
        (["content-LENGTH=3"], "written by fastload itself"),
        (["X-Team=a\r\nX-Evil: 1"], "printable ASCII"),
        (["X-Team=é"], "printable ASCII"),
        (["X-Team=a", "x-team=b"], "given twice"),
    ],
)
def test_headers_that_cannot_be_sent_are_refused(texts: list[str], says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        inputs.headers(texts)
    assert str(caught.value).startswith("--header ")


@pytest.mark.parametrize(
    "text", ["Authorization: Bearer sk-1234", "Authorization Bearer sk-1234", "sk-1234: x"]
)
def test_a_mistyped_header_shows_no_value(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        inputs.headers([text])
    assert text.split(maxsplit=1)[1] not in str(caught.value)


def test_pairs() -> None:
    assert inputs.pairs("--label", ["gpu=H200", "note=a=b"]) == {"gpu": "H200", "note": "a=b"}
    with pytest.raises(PlanError, match=r"--label 'gpu': not of the form K=V"):
        inputs.pairs("--label", ["gpu"])
    with pytest.raises(PlanError, match=r"--label 'gpu': given twice"):
        inputs.pairs("--label", ["gpu=a", "gpu=b"])


def test_json_objects() -> None:
    assert inputs.json_object("--extra-body", None) == {}
    assert inputs.json_object("--extra-body", '{"top_a": 0.5}') == {"top_a": 0.5}


@pytest.mark.parametrize(
    ("text", "says"), [("{", "not JSON"), ("", "not JSON"), ("[1]", "not a JSON object"), ("NaN", "not JSON")]
)
def test_what_is_no_json_object_is_refused(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        inputs.json_object("--extra-body", text)
    assert str(caught.value).startswith("--extra-body ")


def test_the_key_comes_from_flag_file_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(typed: str | None, file: str | None) -> str | None:
        secret = inputs.api_key(typed, file)
        return None if secret is None else secret.reveal()

    monkeypatch.delenv("FASTLOAD_API_KEY", raising=False)
    assert key(None, None) is None
    monkeypatch.setenv("FASTLOAD_API_KEY", "")
    assert key(None, None) is None
    monkeypatch.setenv("FASTLOAD_API_KEY", "sk-env")
    assert key(None, None) == "sk-env"
    assert key("sk-flag", None) == "sk-flag"
    (tmp_path / "key").write_text("sk-file\n")
    assert key(None, str(tmp_path / "key")) == "sk-file"
    monkeypatch.setattr("sys.stdin", io.StringIO("sk-stdin\n"))
    assert key(None, "-") == "sk-stdin"


def test_bad_keys_are_refused_without_being_shown(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="both given"):
        inputs.api_key("a", "b")
    with pytest.raises(PlanError, match=r"--api-key-file .*: cannot be read: No such file"):
        inputs.api_key(None, str(tmp_path / "none"))
    for bad in ("sk-1\r\nX: y", "sk 1", "sk-é", " "):
        with pytest.raises(PlanError, match="--api-key: ") as caught:
            inputs.api_key(bad, None)
        assert "sk" not in str(caught.value)


def test_a_writable_place_is_left_as_it_was(tmp_path: Path) -> None:
    wanted = tmp_path / "new" / "deeper"
    assert inputs.writable("--output", wanted) == wanted
    assert list(tmp_path.iterdir()) == []


def test_unwritable_places_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name, says in [
        ("file", "is not a directory"),
        ("file/sub", "is not a directory"),
        ("dangling", "broken link"),
    ]:
        with pytest.raises(PlanError, match=says) as caught:
            inputs.writable("--output", tmp_path / name)
        assert str(caught.value).startswith(f"--output '{tmp_path / name}': ")
    if os.path.isdir("/proc"):  # takes no write, not even root's
        with pytest.raises(PlanError, match="cannot be written to"):
            inputs.writable("--output", Path("/proc/results"))
    with pytest.raises(PlanError, match="NUL"):
        inputs.writable("--output", Path("a\0b"))


def test_run_names() -> None:
    assert inputs.run_name("h200-spec", "x") == "h200-spec"
    assert inputs.run_name(None, "moonshotai/Kimi-K2 (fp8)") == "Kimi-K2-fp8"
    assert inputs.run_name(None, "///") == "run"
    for bad in ("", "../up", "a/b", ".hidden", "a b", "x" * 65):
        with pytest.raises(PlanError, match="--name "):
            inputs.run_name(bad, "x")


def test_the_cpu_must_be_one_we_may_use() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert inputs.processor(None) is None
    assert inputs.processor(allowed[0]) == allowed[0]
    with pytest.raises(PlanError, match="--cpu 100000: not a CPU this process may use"):
        inputs.processor(100_000)


@pytest.mark.parametrize(
    ("words", "secrets"),
    [
        (["sweep", "--api-key", "sk-1"], ["sk-1"]),
        (["sweep", "--api-key=sk-1", "--name", "a"], ["sk-1"]),
        (["--header", "X-Team=a", "--header", "authorization=Basic c2V=", "--header=X-Key=k=1"], ["Basic c2V=", "k=1"]),
        (["--url", "http://u:p%40q@host/v1"], ["u:p%40q"]),
        (["--proxy=http://u:p@q/r@host:1"], ["u:p@q/r"]),
        (["--base-url", "u:p/q@host", "--label", "to=a@b"], ["u:p/q"]),
        (["--url", "http://host/v1", "--api-key"], []),
    ],
)
def test_secrets_in_a_command_line(words: list[str], secrets: list[str]) -> None:
    assert argv.secrets_in(words) == secrets
    assert not any(secret in word for word in argv.masked(words) for secret in secrets)


def test_secrets_are_masked_in_the_command_line() -> None:
    words = "sweep --api-key sk-1 --api-key=sk-2 --header=X-Api-Key=sk-4 --header X-Team=search".split()
    words += ["--header", "Authorization=Bearer sk-3", "--header=Cookie=sk-5", "--header", "Bearer sk-6"]
    words += ["--url", "http://me:sk-7@host/v1", "--url=https://sk-8@host", "--label", "key=seen", "--header"]
    line = argv.masked(words)
    assert "sk-" not in " ".join(line)
    assert line[:4] == ["sweep", "--api-key", "***", "--api-key=***"]
    assert "X-Team=search" in line and "Authorization=***" in line and "key=seen" in line
    assert "http://***@host/v1" in line
