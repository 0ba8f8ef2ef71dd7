"""The three ways a command can fail without it being our bug: each is one clear line and an exit code.

A message names the flag, field or file, the value found, and what would be right. `cli` prints it and exits;
nothing else catches these. A failed request is never an exception: it is a row with a `status`.
"""

from __future__ import annotations


class PlanError(Exception):
    """The user's mistake: a flag, a value or a file that cannot be meant. Nothing was sent yet."""

    exit_code = 2


class TargetError(Exception):
    """The server's fault before the run began: not reachable, no such model, wrong key, never ready."""

    exit_code = 1


class TraceError(Exception):
    """A run that cannot be written or read: a full disk, a corrupt file, a newer schema, not a run at all."""

    exit_code = 1
