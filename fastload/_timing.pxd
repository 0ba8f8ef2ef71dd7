# The C face of _timing: what _client cimports. The grammar and the columns know no socket.
from libc.stdint cimport int32_t, int64_t, uint8_t

cdef enum:                     # one row of `requests`, as int64, -1 = null; the order is ROW_FIELDS
    F_REQUEST, F_LEVEL, F_SLOT, F_ATTEMPT, F_ROLE, F_DUE, F_SENT, F_SENT_DONE, F_CONNECT, F_TLS
    F_FIRST_BYTE, F_HEAD, F_DONE, F_FRAMING_END, F_END, F_STATUS, F_ERRNO, F_REQUEST_BYTES
    F_RESPONSE_BYTES, F_EVENTS, F_COALESCED, F_CLAMPED, F_STAMP_SOURCE, F_REUSED, F_BACKOFF, F_RTT
    F_RETRANSMITS, F_FRAMING, F_FLAGS, N_FIELDS

cdef enum:
    C_FL_COALESCED = 1
    C_FL_CLAMPED = 2
    C_FL_READ = 4
    C_FL_CHOICES = 8
    C_FL_FINISH = 16
    C_FL_USAGE = 32
    C_FL_NAMED_ERROR = 64
    C_RF_SSE = 1
    C_RF_DONE = 2
    C_RF_FRAMING_BROKEN = 4
    C_RF_KEEPALIVE = 8
    C_RF_ENCODED = 16
    C_RF_DUE_LATE = 32
    C_RF_RETRIED = 64
    C_RF_BLOB_CUT = 128
    C_CH_DONE = 16
    C_CH_SENT = 255
    C_BLOB_ERROR = 4
    C_SAW_TEXT = 1                   # bits of Stream.saw
    C_SAW_FINISH = 2
    C_SAW_ERROR = 4
    C_END_COMPLETE = 0
    C_END_EOF = 1
    C_END_RESET = 2
    C_END_TIMEOUT = 3
    C_END_CONNECT = 4
    C_END_HTTP = 5
    C_END_LIMIT = 6
    C_END_CANCELLED = 7
    FEED_MORE = 0
    FEED_COMPLETE = 1
    FEED_MALFORMED = -5
    FEED_LIMIT = -6

cdef struct Buf:                     # growable bytes, kept from request to request
    char *p
    Py_ssize_t n
    Py_ssize_t cap

cdef struct Hist:                    # log-linear counts: 128 steps an octave, see Histogram
    int64_t count
    int64_t overflow
    int64_t low
    int64_t high
    int64_t buckets[4736]

cdef struct Rec:                     # the open block's columns; all pointers into shared memory
    int64_t *head
    int64_t *stamp
    int32_t *request
    int32_t *delay
    int32_t *nbytes
    int32_t *tokens
    uint8_t *channel
    uint8_t *flags
    int64_t *rows
    char *arena
    Py_ssize_t n_events, n_rows, n_blob, cap_events, cap_rows, cap_blob, limit_blob
    int64_t level
    int64_t texts                    # events with generated text so far, for the live display
    bint save_text
    bint open

cdef struct Stream:                  # one exchange on one connection; reused for the next
    int64_t row[32]
    uint8_t http, sse, bom, after_cr, has_data, event_error, event_ping, first_choices
    int64_t remain
    int digits
    Buf head, line, data, usage
    Buf stray                        # lines that are none of an event stream: if all are, this is what the answer said
    int32_t usage_ordinal
    int64_t data_ns
    int32_t data_delay
    uint8_t data_flags, data_more
    const char *data_end             # behind the last data line, while its read is being fed
    int64_t body_kept
    # of the read being fed
    int64_t stamp
    int32_t delay
    uint8_t stamp_flags
    Py_ssize_t read_event            # index in the block of this read's last event, -1 = none
    const char *read_event_end
    # the shape of an ordinary text event of this answer
    Buf shape
    Py_ssize_t shape_prefix
    uint8_t shape_channel
    Py_ssize_t shape_told            # where in the shape the completion_tokens stand; 0: no number varies, -1: some do
    # for time limits and the live display; the trace is computed from the columns
    uint8_t saw                      # text, an end, an error: what the answer is worth so far
    int64_t pings                    # of its events, those that only keep the line warm
    int64_t first_token, last_token
    int32_t text_events, told_tokens
    const char *why

cdef int64_t mono_ns() noexcept nogil
cdef int64_t real_ns() noexcept nogil
cdef int64_t bracket_offset(int samples, int64_t *width) noexcept nogil
cdef int64_t convert(int64_t real, int64_t offset, int64_t floor, int64_t now) noexcept nogil
cdef bint hist_record(Hist *h, int64_t value) noexcept nogil
cdef void stream_begin(Stream *s, Rec *rec, int64_t request) noexcept nogil
cdef void stream_free(Stream *s) noexcept nogil
cdef int feed(Stream *s, Rec *rec, const char *p, Py_ssize_t n, int64_t stamp, int32_t delay, uint8_t flags,
              Py_ssize_t *used) noexcept nogil
cdef int feed_eof(Stream *s, Rec *rec, int64_t stamp) noexcept nogil
cdef void stream_cut(Stream *s, Rec *rec) noexcept nogil
cdef void stream_end(Stream *s, Rec *rec) noexcept nogil
cdef int64_t stream_progress(const Stream *s) noexcept nogil
cdef Py_ssize_t rec_event(Rec *rec, int64_t stamp, int64_t request, int32_t delay, int32_t nbytes, int32_t tokens,
                          uint8_t channel, uint8_t flags) noexcept nogil
cdef bint rec_room(const Rec *rec) noexcept nogil
cdef void rec_row(Rec *rec, const int64_t *row) noexcept nogil
cdef bint rec_blob(Rec *rec, int64_t request, int32_t ordinal, int32_t kind, const char *p, Py_ssize_t n) noexcept nogil

cdef class Histogram:
    cdef Hist *h
    cdef bint owned
    cdef object keeper

cdef class Recorder:
    cdef Rec rec
    cdef object memory
    cdef char *base
    cdef Py_ssize_t block_bytes
    cdef int blocks, current
    cdef int64_t sequence
    cdef list sealed
    cdef bint ready(self) noexcept
