"""The server before the run: where it is, which model, what it says of itself, and whether it is ready.

Everything here happens before the clock starts and through a plain HTTP client; measuring has its own
sockets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import sleep
from typing import Any, TypeVar

import httpx

from fastload import _timing
from fastload.errors import PlanError, TargetError
from fastload.load.redirects import shown_location
from fastload.load.secrets import Secret
from fastload.load.target_address import DIRECT, Address, NotYetError, Place, Way, parse_url, reach
from fastload.load.target_client import FACT_TIMEOUT_S, ask, client_for, denied, read_json, said
from fastload.load.target_tokens import complete_once, token_counter, which_tokenizer

__all__ = ["Address", "Place", "Target", "list_models", "open_target", "parse_url", "token_counter"]

SIMULATED_OWNER = "fastload-sim"  # owned_by of every model of our own simulated engine
_POLL_FIRST_S = 0.2
_POLL_LAST_S = 2.0
Notice = Callable[[str], None]
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Target:
    """A server found ready to be asked, and the model to ask for.

    `url` is the server's root without `/v1` and without credentials; `path_prefix` is what stands before
    `/chat/completions` (`/v1`, behind the root's path if there is one); `host_header` goes into every
    request. `facts` are what the server told about itself, plain JSON values. `tokenizer` is the form of its
    /tokenize.
    """

    url: str
    address: Address
    path_prefix: str
    host_header: str
    model: str
    simulated: bool
    models: tuple[str, ...]
    facts: dict[str, object]
    tokenizer: str | None  # "vllm", "llamacpp" or None
    reach_ms: float  # time the first connection took
    max_model_len: int | None  # tokens of prompt and answer together

    @property
    def root(self) -> str:
        """Path of the server's root, "" mostly: where /health, /tokenize and /metrics are."""
        return self.path_prefix.removesuffix("/v1")

    def request_path(self, endpoint: str) -> str:
        """Path of an endpoint: `/v1/chat/completions` for "chat", `/v1/` and its name for the others."""
        return _request_path(self.path_prefix, endpoint)


def _request_path(prefix: str, endpoint: str) -> str:
    return f"{prefix}/{'chat/completions' if endpoint == 'chat' else endpoint}"


def open_target(
    url: str,
    model: str | None,
    key: Secret | None,
    headers: Mapping[str, str],
    wait_ready_s: float | None,
    endpoint: str,
    notice: Notice,
    way: Way = DIRECT,
) -> Target:
    """Reach the server, choose the model, gather facts.

    Without `wait_ready_s` the server is looked at once. With it, it is asked again and again, for so many
    seconds, until it is healthy, lists the model, and has answered one real request on `endpoint`; `notice`
    is told each stage. Raises PlanError (URL, model) and TargetError (not there, not ready, wrong key,
    another kind of server).
    """
    place = parse_url(url)
    if wait_ready_s is not None:
        return _wait_for(place, model, key, headers, wait_ready_s, endpoint, notice, way)
    try:
        address, reach_ms = reach(place, way, notice=notice)
        with client_for(address, place.netloc, key, headers, endpoint) as client:
            listed = _listed(client, place, key)
            return _target(client, place, address, reach_ms, _chosen(place, model, listed), listed)
    except NotYetError as error:
        raise TargetError(f"{error} (--wait-ready 10m waits for a server that is starting)") from None


def list_models(
    url: str, key: Secret | None, headers: Mapping[str, str], way: Way = DIRECT
) -> list[dict[str, Any]]:
    """Entries of the server's /v1/models, each with an `id`. Raises PlanError and TargetError."""
    place = parse_url(url)
    address, _ = reach(place, way)
    with client_for(address, place.netloc, key, headers) as client:
        return _listed(client, place, key)


def _wait_for(
    place: Place,
    model: str | None,
    key: Secret | None,
    headers: Mapping[str, str],
    wait_s: float,
    endpoint: str,
    notice: Notice,
    way: Way,
) -> Target:
    """Health, then the model list, then one real completion."""
    deadline = _Deadline(place, wait_s, notice)
    notice(f"waiting up to {wait_s:g} s for {place.url}")
    address, reach_ms = deadline.until(lambda: reach(place, way, deadline.connect_timeout_s(), notice))
    with client_for(address, place.netloc, key, headers, endpoint) as client:
        deadline.until(lambda: _healthy(client, place))
        notice(f"{place.url} is up; waiting for its model list")
        listed = deadline.until(lambda: _listed_with(client, place, key, model, deadline))
        name = _chosen(place, model, listed)
        notice(f"model {name} is listed; asking for one token")
        path = _request_path(f"{place.root}/v1", endpoint)
        deadline.until(partial(complete_once, client, place.url, path, name, endpoint, key, "Are you ready?"))
        notice(f"{place.url} is ready")
        return _target(client, place, address, reach_ms, name, listed)


def _target(
    client: httpx.Client,
    place: Place,
    address: Address,
    reach_ms: float,
    name: str,
    listed: list[dict[str, Any]],
) -> Target:
    entry = next(entry for entry in listed if entry["id"] == name)
    facts = _facts(client, place, entry)
    longest = facts.get("max_model_len")
    return Target(
        url=place.url,
        address=address,
        path_prefix=f"{place.root}/v1",
        host_header=place.netloc,
        model=name,
        simulated=entry.get("owned_by") == SIMULATED_OWNER,
        models=tuple(each["id"] for each in listed),
        facts=facts,
        tokenizer=which_tokenizer(client, place.url, place.root, name),
        reach_ms=reach_ms,
        max_model_len=longest if isinstance(longest, int) else None,
    )


# ---- models ----


def _listed(client: httpx.Client, place: Place, key: Secret | None) -> list[dict[str, Any]]:
    response = ask(client, place.url, f"{place.root}/v1/models")
    status = response.status_code
    hint = "is --url the root of an OpenAI-compatible server, such as http://127.0.0.1:8000?"
    if status in (401, 403):
        raise TargetError(denied(status, place.url, key))
    if status == 404:
        raise TargetError(f"{place.url}: has no {place.root}/v1/models (HTTP 404); {hint}")
    if 300 <= status < 400:
        where = shown_location(response.headers.get("location", "another place"))
        raise TargetError(f"{place.url}: redirects to {where}; give that server's root as --url")
    if status != 200:
        why = f": {said(response)}" if said(response) else ""
        kind = NotYetError if status >= 500 or status == 429 else TargetError
        raise kind(f"{place.url}/v1/models: HTTP {status}{why}")
    body = read_json(response)
    data = body.get("data") if isinstance(body, dict) else None
    if not isinstance(data, list):
        raise TargetError(
            f"{place.url}/v1/models: the answer is not a model list as OpenAI's API has it; {hint}"
        )
    entries = [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    if not entries:
        raise NotYetError(f"{place.url}: lists no model yet")
    return entries


def _listed_with(
    client: httpx.Client, place: Place, key: Secret | None, model: str | None, deadline: "_Deadline"
) -> list[dict[str, Any]]:
    """The list once it has `model`: routers list a worker's models when the worker has come up.

    At the deadline the list is returned as it is, so that the user is told what there is to choose from.
    """
    entries = _listed(client, place, key)
    names = [entry["id"] for entry in entries]
    if model is not None and model not in names and deadline.left_s() > 0:
        raise NotYetError(f"{place.url}: does not list {model} yet; it has {_names(names)}")
    return entries


def _chosen(place: Place, model: str | None, listed: list[dict[str, Any]]) -> str:
    """The model asked for, or the only one."""
    names = [entry["id"] for entry in listed]
    if model is not None:
        if model not in names:
            raise PlanError(f"--model {model}: {place.url} does not have it; it has {_names(names)}")
        return model
    if len(names) > 1:
        raise PlanError(f"{place.url} has {len(names)} models; choose one by --model: {_names(names)}")
    return str(names[0])


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more (see fastload models)"


# ---- waiting ----


class _Deadline:
    """Repeats a question until it is answered or the time is over; says each new reason for waiting once."""

    def __init__(self, place: Place, wait_s: float, notice: Notice) -> None:
        self._url = place.url
        self._wait_s = wait_s
        self._notice = notice
        self._end_ns = _timing.now_ns() + int(wait_s * 1e9)

    def left_s(self) -> float:
        return (self._end_ns - _timing.now_ns()) / 1e9

    def connect_timeout_s(self) -> float:
        """For one try: short, since a host that is starting may drop packets, and within the deadline."""
        return max(0.1, min(5.0, self.left_s()))

    def until(self, question: Callable[[], _Answer]) -> _Answer:
        pause_s = _POLL_FIRST_S
        reason = ""
        while True:
            try:
                return question()
            except NotYetError as error:
                if str(error) != reason:
                    reason = str(error)
                    self._notice(f"not yet: {reason}")
            left_s = self.left_s()
            if left_s <= 0:
                last = reason.removeprefix(f"{self._url}: ")
                raise TargetError(f"{self._url}: not ready after {self._wait_s:g} s: {last}")
            sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, _POLL_LAST_S)


def _healthy(client: httpx.Client, place: Place) -> None:
    """Pass when /health is well, or when there is none to see (the model list decides then)."""
    status = ask(client, place.url, f"{place.root}/health").status_code
    if status >= 500 or status == 429:
        raise NotYetError(f"{place.url}/health: HTTP {status}")


# ---- facts ----

_LLAMACPP_PROPS = ("build_info", "total_slots", "model_ftype", "model_alias")
# Chosen by name: the whole answer holds the server's arguments, its API key among them.
_SGLANG_INFO = (
    "version",
    "model_path",
    "tp_size",
    "dp_size",
    "max_running_requests",
    "speculative_algorithm",
    "speculative_num_steps",
    "quantization",
    "kv_cache_dtype",
    "context_length",
)


def _facts(client: httpx.Client, place: Place, entry: dict[str, Any]) -> dict[str, object]:
    """What the server tells about itself, each question asked once and none of them needed."""
    facts: dict[str, object] = {}
    for name in ("owned_by", "root", "max_model_len"):
        if entry.get(name) is not None:
            facts[name] = entry[name]
    meta = entry.get("meta")
    if isinstance(meta, dict):
        facts["model_meta"] = _plain(meta, tuple(meta))
        if isinstance(meta.get("n_ctx"), int):
            facts.setdefault("max_model_len", meta["n_ctx"])

    health = _told(client, place, "/health")
    if health is not None:
        facts["health"] = health.status_code
        if "server" in health.headers:
            facts["server_header"] = health.headers["server"]
    version = _told_json(client, place, "/version")
    if version:
        facts |= _plain(version, ("version",))
    props = _told_json(client, place, "/props")
    if props:
        facts |= _plain(props, _LLAMACPP_PROPS)
        settings = props.get("default_generation_settings")
        if isinstance(settings, dict) and isinstance(settings.get("n_ctx"), int):
            facts["max_model_len"] = settings["n_ctx"]  # of one slot: what one request may use
    info = _told_json(client, place, "/get_server_info")
    if info:
        facts["sglang"] = _plain(info, _SGLANG_INFO)
    return facts


def _told(client: httpx.Client, place: Place, path: str) -> httpx.Response | None:
    try:
        return ask(client, place.url, f"{place.root}{path}", timeout_s=FACT_TIMEOUT_S)
    except TargetError:
        return None


def _told_json(client: httpx.Client, place: Place, path: str) -> dict[str, Any]:
    response = _told(client, place, path)
    body = read_json(response) if response is not None and response.status_code == 200 else None
    return body if isinstance(body, dict) else {}


def _plain(told: dict[str, Any], names: tuple[str, ...]) -> dict[str, object]:
    """The named values that are plain and short."""
    return {
        name: value
        for name in names
        if isinstance(value := told.get(name), bool | int | float | str) and len(str(value)) <= 300
    }
