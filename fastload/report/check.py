"""The result of a check as text, as JUnit XML and as Markdown: each escaped for its reader, none computes anything."""

import textwrap
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from fastload.report.tables import SIMULATED, printable

WIDTH = 120
_MARKDOWN = str.maketrans(
    {sign: f"\\{sign}" for sign in "\\`*_[]|~"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
)  # what has a meaning inside a line


def plain(result: Mapping[str, Any], width: int = WIDTH) -> str:
    """Return the result as text, ending in a newline: what missed first, one entry a line."""
    lines = [_title(result)]
    if result["simulated"]:
        lines += textwrap.wrap(SIMULATED, width)
    for case in sorted(result["cases"], key=lambda case: bool(case["ok"])):
        text = f"{'ok  ' if case['ok'] else 'MISS'} {case['says']}"
        lines += textwrap.wrap(printable(text), width, subsequent_indent="       ", break_long_words=False)
    lines += [
        line
        for remark in result["remarks"]
        for line in textwrap.wrap(printable(f"note: {remark}"), width, subsequent_indent="    ")
    ]
    return "\n".join([*lines, tally(result)]) + "\n"


def tally(result: Mapping[str, Any]) -> str:
    """Return one line: how many missed, of how many."""
    missed = sum(not case["ok"] for case in result["cases"])
    mark = " (SIMULATED)" if result["simulated"] else ""
    return f"check{mark}: {missed} of {len(result['cases'])} missed" if missed else f"check{mark}: all kept"


def junit(result: Mapping[str, Any]) -> str:
    """Return the result as JUnit XML: a test case each, a failure for what missed. Text XML cannot hold becomes "?"."""
    missed = sum(not case["ok"] for case in result["cases"])
    suite = ElementTree.Element(
        "testsuite",
        name=_title(result),
        tests=str(len(result["cases"])),
        failures=str(missed),
        errors="0",
        skipped="0",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name in ("run_id", "baseline", "simulated"):
        value = result[name]
        text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        ElementTree.SubElement(properties, "property", name=name, value=printable(text))
    for case in result["cases"]:
        test = ElementTree.SubElement(
            suite, "testcase", classname=f"fastload.{case['kind']}", name=printable(_marked(result, case["name"]))
        )
        if not case["ok"]:
            failure = ElementTree.SubElement(test, "failure", message=printable(case["says"]), type=case["kind"])
            failure.text = printable(case["says"])
        else:
            ElementTree.SubElement(test, "system-out").text = printable(case["says"])
    if result["remarks"]:
        ElementTree.SubElement(suite, "system-out").text = "\n".join(map(printable, result["remarks"]))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=False) + "\n"


def markdown(result: Mapping[str, Any]) -> str:
    """Return the result as a Markdown table, for a pull request's comment or a job's summary."""
    lines = [f"### {_escaped(_title(result))}", "", f"**{_escaped(tally(result))}**", ""]
    if result["simulated"]:
        lines += [_escaped(SIMULATED), ""]
    lines += ["| | check | found |", "|---|---|---|"]
    for case in sorted(result["cases"], key=lambda case: bool(case["ok"])):
        lines.append(f"| {'ok' if case['ok'] else '**MISS**'} | {_escaped(case['name'])} | {_escaped(case['says'])} |")
    lines += ["", *(f"- {_escaped(remark)}" for remark in result["remarks"])]
    return "\n".join(lines).rstrip() + "\n"


def _title(result: Mapping[str, Any]) -> str:
    against = f" against {result['baseline']}" if result["baseline"] is not None else ""
    return printable(_marked(result, f"fastload check {result['run_id']}{against}"))


def _marked(result: Mapping[str, Any], text: str) -> str:
    return f"[SIMULATED] {text}" if result["simulated"] else text


def _escaped(text: str) -> str:
    """Return text that Markdown shows as it is: signs with a meaning escaped, no line breaks, no HTML."""
    return printable(text).translate(_MARKDOWN)
