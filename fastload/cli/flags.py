"""Flags that several commands share: where the server is and how to be let in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from fastload.cli import inputs
from fastload.errors import PlanError

if TYPE_CHECKING:
    from fastload.load.secrets import Secret


def together(options: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Return one decorator that applies click options in the order they should stand in --help."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


access = together(
    [
        click.option(
            "--api-key",
            metavar="KEY",
            help="API key. Others on this machine can see it in the process list: FASTLOAD_API_KEY or "
            "--api-key-file are safer.",
        ),
        click.option(
            "--api-key-file", metavar="FILE", help="Read the API key from a file; - reads standard input."
        ),
        click.option(
            "--header",
            "headers",
            multiple=True,
            metavar="NAME=VALUE",
            help="Send this header too; repeatable.",
        ),
    ]
)


def warn_of_typed_key(typed: str | None, quiet: bool) -> None:
    """Say on stderr that a key on the command line is no secret."""
    if typed is not None and not quiet:
        click.echo(
            "fastload: warning: others on this machine can see --api-key in the process list; "
            "use FASTLOAD_API_KEY or --api-key-file",
            err=True,
        )


def credentials(
    api_key: str | None, api_key_file: str | None, headers: Sequence[str]
) -> tuple[Secret | None, dict[str, str]]:
    """Return the key and the headers to send. PlanError when one is no good or both would say who we are."""
    key, sent = inputs.api_key(api_key, api_key_file), inputs.headers(headers)
    if key is not None and any(name.lower() == "authorization" for name in sent):
        raise PlanError(
            "--header Authorization: an API key is given too and would be sent in the same header; give one"
        )
    return key, sent
