"""`fastload import`: the file of another tool as runs, one a configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from fastload.cli.argv import masked
from fastload.errors import PlanError

FORMATS = ("kimi-report", "vllm", "aiperf", "cordatus")
"""The keys of trace.formats.readers.READERS, here so that --help loads none of it (a test compares them)."""


@click.command("import")
@click.argument("file", metavar="FILE")
@click.option(
    "--format", "form", type=click.Choice(FORMATS), help="Which tool wrote it.  [default: by what is in the file]"
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="[NAME:]KEY=VALUE",
    help="Label the runs, or only the one of this name; repeatable. engine, speculation, model, hardware and "
    "max_num_seqs are looked at.",
)
@click.option("--output", metavar="DIR", default="results", show_default=True, help="Make the run directories in here.")
@click.option("--name", metavar="NAME", help="Name of the run, or what comes before its name in the file.")
@click.pass_obj
def import_(
    words: Sequence[str] | None, file: str, form: str | None, labels: tuple[str, ...], output: str, name: str | None
) -> None:
    """Make runs of another tool's result file, for report, compare and check.

    Known are the tables of the Kimi K3 report (JSON, or Appendix A as CSV), `vllm bench serve`
    JSON, AIPerf and the Cordatus tool's CSV. What a format lacks stays empty and is named.
    """
    from fastload.trace.formats.readers import read
    from fastload.trace.imported import write_imported

    sources = read(Path(file), form)
    given = [_label(text, {each.name for each in sources}) for text in labels]
    command = ["fastload", *masked(sys.argv[1:] if words is None else words)]
    for each in sources:
        own = {key: value for whose, key, value in given if whose in (None, each.name)}
        if name is None:
            called = each.name
        else:
            called = name if len(sources) == 1 else f"{name}-{each.name}"
        path = write_imported(Path(output), called, each.told, {**each.labels, **own}, command)
        click.echo(f"{len(each.told.levels)} levels of {each.name} in {path}")
    click.echo(f"not told by this format: {', '.join(sources[0].told.lacks) or 'nothing is lacking'}", err=True)


def _label(text: str, names: set[str]) -> tuple[str | None, str, str]:
    """Return (configuration or None for all, key, value) of one --label."""
    key, equals, value = text.partition("=")
    whose, colon, rest = key.partition(":")
    if not equals or not (rest if colon else key).strip() or not value.strip():
        raise PlanError(f"--label {text!r}: give KEY=VALUE, or NAME:KEY=VALUE for one configuration of the file")
    if colon and whose not in names:
        raise PlanError(f"--label {text!r}: the file has no {whose!r}; it has {', '.join(sorted(names))}")
    return (whose, rest.strip(), value.strip()) if colon else (None, key.strip(), value.strip())
