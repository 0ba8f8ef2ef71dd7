# The byte machine: bytes of one HTTP/1.1 answer in, columns out. Included by _timing.pyx.
#
# Goals    any slicing of the same bytes gives the same events; nothing is parsed as JSON here; an ordinary token
#          costs tens of ns; whatever is not ordinary is kept raw, so that the trace room can decide with a parser.
# Plan     feed -> head (_head.pxi) | framing (chunked, length, close) -> body -> lines -> events -> scan -> rec_event
#          Every layer works on the caller's bytes in place and copies only what a slice border cuts.
# Warning  "events" of a read are patched after the fact (FL_COALESCED), so a block may be sealed between reads only.
#
# An event's stamp is that of the read which brought the end of its last data line: some servers send the blank line
# later, or never. An event is coalesced when anything but the end of its own HTTP chunk follows it in its read: the
# kernel keeps one stamp a read, that of the last segment.

cdef enum Http:
    HEAD, UNTIL_CLOSE, LENGTH, CHUNK_SIZE, SIZE_PAD, SIZE_LF, CHUNK_EXT, CHUNK_DATA, CHUNK_END, CHUNK_LF, TRAILER
    COMPLETE, BROKEN

cdef enum:
    HEAD_LIMIT = 65536
    EVENT_LIMIT = 67108864
    SIZE_DIGITS = 15
    BODY_KEPT = 4194304
    STRAY_KEPT = 4096

cdef inline bint buf_add(Buf *b, const char *p, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t cap
    cdef char *grown
    if n == 0:
        return True                  # there may be no memory yet, and C forbids memcpy even of nothing into none
    if b.n + n > b.cap:              # rare: a buffer is kept from request to request
        cap = b.cap * 2 if b.cap else 1024
        while cap < b.n + n:
            cap *= 2
        grown = <char *>realloc(b.p, cap)
        if grown == NULL:
            return False
        b.p = grown
        b.cap = cap
    memcpy(b.p + b.n, p, n)
    b.n += n
    return True

cdef void stream_begin(Stream *s, Rec *rec, int64_t request) noexcept nogil:
    cdef int i
    for i in range(N_FIELDS):
        s.row[i] = -1
    s.row[F_REQUEST] = request
    s.row[F_RESPONSE_BYTES] = s.row[F_EVENTS] = s.row[F_COALESCED] = s.row[F_CLAMPED] = 0
    s.row[F_FRAMING] = s.row[F_FLAGS] = s.row[F_BACKOFF] = 0
    s.http = HEAD
    s.sse = s.bom = s.after_cr = s.has_data = s.event_error = s.event_ping = s.first_choices = s.saw = 0
    s.remain = s.body_kept = s.pings = 0
    s.data_more = 0
    s.data_end = NULL
    s.digits = 0
    s.head.n = s.line.n = s.data.n = s.usage.n = s.stray.n = s.shape.n = 0
    s.read_event = -1
    s.first_token = s.last_token = -1
    s.text_events = 0
    s.told_tokens = -1
    s.why = NULL

cdef void stream_free(Stream *s) noexcept nogil:
    free(s.head.p)
    free(s.line.p)
    free(s.data.p)
    free(s.usage.p)
    free(s.stray.p)
    free(s.shape.p)
    memset(s, 0, sizeof(Stream))

cdef int broken(Stream *s, const char *why, int code) noexcept nogil:
    s.http = BROKEN
    s.why = why
    return code

cdef int feed(Stream *s, Rec *rec, const char *p, Py_ssize_t n, int64_t stamp, int32_t delay, uint8_t flags,
              Py_ssize_t *used) noexcept nogil:
    """One read. `used` gets the bytes taken; less than n only when the message ended before them."""
    cdef const char *start = p
    cdef const char *end = p + n
    cdef const char *nl
    cdef Py_ssize_t take
    cdef int code = FEED_MORE, digit
    cdef char c
    s.stamp = stamp
    s.delay = delay
    s.stamp_flags = flags
    s.read_event = -1
    s.read_event_end = s.data_end = NULL
    if s.row[F_FIRST_BYTE] < 0 and n > 0:
        s.row[F_FIRST_BYTE] = stamp
    while p < end and code == FEED_MORE:
        if s.http == CHUNK_DATA or s.http == LENGTH:
            take = end - p
            if take > s.remain:
                take = <Py_ssize_t>s.remain
            code = body(s, rec, p, take)
            p += take
            s.remain -= take
            if s.remain == 0 and code == FEED_MORE:
                if s.http == LENGTH:
                    code = message_end(s, rec)
                else:
                    s.http = CHUNK_END
        elif s.http == CHUNK_END or s.http == CHUNK_LF:
            if p[0] == c'\r' and s.http == CHUNK_END:
                s.http = CHUNK_LF
                p += 1
                if p == end:
                    continue
            if p[0] == c'\n':
                s.http = CHUNK_SIZE
                s.remain = 0
                s.digits = 0
            else:
                code = broken(s, b"a chunk is longer than its size says", FEED_MALFORMED)
            p += 1
        elif s.http == CHUNK_SIZE:
            digit = hex_digit(p[0])
            while digit >= 0:
                s.digits += 1
                s.remain = (s.remain << 4) | digit
                p += 1
                if s.digits > SIZE_DIGITS or p == end:
                    break
                digit = hex_digit(p[0])
            if s.digits > SIZE_DIGITS:
                code = broken(s, b"a chunk size of more than 15 hex digits", FEED_LIMIT)
            elif digit >= 0:
                continue             # the read ended inside the number
            elif s.digits == 0:
                code = broken(s, b"a chunk size that is no hex number", FEED_MALFORMED)
            elif p[0] == c'\n' or (p[0] == c'\r' and p + 1 < end and p[1] == c'\n'):
                p += 1 if p[0] == c'\n' else 2
                chunk_sized(s)
            else:
                s.http = SIZE_PAD
                s.head.n = 0         # from here on the bytes of blanks and extensions, or of trailers
        elif s.http == SIZE_PAD:
            # some servers pad the number with blanks; anything else that is not its line's end makes it no number
            c = p[0]
            if c == c'\n':
                chunk_sized(s)
            elif c == c'\r':
                s.http = SIZE_LF
            elif c == c';':
                s.http = CHUNK_EXT
            elif c == c' ' or c == c'\t':
                code = head_limit(s, 1)
            else:
                code = broken(s, b"a chunk size that is no hex number", FEED_MALFORMED)
            p += 1
        elif s.http == SIZE_LF:
            if p[0] == c'\n':
                chunk_sized(s)
            else:
                code = broken(s, b"a chunk size that is no hex number", FEED_MALFORMED)
            p += 1
        elif s.http == CHUNK_EXT:
            nl = <const char *>memchr(p, c'\n', end - p)
            code = head_limit(s, (end if nl == NULL else nl) - p)
            p = end if nl == NULL else nl + 1
            if nl != NULL and code == FEED_MORE:
                chunk_sized(s)
        elif s.http == TRAILER:
            # `digits` counts the bytes of the trailer line so far, -1 is a lone CR: an empty line ends the message
            c = p[0]
            p += 1
            code = head_limit(s, 1)
            if code == FEED_MORE:
                if c == c'\n':
                    if s.digits <= 0:
                        code = message_end(s, rec)
                    s.digits = 0
                else:
                    s.digits = -1 if s.digits == 0 and c == c'\r' else 1
        elif s.http == HEAD:
            code = head_bytes(s, rec, &p, end)
        elif s.http == UNTIL_CLOSE:
            code = body(s, rec, p, end - p)
            p = end
        else:
            code = FEED_COMPLETE if s.http == COMPLETE else FEED_MALFORMED
    used[0] = p - start
    s.row[F_RESPONSE_BYTES] += p - start
    if s.read_event >= 0 and followed(s, s.read_event_end, end):
        flag_coalesced(s, rec)
    if s.has_data and s.data_end != NULL:
        s.data_more = followed(s, s.data_end, end)
    return code

cdef inline bint followed(const Stream *s, const char *p, const char *end) noexcept nogil:
    # the CRLF that ends the event's own chunk travels with it; anything more came later
    if s.row[F_FRAMING] == 1:
        if p < end and p[0] == c'\r':
            p += 1
        if p < end and p[0] == c'\n':
            p += 1
    return p < end

cdef void flag_coalesced(Stream *s, Rec *rec) noexcept nogil:
    if not rec.flags[s.read_event] & C_FL_COALESCED:
        rec.flags[s.read_event] |= C_FL_COALESCED
        s.row[F_COALESCED] += 1

cdef inline int hex_digit(char c) noexcept nogil:
    if c'0' <= c <= c'9':
        return c - c'0'
    c |= 0x20
    return c - c'a' + 10 if c'a' <= c <= c'f' else -1

cdef inline void chunk_sized(Stream *s) noexcept nogil:
    s.digits = 0
    if s.remain:
        s.http = CHUNK_DATA
    else:
        s.http = TRAILER
        s.head.n = 0

cdef inline int head_limit(Stream *s, Py_ssize_t n) noexcept nogil:
    s.head.n += n
    return FEED_MORE if s.head.n <= HEAD_LIMIT else \
        broken(s, b"chunk extensions or trailers of more than 64 KB", FEED_LIMIT)

cdef int message_end(Stream *s, Rec *rec) noexcept nogil:
    cdef int code = sse_end(s, rec)
    if code != FEED_MORE:
        return code
    s.http = COMPLETE
    s.row[F_FRAMING_END] = s.stamp
    if s.row[F_DONE] < 0:
        s.row[F_DONE] = s.stamp
    return FEED_COMPLETE

cdef int feed_eof(Stream *s, Rec *rec, int64_t stamp) noexcept nogil:
    """The peer closed. COMPLETE when the framing allows it here, MALFORMED (with `why`) when the message is cut."""
    s.stamp = stamp
    s.delay = -1
    s.stamp_flags = C_FL_READ
    s.read_event = -1
    s.data_end = NULL
    if s.http == COMPLETE:
        return FEED_COMPLETE
    if s.http == UNTIL_CLOSE:
        return message_end(s, rec)
    stream_cut(s, rec)
    return FEED_MALFORMED

cdef void stream_cut(Stream *s, Rec *rec) noexcept nogil:
    """The exchange ends here, message complete or not: an event whose data is all there counts."""
    if s.sse == 1 and s.http != COMPLETE:
        sse_end(s, rec)


# ---------------------------------------------------------------- body, lines, events

cdef inline int body(Stream *s, Rec *rec, const char *p, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t kept
    if s.sse == 1:
        return sse_feed(s, rec, p, n)
    kept = BODY_KEPT - s.body_kept
    if kept > n:
        kept = n
    if kept > 0 and not s.row[F_FLAGS] & C_RF_ENCODED:
        s.body_kept += kept
        if not rec_blob(rec, s.row[F_REQUEST], 0, BLOB_BODY_KIND, p, kept):
            s.row[F_FLAGS] |= C_RF_BLOB_CUT
    return FEED_MORE

cdef int sse_feed(Stream *s, Rec *rec, const char *p, Py_ssize_t n) noexcept nogil:
    cdef const char *end = p + n
    cdef const char *nl
    cdef const char *cr
    cdef const char *eol
    cdef const char *following
    cdef bint whole
    cdef int code
    while s.bom < 3 and p < end:
        # a byte-order mark may stand before the first line, and may be cut anywhere
        if <uint8_t>p[0] != (0xEF if s.bom == 0 else 0xBB if s.bom == 1 else 0xBF):
            if s.bom and not buf_add(&s.line, b"\xef\xbb", s.bom):
                return broken(s, b"out of memory", FEED_LIMIT)
            s.bom = 3
            break
        s.bom += 1
        p += 1
    while p < end:
        if s.after_cr:
            s.after_cr = 0
            if p[0] == c'\n':
                p += 1
                continue
        nl = <const char *>memchr(p, c'\n', end - p)
        cr = <const char *>memchr(p, c'\r', (nl if nl != NULL else end) - p)
        if cr != NULL:
            eol = cr
            following = cr + 1
            if following < end:
                if following[0] == c'\n':
                    following += 1
            else:
                s.after_cr = 1
        elif nl != NULL:
            eol = nl
            following = nl + 1
        else:
            if s.line.n + (end - p) > EVENT_LIMIT or not buf_add(&s.line, p, end - p):
                return broken(s, b"an event of more than 64 MB", FEED_LIMIT)
            return FEED_MORE
        # with the blank line at hand the event is taken from where it lies, without a copy
        whole = following < end and (following[0] == c'\n' or following[0] == c'\r')
        if s.line.n:
            if s.line.n + (eol - p) > EVENT_LIMIT or not buf_add(&s.line, p, eol - p):
                return broken(s, b"an event of more than 64 MB", FEED_LIMIT)
            code = sse_line(s, rec, s.line.p, s.line.n, following, whole)
            s.line.n = 0
        else:
            code = sse_line(s, rec, p, eol - p, following, whole)
        if code != FEED_MORE:
            return code
        p = following
    return FEED_MORE

cdef int sse_line(Stream *s, Rec *rec, const char *p, Py_ssize_t n, const char *following, bint whole) noexcept nogil:
    cdef char last
    if n == 0:
        if s.has_data:
            dispatch_kept(s, rec, following)
        elif s.read_event >= 0 and s.read_event_end == p:
            s.read_event_end = following
        s.event_error = s.event_ping = 0
        return FEED_MORE
    if p[0] == c'd' and n >= 4 and memcmp(p, b"data", 4) == 0 and (n == 4 or p[4] == c':'):
        p += 5
        n -= 5
        if n < 0:
            n = 0
        elif n and p[0] == c' ':
            p += 1
            n -= 1
        if s.has_data:
            # `}` and then `{` or `[` is nowhere inside one JSON text: a server that leaves out the blank line
            last = s.data.p[s.data.n - 1] if s.data.n else 0
            if n and ((last == c'}' and (p[0] == c'{' or p[0] == c'[')) or (last == c']' and p[0] == c'{')):
                dispatch_kept(s, rec, NULL)
        if not s.has_data and whole:
            dispatch(s, rec, p, n, s.stamp, s.delay, s.stamp_flags, following)
            return FEED_MORE
        if s.has_data:
            if not buf_add(&s.data, b"\n", 1):
                return broken(s, b"out of memory", FEED_LIMIT)
        else:
            s.data.n = 0
        if s.data.n + n > EVENT_LIMIT or not buf_add(&s.data, p, n):
            return broken(s, b"an event of more than 64 MB", FEED_LIMIT)
        s.has_data = 1
        s.data_ns = s.stamp
        s.data_delay = s.delay
        s.data_flags = s.stamp_flags
        s.data_end = following
        s.data_more = 0
    elif p[0] == c'e' and n >= 6 and memcmp(p, b"event:", 6) == 0:
        s.event_error = (n == 11 or (n == 12 and p[6] == c' ')) and memcmp(p + n - 5, b"error", 5) == 0
        s.event_ping = (n == 10 or (n == 11 and p[6] == c' ')) and memcmp(p + n - 4, b"ping", 4) == 0
    elif p[0] != c':' and s.stray.n < STRAY_KEPT and not is_field(p, n):
        buf_add(&s.stray, p, n if n < STRAY_KEPT - s.stray.n else STRAY_KEPT - s.stray.n)
        buf_add(&s.stray, b"\n", 1)
    return FEED_MORE                 # comments, id, retry and unknown fields say nothing about tokens

cdef bint is_field(const char *p, Py_ssize_t n) noexcept nogil:
    # of those that are not data
    cdef const char *colon = <const char *>memchr(p, c':', n)
    if colon != NULL:
        n = colon - p
    return (n == 2 and memcmp(p, b"id", 2) == 0) or (n == 5 and memcmp(p, b"retry", 5) == 0) \
        or (n == 5 and memcmp(p, b"event", 5) == 0)

cdef void dispatch_kept(Stream *s, Rec *rec, const char *following) noexcept nogil:
    # `following`: behind the event's blank line; NULL where it has none and ends with its data
    cdef uint8_t flags = s.data_flags
    if s.data_end == NULL:           # the data, and so the stamp, came with an earlier read
        if following == NULL and s.data_more:
            flags |= C_FL_COALESCED
        following = NULL
    elif following == NULL:
        following = s.data_end
    s.has_data = 0
    dispatch(s, rec, s.data.p, s.data.n, s.data_ns, s.data_delay, flags, following)
    s.data.n = 0

cdef int sse_end(Stream *s, Rec *rec) noexcept nogil:
    # a last line without its end, a last event without its blank line: what came is kept
    cdef int code = FEED_MORE
    if s.sse == 1 and s.line.n:
        code = sse_line(s, rec, s.line.p, s.line.n, NULL, False)
        s.line.n = 0
    if s.has_data:
        dispatch_kept(s, rec, NULL)
    return code

cdef bint is_blank(char c) noexcept nogil:
    return c == c' ' or c == c'\t' or c == c'\n'

cdef void dispatch(Stream *s, Rec *rec, const char *p, Py_ssize_t n, int64_t stamp, int32_t delay, uint8_t flags,
                   const char *following) noexcept nogil:
    cdef Scan found
    cdef int32_t ordinal = <int32_t>s.row[F_EVENTS]
    cdef Py_ssize_t here
    while n and is_blank(p[n - 1]):
        n -= 1
    while n and is_blank(p[0]):
        p += 1
        n -= 1
    if n == 0:
        return                       # relays keep a line warm with empty data
    if n == 6 and memcmp(p, b"[DONE]", 6) == 0:
        found.channel, found.nbytes, found.tokens, found.flags, found.keep = C_CH_DONE, 0, -1, 0, 0
        s.row[F_FLAGS] |= C_RF_DONE
        if s.row[F_DONE] < 0:
            s.row[F_DONE] = stamp
    else:
        scan(s, p, n, &found)
        if s.event_error:
            found.channel = 15
            found.keep = 1
            found.flags |= C_FL_NAMED_ERROR
        s.pings += s.event_ping
        if found.ends and s.row[F_DONE] < 0:
            s.row[F_DONE] = stamp    # the end marker of an API that has no [DONE]
        if found.wrong or s.event_error:
            s.saw |= C_SAW_ERROR
        elif found.ends or found.flags & C_FL_FINISH:
            s.saw |= C_SAW_FINISH
        if found.tokens >= 0:
            s.told_tokens = found.tokens
        if found.channel != 15:      # an odd one is kept, and what it seems to say must push out nothing that is sure
            if found.flags & C_FL_CHOICES and not s.first_choices:
                s.first_choices = 1
                found.keep = 1
            if found.flags & C_FL_USAGE:
                s.usage.n = 0
                if not found.keep and not rec.save_text:
                    buf_add(&s.usage, p, n)
                    s.usage_ordinal = ordinal
        if found.keep or rec.save_text:
            if not rec_blob(rec, s.row[F_REQUEST], ordinal, BLOB_EVENT_KIND, p, n):
                s.row[F_FLAGS] |= C_RF_BLOB_CUT
        if 1 <= found.channel <= 4 or (found.channel == 15 and found.flags & C_FL_CHOICES):
            s.saw |= C_SAW_TEXT      # or, of an event that only a parser can read, most likely
        if 1 <= found.channel <= 4:
            if s.first_token < 0:
                s.first_token = stamp
            s.last_token = stamp
            s.text_events += 1
            rec.texts += 1
    if s.read_event >= 0:
        flag_coalesced(s, rec)       # this one follows it in the same read
    here = rec_event(rec, stamp, s.row[F_REQUEST], delay, found.nbytes, found.tokens, found.channel,
                     flags | found.flags)
    s.row[F_EVENTS] += 1
    if flags & C_FL_CLAMPED:
        s.row[F_CLAMPED] += 1
    if flags & C_FL_COALESCED:
        s.row[F_COALESCED] += 1
    # an event whose data ended in an earlier read shares nothing with this one
    if following != NULL:
        s.read_event = here
        s.read_event_end = following
    else:
        s.read_event = -1

cdef int64_t stream_progress(const Stream *s) noexcept nogil:
    """A number that changes whenever the answer comes on: with events and pieces of them, not with comments or pings."""
    cdef int64_t piece = s.stray.n + (s.data.n if s.has_data else 0)
    if s.sse != 1:
        return s.row[F_RESPONSE_BYTES]
    if s.line.n and s.line.p[0] != c':':
        piece += s.line.n
    return (s.row[F_EVENTS] - s.pings) << 28 | piece

cdef void stream_end(Stream *s, Rec *rec) noexcept nogil:
    """Before the row is written: the last usage, where it was not kept with its event; what a body without events said."""
    if s.usage.n:
        if not rec_blob(rec, s.row[F_REQUEST], s.usage_ordinal, BLOB_EVENT_KIND, s.usage.p, s.usage.n):
            s.row[F_FLAGS] |= C_RF_BLOB_CUT
        s.usage.n = 0
    if s.stray.n and s.row[F_EVENTS] == 0:
        if not rec_blob(rec, s.row[F_REQUEST], 0, BLOB_BODY_KIND, s.stray.p, s.stray.n):
            s.row[F_FLAGS] |= C_RF_BLOB_CUT
        s.stray.n = 0


# ---------------------------------------------------------------- the machine without a socket

cdef class Parser:
    """The byte machine on its own: feed bytes and stamps, then look into the Recorder's blocks.

    For tests, fuzzing and benches; the engine runs the same functions.
    """
    cdef Stream s
    cdef Recorder recorder
    cdef bint begun

    def __cinit__(self, Recorder recorder not None):
        memset(&self.s, 0, sizeof(Stream))
        self.recorder = recorder

    def __dealloc__(self):
        stream_free(&self.s)

    def begin(self, int64_t request, int64_t sent_ns):
        """Start an exchange numbered `request`, handed to the kernel at `sent_ns`. BufferError when no block is free."""
        if not self.recorder.ready():
            raise BufferError("no free block")
        stream_begin(&self.s, &self.recorder.rec, request)
        self.s.row[F_SENT] = sent_ns
        rec_event(&self.recorder.rec, sent_ns, request, -1, 0, -1, C_CH_SENT, 0)
        self.begun = True

    def feed(self, const unsigned char[::1] data not None, int64_t stamp_ns, int32_t delay_ns=0, int flags=0):
        """One read: (code, bytes taken). code 0 = more to come, 1 = message complete, below 0 = malformed (-5) or past
        a limit (-6); then `why` says what."""
        cdef Py_ssize_t used = 0, at = 0, n = data.shape[0]
        cdef int code = FEED_MORE
        if not self.begun:
            raise ValueError("begin() first")
        # an engine never reads more than 128 KB at once; the Recorder counts on it
        while at < n and code == FEED_MORE:
            if not self.recorder.ready():
                raise BufferError("no free block")
            code = feed(&self.s, &self.recorder.rec, <const char *>&data[at], min(n - at, 131072), stamp_ns, delay_ns,
                        flags, &used)
            at += used
        return code, at

    def feed_slices(self, bytes data not None, int size, int64_t stamp_ns):
        """`feed` in reads of `size` bytes without returning to Python between them; the last code. For benches."""
        cdef const char *p = data
        cdef Py_ssize_t at = 0, n = len(data), used = 0
        cdef int code = FEED_MORE
        if not self.begun or not 0 < size <= 131072:
            raise ValueError(f"size={size}: 1 to 131072, after begin()")
        while at < n and code == FEED_MORE:
            if not self.recorder.ready():
                raise BufferError("no free block")
            with nogil:
                while at < n and code == FEED_MORE and rec_room(&self.recorder.rec):
                    code = feed(&self.s, &self.recorder.rec, p + at, size if size < n - at else n - at, stamp_ns, 0, 0,
                                &used)
                    at += used
        return code

    def eof(self, int64_t stamp_ns):
        """The peer closed: 1 when the message may end so, -5 when it was cut."""
        if not self.recorder.ready():
            raise BufferError("no free block")
        return feed_eof(&self.s, &self.recorder.rec, stamp_ns)

    def finish(self, int end=C_END_COMPLETE):
        """Write the exchange's row with the END_ code `end`, and give it as a dict of ROW_FIELDS."""
        if not self.recorder.ready():
            raise BufferError("no free block")
        self.s.row[F_END] = end
        stream_end(&self.s, &self.recorder.rec)
        rec_row(&self.recorder.rec, self.s.row)
        return dict(zip(ROW_FIELDS, [self.s.row[i] for i in range(N_FIELDS)]))

    @property
    def why(self):
        """What was malformed, or None."""
        return None if self.s.why == NULL else (<bytes>self.s.why).decode()
