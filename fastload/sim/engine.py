"""The engine model: continuous batching in simulated time. No clock here, no sockets.

    arrival -> front end -> waiting -> [ prefill | decode, decode, ... ] -> done
               one by one   queue        running: at most max_num_seqs, and what KV memory holds

The engine works in steps. At a step's start it decides who takes part and what the step will give, from the queue and
what runs, and how long it takes, from the profile's knots; at its end the tokens leave, all in the same instant. All
times are int64 ns of one time line that the caller keeps: `advance` is called when `next_ns` has come. The engine
knows nothing of who sends requests, nor of how many.
"""

from dataclasses import dataclass
from math import exp

from fastload.sim.cache import Blocks
from fastload.sim.profiles import Profile
from fastload.sim.speculation import GOLDEN, SQUARE_ROOT_2, SQUARE_ROOT_3, accepted, normal, survival

_NS_PER_MS = 1_000_000
_NS_PER_US = 1_000


class Sequence:
    """One answer being made: what is asked for, and how far it is.

    prompt_tokens, and `hashes` of the prompt's full blocks (`cache.chain`); `limit` tokens are generated.
    """

    __slots__ = (
        "arrived_ns",
        "cached_tokens",
        "chances",
        "drafts",
        "generated",
        "given",
        "gone",
        "hashes",
        "held_back",
        "limit",
        "number",
        "own_blocks",
        "prefill_left",
        "preemptions",
        "prompt_tokens",
        "room",
        "scheduled_ns",
    )

    def __init__(self, prompt_tokens: int, limit: int, hashes: tuple[int, ...] = ()) -> None:
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        self.hashes = hashes
        self.number = -1
        self.arrived_ns = 0
        self.scheduled_ns = -1  # when it first got into the batch
        self.generated = 0  # by the steps that have begun
        self.given = 0  # handed out by `advance`; with `limit` it is complete
        self.held_back = 0  # generated, and not given out for the stream interval's sake
        self.prefill_left = 0
        self.cached_tokens = 0  # found in the cache when it first got into the batch
        self.own_blocks = 0
        self.room = 0  # tokens that its blocks still take
        self.chances: tuple[float, ...] = ()
        self.drafts = 0  # steps it was drafted for
        self.preemptions = 0
        self.gone = False


@dataclass(slots=True)
class Counters:
    """What the engine has done since it began."""

    steps: int = 0
    preemptions: int = 0
    cache_queries: int = 0  # prompt tokens looked up
    cache_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: list[int] | None = None  # by position


class Engine:
    """A profile at work. The same calls in the same order give the same times and tokens; `seed` varies them."""

    def __init__(self, profile: Profile, seed: int = 0) -> None:
        self.profile = profile
        self.counters = Counters()
        self.blocks = Blocks(profile.memory.blocks, profile.memory.prefix)
        self._seed = seed
        self._front_ns = round(profile.scheduler.front_ms * _NS_PER_MS)
        self._front_free_ns = 0
        self._incoming: dict[Sequence, int] = {}  # when the front end has done with it
        self._waiting: dict[Sequence, None] = {}
        self._running: dict[Sequence, None] = {}
        self._end_ns: int | None = None  # of the step that runs
        self._made: list[tuple[Sequence, int]] = []  # what it gives at its end
        self._late: list[tuple[Sequence, int]] = []  # what the step before it gives, with late results
        self._prefilled_ns = 0  # end of the last step that prefilled
        self._gap_ns = round(profile.scheduler.prefill_gap_ms * _NS_PER_MS)
        self._full = False
        self._admitted = 0
        self._prefills = 0
        self._decode_ns: dict[int, int] = {}
        if profile.speculation is not None:
            self.counters.accepted = [0] * profile.speculation.draft_tokens

    # ------------------------------------------------------------ from outside

    def admit(self, sequence: Sequence, now_ns: int) -> None:
        """A request has arrived. ValueError if it can never fit into KV memory (see `fits`)."""
        if not self.fits(sequence.prompt_tokens + sequence.limit):
            raise ValueError(f"{sequence.prompt_tokens} + {sequence.limit} tokens are more than KV memory holds")
        sequence.arrived_ns = now_ns
        sequence.number = self._admitted
        self._admitted += 1
        speculation = self.profile.speculation
        if speculation is not None:
            sequence.chances = survival(speculation, normal(sequence.number, self._seed, GOLDEN))
        self._front_free_ns = max(self._front_free_ns, now_ns) + self._front_ns
        self._incoming[sequence] = self._front_free_ns

    def fits(self, tokens: int) -> bool:
        """Can KV memory hold a sequence of so many tokens, drafts included?"""
        drafted = 0 if self.profile.speculation is None else self.profile.speculation.draft_tokens
        memory = self.profile.memory
        return tokens + drafted + memory.block_tokens <= memory.blocks * memory.block_tokens

    def drop(self, sequence: Sequence) -> None:
        """The client has gone: its place and blocks are free at once; what a step was making for it is not given."""
        sequence.gone = True
        self._incoming.pop(sequence, None)
        self._waiting.pop(sequence, None)
        if sequence in self._running:
            self._leave(sequence)

    @property
    def waiting(self) -> int:
        """Requests that are in no batch yet."""
        return len(self._incoming) + len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def memory_share(self) -> float:
        """Share of KV memory that sequences hold."""
        return self.blocks.used / self.blocks.total

    def next_ns(self) -> int | None:
        """When something happens next; None while nobody is here."""
        if self._end_ns is not None:
            return self._end_ns
        return next(iter(self._incoming.values())) if self._incoming else None

    @property
    def in_making(self) -> list[tuple[Sequence, int]]:
        """What the running step will give at its end, so that it can be made ready; a request may still be dropped."""
        return self._made

    def advance(self, now_ns: int) -> list[tuple[Sequence, int]]:
        """End the step that is over by `now_ns` and start the next; returns who gets how many tokens now.

        A caller that comes a whole step late does not make up for it: the next step starts when he came.
        """
        ended_ns = self.next_ns()
        if ended_ns is None or ended_ns > now_ns:
            return []
        made, self._made = self._made, []
        self._end_ns = None
        start_ns = ended_ns
        given, self._late = self._late, []
        self._end_of(given)
        if not self.profile.scheduler.late_results:
            self._end_of(made)
            given, made = made, []
        duration_ns, prefills = self._start(start_ns)
        if prefills:
            self._late = made
        elif made:
            self._end_of(made)
            given += made
            if not duration_ns:  # nobody could start before these had left
                duration_ns, _ = self._start(start_ns)
        if duration_ns:
            if start_ns + duration_ns <= now_ns:
                start_ns = now_ns
            self._end_ns = start_ns + duration_ns
        return [each for each in given if not each[0].gone]

    def _end_of(self, given: list[tuple[Sequence, int]]) -> None:
        """What is complete leaves the batch now that its last tokens do."""
        for sequence, tokens in given:
            sequence.given += tokens
            if sequence.given == sequence.limit and not sequence.gone:
                self._leave(sequence)

    # ------------------------------------------------------------ a step

    def _start(self, now_ns: int) -> tuple[int, bool]:
        """Choose who takes part in a step that starts now; gives its length (0: nobody) and whether it prefills."""
        while self._incoming and next(iter(self._incoming.values())) <= now_ns:
            sequence = next(iter(self._incoming))
            del self._incoming[sequence]
            self._waiting[sequence] = None
        mixed = self.profile.scheduler.mixed
        preempted = self.counters.preemptions
        decoding = self._decoders() if mixed else []
        prefilling, tokens = self._take_prompts(now_ns, self.counters.preemptions > preempted)
        if not prefilling and not mixed:
            decoding = self._decoders()
        if not prefilling and not decoding:
            return 0, False
        self.counters.steps += 1
        duration_ns = self._decode(decoding) if decoding else 0
        if prefilling:
            duration_ns += self._prefill(prefilling, tokens)
            self._prefilled_ns = now_ns + duration_ns
        return max(duration_ns, 1), bool(prefilling)

    def _take_prompts(self, now_ns: int, no_new: bool) -> tuple[list[Sequence], int]:
        """Sequences of which a part is prefilled in this step, and how many tokens in all; `no_new`: begun ones."""
        scheduler = self.profile.scheduler
        left = scheduler.max_batched_tokens
        chosen: list[Sequence] = []
        tokens = 0
        for sequence in self._running:
            if sequence.prefill_left and left:
                part = min(sequence.prefill_left, left)
                sequence.prefill_left -= part
                left -= part
                tokens += part
                chosen.append(sequence)
        free = scheduler.max_num_seqs - len(self._running)
        busy = len(self._running) > 0
        held = self._full and free < min(scheduler.refill, scheduler.max_num_seqs)
        if no_new or held or (busy and now_ns < self._prefilled_ns + self._gap_ns):
            return chosen, tokens
        self._full = False
        for sequence in list(self._waiting):
            if free == 0:
                self._full = True
                break
            if not left:
                break
            part = self._enter(sequence, left, alone=not chosen)
            if part == 0:
                break
            if sequence.scheduled_ns < 0:
                sequence.scheduled_ns = now_ns
            del self._waiting[sequence]
            self._running[sequence] = None
            free -= 1
            left = max(left - part, 0)
            tokens += part
            chosen.append(sequence)
        return chosen, tokens

    def _enter(self, sequence: Sequence, left: int, alone: bool) -> int:
        """Give a waiting sequence its blocks; returns the tokens prefilled now, 0 if it must go on waiting."""
        memory = self.profile.memory
        known = self.blocks.known(sequence.hashes) if memory.prefix else 0
        whole = sequence.prompt_tokens + sequence.generated
        cached = min(known * memory.block_tokens, whole - 1)  # the last token is computed in any case
        uncached = whole - cached
        part = min(uncached, left)
        if part < uncached and not self.profile.scheduler.chunked:
            if not alone:
                return 0
            part = uncached
        hashes = sequence.hashes if memory.prefix else ()
        need = -(-(whole + 1) // memory.block_tokens) - len(hashes)
        if not self.blocks.hold(hashes, need):
            return 0
        sequence.own_blocks = need
        sequence.room = (need + len(hashes)) * memory.block_tokens - whole
        sequence.prefill_left = uncached - part
        if sequence.preemptions == 0:
            sequence.cached_tokens = cached
            self.counters.cache_queries += whole
            self.counters.cache_hits += cached
        return part

    def _prefill(self, chosen: list[Sequence], tokens: int) -> int:
        prefill = self.profile.prefill
        self._prefills += 1
        for sequence in chosen:
            if not sequence.prefill_left:
                self._give(sequence, 1)
        ms = prefill.knots.at(len(self._running)) + tokens * prefill.token_us / _NS_PER_US
        if prefill.jitter:
            ms *= exp(prefill.jitter * normal(self._prefills, self._seed, SQUARE_ROOT_2) - prefill.jitter**2 / 2)
        return round(ms * _NS_PER_MS)

    def _decode(self, decoding: list[Sequence]) -> int:
        batch = len(decoding)
        speculation = self.profile.speculation
        if speculation is None:
            for sequence in decoding:
                self._give(sequence, 1)
        else:
            counters = self.counters
            counters.drafts += batch
            counters.draft_tokens += batch * speculation.draft_tokens
            assert counters.accepted is not None
            for sequence in decoding:
                # the request's number moves the start, so that two do not draw alike
                point = (sequence.number * SQUARE_ROOT_3 + sequence.drafts * GOLDEN) % 1.0
                sequence.drafts += 1
                taken = accepted(sequence.chances, point)
                for position in range(taken):
                    counters.accepted[position] += 1
                self._give(sequence, min(1 + taken, sequence.limit - sequence.generated))
        length_ns = self._decode_ns.get(batch)
        if length_ns is None:
            ms = self.profile.decode.knots.at(batch)
            if speculation is not None:
                ms += speculation.knots.at(batch)
            length_ns = self._decode_ns[batch] = round(ms * _NS_PER_MS)
        if self.profile.decode.jitter:
            deviate = normal(self.counters.steps, self._seed, SQUARE_ROOT_3)
            return round(length_ns * exp(self.profile.decode.jitter * deviate - self.profile.decode.jitter**2 / 2))
        return length_ns

    def _give(self, sequence: Sequence, tokens: int) -> None:
        """The running step makes so many tokens for the sequence."""
        sequence.generated += tokens
        sequence.room -= tokens
        held = sequence.held_back + tokens
        if sequence.generated >= sequence.limit:
            self._made.append((sequence, held))
        elif held >= self.profile.stream_interval or sequence.generated == tokens:
            self._made.append((sequence, held))
            sequence.held_back = 0
        else:
            sequence.held_back = held

    def _decoders(self) -> list[Sequence]:
        """Who decodes in a step, with blocks for what it makes; the latest comers give way where there are none."""
        most = 1 if self.profile.speculation is None else 1 + self.profile.speculation.draft_tokens
        decoding = [one for one in self._running if not one.prefill_left and one.generated < one.limit]
        for sequence in decoding:
            if sequence not in self._running:  # gave way to one before it
                continue
            while sequence.room < most and sequence.room < sequence.limit - sequence.generated:
                if self.blocks.grow():
                    sequence.own_blocks += 1
                    sequence.room += self.profile.memory.block_tokens
                    continue
                last = next(one for one in reversed(self._running) if one.generated < one.limit)
                self._preempt(last)
                if last is sequence:
                    break
        return [one for one in decoding if one in self._running] if self.counters.preemptions else decoding

    def _preempt(self, sequence: Sequence) -> None:
        """Out of the batch, to the head of the queue; all it had is computed again, what was made it keeps."""
        self._leave(sequence)
        sequence.preemptions += 1
        sequence.prefill_left = 0
        self.counters.preemptions += 1
        self._waiting = {sequence: None, **self._waiting}

    def _leave(self, sequence: Sequence) -> None:
        del self._running[sequence]
        self.blocks.release(sequence.hashes if self.profile.memory.prefix else (), sequence.own_blocks)
        sequence.own_blocks = 0
