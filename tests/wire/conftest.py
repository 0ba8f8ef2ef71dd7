"""Makes the twin, the machine's driver and the scripted server importable beside the tests."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "load")]
