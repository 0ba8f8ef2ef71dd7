"""The trace: what a run leaves on disk, written while it goes and opened again later. SCHEMA.md says what is
in it.
"""

from fastload.trace.reader import Run, open_run
from fastload.trace.writer import RunWriter, create_run

__all__ = ["Run", "RunWriter", "create_run", "open_run"]
