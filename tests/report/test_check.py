"""A check's result for CI: XML that parses, Markdown that shows what was meant, whatever the names hold."""

from typing import Any
from xml.etree import ElementTree

from fastload.report import check

NASTY = 'ttft|p90 <b>&"]]>\x00\x1b[31m\nx*_`'


def result(simulated: bool = False) -> dict[str, Any]:
    return {
        "run_id": f"20261130-{NASTY}",
        "baseline": None,
        "simulated": simulated,
        "ok": False,
        "cases": [
            {"name": "the run is valid", "kind": "run", "ok": True, "says": "the run is valid"},
            {"name": NASTY, "kind": "assertion", "ok": False, "says": f"{NASTY} is 3"},
        ],
        "remarks": [NASTY],
    }


def test_junit_can_be_read_back() -> None:
    (suite,) = ElementTree.fromstring(check.junit(result()))
    assert (suite.tag, suite.get("tests"), suite.get("failures")) == ("testsuite", "2", "1")
    kept, missed = suite.findall("testcase")
    assert kept.get("name") == "the run is valid" and kept.find("failure") is None
    shown = NASTY.replace("\x00", "?").replace("\x1b", "?").replace("\n", "?")
    assert missed.get("name") == shown and missed.get("classname") == "fastload.assertion"
    failure = missed.find("failure")
    assert failure is not None and failure.get("message") == failure.text == f"{shown} is 3"
    assert suite.find("properties/property[@name='simulated']").get("value") == "false"  # type: ignore[union-attr]


def test_markdown_keeps_its_table() -> None:
    lines = check.markdown(result()).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 4 and all(line.replace("\\|", "").count("|") == 4 for line in rows)
    assert rows[2].startswith("| **MISS** | ttft\\|p90 &lt;b&gt;&amp;")  # what missed stands first
    assert "<b>" not in "\n".join(lines) and "\x1b" not in "\n".join(lines)
    assert "**check: 1 of 2 missed**" in lines


def test_what_was_simulated_says_so_everywhere() -> None:
    simulated = result(simulated=True)
    for text in (check.plain(simulated), check.markdown(simulated), check.junit(simulated)):
        assert "SIMULATED" in text
    (suite,) = ElementTree.fromstring(check.junit(simulated))
    assert all("[SIMULATED]" in str(case.get("name")) for case in suite.findall("testcase"))
    assert "SIMULATED" not in check.plain(result()) + check.markdown(result()) + check.junit(result())


def test_plain_text_is_safe_for_a_terminal_and_ends_with_the_tally() -> None:
    lines = check.plain(result()).splitlines()
    assert lines[-1] == "check: 1 of 2 missed" and lines[1].startswith("MISS ttft|p90")
    assert all(line.isprintable() for line in lines)
    kept = {**result(), "cases": result()["cases"][:1]}
    assert check.plain(kept).splitlines()[-1] == "check: all kept"
