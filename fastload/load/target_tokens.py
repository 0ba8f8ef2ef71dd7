"""Counting the tokens of a prompt as the server counts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx

from fastload.errors import TargetError
from fastload.load.redirects import shown_location
from fastload.load.secrets import Secret
from fastload.load.target_address import NotYetError
from fastload.load.target_client import (
    ANSWER_TIMEOUT_S,
    FACT_TIMEOUT_S,
    ask,
    client_for,
    denied,
    read_json,
    said,
)
from fastload.plan import ENDPOINTS, question

if TYPE_CHECKING:
    from fastload.load.target import Target

Count = Callable[[Sequence[str]], list[int | None]]

THREADS = 4
# A tokenizer is believed after it agreed with a real request about this text.
_TRIAL_TEXT = "Before anything is measured: how many tokens, do you count, in this one line?"


def token_counter(target: Target, endpoint: str, key: Secret | None, headers: Mapping[str, str]) -> tuple[Count, bool]:
    """(count, exact): `count` gives each text's prompt tokens, template included; None where none are told.

    exact: the server's own tokenizer is asked, about a millisecond a text, and it agreed with `usage` of one
    real completion. Else each text costs a real request with max_tokens=1. `count` raises TargetError when
    the server refuses or is gone.
    """
    if target.tokenizer is not None:
        with client_for(target.address, target.host_header, key, headers, endpoint) as client:
            truth = _by_generating(client, target, endpoint, key, _TRIAL_TEXT)
            for form in _forms(target, endpoint):
                told = form(client, _TRIAL_TEXT)
                if told is not None and truth in (None, told):
                    return _counter(target, endpoint, key, headers, form), True

    def generate(client: httpx.Client, text: str) -> int | None:
        return _by_generating(client, target, endpoint, key, text)

    return _counter(target, endpoint, key, headers, generate), False


_One = Callable[[httpx.Client, str], int | None]


def _counter(target: Target, endpoint: str, key: Secret | None, headers: Mapping[str, str], one: _One) -> Count:
    """Many texts over a few kept connections; nothing stays open between calls."""

    def count(texts: Sequence[str]) -> list[int | None]:
        with (
            client_for(target.address, target.host_header, key, headers, endpoint) as client,
            ThreadPoolExecutor(min(THREADS, max(1, len(texts)))) as pool,
        ):
            return list(pool.map(lambda text: one(client, text), texts))

    return count


def _forms(target: Target, endpoint: str) -> list[_One]:
    """Ways to ask the tokenizer, the likelier first."""
    if target.tokenizer == "vllm":
        return [lambda client, text: _vllm(client, target, endpoint, text)]
    # Whether a start token is added twice or not at all behind a template differs between models.
    return [
        lambda client, text: _llamacpp(client, target, endpoint, text, add_special=True),
        lambda client, text: _llamacpp(client, target, endpoint, text, add_special=False),
    ]


def _vllm(client: httpx.Client, target: Target, endpoint: str, text: str) -> int | None:
    body: dict[str, object] = {"model": target.model}
    if endpoint != "completions":  # the others go through the chat template too
        body |= {"messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
    else:
        body["prompt"] = text
    return tokens_in(read_json(ask(client, target.url, f"{target.root}/tokenize", body)))


def _llamacpp(client: httpx.Client, target: Target, endpoint: str, text: str, add_special: bool) -> int | None:
    if endpoint != "completions":
        messages = {"messages": [{"role": "user", "content": text}]}
        shaped = read_json(ask(client, target.url, f"{target.root}/apply-template", messages))
        prompt = shaped.get("prompt") if isinstance(shaped, dict) else None
        if not isinstance(prompt, str):
            return None
        text = prompt
    body = {"content": text, "add_special": add_special, "parse_special": True}
    return tokens_in(read_json(ask(client, target.url, f"{target.root}/tokenize", body)))


def tokens_in(answer: Any) -> int | None:
    """Number of tokens in an answer of /tokenize, vLLM's form (`count`) or llama.cpp's (`tokens`)."""
    if not isinstance(answer, dict):
        return None
    count = answer.get("count")
    if isinstance(count, int) and not isinstance(count, bool):
        return count
    tokens = answer.get("tokens")
    return len(tokens) if isinstance(tokens, list) and tokens else None


def which_tokenizer(client: httpx.Client, url: str, root: str, model: str) -> str | None:
    """ "vllm" or "llamacpp" by the form that /tokenize understands; None where there is none."""
    for name, body in (
        ("vllm", {"model": model, "prompt": "sun map"}),
        ("llamacpp", {"content": "sun map", "add_special": True, "parse_special": True}),
    ):
        try:
            response = ask(client, url, f"{root}/tokenize", body, FACT_TIMEOUT_S)
        except TargetError:
            return None
        if response.status_code == 200 and tokens_in(read_json(response)) is not None:
            return name
    return None


def _by_generating(client: httpx.Client, target: Target, endpoint: str, key: Secret | None, text: str) -> int | None:
    answer = complete_once(client, target.url, target.request_path(endpoint), target.model, endpoint, key, text)
    return prompt_tokens(answer.get("usage"))


def prompt_tokens(usage: object) -> int | None:
    """Tokens of the prompt in a usage object, OpenAI's or Anthropic's (cached ones apart); None without them."""
    if not isinstance(usage, dict):
        return None
    told = usage.get("prompt_tokens")
    if told is None:
        parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        counts = [usage[name] for name in parts if isinstance(usage.get(name), int)]
        told = sum(counts) if counts else None
    return told if isinstance(told, int) and not isinstance(told, bool) and told > 0 else None


# Fields for the shortest answer, the likelier first. OpenAI's newer chat models refuse max_tokens, and its responses
# have 16 tokens at least.
_SHORTEST: dict[str, tuple[dict[str, object], ...]] = {
    "chat": ({"max_tokens": 1}, {"max_completion_tokens": 1}),
    "completions": ({"max_tokens": 1},),
    "responses": ({"max_output_tokens": 1}, {"max_output_tokens": 16}),
    "messages": ({"max_tokens": 1},),
}
# What every answer of an endpoint has.
_SIGN = {"chat": "choices", "completions": "choices", "responses": "output", "messages": "content"}


def complete_once(
    client: httpx.Client, url: str, path: str, model: str, endpoint: str, key: Secret | None, text: str
) -> dict[str, Any]:
    """One real completion of one token, not streamed; its JSON. Raises TargetError."""
    for shortest in _SHORTEST[endpoint]:
        body = {"model": model, "stream": False} | question(endpoint, text) | shortest
        response = ask(client, url, path, body, ANSWER_TIMEOUT_S)
        if response.status_code not in (400, 422) or not any(name in response.text for name in shortest):
            break
    status = response.status_code
    if status in (401, 403):
        raise TargetError(denied(status, url, key))
    if status == 404:
        why = f" ({said(response)})" if said(response) else ""
        others = " or ".join(other for other in ENDPOINTS if other != endpoint)
        raise TargetError(f"{url}: {path} is not there (HTTP 404){why}; try --endpoint {others}")
    if 300 <= status < 400:
        where = shown_location(response.headers.get("location", "another place"))
        raise TargetError(f"{url}{path}: redirects to {where}; redirects are not followed")
    answer = read_json(response)
    if status != 200:
        kind = NotYetError if status >= 500 or status == 429 else TargetError
        raise kind(f"{url}{path}: HTTP {status} to a request of one token: {said(response) or 'no reason given'}")
    if not isinstance(answer, dict) or _SIGN[endpoint] not in answer:
        raise TargetError(f"{url}{path}: the answer is not a completion as the {endpoint} API has it")
    return answer
