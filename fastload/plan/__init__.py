"""The plan room: what is sent and at which levels. No clock, no socket, and nothing imported but orjson."""

from fastload.plan.build import (
    ENDPOINTS,
    LIMIT_FIELDS,
    Plan,
    build,
    check_room,
    encode,
    question,
    refused_field,
    without,
)
from fastload.plan.lengths import ensure, fit
from fastload.plan.levels import LARGEST_LEVEL, Level, levels, parse_duration, parse_levels
from fastload.plan.prompts import Lengths

__all__ = [
    "ENDPOINTS",
    "LIMIT_FIELDS",
    "LARGEST_LEVEL",
    "Lengths",
    "Level",
    "Plan",
    "build",
    "check_room",
    "encode",
    "ensure",
    "fit",
    "levels",
    "parse_duration",
    "parse_levels",
    "question",
    "refused_field",
    "without",
]
