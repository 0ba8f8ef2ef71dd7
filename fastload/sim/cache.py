"""KV memory: blocks of tokens, shared where prompts begin alike. Pure.

A sequence holds the blocks of its prompt, by the hash of everything up to their end, and blocks of its own for what it
generates. Prompt blocks that nobody holds stay as long as there is room; the least recently held goes first.
"""

from collections.abc import Sequence


class Blocks:
    """So many blocks, who holds them, and what is still known of prompts."""

    def __init__(self, total: int, remember: bool) -> None:
        self.total = total
        self._remember = remember
        self._held: dict[int, int] = {}  # hash -> how many sequences hold it
        self._idle: dict[int, None] = {}  # held by nobody, the least recently held first
        self._own = 0  # blocks without a hash

    @property
    def used(self) -> int:
        """Blocks held by a sequence."""
        return len(self._held) + self._own

    def known(self, hashes: Sequence[int]) -> int:
        """How many of these leading blocks are here."""
        count = 0
        for one in hashes:
            if one not in self._held and one not in self._idle:
                break
            count += 1
        return count

    def hold(self, hashes: Sequence[int], own: int) -> bool:
        """Take the blocks of a prompt and `own` further ones; False, and nothing taken, where there is no room."""
        new = sum(1 for one in hashes if one not in self._held)
        if self.used + new + own > self.total:
            return False
        for one in hashes:
            self._held[one] = self._held.get(one, 0) + 1
            self._idle.pop(one, None)
        self._own += own
        self._evict()
        return True

    def grow(self) -> bool:
        """One more block for a sequence that generates; False where there is none."""
        if self.used >= self.total:
            return False
        self._own += 1
        self._evict()
        return True

    def release(self, hashes: Sequence[int], own: int) -> None:
        """A sequence ends, or gives way."""
        self._own -= own
        # The end of a prompt goes first: its beginning is what others share.
        for one in reversed(hashes):
            left = self._held[one] - 1
            if left:
                self._held[one] = left
            else:
                del self._held[one]
                if self._remember:
                    self._idle[one] = None

    def _evict(self) -> None:
        while len(self._held) + len(self._idle) + self._own > self.total:
            del self._idle[next(iter(self._idle))]


def chain(tokens: Sequence[object], block_tokens: int) -> tuple[int, ...]:
    """A hash for each full block, of it and all before it: equal where two prompts begin alike."""
    hashes = []
    before = 0
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        before = hash((before, *tokens[start : start + block_tokens]))
        hashes.append(before)
    return tuple(hashes)
