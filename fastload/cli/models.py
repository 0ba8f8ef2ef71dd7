"""`fastload models`: the models a server serves, one a line."""

from __future__ import annotations

import json
from typing import Any

import click

from fastload.cli import flags
from fastload.cli.display import one_line


@click.command("models")
@click.option(
    "--url", "--base-url", "url", required=True, metavar="URL", help="The server, with or without /v1."
)
@flags.access
@click.option("--quiet", is_flag=True, help="Only the names.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON on stdout and nothing else.")
def models(
    url: str,
    api_key: str | None,
    api_key_file: str | None,
    headers: tuple[str, ...],
    quiet: bool,
    as_json: bool,
    **typed: Any,
) -> None:
    """List the models a server serves, one a line."""
    key, sent = flags.credentials(api_key, api_key_file, headers)
    way = flags.way({"url": url, **typed})
    flags.warn_of_typed_secrets({"api_key": api_key, "headers": headers, **typed}, quiet)
    flags.warn_of_ignored_proxies(typed["proxy"], quiet)

    from fastload.load.hiding import hidden
    from fastload.load.target import SIMULATED_OWNER, list_models

    entries = list_models(url, key, sent, way)
    if as_json:
        click.echo(json.dumps(hidden(entries), indent=2, ensure_ascii=False))
        return
    for entry in entries:
        click.echo(one_line(entry["id"]))
    if not quiet and any(entry.get("owned_by") == SIMULATED_OWNER for entry in entries):
        click.echo("fastload: SIMULATED: this is fastload's simulated engine, not a real server", err=True)
