"""The yard: a simulated engine to load, a server process of its own.

`start` runs one for the length of a `with` block; `fastload serve-sim` runs one in the foreground. What it
does and what it leaves out stands in `engine.py`; the wire it speaks in `openai.py` (what is said) and
`http1.py` (how it is framed).
"""

from fastload.sim.launch import start
from fastload.sim.options import Options

__all__ = ["Options", "start"]
