"""Flags that several commands share: where the server is and how to be let in."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from fastload.cli import inputs
from fastload.cli.argv import MASK, SECRET_NAME, URL_LOGIN
from fastload.errors import PlanError

if TYPE_CHECKING:
    from fastload.load.secrets import Secret
    from fastload.load.target_address import Way

PROXY_VARIABLES = frozenset({"http_proxy", "https_proxy", "all_proxy"})


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
        click.option(
            "--ca-file", metavar="FILE", help="Trust these authorities (PEM) and no others for an https server."
        ),
        click.option("--insecure", is_flag=True, help="Do not verify the server's certificate; the report says so."),
        click.option("--client-cert", metavar="FILE", help="Our own certificate (PEM), for servers that want one."),
        click.option("--client-key", metavar="FILE", help="Its private key, if that is not in the same file."),
        click.option(
            "--proxy",
            metavar="URL",
            help="Go through this HTTP proxy by CONNECT. Proxies named in the environment are ignored.",
        ),
    ]
)


def way(typed: Mapping[str, Any]) -> Way:
    """Return how to connect, from the flags of `access`. PlanError for files that are no good or flags at odds."""
    from fastload.load.target_address import Way, parse_proxy
    from fastload.load.tls import TlsOptions, context

    ca_file, cert, key = typed["ca_file"], typed["client_cert"], typed["client_key"]
    if typed["insecure"] and ca_file is not None:
        raise PlanError(f"--insecure: trusts any certificate, so --ca-file {ca_file} would not be used; give one")
    if key is not None and cert is None:
        raise PlanError(f"--client-key {key}: is of no use alone; give --client-cert too")
    tls = TlsOptions(ca_file, cert, key, typed["insecure"])
    if (ca_file or cert or typed["insecure"]) and not (typed["url"] or "").strip().startswith("https://"):
        flag = "--ca-file" if ca_file else "--client-cert" if cert else "--insecure"
        url = URL_LOGIN.sub(MASK, typed["url"] or "not given")
        raise PlanError(f"{flag}: is for https servers; --url is {url}")
    if ca_file or cert:
        context(tls)  # its PlanError now, before anything is started
    if typed["proxy"] is not None and typed["url"] is None:
        raise PlanError("--proxy: the simulated engine is on this machine; --url names a server behind a proxy")
    return Way(tls, None if typed["proxy"] is None else parse_proxy(typed["proxy"]))


def warn_of_ignored_proxies(proxy: str | None, quiet: bool) -> None:
    """Say on stderr which of the environment's proxies are not used. Their values may hold passwords."""
    found = sorted(name for name in os.environ if name.lower() in PROXY_VARIABLES and os.environ[name])
    if found and proxy is None and not quiet:
        click.echo(
            f"fastload: {', '.join(found)}: set in the environment and not used; --proxy URL goes through a proxy",
            err=True,
        )


def warn_of_typed_secrets(typed: Mapping[str, Any], quiet: bool) -> None:
    """Say on stderr that a key, a secret header or a proxy's password on the command line is no secret."""
    found = ["--api-key"] * (typed["api_key"] is not None)
    names = [text.partition("=")[0].strip() for text in typed["headers"]]
    found += [f"--header {name}" for name in names if SECRET_NAME.search(name)]
    found += ["the login in --proxy"] * bool(URL_LOGIN.search(typed.get("proxy") or ""))
    if found and not quiet:
        right = "; FASTLOAD_API_KEY or --api-key-file keep a key to yourself"
        click.echo(
            f"fastload: warning: others on this machine can see {', '.join(found)} in the process list{right}", err=True
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
