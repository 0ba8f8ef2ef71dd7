"""The ground-truth server: paced native sends over many sockets, and a log of when each one began.

Goals    the CLOCK_MONOTONIC time just before each send(), and the kernel's receive stamp of each request's last byte,
         in a file another process can map; 300k sends a second on one core; thousands of streams in one burst a step.
Plan     one thread, one epoll, one loop: accept, read requests, and at each step of an absolute grid send every
         running stream its next event. Payloads are formatted once a request; a step is clock, send, log.
Warning  this is an instrument, not an engine: it answers any POST to .../completions with a stream of so many equal
         chat tokens and knows no model. It reads only what it needs of HTTP: a content-length, and
         "max_completion_tokens" or "max_tokens" in the body. Clients look before they load: GET and HEAD of /health and
         /v1/models, and a completion that is not to be streamed, are answered at once; anything else is 404. None of
         these is in the log.

    client ----- request ----> [kernel stamp of its last byte -> log]
           <---- event k ----- [clock -> log, then send]

Log: 64 bytes of header (int64: records written, records dropped, steps, steps skipped because a burst took longer), then
records of 16 bytes: int64 ns, uint32 request (in order of arrival), uint32 token (its number; RECEIVED for the request's
last byte; ENDED for the end of the answer).
"""
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memmove, memset
from posix.unistd cimport close, read

from fastload._linux cimport *
from fastload._timing cimport bracket_offset, mono_ns

cdef extern from "<string.h>" nogil:
    void *memmem(const void *haystack, size_t haystacklen, const void *needle, size_t needlelen)
    char *strcasestr(const char *haystack, const char *needle)

cdef extern from "<stdlib.h>" nogil:
    long strtol(const char *p, char **end, int base)

__all__ = ["ENDED", "Emitter", "HEADER_BYTES", "RECEIVED", "RECORD_BYTES"]

RECEIVED = 0xffffffff
ENDED = 0xfffffffe
HEADER_BYTES = 64
RECORD_BYTES = 16

cdef enum:
    BATCH = 512
    READ_BYTES = 65536
    EARLY_NS = 150000                # a timer in a VM is late by about this: wake early, then spin
cdef uint32_t C_RECEIVED = <uint32_t>0xffffffff
cdef uint32_t C_ENDED = <uint32_t>0xfffffffe
cdef uint64_t TAG_LISTEN = (<uint64_t>1 << 62) | 1
cdef uint64_t TAG_STDIN = (<uint64_t>1 << 62) | 2
cdef uint64_t TAG_TIMER = (<uint64_t>1 << 62) | 3

# the shape of vLLM's events, so that a client reads what it will read in earnest
cdef const char *HEAD = (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                         b"transfer-encoding: chunked\r\n\r\n")
cdef const char *JSON = (b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s')
cdef const char *MODEL = (b'{"object":"list","data":[{"id":"%s","object":"model","created":1764500000,'
                          b'"owned_by":"fastload","max_model_len":131072}]}')
cdef const char *WHOLE = (b'{"id":"truth-whole","object":"chat.completion","created":1764500000,"model":"%s",'
                          b'"choices":[{"index":0,"message":{"role":"assistant","content":" token"},"logprobs":null,'
                          b'"finish_reason":"length"}],"usage":{"prompt_tokens":%d,"total_tokens":%d,'
                          b'"completion_tokens":%d}}')
cdef const char *NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
cdef const char *ROLE = (b'data: {"id":"truth-%08u","object":"chat.completion.chunk","created":1764500000,'
                         b'"model":"%s","choices":[{"index":0,"delta":{"role":"assistant","content":""},'
                         b'"logprobs":null,"finish_reason":null}]}\n\n')
cdef const char *TOKEN = (b'data: {"id":"truth-%08u","object":"chat.completion.chunk","created":1764500000,'
                          b'"model":"%s","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,'
                          b'"finish_reason":%s}]}\n\n')
cdef const char *USAGE = (b'data: {"id":"truth-%08u","object":"chat.completion.chunk","created":1764500000,'
                          b'"model":"%s","choices":[],"usage":{"prompt_tokens":%d,"total_tokens":%d,'
                          b'"completion_tokens":%d}}\n\n')

cdef struct Conn:
    int fd
    bint used, running, blocked
    char *request
    Py_ssize_t n, cap
    int64_t ready_ns
    uint32_t serial
    uint32_t token, tokens
    char *text                       # role + first token | token | last token + the end of the answer
    int first_n, token_n, last_n, end_n
    Py_ssize_t sent                  # of a send the socket took in part
    int running_at                   # place in the list of running streams

cdef class Emitter:
    """Serve on the listening socket `fd` (which stays the caller's), logging into `log`, a writable buffer.

    A request's first token leaves at the first step at least `ttft_ns` after its last byte came; each further token a
    step of `step_ns` later. `step_ns` 0 sends without pace, as fast as sockets take it. OSError without epoll.
    """
    cdef Conn *conns
    cdef int size, ep, listen_fd, timer
    cdef int *running
    cdef int n_running
    cdef char *buffer
    cdef int64_t *header
    cdef char *records
    cdef int64_t capacity
    cdef object log
    cdef int64_t ttft_ns, step_ns, offset
    cdef uint32_t serial
    cdef bytes model
    cdef const char *model_at
    cdef bint stopping
    cdef readonly int64_t late_steps, steps

    def __cinit__(self, int fd, log, int64_t ttft_ns, int64_t step_ns, str model="fastload-truth", int streams=8192):
        cdef char[::1] view = log
        cdef epoll_event ev
        cdef int64_t width
        self.ep = self.timer = -1    # what __dealloc__ closes, should this fail
        if ttft_ns < 0 or step_ns < 0:
            raise ValueError(f"ttft_ns={ttft_ns} step_ns={step_ns}: not below 0")
        self.log = log
        self.header = <int64_t *>&view[0]
        self.records = &view[HEADER_BYTES]
        self.capacity = (view.shape[0] - HEADER_BYTES) // RECORD_BYTES
        self.ttft_ns, self.step_ns = ttft_ns, step_ns
        self.model = model.encode()
        self.model_at = self.model
        self.size = streams
        self.listen_fd = fd
        self.conns = <Conn *>calloc(streams, sizeof(Conn))
        self.running = <int *>calloc(streams, sizeof(int))
        self.buffer = <char *>malloc(READ_BYTES)
        self.ep = epoll_create1(EPOLL_CLOEXEC)
        self.timer = timerfd_create(1, TFD_NONBLOCK | TFD_CLOEXEC)
        if not (self.conns and self.running and self.buffer):
            raise MemoryError
        if self.ep < 0 or self.timer < 0:
            raise OSError(errno, "the emitter needs epoll and timerfd")
        self.offset = bracket_offset(500, &width)
        ev.events = EPOLLIN
        ev.data.u64 = TAG_LISTEN
        epoll_ctl(self.ep, EPOLL_CTL_ADD, fd, &ev)
        ev.data.u64 = TAG_TIMER
        epoll_ctl(self.ep, EPOLL_CTL_ADD, self.timer, &ev)
        ev.data.u64 = TAG_STDIN
        epoll_ctl(self.ep, EPOLL_CTL_ADD, 0, &ev)

    def __dealloc__(self):
        for i in range(self.size):
            if self.conns[i].used:
                close(self.conns[i].fd)
            free(self.conns[i].request)
            free(self.conns[i].text)
        if self.ep >= 0:
            close(self.ep)
        if self.timer >= 0:
            close(self.timer)
        free(self.conns)
        free(self.running)
        free(self.buffer)

    def serve(self):
        """Serve until stdin ends. Holds no lock of Python's meanwhile."""
        with nogil:
            if self.step_ns:
                self.serve_paced()
            else:
                self.serve_unpaced()

    @property
    def records_written(self):
        """Records in the log."""
        return self.header[0]

    # ------------------------------------------------------------ loops

    cdef void serve_paced(self) noexcept nogil:
        cdef int64_t next = mono_ns() + self.step_ns, now, resample = 0, width
        cdef itimerspec t
        memset(&t, 0, sizeof(t))
        while not self.stopping:
            now = mono_ns()
            if now > resample:
                self.offset = bracket_offset(100, &width)
                resample = now + 1000000000
            if next - now > EARLY_NS:
                t.it_value.tv_sec = (next - EARLY_NS) // 1000000000
                t.it_value.tv_nsec = (next - EARLY_NS) % 1000000000
                timerfd_settime(self.timer, TFD_TIMER_ABSTIME, &t, NULL)
                self.events(-1)
                continue
            self.events(0)
            while mono_ns() < next:
                pass
            self.step(next)
            self.steps += 1
            self.header[2] = self.steps
            next += self.step_ns
            if mono_ns() > next:
                # a burst longer than a step: the grid moves on rather than bunch up
                self.late_steps += 1
                self.header[3] = self.late_steps
                next += (mono_ns() - next) // self.step_ns * self.step_ns + self.step_ns

    cdef void serve_unpaced(self) noexcept nogil:
        cdef int i
        while not self.stopping:
            self.events(0 if self.n_running else -1)
            i = 0
            while i < self.n_running:
                # a stream that ended was replaced by the last of the list: look at that one next
                if self.conns[self.running[i]].blocked or self.emit(&self.conns[self.running[i]]):
                    i += 1

    cdef void step(self, int64_t due) noexcept nogil:
        cdef int i = 0
        cdef Conn *c
        while i < self.n_running:
            c = &self.conns[self.running[i]]
            if c.blocked or due < c.ready_ns or self.emit(c):
                i += 1

    cdef bint emit(self, Conn *c) noexcept nogil:
        """Send the stream's next event. False when that ended it."""
        cdef char *p
        cdef int n, done
        if c.token == c.tokens:
            return self.emit_end(c)
        if c.token == 0:
            p, n = c.text, c.first_n
        elif c.token + 1 < c.tokens:
            p, n = c.text + c.first_n, c.token_n
        else:
            p, n = c.text + c.first_n + c.token_n, c.last_n
        if c.sent == 0:
            self.note(c.serial, c.token)
        done = self.push(c, p, n)
        if done <= 0:
            return done == 0
        c.token += 1
        if c.token < c.tokens:
            return True
        return self.emit_end(c)

    cdef bint emit_end(self, Conn *c) noexcept nogil:
        """Send what follows the last token; the socket may be full of tokens. False when the answer is over."""
        cdef int done = self.push(c, c.text + c.first_n + c.token_n + c.last_n, c.end_n)
        if done <= 0:
            return done == 0
        self.note(c.serial, C_ENDED)
        self.unlist(c)
        return False

    cdef int push(self, Conn *c, const char *p, int n) noexcept nogil:
        """Send the rest of these bytes. 1 when all are out, 0 when the socket is full, -1 when the stream is gone."""
        cdef ssize_t put = send(c.fd, p + c.sent, n - c.sent, MSG_DONTWAIT | MSG_NOSIGNAL)
        if put == n - c.sent:
            c.sent = 0
            return 1
        if put < 0 and errno != EAGAIN and errno != EINTR:
            self.drop(c)
            return -1
        c.sent += put if put > 0 else 0
        self.block(c, True)
        return 0

    cdef void note(self, uint32_t serial, uint32_t token) noexcept nogil:
        self.note_at(mono_ns(), serial, token)

    cdef void note_at(self, int64_t ns, uint32_t serial, uint32_t token) noexcept nogil:
        cdef int64_t n = self.header[0]
        cdef char *p
        if n >= self.capacity:
            self.header[1] += 1
            return
        p = self.records + n * RECORD_BYTES_C
        (<int64_t *>p)[0] = ns
        (<uint32_t *>(p + 8))[0] = serial
        (<uint32_t *>(p + 12))[0] = token
        self.header[0] = n + 1

    # ------------------------------------------------------------ sockets

    cdef void events(self, int timeout) noexcept nogil:
        cdef epoll_event events[BATCH]
        cdef int n = epoll_wait(self.ep, events, BATCH, timeout), i
        cdef uint64_t tag
        cdef char scratch[256]
        cdef Conn *c
        for i in range(n):
            tag = events[i].data.u64
            if tag == TAG_LISTEN:
                self.accept()
            elif tag == TAG_TIMER:
                read(self.timer, scratch, 8)
            elif tag == TAG_STDIN:
                if read(0, scratch, sizeof(scratch)) <= 0:
                    self.stopping = True
            else:
                c = &self.conns[tag]
                if c.used and events[i].events & EPOLLOUT:
                    self.block(c, False)
                if c.used and events[i].events & (EPOLLIN | EPOLLRDHUP):
                    self.receive(c)

    cdef void accept(self) noexcept nogil:
        cdef int fd, i, on = 1
        cdef epoll_event ev
        while True:
            fd = accept4(self.listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)
            if fd < 0:
                return
            for i in range(self.size):
                if not self.conns[i].used:
                    break
            else:
                close(fd)
                continue
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on))
            setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof(on))
            setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, b"cubic", 5)   # bbr would pace the sends
            self.conns[i].fd = fd
            self.conns[i].used = True
            self.conns[i].running = self.conns[i].blocked = False
            self.conns[i].n = 0
            ev.events = EPOLLIN | EPOLLRDHUP
            ev.data.u64 = <uint64_t>i
            epoll_ctl(self.ep, EPOLL_CTL_ADD, fd, &ev)

    cdef void receive(self, Conn *c) noexcept nogil:
        cdef iovec iov
        cdef msghdr msg
        cdef char control[128]
        cdef cmsghdr *m
        cdef timespec *t
        cdef ssize_t got
        cdef int64_t stamp
        memset(&msg, 0, sizeof(msg))
        iov.iov_base = self.buffer
        iov.iov_len = READ_BYTES
        msg.msg_iov = &iov
        msg.msg_iovlen = 1
        msg.msg_control = control
        msg.msg_controllen = sizeof(control)
        got = recvmsg(c.fd, &msg, MSG_DONTWAIT)
        stamp = mono_ns()
        if got <= 0:
            if got == 0 or (errno != EAGAIN and errno != EINTR):
                self.drop(c)
            return
        m = CMSG_FIRSTHDR(&msg)
        if m != NULL and m.cmsg_level == SOL_SOCKET and m.cmsg_type == SO_TIMESTAMPNS:
            t = <timespec *>CMSG_DATA(m)
            stamp = <int64_t>t.tv_sec * 1000000000 + t.tv_nsec - self.offset
        if c.n + got + 1 > c.cap:
            c.cap = (c.n + got + 1) * 2
            c.request = <char *>realloc(c.request, c.cap)
        memcpy(c.request + c.n, self.buffer, got)
        c.n += got
        c.request[c.n] = 0
        self.begin(c, stamp)

    cdef void begin(self, Conn *c, int64_t stamp) noexcept nogil:
        """Start answering if the whole request is there; at once if it asks for no tokens."""
        cdef char *head_end
        cdef char *at
        cdef Py_ssize_t length, whole
        while not c.running:
            head_end = <char *>memmem(c.request, c.n, b"\r\n\r\n", 4)
            if head_end == NULL:
                return
            head_end[0] = 0
            at = strcasestr(c.request, b"content-length:")
            head_end[0] = c'\r'
            length = strtol(at + 15, NULL, 10) if at != NULL else 0
            whole = head_end + 4 - c.request + length
            if c.n < whole:
                return
            if c.request[0] == c'P' and memmem(c.request, line_of(c.request, c.n), b"/completions ", 13) != NULL:
                self.begin_answer(c, stamp, head_end + 4, length)
            else:
                self.answer_look(c)
            memmove(c.request, c.request + whole, c.n - whole)
            c.n -= whole

    cdef void answer_look(self, Conn *c) noexcept nogil:
        cdef char body[512]
        cdef Py_ssize_t line = line_of(c.request, c.n)
        if c.request[0] == c'P' or (memmem(c.request, line, b"/models ", 8) == NULL
                                    and memmem(c.request, line, b"/health ", 8) == NULL):
            send(c.fd, NOT_FOUND, strlen_c(NOT_FOUND), MSG_DONTWAIT | MSG_NOSIGNAL)
            return
        self.answer_json(c, body, snprintf(body, sizeof(body), MODEL, self.model_at))

    cdef void answer_json(self, Conn *c, char *body, int size) noexcept nogil:
        cdef char text[1024]
        if c.request[0] == c'H':
            body[0] = 0              # HEAD: the length, not the body
        size = snprintf(text, sizeof(text), JSON, size, body)
        send(c.fd, text, size, MSG_DONTWAIT | MSG_NOSIGNAL)

    cdef void begin_answer(self, Conn *c, int64_t stamp, const char *body, Py_ssize_t length) noexcept nogil:
        cdef char whole[768]
        c.tokens = <uint32_t>number_after(body, length, b'"max_completion_tokens":',
                                          number_after(body, length, b'"max_tokens":', 16))
        if c.tokens < 1:
            c.tokens = 1
        if not is_true(body, length, b'"stream":'):
            self.answer_json(c, whole, snprintf(whole, sizeof(whole), WHOLE, self.model_at, <int>length,
                                                <int>(length + c.tokens), c.tokens))
            return
        c.serial = self.serial
        self.serial += 1
        self.note_at(stamp, c.serial, C_RECEIVED)
        self.format(c, <int>length)
        c.token = 0
        c.sent = 0
        c.ready_ns = stamp + self.ttft_ns
        c.running = True
        c.running_at = self.n_running
        self.running[self.n_running] = <int>(c - self.conns)
        self.n_running += 1
        send(c.fd, HEAD, strlen_c(HEAD), MSG_DONTWAIT | MSG_NOSIGNAL)

    cdef void format(self, Conn *c, int prompt) noexcept nogil:
        cdef char text[1024]
        cdef int n, at = 0
        if c.text == NULL:
            c.text = <char *>malloc(8192)
        n = snprintf(text, sizeof(text), ROLE, c.serial, self.model_at)
        at += self.chunk(c.text + at, text, n)
        n = snprintf(text, sizeof(text), TOKEN, c.serial, self.model_at, b"null" if c.tokens > 1 else b'"length"')
        at += self.chunk(c.text + at, text, n)
        c.first_n = at
        at += self.chunk(c.text + at, text, n)
        c.token_n = at - c.first_n
        n = snprintf(text, sizeof(text), TOKEN, c.serial, self.model_at, b'"length"')
        at += self.chunk(c.text + at, text, n)
        c.last_n = at - c.first_n - c.token_n
        n = snprintf(text, sizeof(text), USAGE, c.serial, self.model_at, prompt, prompt + <int>c.tokens, c.tokens)
        at += self.chunk(c.text + at, text, n)
        at += self.chunk(c.text + at, b"data: [DONE]\n\n", 14)
        memcpy(c.text + at, b"0\r\n\r\n", 5)
        at += 5
        c.end_n = at - c.first_n - c.token_n - c.last_n

    cdef int chunk(self, char *out, const char *text, int n) noexcept nogil:
        cdef int at = snprintf(out, 16, b"%x\r\n", n)
        memcpy(out + at, text, n)
        memcpy(out + at + n, b"\r\n", 2)
        return at + n + 2

    cdef void block(self, Conn *c, bint on) noexcept nogil:
        cdef epoll_event ev
        c.blocked = on
        ev.events = EPOLLIN | EPOLLRDHUP | (EPOLLOUT if on else 0)
        ev.data.u64 = <uint64_t>(c - self.conns)
        epoll_ctl(self.ep, EPOLL_CTL_MOD, c.fd, &ev)

    cdef void unlist(self, Conn *c) noexcept nogil:
        self.n_running -= 1
        self.running[c.running_at] = self.running[self.n_running]
        self.conns[self.running[c.running_at]].running_at = c.running_at
        c.running = False
        if c.n:
            self.begin(c, mono_ns())     # a request that was already there

    cdef void drop(self, Conn *c) noexcept nogil:
        c.n = 0
        if c.running:
            self.unlist(c)
        close(c.fd)
        c.used = False


cdef enum:
    RECORD_BYTES_C = 16

cdef Py_ssize_t line_of(const char *p, Py_ssize_t n) noexcept nogil:
    """Bytes of the request line."""
    cdef char *end = <char *>memmem(p, n, b"\r\n", 2)
    return n if end == NULL else end - p

cdef long number_after(const char *p, Py_ssize_t n, const char *name, long absent) noexcept nogil:
    """The number behind `name` in `n` bytes; blanks may stand between."""
    cdef char *at = <char *>memmem(p, n, name, strlen_c(name))
    return absent if at == NULL else strtol(at + strlen_c(name), NULL, 10)

cdef bint is_true(const char *p, Py_ssize_t n, const char *name) noexcept nogil:
    """Is the value behind `name` true?"""
    cdef const char *at = <const char *>memmem(p, n, name, strlen_c(name))
    if at == NULL:
        return False
    at += strlen_c(name)
    while at < p + n - 1 and at[0] == c' ':
        at += 1
    return at[0] == c't'

cdef Py_ssize_t strlen_c(const char *p) noexcept nogil:
    cdef Py_ssize_t n = 0
    while p[n]:
        n += 1
    return n
