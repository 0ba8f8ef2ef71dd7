"""Where a redirect leads, in words that may be shown: redirects are never followed, only told."""

import re


def shown_location(where: str) -> str:
    """A Location without what may be secret in it: user and password, query, fragment."""
    where = re.sub(r"^([A-Za-z][A-Za-z0-9+.-]*:)?//[^/?#]*@", lambda found: f"{found[1] or ''}//***@", where)
    cut = re.search(r"[?#]", where)
    return where if cut is None else f"{where[: cut.end()]}***"
