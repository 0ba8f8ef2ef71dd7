"""The instrument without its wires: clock, histogram, the columns of a run, and the byte machine.

Nothing here knows a socket, so all of it can be fuzzed, twinned and timed by feeding bytes. Four parts:

* the clock: CLOCK_MONOTONIC in int64 ns, and its distance to CLOCK_REALTIME (kernel stamps are REALTIME);
* `Histogram`: log-linear counts with a relative error below 0.4 %, which add and travel as bytes;
* `Recorder`: the columns of a run in blocks of shared memory. Recording is an append; the other process reads
  sealed blocks only;
* the byte machine (`_wire.pxi`, `_head.pxi`, `_scan.pxi`, `_json.pxi`): HTTP/1.1 answer -> event stream -> one
  record an event, without parsing JSON.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, CLOCK_REALTIME, clock_gettime, timespec

from collections import namedtuple

cdef extern from * nogil:
    """
    /* The block's state word is the only thing two processes write: it needs an order, nothing else does. */
    static inline void fl_store(int64_t *p, int64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    static inline int64_t fl_load(int64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline int fl_log2(unsigned long long v) { return 63 - __builtin_clzll(v); }
    /* ASCII that stands for itself in a JSON string: no control, quote or backslash. One byte, and eight at once. */
    static const unsigned char fl_plain[256] = {[' ' ... '!'] = 1, ['#' ... '['] = 1, [']' ... 127] = 1};
    static inline int fl_plain8(const char *p) {
        const unsigned long long ones = ~0ULL / 255, tops = ones << 7;
        unsigned long long w, quote, slash;
        __builtin_memcpy(&w, p, 8);
        quote = w ^ ones * '"';
        slash = w ^ ones * '\\\\';
        return !((w | ((w - ones * 0x20) & ~w) | ((quote - ones) & ~quote) | ((slash - ones) & ~slash)) & tops);
    }
    """
    void fl_store(int64_t *p, int64_t v)
    int64_t fl_load(int64_t *p)
    int fl_log2(unsigned long long v)
    const uint8_t fl_plain[256]
    int fl_plain8(const char *p)

cdef extern from "<string.h>" nogil:
    void *memmem(const void *haystack, size_t haystacklen, const void *needle, size_t needlelen)
    int strncasecmp(const char *a, const char *b, size_t n)

__all__ = ["BLOCKS", "Block", "EVENT_COLUMNS", "Histogram", "Parser", "ROW_FIELDS", "Recorder", "block_bytes",
           "clock_offset", "convert_stamp", "now_ns", "read_block", "realtime_ns"]

EVENT_COLUMNS = (("stamp_ns", "<i8"), ("request", "<i4"), ("delay_ns", "<i4"), ("bytes", "<i4"), ("tokens", "<i4"),
                 ("channel", "u1"), ("flags", "u1"))
ROW_FIELDS = ("request", "level", "slot", "attempt", "role", "due_ns", "sent_ns", "sent_done_ns", "connect_ns",
              "tls_ns", "first_byte_ns", "head_ns", "done_ns", "framing_end_ns", "end", "http_status", "errno",
              "request_bytes", "response_bytes", "events", "coalesced", "clamped", "stamp_source", "conn_reused",
              "backoff_ms", "rtt_us", "retransmits", "framing", "row_flags")
CH_NONE, CH_CONTENT, CH_REASONING, CH_TOOL, CH_REFUSAL, CH_ODD = 0, 1, 2, 3, 4, 15
CH_DONE, CH_SENT = C_CH_DONE, C_CH_SENT
FL_COALESCED, FL_CLAMPED, FL_READ = C_FL_COALESCED, C_FL_CLAMPED, C_FL_READ
FL_CHOICES, FL_FINISH, FL_USAGE = C_FL_CHOICES, C_FL_FINISH, C_FL_USAGE
FL_NAMED_ERROR = C_FL_NAMED_ERROR
ROLE_WARMUP, ROLE_MEASURED, ROLE_FILL = 0, 1, 2
END_COMPLETE, END_EOF, END_RESET, END_TIMEOUT = C_END_COMPLETE, C_END_EOF, C_END_RESET, C_END_TIMEOUT
END_CONNECT, END_HTTP, END_LIMIT, END_CANCELLED, END_PORTS = C_END_CONNECT, C_END_HTTP, C_END_LIMIT, C_END_CANCELLED, 8
RF_SSE, RF_DONE, RF_FRAMING_BROKEN, RF_KEEPALIVE = C_RF_SSE, C_RF_DONE, C_RF_FRAMING_BROKEN, C_RF_KEEPALIVE
RF_ENCODED, RF_DUE_LATE, RF_RETRIED, RF_BLOB_CUT = C_RF_ENCODED, C_RF_DUE_LATE, C_RF_RETRIED, C_RF_BLOB_CUT
BLOB_HEAD, BLOB_EVENT, BLOB_BODY, BLOB_ERROR = 1, 2, 3, C_BLOB_ERROR


# ---------------------------------------------------------------- clock

cdef enum:
    SLACK_NS = 1000                  # two offsets differ by their brackets: no reason to call a stamp wrong

cdef int64_t mono_ns() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return <int64_t>t.tv_sec * 1000000000 + t.tv_nsec

cdef int64_t real_ns() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_REALTIME, &t)
    return <int64_t>t.tv_sec * 1000000000 + t.tv_nsec

cdef int64_t bracket_offset(int samples, int64_t *width) noexcept nogil:
    # One unbracketed pair can be wrong by a pre-emption (7 us seen); the narrowest of many is wrong by its width.
    cdef int64_t before, real, after, best = 0
    cdef int i
    width[0] = -1
    for i in range(samples):
        before = mono_ns()
        real = real_ns()
        after = mono_ns()
        if width[0] < 0 or after - before < width[0]:
            width[0] = after - before
            best = real - (before + ((after - before) >> 1))
    return best

def now_ns():
    """CLOCK_MONOTONIC in ns: the one clock every stamp of a run is on."""
    return mono_ns()

def realtime_ns():
    """CLOCK_REALTIME in ns since 1970 (UTC): for anchors and names, never for durations."""
    return real_ns()

def clock_offset(int samples=500):
    """(REALTIME - MONOTONIC in ns, width of the bracket in ns): the narrowest of `samples` brackets.

    The offset is wrong by at most half the width. ValueError if `samples` is below 1.
    """
    if samples < 1:
        raise ValueError(f"samples={samples}: at least 1 is needed")
    cdef int64_t width
    cdef int64_t offset = bracket_offset(samples, &width)
    return offset, width

cdef int64_t convert(int64_t real, int64_t offset, int64_t floor, int64_t now) noexcept nogil:
    cdef int64_t stamp = real - offset
    if floor <= stamp <= now:
        return stamp
    return floor if floor - SLACK_NS <= stamp < floor else -1

def convert_stamp(int64_t real_ns, int64_t offset_ns, int64_t floor_ns, int64_t now_ns):
    """The monotonic time of a kernel stamp: real_ns - offset_ns, which must lie in [floor_ns, now_ns].

    `floor_ns` is the stream's last stamp. Up to 1 us below it is the error of the offset itself, and gives `floor_ns`;
    anything else says that the offset is no longer right, and gives None.
    """
    cdef int64_t stamp = convert(real_ns, offset_ns, floor_ns, now_ns)
    return None if stamp < 0 else stamp


# ---------------------------------------------------------------- histogram

cdef enum:
    HIST_BUCKETS = 4736              # up to 2**43 ns, two hours and a half

cdef bint hist_record(Hist *h, int64_t value) noexcept nogil:
    cdef int octave
    if value < 0 or value >= (<int64_t>1 << 43):
        h.overflow += 1              # counted, never clamped into a bucket it does not belong to
        return False
    if h.count == 0 or value < h.low:
        h.low = value
    if value > h.high:
        h.high = value
    h.count += 1
    if value < 128:
        h.buckets[value] += 1
    else:
        octave = fl_log2(value) - 7
        h.buckets[octave * 128 + (value >> octave)] += 1
    return True

cdef class Histogram:
    """Counts of durations in ns, 128 steps an octave: any quantile within 0.4 %; exact below 256 ns.

    `Histogram()` owns its memory. `Histogram(buffer, offset)` views counts that another process writes (a writable
    buffer of at least `Histogram.SIZE` bytes there), which it keeps alive; a reader then sees each count whole, but
    not all counts of one instant.
    """
    SIZE = sizeof(Hist)

    def __cinit__(self, memory=None, Py_ssize_t offset=0):
        cdef char[::1] view
        if memory is None:
            self.h = <Hist *>calloc(1, sizeof(Hist))
            self.owned = True
            if self.h == NULL:
                raise MemoryError
            return
        view = memory
        if offset < 0 or offset + <Py_ssize_t>sizeof(Hist) > view.shape[0]:
            raise ValueError(f"offset={offset}: {sizeof(Hist)} bytes are needed there, the buffer has {view.shape[0]}")
        self.keeper = memory
        self.h = <Hist *>&view[offset]

    def __dealloc__(self):
        if self.owned:
            free(self.h)

    def record(self, int64_t ns):
        """Count one duration. False (and `overflow` counts it) below 0 or from 2**43 ns on."""
        return hist_record(self.h, ns)

    def merge(self, Histogram other not None):
        """Add the counts of `other` to this one."""
        cdef int i
        if other.h.count:
            if self.h.count == 0 or other.h.low < self.h.low:
                self.h.low = other.h.low
            if other.h.high > self.h.high:
                self.h.high = other.h.high
        self.h.count += other.h.count
        self.h.overflow += other.h.overflow
        for i in range(HIST_BUCKETS):
            self.h.buckets[i] += other.h.buckets[i]

    def clear(self):
        """Forget everything."""
        memset(self.h, 0, sizeof(Hist))

    def quantile(self, double q):
        """Nearest-rank quantile in ns: the middle of the bucket of rank ceil(q n); None when empty.

        ValueError unless 0 <= q <= 1.
        """
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"q={q}: a quantile lies between 0 and 1")
        cdef int64_t rank, seen = 0, value
        cdef int i, octave
        if self.h.count == 0:
            return None
        # 1e-9: 0.9 * 10 is 9.000000000000002 in binary, whose ceiling would be one rank too high
        rank = <int64_t>(q * self.h.count - 1e-9) + 1
        if rank > self.h.count:
            rank = self.h.count
        for i in range(HIST_BUCKETS):
            seen += self.h.buckets[i]
            if seen >= rank:
                octave = 0 if i < 256 else (i >> 7) - 1
                value = (<int64_t>(i - octave * 128)) << octave
                value += (<int64_t>1 << octave) >> 1
                return min(max(value, self.h.low), self.h.high)
        return self.h.high

    @property
    def count(self):
        """How many durations were counted (without overflow)."""
        return self.h.count

    @property
    def overflow(self):
        """How many were outside [0, 2**43) ns."""
        return self.h.overflow

    @property
    def max_ns(self):
        """The largest duration counted, exact; None when empty."""
        return self.h.high if self.h.count else None

    def to_bytes(self):
        """A portable form: little-endian int64 [count, overflow, low, high, then pairs of bucket and count]."""
        cdef int i
        values = [self.h.count, self.h.overflow, self.h.low, self.h.high]
        for i in range(HIST_BUCKETS):
            if self.h.buckets[i]:
                values.append(i)
                values.append(self.h.buckets[i])
        return b"FLH1" + b"".join(int(v).to_bytes(8, "little", signed=True) for v in values)

    @staticmethod
    def from_bytes(bytes data not None):
        """The histogram `to_bytes` wrote. ValueError when `data` is not one."""
        if data[:4] != b"FLH1" or len(data) < 36 or (len(data) - 36) % 16:
            raise ValueError("not a histogram of this version (FLH1)")
        values = [int.from_bytes(data[i:i + 8], "little", signed=True) for i in range(4, len(data), 8)]
        cdef Histogram made = Histogram()
        made.h.count, made.h.overflow, made.h.low, made.h.high = values[:4]
        for i, n in zip(values[4::2], values[5::2]):
            if not 0 <= i < HIST_BUCKETS:
                raise ValueError(f"bucket {i}: this version has {HIST_BUCKETS}")
            made.h.buckets[i] = n
        return made


# ---------------------------------------------------------------- recorder

cdef enum BlockState:
    BLOCK_FREE, BLOCK_OPEN, BLOCK_SEALED

cdef enum:
    HEADER_BYTES = 64                # int64: state, level, events, rows, blob bytes, sequence
    READ_EVENTS = 16384 + 8          # most events one read of 128 KB can end: the shortest is 8 bytes, and two may
                                     # wait for it, one more end with the message
    READ_BLOB = (64 << 20) + (1 << 19)   # the largest event, and the rest of its read

# 16 blocks are 4 s of the fastest stream a core can read, should the other process be held up that long. The arena is
# mostly never touched: the file is sparse.
BLOCKS = 16
EVENTS = 65536
ROWS = 4096
ARENA = READ_BLOB + (4 << 20)

Block = namedtuple("Block", "level events n_events rows n_rows blobs sequence")
Block.__doc__ = """One sealed block, copied: see trace/SCHEMA.md of the project for what the columns become.

`events` maps each name of EVENT_COLUMNS to its little-endian bytes; `rows` holds n_rows records of int64 in the order
of ROW_FIELDS; `blobs` are (request, ordinal of the event, BLOB_ kind, bytes); `sequence` orders blocks."""

def block_bytes(Py_ssize_t events=EVENTS, Py_ssize_t rows=ROWS, Py_ssize_t arena=ARENA):
    """Bytes one block takes in shared memory."""
    return (HEADER_BYTES + (events * 26 + 7) // 8 * 8 + rows * N_FIELDS * 8 + arena + 4095) // 4096 * 4096

cdef void map_block(Rec *rec, char *at) noexcept nogil:
    cdef char *p = at + HEADER_BYTES
    rec.head = <int64_t *>at
    rec.stamp = <int64_t *>p
    p += rec.cap_events * 8
    rec.rows = <int64_t *>p
    p += rec.cap_rows * N_FIELDS * 8
    rec.request = <int32_t *>p
    p += rec.cap_events * 4
    rec.delay = <int32_t *>p
    p += rec.cap_events * 4
    rec.nbytes = <int32_t *>p
    p += rec.cap_events * 4
    rec.tokens = <int32_t *>p
    p += rec.cap_events * 4
    rec.channel = <uint8_t *>p
    p += rec.cap_events
    rec.flags = <uint8_t *>p
    rec.arena = p + rec.cap_events + (-26 * rec.cap_events & 7)      # whole words begin there
    rec.n_events = rec.n_rows = rec.n_blob = 0

cdef Py_ssize_t rec_event(Rec *rec, int64_t stamp, int64_t request, int32_t delay, int32_t nbytes, int32_t tokens,
                          uint8_t channel, uint8_t flags) noexcept nogil:
    cdef Py_ssize_t i = rec.n_events
    rec.stamp[i] = stamp
    rec.request[i] = <int32_t>request
    rec.delay[i] = delay
    rec.nbytes[i] = nbytes
    rec.tokens[i] = tokens
    rec.channel[i] = channel
    rec.flags[i] = flags
    rec.n_events = i + 1
    return i

cdef bint rec_room(const Rec *rec) noexcept nogil:
    # one more read fits: its events, its row (32: Python may end a few more), its raw payloads
    return (rec.n_events + READ_EVENTS <= rec.cap_events and rec.n_rows + 32 <= rec.cap_rows
            and rec.n_blob <= rec.limit_blob)

cdef void rec_row(Rec *rec, const int64_t *row) noexcept nogil:
    memcpy(rec.rows + rec.n_rows * N_FIELDS, row, N_FIELDS * 8)
    rec.n_rows += 1

cdef bint rec_blob(Rec *rec, int64_t request, int32_t ordinal, int32_t kind, const char *p, Py_ssize_t n) noexcept nogil:
    # False when it had to be cut: the trace then says so, rather than parse half a payload in silence
    cdef Py_ssize_t room = rec.cap_blob - rec.n_blob - 16
    cdef int32_t *head = <int32_t *>(rec.arena + rec.n_blob)
    cdef Py_ssize_t kept = n if n < room else room
    if room < 0:
        return False
    head[0] = <int32_t>request
    head[1] = ordinal
    head[2] = kind
    head[3] = <int32_t>kept
    memcpy(rec.arena + rec.n_blob + 16, p, kept)
    rec.n_blob += (16 + kept + 7) // 8 * 8
    if rec.n_blob > rec.cap_blob:
        rec.n_blob = rec.cap_blob
    return kept == n

cdef class Recorder:
    """Columns of a run in a ring of blocks inside `memory` (a writable buffer, usually shared).

    The process that measures appends to the open block and seals it; a reader takes `read_block`, then `release`s
    it. Sealing waits for nothing: when no block is free, `ready()` is false and the engine leaves bytes in the kernel
    (which keeps their stamps) until one is: nothing is lost, the delay shows as coalesced events.
    ValueError when the buffer is too small for `blocks` blocks of the given capacities.
    """

    def __cinit__(self, memory, int blocks=BLOCKS, Py_ssize_t events=EVENTS, Py_ssize_t rows=ROWS,
                  Py_ssize_t arena=ARENA):
        cdef char[::1] view = memory
        self.block_bytes = block_bytes(events, rows, arena)
        if blocks < 1 or view.shape[0] < blocks * self.block_bytes:
            raise ValueError(f"{blocks} blocks need {blocks * self.block_bytes} bytes, the buffer has {view.shape[0]}")
        if events <= READ_EVENTS or rows < 64 or arena < 1 << 17:
            raise ValueError(f"events={events} rows={rows} arena={arena}: a block must hold more than one read's worth")
        self.memory = memory
        self.base = &view[0]
        self.blocks = blocks
        self.current = -1
        self.sealed = []
        self.rec.cap_events = events
        self.rec.cap_rows = rows
        self.rec.cap_blob = arena
        self.rec.limit_blob = arena - READ_BLOB if arena > READ_BLOB + 65536 else arena // 2
        self.rec.level = -1

    cdef bint ready(self) noexcept:
        """Is there room for one more read? Seals and opens blocks as needed."""
        cdef Rec *r = &self.rec
        if r.open:
            if rec_room(r):
                return True
            self.seal()
        cdef int i, at
        for i in range(1, self.blocks + 1):
            at = (self.current + i) % self.blocks
            map_block(r, self.base + at * self.block_bytes)
            if fl_load(r.head) == BLOCK_FREE:
                self.current = at
                r.open = True
                r.head[1] = r.level
                fl_store(r.head, BLOCK_OPEN)
                return True
        r.open = False
        return False

    def seal(self):
        """Close the open block, if it holds anything, and list it for `take_sealed`."""
        cdef Rec *r = &self.rec
        if not r.open or (r.n_events == 0 and r.n_rows == 0 and r.n_blob == 0):
            return
        r.head[2] = r.n_events
        r.head[3] = r.n_rows
        r.head[4] = r.n_blob
        r.head[5] = self.sequence
        self.sequence += 1
        fl_store(r.head, BLOCK_SEALED)
        r.open = False
        self.sealed.append(self.current)

    def take_sealed(self):
        """Indices of blocks sealed since the last call, in order."""
        if not self.sealed:
            return []
        taken = self.sealed
        self.sealed = []
        return taken

    def begin_level(self, int64_t level):
        """Seal what is open: a block belongs to one level."""
        self.seal()
        self.rec.open = False
        self.rec.level = level
        if self.current >= 0 and fl_load(<int64_t *>(self.base + self.current * self.block_bytes)) == BLOCK_OPEN:
            fl_store(<int64_t *>(self.base + self.current * self.block_bytes), BLOCK_FREE)

    @property
    def save_text(self):
        """Keep the raw payload of every event."""
        return bool(self.rec.save_text)

    @save_text.setter
    def save_text(self, bint on):
        self.rec.save_text = on


cdef int check_index(Py_ssize_t size, Py_ssize_t index, Py_ssize_t block) except -1:
    if index < 0 or (index + 1) * block > size:
        raise IndexError(f"index={index}: the memory holds {size // block} blocks")
    return 0


def read_block(memory, int index, Py_ssize_t events=EVENTS, Py_ssize_t rows=ROWS, Py_ssize_t arena=ARENA):
    """The sealed block `index` of a Recorder's memory, copied; None when it is not sealed.

    The capacities must be those the Recorder was made with. IndexError when the memory has no such block.
    """
    cdef char[::1] view = memory
    cdef Rec r
    cdef Py_ssize_t at = index * block_bytes(events, rows, arena), n, i = 0
    cdef int32_t *head
    check_index(view.shape[0], index, block_bytes(events, rows, arena))
    memset(&r, 0, sizeof(Rec))
    r.cap_events, r.cap_rows, r.cap_blob = events, rows, arena
    map_block(&r, &view[at])
    if fl_load(r.head) != BLOCK_SEALED:
        return None
    n = r.head[2]
    columns = {
        "stamp_ns": (<char *>r.stamp)[:n * 8], "request": (<char *>r.request)[:n * 4],
        "delay_ns": (<char *>r.delay)[:n * 4], "bytes": (<char *>r.nbytes)[:n * 4],
        "tokens": (<char *>r.tokens)[:n * 4], "channel": (<char *>r.channel)[:n], "flags": (<char *>r.flags)[:n]}
    blobs = []
    while i < r.head[4]:
        head = <int32_t *>(r.arena + i)
        blobs.append((head[0], head[1], head[2], (r.arena + i + 16)[:head[3]]))
        i += (16 + head[3] + 7) // 8 * 8
    return Block(r.head[1], columns, n, (<char *>r.rows)[:r.head[3] * N_FIELDS * 8], r.head[3], blobs, r.head[5])


def release_block(memory, int index, Py_ssize_t events=EVENTS, Py_ssize_t rows=ROWS, Py_ssize_t arena=ARENA):
    """Give a block that was read back to the Recorder. IndexError when the memory has no such block."""
    cdef char[::1] view = memory
    check_index(view.shape[0], index, block_bytes(events, rows, arena))
    fl_store(<int64_t *>&view[index * block_bytes(events, rows, arena)], BLOCK_FREE)


include "_json.pxi"
include "_scan.pxi"
include "_head.pxi"
include "_wire.pxi"
