"""The engine: the only system calls of the client while a level runs.

Goals    one Python call a request, none a token; the next send of a closed loop leaves from here; every read carries
         the kernel's receive stamp; a stale event never reaches the next owner of a slot.
Plan     one epoll instance, its fd given to uvloop once. drain() = epoll_wait -> recvmsg -> feed -> columns, then
         pump() = while a slot is free and a request is due: send. Python arms requests ahead and opens connections.
Warning  nogil functions touch C memory only. A slot's state changes in join, transmit, settle, dial and shut.

    EMPTY --attach--> IDLE --transmit--> BUSY --settle: complete, connection sound--> IDLE
      |                ^                   |
      +----dial----> DIALING <----renew----+ settle: failed, or the server closes after each answer
      |                |
      +<----list_slot--+ what dialling meets (refused, no ports) is Python's to handle: it backs off and writes rows

An IDLE slot that must wait after failures is `held`: in no list of free slots until Python releases it.

Kernel stamps are CLOCK_REALTIME; `offset` takes them to CLOCK_MONOTONIC. A stamp outside [the slot's last, now] means
the clock was stepped: measure the offset again and convert again; a stamp that still does not fit is replaced by the
read time and flagged.
"""
from libc.errno cimport EAGAIN, ECONNRESET, EINTR, EPIPE, ETIMEDOUT, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from posix.unistd cimport close, read

from fastload._linux cimport *
from fastload._timing cimport *

include "_tls.pxi"

__all__ = ["Engine", "GAUGES", "ON_FREE"]

ON_FREE = -1
cdef enum:
    C_ON_FREE = -1
    READ_BYTES = 131072              # Recorder.ready() keeps room for the events of one such read
    BATCH = 256                      # events a drain takes before control may run
    WAKE_EARLY_NS = 120000           # a timer is late by up to this in a VM: wake early, then spin
    DRAIN_LIMIT_NS = 1000000000      # how long the framing may follow [DONE]
    STALE_SAMPLES = 100
    LATE_NS = 1000000                # a send this far behind its due time is flagged
    DRAIN_NS = 1000000               # how long a drain may go on for the sake of a due time before control runs

cdef enum:
    EMPTY, DIALING, IDLE, BUSY       # states of a slot

# epoll tags that are no slot
cdef uint64_t TAG_CLOCK = (<uint64_t>1 << 63) | 1
cdef uint64_t TAG_PACER = (<uint64_t>1 << 63) | 2

# counters the supervisor reads while the level runs, int64 each, in this order; then three histograms
GAUGES = ("sent", "done", "failed", "in_flight", "text_events", "told_events", "told_tokens", "reads", "events",
          "stray_bytes", "stale_retries", "idle_closed", "stale_events", "unstamped", "clamped", "rebracketed",
          "stalled_ns", "measured_done", "measured_failed", "late_sends", "clock_steps", "failed_in_row", "last_end",
          "last_status", "last_errno")
cdef enum:
    G_SENT, G_DONE, G_FAILED, G_IN_FLIGHT, G_TEXT, G_TOLD_EVENTS, G_TOLD_TOKENS, G_READS, G_EVENTS
    G_STRAY, G_RETRIES, G_IDLE_CLOSED, G_STALE_EVENTS, G_UNSTAMPED, G_CLAMPED, G_REBRACKETED
    G_STALLED_NS, G_MEASURED_DONE, G_MEASURED_FAILED, G_LATE, G_CLOCK_STEPS, G_IN_ROW, G_LAST_END
    G_LAST_STATUS, G_LAST_ERRNO, N_GAUGES
GAUGE_BYTES = 4096
MEMORY_BYTES = 4096 + 3 * sizeof(Hist)

cdef struct Armed:
    char *bytes
    Py_ssize_t n
    int64_t row
    int64_t due

cdef struct Slot:
    Stream s
    int fd
    uint32_t generation
    uint8_t state, sending, retry, kernel, tls
    uint8_t answered                 # this connection, or the last one, brought a byte of an answer
    uint8_t held                     # it failed: Python says when it may go on
    int failures                     # of this slot, in a row; a lost or refused connection makes it two at least
    int dial_error                   # errno of the last dial, for Python to write the row
    Armed out
    const char *wire                 # what the socket is given: the request itself, or its TLS records
    Py_ssize_t wire_n, sent
    int64_t freed_ns                 # when the slot could have sent next: the done_ns of the request before
    int64_t active_ns                # when it last came on, by our clock: bytes out, events or pieces of them in
    int64_t progress                 # stream_progress then
    int64_t last_stamp
    int64_t connect_ns, tls_ns
    int64_t dialed_ns
    int64_t backoff_ms
    int64_t served                   # requests this connection has answered
    int64_t retransmits

cdef class Engine:
    """Sockets, stamps and sends of one measuring process; not thread-safe.

    `recorder` takes the columns; `gauges` is a writable buffer of MEMORY_BYTES (shared) with the live counters and the
    histograms of TTFT, ITL (per request) and client delay. `stamp` is "kernel" or "read". OSError when epoll or timers
    cannot be had.
    """
    cdef Recorder recorder
    cdef Rec *rec
    cdef Slot *slots
    cdef readonly int size
    cdef int ep, clock_fd, pacer_fd, dummy_fd
    cdef int64_t *g
    cdef Hist *ttft
    cdef Hist *itl
    cdef Hist *delay
    cdef object gauges
    cdef char *buffer
    cdef char *plain                 # what a read of TLS records holds; there from the first such connection on
    cdef object plain_view
    cdef list tls                    # by slot: its _Tls, or None
    cdef object last_session
    cdef bint kernel
    cdef readonly int64_t offset
    cdef Armed *queue
    cdef Py_ssize_t q_head, q_n, q_cap
    cdef int *free_slots
    cdef int n_free
    cdef int *todo
    cdef int n_todo
    cdef public int64_t warmup_left, measured_left, until_ns
    cdef readonly int64_t measured_open, level_start_ns, measured_end_ns
    cdef public bint reuse
    cdef public bint respect_retry_after    # a 429 or 503 holds its slot at once
    cdef bint stopped                # cancelled: nothing more is sent before the next begin_level
    cdef public int low_water
    cdef int64_t pacer_at, stalled_at
    cdef int family, streams
    cdef bytes address
    cdef unsigned int address_size
    cdef const char *address_at
    cdef list brackets

    def __cinit__(self, Recorder recorder not None, int slots, gauges, str stamp="kernel"):
        cdef char[::1] view = gauges
        cdef epoll_event ev
        cdef int on = 1
        # before anything can fail: __dealloc__ closes what is not -1, and 0 is stdin
        self.ep = self.clock_fd = self.pacer_fd = self.dummy_fd = -1
        if view.shape[0] < MEMORY_BYTES:
            raise ValueError(f"gauges: {MEMORY_BYTES} bytes are needed, the buffer has {view.shape[0]}")
        if stamp not in ("kernel", "read"):
            raise ValueError(f"stamp={stamp!r}: kernel or read")
        self.recorder = recorder
        self.rec = &recorder.rec
        self.gauges = gauges
        self.g = <int64_t *>&view[0]
        self.ttft = <Hist *>&view[4096]
        self.itl = self.ttft + 1
        self.delay = self.ttft + 2
        self.slots = <Slot *>calloc(slots, sizeof(Slot))
        self.free_slots = <int *>calloc(slots, sizeof(int))
        self.todo = <int *>calloc(slots * 2, sizeof(int))
        self.q_cap = 1024
        self.queue = <Armed *>calloc(self.q_cap, sizeof(Armed))
        self.buffer = <char *>malloc(READ_BYTES)
        if not (self.slots and self.free_slots and self.todo and self.queue and self.buffer):
            raise MemoryError
        for i in range(slots):
            self.slots[i].fd = -1
        self.size = slots
        self.kernel = stamp == "kernel"
        self.reuse = True
        self.until_ns = -1
        self.measured_end_ns = -1
        self.pacer_at = -1
        self.brackets = []
        self.tls = [None] * slots
        self.ep = epoll_create1(EPOLL_CLOEXEC)
        self.pacer_fd = timerfd_create(1, TFD_NONBLOCK | TFD_CLOEXEC)
        self.clock_fd = timerfd_create(0, TFD_NONBLOCK | TFD_CLOEXEC)
        if self.ep < 0 or self.pacer_fd < 0 or self.clock_fd < 0:
            raise OSError(errno, "the engine needs epoll and timerfd")
        ev.events = EPOLLIN
        ev.data.u64 = TAG_PACER
        epoll_ctl(self.ep, EPOLL_CTL_ADD, self.pacer_fd, &ev)
        ev.data.u64 = TAG_CLOCK
        epoll_ctl(self.ep, EPOLL_CTL_ADD, self.clock_fd, &ev)
        self.watch_clock()
        # The kernel stamps packets only while some socket of the host asks for it, and switching costs the first ones.
        self.dummy_fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)
        if self.kernel and (self.dummy_fd < 0
                            or setsockopt(self.dummy_fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof(on)) != 0):
            self.kernel = False
        self.sample_clock(500)

    def __dealloc__(self):
        for i in range(self.size):
            if self.slots[i].fd >= 0:
                close(self.slots[i].fd)
            free(self.slots[i].out.bytes)
            stream_free(&self.slots[i].s)
        while self.q_n:
            free(self.queue[self.q_head].bytes)
            self.q_head = (self.q_head + 1) % self.q_cap
            self.q_n -= 1
        for fd in (self.ep, self.pacer_fd, self.clock_fd, self.dummy_fd):
            if fd >= 0:
                close(fd)
        free(self.slots)
        free(self.free_slots)
        free(self.todo)
        free(self.queue)
        free(self.buffer)
        free(self.plain)

    # ------------------------------------------------------------ what Python calls

    def fileno(self):
        """The epoll descriptor: give it to the loop's add_reader once."""
        return self.ep

    def begin_level(self, int64_t level, int streams, int64_t warmup, int64_t measured, int64_t until_ns=-1):
        """Start counting a level of `streams` slots: the first `warmup` requests sent are warm-up, the next `measured` are measured (or
        all sent before `until_ns`), then fills keep the load while measured ones are open. Clears the gauges."""
        memset(self.g, 0, N_GAUGES * 8)
        memset(self.ttft, 0, 3 * sizeof(Hist))
        self.rec.texts = 0
        self.recorder.begin_level(level)
        self.streams = streams
        self.warmup_left = warmup
        self.measured_left = measured
        self.until_ns = until_ns
        self.measured_open = 0
        self.measured_end_ns = -1
        self.stopped = False
        self.level_start_ns = mono_ns()
        for i in range(self.size):
            self.slots[i].freed_ns = self.level_start_ns
            self.slots[i].failures = self.slots[i].dial_error = 0
            self.release(i)
            if self.slots[i].state == IDLE:
                self.slots[i].connect_ns = -1    # whoever it was opened for went elsewhere: no request waits for it

    def arm(self, int64_t row, const unsigned char[::1] request not None, int64_t due_ns=C_ON_FREE):
        """Queue the bytes of request `row` (copied): sent when a slot is free, and not before `due_ns`.

        Requests leave in the order they are armed; due times must not decrease. One queue for all slots, so that no
        slot waits for a request another could take, and prompts are used in the order of the plan.
        """
        cdef Armed a
        cdef Armed *grown
        if request.shape[0] == 0:
            raise ValueError("an empty request")
        if self.q_n == self.q_cap:
            grown = <Armed *>calloc(self.q_cap * 2, sizeof(Armed))
            if grown == NULL:
                raise MemoryError
            for i in range(self.q_n):
                grown[i] = self.queue[(self.q_head + i) % self.q_cap]
            free(self.queue)
            self.queue, self.q_head, self.q_cap = grown, 0, self.q_cap * 2
        a.bytes = <char *>malloc(request.shape[0])
        if a.bytes == NULL:
            raise MemoryError
        memcpy(a.bytes, &request[0], request.shape[0])
        a.n, a.row, a.due = request.shape[0], row, due_ns
        self.queue[(self.q_head + self.q_n) % self.q_cap] = a
        self.q_n += 1

    def attach(self, int slot, int fd, int64_t connect_ns=-1, int64_t backoff_ms=0, tls=None, int64_t tls_ns=-1):
        """Give slot `slot` (EMPTY) the connected, non-blocking socket `fd`, which the engine owns from here.

        `connect_ns` is the time connecting took when a request waited for it, -1 when it was opened ahead. `tls` is
        (ssl.SSLObject, its incoming MemoryBIO, its outgoing one) after a handshake of `tls_ns`. A request that met a
        stale connection is sent again at once; False, and `fd` is not taken, when no block is free to record that.
        """
        if self.slots[slot].state != EMPTY:
            raise ValueError(f"slot={slot} has a connection")
        if self.slots[slot].retry and not self.recorder.ready():
            return False
        if not self.watch_new(slot, fd, EPOLLIN | EPOLLRDHUP):
            raise OSError(errno, "epoll_ctl")
        if tls is not None:
            self.make_plain()
            self.tls[slot] = _Tls(*tls)
        self.slots[slot].tls = tls is not None
        self.slots[slot].tls_ns = tls_ns if connect_ns >= 0 else -1
        self.join(slot, connect_ns, backoff_ms)
        return True

    def tls_session(self):
        """The last ssl.SSLSession a server gave, for the next handshake; None. In TLS 1.3 it comes after the handshake,
        with the first answer."""
        cdef _Tls tls
        if self.last_session is None:
            for tls in self.tls:
                if tls is not None:
                    self.keep_session(tls)
        return self.last_session

    cdef keep_session(self, _Tls tls):
        session = tls.session.session
        if session is not None and session.has_ticket:
            self.last_session = session

    def dial_to(self, int family, bytes address not None):
        """Let slots whose connection ends while a level runs connect by themselves: `address` is the sockaddr."""
        self.family = family
        self.address = address
        self.address_at = address
        self.address_size = len(address)

    def pump(self):
        """Send what is due to whoever is free (drain does so by itself)."""
        if self.recorder.ready() and self.send_due():
            self.wake_now()

    def drain(self):
        """Take what the kernel has for us, up to 256 events. True when Python has something to do: a slot to connect,
        requests to arm (fewer than `low_water` are left and the level wants more), a sealed block, the level's end; or
        no block is free (`stalled`), and all that comes stays in the kernel."""
        cdef epoll_event events[BATCH]
        cdef int n, i
        cdef int64_t until
        cdef bint soon
        if not self.recorder.ready():
            if self.stalled_at == 0:
                self.stalled_at = mono_ns()
            return True              # the block just sealed may be the one the other process waits for
        if self.stalled_at:
            self.g[G_STALLED_NS] += mono_ns() - self.stalled_at
            self.stalled_at = 0
        with nogil:
            until = mono_ns() + DRAIN_NS
            while True:
                n, i = epoll_wait(self.ep, events, BATCH, 0), 0
                # a full block ends the batch: epoll is level-triggered, so what is left comes again
                while i < n and rec_room(self.rec):
                    self.on_event(&events[i])
                    i += 1
                # a send due within the next 120 us is waited for here, reading meanwhile
                soon = self.send_due()
                if not soon or self.n_todo or self.q_n < self.low_water or mono_ns() > until:
                    break
            # Python's turn; or a full block held a send back, and nothing else may come to wake us
            if soon or (self.q_n and self.n_free and not rec_room(self.rec)):
                self.wake_now()
        self.g[G_TEXT] = self.rec.texts
        if self.n_todo or self.recorder.sealed:
            return True
        if self.next_role() < 0:
            return self.g[G_IN_FLIGHT] == 0
        return self.q_n < self.low_water

    def take_lost(self):
        """Slots that lost their connection since the last call."""
        lost = [self.todo[i] for i in range(self.n_todo)]
        self.n_todo = 0
        return lost

    def trim(self, int slots):
        """Close the idle connections of all slots from `slots` on: a level has as many as it has streams."""
        for i in range(slots, self.size):
            if self.slots[i].state != BUSY:
                self.shut(i)

    def expire(self, int64_t connect_ns, int64_t first_byte_ns, int64_t idle_ns, int64_t total_ns):
        """End exchanges past a limit (all in ns), and connections whose framing did not end 1 s after [DONE].

        `first_byte_ns` is from sending to the first token: a server may send its head at once, and pings while it
        queues. Then `idle_ns` is the longest time without an event or a piece of one; pings are none.
        """
        cdef int64_t now = mono_ns()
        cdef Slot *s
        if not self.recorder.ready():
            return
        for i in range(self.size):
            s = &self.slots[i]
            if s.state == DIALING and now - s.dialed_ns > connect_ns:
                self.shut(i)
                s.dial_error = ETIMEDOUT
                self.list_slot(i)
            if s.state != BUSY or not self.recorder.ready():
                continue
            if s.s.row[F_DONE] >= 0:
                if now - s.s.row[F_DONE] > DRAIN_LIMIT_NS:
                    s.s.row[F_FLAGS] |= C_RF_FRAMING_BROKEN
                    self.settle(i, C_END_COMPLETE, False)
            elif now - s.s.row[F_SENT] > total_ns:
                self.fail(i, C_END_TIMEOUT, b"the whole request took longer than --timeout")
            elif s.s.row[F_HEAD] < 0 or (s.s.sse == 1 and not s.s.saw):
                if now - s.s.row[F_SENT] > first_byte_ns:
                    self.fail(i, C_END_TIMEOUT, b"no byte of an answer within --first-byte-timeout"
                              if s.s.row[F_FIRST_BYTE] < 0 else b"no token within --first-byte-timeout")
            elif now - s.active_ns > idle_ns:
                self.fail(i, C_END_TIMEOUT, b"silent for longer than --idle-timeout")

    def refuse(self, int slot, int end, int error, str why, int64_t backoff_ms):
        """The slot could not be connected: a row with the END_ code `end` and the errno for the request that waited,
        or that had to be sent again. False when none waited. Does not use up the level's measured requests."""
        cdef Slot *s = &self.slots[slot]
        cdef Armed a
        text = why.encode()[:500]
        if not self.recorder.ready():
            return False
        if not s.retry:
            role = self.next_role()
            if role < 0 or not self.q_n:
                return False
            a = self.pop()
            stream_begin(&s.s, self.rec, a.row)
            s.s.row[F_ROLE] = role
            s.s.row[F_DUE] = s.freed_ns if a.due == C_ON_FREE else a.due
            s.s.row[F_REQUEST_BYTES] = 0
            s.s.row[F_ATTEMPT] = 1
            free(a.bytes)
        else:
            self.close_role(slot)
            self.g[G_IN_FLIGHT] -= 1
            free(s.out.bytes)
            s.out.bytes = NULL
            s.retry = False
        s.s.row[F_LEVEL] = self.rec.level
        s.s.row[F_SLOT] = slot
        s.s.row[F_END] = end
        s.s.row[F_ERRNO] = error
        s.s.row[F_BACKOFF] = backoff_ms
        s.s.row[F_STAMP_SOURCE] = self.kernel
        s.s.row[F_DONE] = mono_ns()
        s.freed_ns = s.s.row[F_DONE]
        rec_blob(self.rec, s.s.row[F_REQUEST], 0, C_BLOB_ERROR, text, len(text))
        rec_row(self.rec, s.s.row)
        s.failures += s.failures == 0        # a connection that cannot be had is waited for at once
        self.count_failure(s)
        return True

    def cancel(self):
        """End every exchange, as cancelled unless its answer was complete; forget what is armed, close every connection.

        Nothing more is sent. False when no block was free for all the rows: to be called again once one is."""
        self.stopped = True
        for i in range(self.size):
            if not self.recorder.ready():
                return False
            if self.slots[i].state == BUSY and self.slots[i].s.row[F_DONE] >= 0:
                self.slots[i].s.row[F_FLAGS] |= C_RF_FRAMING_BROKEN    # the answer was complete
                self.settle(i, C_END_COMPLETE, False)
            elif self.slots[i].state == BUSY:
                self.fail(i, C_END_CANCELLED, b"the run was stopped")
            elif self.slots[i].retry:
                self.refuse(i, C_END_CANCELLED, 0, "the run was stopped", 0)
        self.disarm()
        self.close_idle()
        self.n_todo = 0
        return True

    def disarm(self):
        """Forget every request that is armed and not sent; the number of the first one, or -1."""
        cdef int64_t first = -1
        cdef Armed a
        while self.q_n:
            a = self.pop()
            free(a.bytes)
            if first < 0:
                first = a.row
        return first

    def close_idle(self):
        """Close idle connections, opened or on the way (a server with few workers holds one worker for each)."""
        for i in range(self.size):
            if self.slots[i].state in (IDLE, DIALING):
                self.shut(i)

    def sample_clock(self, int samples=500):
        """Measure the offset REALTIME - MONOTONIC again; the sample is kept for `take_brackets`."""
        cdef int64_t width
        self.offset = bracket_offset(samples, &width)
        self.brackets.append((mono_ns(), self.offset, width))

    def take_brackets(self):
        """Samples (monotonic ns, offset ns, bracket width ns) since the last call."""
        taken = self.brackets
        self.brackets = []
        return taken

    def is_empty(self, int slot):
        """Has the slot no connection?"""
        return self.slots[slot].state == EMPTY

    def is_held(self, int slot):
        """Does the slot wait, with its connection, for `release`?"""
        return bool(self.slots[slot].held and self.slots[slot].state == IDLE)

    def release(self, int slot, int64_t waited_ms=0):
        """Let a held slot send again, after it waited so long."""
        cdef Slot *s = &self.slots[slot]
        if s.held and s.state == IDLE:
            s.backoff_ms = waited_ms
            self.free_slots[self.n_free] = slot
            self.n_free += 1
        s.held = False

    def failures(self, int slot):
        """How often in a row the slot failed. From 2 on it should wait; a connection refused or lost counts as that."""
        return self.slots[slot].failures

    def take_dial_error(self, int slot):
        """The errno of the slot's own dial that failed, 0 if none did since the last call; its request waits."""
        error = self.slots[slot].dial_error
        self.slots[slot].dial_error = 0
        return error

    def refusal(self, int slot):
        """(HTTP status, raw head) of the answer the slot had last; (-1, b"") when it had none."""
        cdef Slot *s = &self.slots[slot]
        return s.s.row[F_STATUS], s.s.head.p[:s.s.head.n] if s.s.row[F_STATUS] >= 0 else b""

    def hopeful(self, bint waiting):
        """Is a request on the wire whose slot did not fail before, and has its answer begun (or else `waiting`)?"""
        for i in range(self.size):
            if self.slots[i].state == BUSY and not self.slots[i].failures and (waiting or self.slots[i].s.saw):
                return True
        return False

    def must_retry(self, int slot):
        """Does the slot hold a request whose connection turned out stale?"""
        return bool(self.slots[slot].retry)

    def counters(self):
        """The gauges as a dict, by name."""
        return {name: self.g[i] for i, name in enumerate(GAUGES)}

    @property
    def armed(self):
        """Requests armed and not sent yet."""
        return self.q_n

    @property
    def busy(self):
        """Requests on the wire, or waiting for a fresh connection after a stale one."""
        return self.g[G_IN_FLIGHT]

    @property
    def stalled(self):
        """Did the last drain find no block free?"""
        return self.stalled_at != 0

    @property
    def stamps(self):
        """"kernel" or "read": where stamps of connections attached from now on come from."""
        return "kernel" if self.kernel else "read"

    def wants(self):
        """Will the level send another request, given one?"""
        return self.next_role() >= 0

    # ------------------------------------------------------------ one event

    cdef void on_event(self, epoll_event *ev) noexcept nogil:
        cdef uint64_t tag = ev.data.u64
        cdef int slot = <int>(tag >> 32)
        cdef uint64_t ticks
        cdef Slot *s
        if tag == TAG_PACER:
            read(self.pacer_fd, &ticks, 8)
            self.pacer_at = -1
            return
        if tag == TAG_CLOCK:
            if read(self.clock_fd, &ticks, 8) < 0 and errno == ECANCELED:
                with gil:
                    self.g[G_CLOCK_STEPS] += 1
                    self.sample_clock(500)
                    self.watch_clock()
            return
        s = &self.slots[slot]
        if s.fd < 0 or s.generation != <uint32_t>tag:
            self.g[G_STALE_EVENTS] += 1
            return
        if s.state == DIALING:
            self.dialed(slot)
        elif ev.events & EPOLLOUT and s.sending:
            self.send_rest(slot)
        if s.fd >= 0 and s.generation == <uint32_t>tag and ev.events & (EPOLLIN | EPOLLERR | EPOLLHUP | EPOLLRDHUP):
            self.read_slot(slot, ev.events)
        if self.q_n and self.n_free:
            self.send_due()          # the turn-around of a slot waits for one read, not for the batch

    cdef void read_slot(self, int slot, uint32_t events) noexcept nogil:
        cdef Slot *s = &self.slots[slot]
        cdef iovec iov
        cdef msghdr msg
        cdef char control[128]
        cdef ssize_t got
        cdef int64_t now, stamp, offset
        cdef uint32_t generation = s.generation
        cdef uint8_t flags
        cdef int tls_state
        cdef int code
        cdef Py_ssize_t used
        cdef const char *data = self.buffer
        cdef Py_ssize_t n
        memset(&msg, 0, sizeof(msg))
        iov.iov_base = self.buffer
        iov.iov_len = READ_BYTES - TLS_ROOM if s.tls else READ_BYTES
        msg.msg_iov = &iov
        msg.msg_iovlen = 1
        while True:
            msg.msg_control = control
            msg.msg_controllen = sizeof(control)
            got = recvmsg(s.fd, &msg, MSG_DONTWAIT)
            now = mono_ns()
            if got < 0:
                if errno == EINTR:
                    continue
                if errno != EAGAIN:
                    self.lost(slot, now, C_END_RESET, errno)
                return
            if got == 0:
                self.lost(slot, now, C_END_EOF, 0)
                return
            self.g[G_READS] += 1
            flags, n, tls_state = 0, got, TLS_OPEN
            if s.tls:
                data = self.plain
                n = self.unseal(slot, got, &flags, &tls_state)
            if s.state != BUSY and n:
                self.g[G_STRAY] += n
                self.renew(slot)
                return
            if n:
                stamp = self.receive_stamp(s, &msg, now, &flags)
                s.last_stamp = stamp
                code = feed(&s.s, self.rec, data, n, stamp,
                            -1 if flags & C_FL_READ else <int32_t>min_i64(now - stamp, 0x7fffffff), flags, &used)
                if stream_progress(&s.s) != s.progress:
                    s.progress = stream_progress(&s.s)
                    s.active_ns = now
                if s.kernel and not flags & C_FL_READ:
                    hist_record(self.delay, now - stamp)
                if code == FEED_COMPLETE:
                    if used < n:
                        self.g[G_STRAY] += n - used
                    self.settle(slot, C_END_COMPLETE, used == n)
                elif code < 0:
                    self.fail(slot, C_END_LIMIT if code == FEED_LIMIT else C_END_HTTP, s.s.why)
            if tls_state and s.generation == generation:
                if tls_state == TLS_BROKEN:
                    self.tls_broke(slot)
                else:
                    self.lost(slot, now, C_END_EOF, 0)
                return
            if s.generation != generation or s.state != BUSY:
                if s.state != IDLE or not events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP):
                    return
            elif got < <ssize_t>iov.iov_len and not events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP):
                return
            if not rec_room(self.rec):
                return               # level-triggered: what is left comes with the next drain

    cdef Py_ssize_t unseal(self, int slot, Py_ssize_t got, uint8_t *flags, int *state) noexcept with gil:
        """Bytes of plain text in the `got` bytes just read, and the TLS_ state behind them."""
        cdef _Tls tls = self.tls[slot]
        cdef Py_ssize_t n = tls.unseal(PyMemoryView_FromMemory(self.buffer, got, PyBUF_READ), self.plain_view, READ_BYTES)
        if tls.partial:
            flags[0] = C_FL_COALESCED    # the kernel's stamp is that of the record begun behind
        state[0] = tls.state
        return n

    cdef void tls_broke(self, int slot) noexcept with gil:
        cdef _Tls tls = self.tls[slot]
        if self.slots[slot].state == BUSY:
            self.fail(slot, C_END_RESET, tls.why)
        else:
            self.renew(slot)

    cdef bint seal(self, int slot) noexcept with gil:
        """Turn the slot's request into the TLS records that are sent for it; False when TLS is broken."""
        cdef Slot *s = &self.slots[slot]
        cdef _Tls tls = self.tls[slot]
        if not tls.seal(s.out.bytes, s.out.n):
            return False
        s.wire = PyBytes_AS_STRING(tls.sealed)
        s.wire_n = PyBytes_GET_SIZE(tls.sealed)
        return True

    cdef void drop_tls(self, int slot) noexcept with gil:
        self.keep_session(self.tls[slot])
        self.slots[slot].tls = False
        self.tls[slot] = None

    cdef make_plain(self):
        """The second buffer, and what ssl is given to write to; only a run over TLS needs them."""
        if self.plain == NULL:
            self.plain = <char *>malloc(READ_BYTES)
            if self.plain == NULL:
                raise MemoryError
            self.plain_view = PyMemoryView_FromMemory(self.plain, READ_BYTES, PyBUF_WRITE)

    cdef int64_t receive_stamp(self, Slot *s, msghdr *msg, int64_t now, uint8_t *flags) noexcept nogil:
        cdef cmsghdr *c
        cdef timespec *t
        cdef int64_t real, stamp, floor, width
        if not s.kernel:
            flags[0] = C_FL_READ
            return now
        c = CMSG_FIRSTHDR(msg)
        if c == NULL or c.cmsg_level != SOL_SOCKET or c.cmsg_type != SO_TIMESTAMPNS:
            self.g[G_UNSTAMPED] += 1
            flags[0] = C_FL_READ
            return now
        t = <timespec *>CMSG_DATA(c)
        real = <int64_t>t.tv_sec * 1000000000 + t.tv_nsec
        floor = s.last_stamp if s.last_stamp > s.s.row[F_SENT] else s.s.row[F_SENT]
        stamp = convert(real, self.offset, floor, now)
        if stamp >= 0:
            return stamp
        self.g[G_REBRACKETED] += 1
        self.offset = bracket_offset(STALE_SAMPLES, &width)
        with gil:
            self.brackets.append((mono_ns(), self.offset, width))
        stamp = convert(real, self.offset, floor, now)
        if stamp >= 0:
            return stamp
        self.g[G_CLAMPED] += 1
        flags[0] = C_FL_READ | C_FL_CLAMPED
        return now

    cdef void lost(self, int slot, int64_t now, int end, int error) noexcept nogil:
        # the peer closed or reset; everything it sent before was read
        cdef Slot *s = &self.slots[slot]
        cdef int code
        if s.state == IDLE:
            self.g[G_IDLE_CLOSED] += 1
            if not s.answered:       # it takes connections and closes them
                s.failures += 1 + (s.failures == 0)
            self.renew(slot)
            return
        if s.s.row[F_FIRST_BYTE] < 0 and s.s.row[F_ATTEMPT] == 1 and s.connect_ns < 0:
            self.make_stale(slot)
            return
        if end == C_END_EOF:
            code = feed_eof(&s.s, self.rec, now)
            if code == FEED_COMPLETE:
                self.settle(slot, C_END_COMPLETE, False)
                return
            if s.s.row[F_ERRNO] > 0:     # send() met the reset first, and the socket tells it once
                end, error = C_END_RESET, <int>s.s.row[F_ERRNO]
        stream_cut(&s.s, self.rec)
        if s.s.row[F_DONE] >= 0:
            s.s.row[F_FLAGS] |= C_RF_FRAMING_BROKEN
        s.s.row[F_ERRNO] = error
        self.settle(slot, end, False)

    cdef void make_stale(self, int slot) noexcept nogil:
        # a kept connection the server had closed already: no byte came, so the request may be sent once more
        cdef Slot *s = &self.slots[slot]
        self.g[G_RETRIES] += 1
        s.retry = True
        s.sending = False
        self.renew(slot)

    # ------------------------------------------------------------ end of an exchange

    cdef void fail(self, int slot, int end, const char *why) noexcept nogil:
        cdef Slot *s = &self.slots[slot]
        cdef Py_ssize_t n = 0
        stream_cut(&s.s, self.rec)
        if why != NULL:
            while why[n]:
                n += 1
            rec_blob(self.rec, s.s.row[F_REQUEST], 0, C_BLOB_ERROR, why, n)
        self.settle(slot, end, False)

    cdef void settle(self, int slot, int end, bint sound) noexcept nogil:
        """Write the row; keep the connection if it is sound, else close it and list the slot."""
        cdef Slot *s = &self.slots[slot]
        cdef int64_t *row = s.s.row
        cdef tcp_info info
        cdef unsigned int n = sizeof(info)
        cdef int64_t spread
        memset(&info, 0, sizeof(info))
        if s.fd >= 0 and getsockopt(s.fd, IPPROTO_TCP, TCP_INFO, &info, &n) == 0:
            row[F_RTT] = info.tcpi_rtt
            row[F_RETRANSMITS] = info.tcpi_total_retrans - s.retransmits
            s.retransmits = info.tcpi_total_retrans
        row[F_END] = end
        if end == C_END_COMPLETE:
            row[F_ERRNO] = -1            # an early answer came whole: that sending failed says nothing more
        if row[F_DONE] < 0:
            row[F_DONE] = mono_ns()
        stream_end(&s.s, self.rec)
        rec_row(self.rec, row)
        s.freed_ns = row[F_DONE]
        s.served += 1
        s.answered = s.answered or row[F_FIRST_BYTE] >= 0
        self.g[G_IN_FLIGHT] -= 1
        self.g[G_EVENTS] += row[F_EVENTS]
        # a first judgement, for the live display and for back-off; the trace decides by METRICS.md
        if row[F_STATUS] == 200 and not s.s.saw & C_SAW_ERROR and (
                s.s.saw & C_SAW_FINISH or (s.s.saw & C_SAW_TEXT and row[F_FLAGS] & C_RF_DONE)):
            s.failures = 0
            self.g[G_IN_ROW] = 0
            self.g[G_DONE] += 1
            if row[F_ROLE] == 1:
                self.g[G_MEASURED_DONE] += 1
                if s.s.first_token >= 0:
                    hist_record(self.ttft, s.s.first_token - row[F_SENT])
                    spread = s.s.told_tokens if s.s.told_tokens > 0 else s.s.text_events
                    if spread > 1:
                        hist_record(self.itl, (s.s.last_token - s.s.first_token) // (spread - 1))
            if s.s.told_tokens > 0:
                self.g[G_TOLD_TOKENS] += s.s.told_tokens
                self.g[G_TOLD_EVENTS] += s.s.text_events
        else:
            if not s.answered and (end == C_END_EOF or end == C_END_RESET):
                s.failures += s.failures == 0    # as good as a connection refused
            self.count_failure(s)
        self.close_role(slot)
        free(s.out.bytes)
        s.out.bytes = NULL
        if sound and self.reuse and row[F_FLAGS] & C_RF_KEEPALIVE and not s.sending:
            s.state = IDLE
            if s.held:
                self.list_slot(slot)
            else:
                self.free_slots[self.n_free] = slot
                self.n_free += 1
        else:
            self.renew(slot)

    cdef void count_failure(self, Slot *s) noexcept nogil:
        """The slot's row is a failure: one in a row of this slot and of the level. One failure alone holds nothing up."""
        cdef int64_t *row = s.s.row
        self.g[G_FAILED] += 1
        if row[F_ROLE] == 1:
            self.g[G_MEASURED_FAILED] += 1
        if row[F_END] == C_END_CANCELLED:
            return
        s.failures += 1
        s.held = s.failures > 1 or (self.respect_retry_after and (row[F_STATUS] == 429 or row[F_STATUS] == 503))
        self.g[G_IN_ROW] += 1
        self.g[G_LAST_END] = row[F_END]
        self.g[G_LAST_STATUS] = row[F_STATUS]
        self.g[G_LAST_ERRNO] = row[F_ERRNO]

    cdef void close_role(self, int slot) noexcept nogil:
        if self.slots[slot].s.row[F_ROLE] == 1:
            self.measured_open -= 1
            if self.measured_open == 0 and self.next_role() != 1:
                self.measured_end_ns = mono_ns()

    cdef void shut(self, int slot) noexcept nogil:
        cdef Slot *s = &self.slots[slot]
        cdef int i
        if s.state == IDLE:
            for i in range(self.n_free):
                if self.free_slots[i] == slot:
                    self.n_free -= 1
                    self.free_slots[i] = self.free_slots[self.n_free]
                    break
        if s.fd >= 0:
            close(s.fd)              # leaves the epoll set with it
        s.fd = -1
        s.generation += 1
        s.sending = False
        s.state = EMPTY
        if s.tls:
            self.drop_tls(slot)

    # ------------------------------------------------------------ connections

    cdef void renew(self, int slot) noexcept nogil:
        """The connection is over: dial again at once if it served and a request waits for this slot, else leave it to
        Python, which knows to back off: always when the slot is held.

        A server that closes after each answer would otherwise wait for the event loop once a request; one that accepts
        and closes would be dialled thousands of times a second."""
        cdef Slot *s = &self.slots[slot]
        self.shut(slot)
        if slot >= self.streams or self.family == 0 or not (
                s.retry or (s.answered and not s.held and self.q_n and self.next_role() >= 0)):
            self.list_slot(slot)
        elif not self.dial(slot):
            self.list_slot(slot)

    cdef bint dial(self, int slot) noexcept nogil:
        cdef Slot *s = &self.slots[slot]
        cdef int on = 1, fd
        s.dialed_ns = mono_ns()
        s.dial_error = 0
        fd = socket(self.family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)
        if fd < 0:
            s.dial_error = errno
            return False
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on))
        if connect(fd, <const sockaddr *>self.address_at, self.address_size) != 0 and errno != EINPROGRESS:
            s.dial_error = errno
            close(fd)
            return False
        if not self.watch_new(slot, fd, EPOLLIN | EPOLLRDHUP | EPOLLOUT):
            s.dial_error = errno
            close(fd)
            return False
        s.state = DIALING            # even when connect is done: EPOLLOUT says so at once
        return True

    cdef void dialed(self, int slot) noexcept nogil:
        cdef Slot *s = &self.slots[slot]
        cdef int error = 0
        cdef unsigned int n = sizeof(error)
        if getsockopt(s.fd, SOL_SOCKET, SO_ERROR, &error, &n) != 0 or error:
            s.dial_error = error if error else errno
            self.shut(slot)
            self.list_slot(slot)
            return
        self.watch_slot(slot, EPOLLIN | EPOLLRDHUP)
        self.join(slot, mono_ns() - s.dialed_ns, 0)

    cdef bint watch_new(self, int slot, int fd, uint32_t events) noexcept nogil:
        cdef Slot *s = &self.slots[slot]
        cdef epoll_event ev
        cdef int on = 1
        s.kernel = self.kernel and setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof(on)) == 0
        s.generation += 1
        ev.events = events
        ev.data.u64 = <uint64_t>slot << 32 | s.generation
        if epoll_ctl(self.ep, EPOLL_CTL_ADD, fd, &ev) != 0:
            return False
        s.fd = fd
        return True

    cdef void join(self, int slot, int64_t connect_ns, int64_t backoff_ms) noexcept nogil:
        """A connection is there: send what must be sent again, or be free for the next request."""
        cdef Slot *s = &self.slots[slot]
        s.served = 0
        s.answered = False
        s.retransmits = 0
        s.connect_ns = connect_ns
        s.backoff_ms = backoff_ms
        s.last_stamp = -1
        s.held = False
        s.dial_error = 0
        s.state = IDLE
        if s.retry:
            self.transmit(slot, s.s.row[F_ROLE], s.s.row[F_DUE], False)
        else:
            self.free_slots[self.n_free] = slot
            self.n_free += 1

    cdef void list_slot(self, int slot) noexcept nogil:
        cdef int i
        for i in range(self.n_todo):
            if self.todo[i] == slot:
                return
        self.todo[self.n_todo] = slot
        self.n_todo += 1

    # ------------------------------------------------------------ sending

    cdef int next_role(self) noexcept nogil:
        """Role of the next request to be sent; -1 when the level needs no more."""
        if self.stopped:
            return -1
        if self.warmup_left > 0:
            return 0
        if self.measured_left > 0 and (self.until_ns < 0 or mono_ns() < self.until_ns):
            return 1
        return 2 if self.measured_open > 0 else -1

    cdef Armed pop(self) noexcept nogil:
        cdef Armed a = self.queue[self.q_head]
        self.q_head = (self.q_head + 1) % self.q_cap
        self.q_n -= 1
        return a

    cdef bint send_due(self) noexcept nogil:
        """While a slot is free and the head of the queue is due: send it. True when one is due so soon that no timer
        would be in time: look again at once."""
        cdef int slot, role
        cdef int64_t due, early
        cdef Slot *s
        while self.q_n and self.n_free and rec_room(self.rec):
            due = self.queue[self.q_head].due
            if due != C_ON_FREE:
                early = due - mono_ns()
                if early > WAKE_EARLY_NS:
                    self.wake_at(due - WAKE_EARLY_NS)
                    return False
                if early > 0:
                    return True
            self.n_free -= 1
            slot = self.free_slots[self.n_free]
            s = &self.slots[slot]
            role = self.next_role()
            if role < 0:
                self.n_free += 1
                return False
            s.out = self.pop()
            s.s.row[F_ATTEMPT] = 0
            if role == 1:
                self.measured_left -= 1
                self.measured_open += 1
            elif role == 0:
                self.warmup_left -= 1
            self.g[G_IN_FLIGHT] += 1
            self.transmit(slot, role, s.freed_ns if due == C_ON_FREE else due, due != C_ON_FREE)
        return False

    cdef void transmit(self, int slot, int64_t role, int64_t due, bint timed) noexcept nogil:
        """The stamp, then the write: nothing stands between them."""
        cdef Slot *s = &self.slots[slot]
        cdef int64_t attempt = s.s.row[F_ATTEMPT] + 1
        cdef int64_t late = s.s.row[F_FLAGS] & C_RF_DUE_LATE if attempt > 1 else 0
        cdef int64_t now
        cdef ssize_t put
        cdef bint sealed
        stream_begin(&s.s, self.rec, s.out.row)
        s.s.row[F_LEVEL] = self.rec.level
        s.s.row[F_SLOT] = slot
        s.s.row[F_ATTEMPT] = attempt
        s.s.row[F_ROLE] = role
        s.s.row[F_DUE] = due
        s.s.row[F_REQUEST_BYTES] = s.out.n
        s.s.row[F_STAMP_SOURCE] = s.kernel
        s.s.row[F_REUSED] = s.served > 0
        s.s.row[F_BACKOFF] = s.backoff_ms
        if s.connect_ns >= 0 and s.served == 0:
            s.s.row[F_CONNECT] = s.connect_ns
            s.s.row[F_TLS] = s.tls_ns
        else:
            s.connect_ns = -1        # a later request of this connection may find it stale
        if attempt > 1:
            s.s.row[F_FLAGS] |= C_RF_RETRIED | late
            s.retry = False
        s.backoff_ms = 0
        s.progress = -1
        s.state = BUSY
        s.sent = 0
        s.wire, s.wire_n = s.out.bytes, s.out.n
        sealed = self.seal(slot) if s.tls else True
        now = mono_ns()
        put = send(s.fd, s.wire, s.wire_n, MSG_DONTWAIT | MSG_NOSIGNAL) if sealed else 0
        s.s.row[F_SENT] = now
        s.active_ns = now
        s.last_stamp = now
        rec_event(self.rec, now, s.out.row, -1, 0, -1, C_CH_SENT, 0)
        self.g[G_SENT] += 1
        if timed and now - due > LATE_NS:
            s.s.row[F_FLAGS] |= C_RF_DUE_LATE
            self.g[G_LATE] += 1
        if not sealed:
            self.fail(slot, C_END_RESET, b"TLS: the request could not be encrypted")
        elif put == s.wire_n:
            s.s.row[F_SENT_DONE] = mono_ns()
        elif put < 0 and errno != EAGAIN and errno != EINTR:
            self.send_failed(slot, errno)
        else:
            s.sent = put if put > 0 else 0
            s.sending = True
            self.watch_slot(slot, EPOLLIN | EPOLLRDHUP | EPOLLOUT)

    cdef void send_rest(self, int slot) noexcept nogil:
        cdef Slot *s = &self.slots[slot]
        cdef ssize_t put = send(s.fd, s.wire + s.sent, s.wire_n - s.sent, MSG_DONTWAIT | MSG_NOSIGNAL)
        s.active_ns = mono_ns()
        if put >= 0:
            s.sent += put
            if s.sent == s.wire_n:
                s.s.row[F_SENT_DONE] = s.active_ns
                s.sending = False
                self.watch_slot(slot, EPOLLIN | EPOLLRDHUP)
        elif errno != EAGAIN and errno != EINTR:
            self.send_failed(slot, errno)

    cdef void send_failed(self, int slot, int error) noexcept nogil:
        # An answer may lie in the socket that explains it (an early 413): reading goes on, only sending ends.
        cdef Slot *s = &self.slots[slot]
        s.sending = True             # and stays: the connection cannot serve again
        s.s.row[F_ERRNO] = error
        self.watch_slot(slot, EPOLLIN | EPOLLRDHUP)
        if error != EPIPE and error != ECONNRESET:
            self.settle(slot, C_END_RESET, False)

    cdef void watch_slot(self, int slot, uint32_t events) noexcept nogil:
        cdef epoll_event ev
        ev.events = events
        ev.data.u64 = <uint64_t>slot << 32 | self.slots[slot].generation
        epoll_ctl(self.ep, EPOLL_CTL_MOD, self.slots[slot].fd, &ev)

    cdef void wake_at(self, int64_t at) noexcept nogil:
        cdef itimerspec t
        if self.pacer_at == at:
            return
        self.pacer_at = at
        t.it_interval.tv_sec = t.it_interval.tv_nsec = 0
        t.it_value.tv_sec = at // 1000000000
        t.it_value.tv_nsec = at % 1000000000
        timerfd_settime(self.pacer_fd, TFD_TIMER_ABSTIME, &t, NULL)

    cdef void wake_now(self) noexcept nogil:
        # a time long gone: the timer is due at once, and the descriptor readable
        self.wake_at(1)

    cdef void watch_clock(self) noexcept:
        # never fires: it is cancelled, and so readable, the moment somebody sets the clock
        cdef itimerspec t
        memset(&t, 0, sizeof(t))
        t.it_value.tv_sec = (<int64_t>1 << 40)
        timerfd_settime(self.clock_fd, TFD_TIMER_ABSTIME | TFD_TIMER_CANCEL_ON_SET, &t, NULL)


cdef int64_t min_i64(int64_t a, int64_t b) noexcept nogil:
    return a if a < b else b
