"""The yard: a simulated engine to load, a server process of its own.

`start` runs one for the length of a `with` block; `fastload serve-sim` runs one in the foreground. What it
does stands in `engine.py` (a profile of `profiles/`) and `lockstep.py` (all streams in step); the wire it speaks in
`openai.py`, `responses.py`, `messages.py` (what is said) and `http1.py` (how it is framed).
"""

from fastload.sim.launch import start
from fastload.sim.options import Options

__all__ = ["Options", "start"]
