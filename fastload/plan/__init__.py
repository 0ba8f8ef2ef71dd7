"""The plan room: what is sent and at which levels. No clock, no socket, and nothing imported but orjson."""

from fastload.plan.build import ENDPOINTS, Plan, build, check_room, encode
from fastload.plan.lengths import ensure, fit
from fastload.plan.levels import LARGEST_LEVEL, Level, levels, parse_duration, parse_levels
from fastload.plan.prompts import Lengths

__all__ = [
    "ENDPOINTS",
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
]
