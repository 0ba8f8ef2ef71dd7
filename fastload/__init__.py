"""fastload: a precise load generator for LLM inference servers.

The names here are loaded when they are first used: the measuring process imports this package too, and may
load nothing heavy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastload.errors import PlanError, TargetError, TraceError
    from fastload.trace.reader import open_run

__version__ = "0.1.0"

_FRONT_DOOR = {
    "PlanError": "fastload.errors",
    "TargetError": "fastload.errors",
    "TraceError": "fastload.errors",
    "open_run": "fastload.trace.reader",
}

__all__ = ["PlanError", "TargetError", "TraceError", "__version__", "open_run"]


def __getattr__(name: str) -> object:
    room = _FRONT_DOOR.get(name)
    if room is None:
        raise AttributeError(f"module 'fastload' has no attribute {name!r}")
    value = getattr(import_module(room), name)
    globals()[name] = value  # the next use finds it without us
    return value


def __dir__() -> list[str]:
    return __all__
