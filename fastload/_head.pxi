# The head of an answer: its lines, its status, and what its fields say of the framing. Included by _timing.pyx.

cdef int head_bytes(Stream *s, Rec *rec, const char **at, const char *end) noexcept nogil:
    # Lines end with LF, a CR before it is dropped; an empty line ends the head.
    cdef const char *p = at[0]
    cdef const char *nl
    cdef Py_ssize_t line
    while p < end:
        nl = <const char *>memchr(p, c'\n', end - p)
        if nl == NULL:
            nl = end - 1
        if not buf_add(&s.head, p, nl + 1 - p) or s.head.n > HEAD_LIMIT:
            return broken(s, b"an answer head of more than 64 KB", FEED_LIMIT)
        p = nl + 1
        at[0] = p
        if nl[0] != c'\n':
            return FEED_MORE
        line = s.head.n - 1
        if line > 0 and s.head.p[line - 1] == c'\r':
            line -= 1
        if line == 0:
            s.head.n = 0             # blank lines before a status line are allowed
        elif s.head.p[line - 1] == c'\n':
            return head_done(s, rec)
    return FEED_MORE

cdef int head_done(Stream *s, Rec *rec) noexcept nogil:
    cdef char *p = s.head.p
    cdef char *end = s.head.p + s.head.n
    cdef char *nl
    cdef char *value
    cdef char *colon
    cdef const char *word
    cdef const char *rest
    cdef Py_ssize_t size, n
    cdef int64_t length = -1, parsed
    cdef bint coded = False, chunked = False, other_coding = False, old, close = False, keep = False
    cdef bint plain = False
    cdef int status
    # "HTTP/1.x NNN"
    if s.head.n < 13 or memcmp(p, b"HTTP/1.", 7) != 0 or not c'0' <= p[7] <= c'9' or p[8] != c' ':
        return broken(s, b"the answer is not HTTP/1.x", FEED_MALFORMED)
    status = digits3(p + 9)
    if status < 100 or not (p[12] == c' ' or p[12] == c'\n' or (p[12] == c'\r' and p[13] == c'\n')):
        return broken(s, b"the status line has no three-digit status", FEED_MALFORMED)
    if status >= 200:
        s.row[F_STATUS] = status
    old = p[7] == c'0'
    unfold(p, end)
    p = <char *>memchr(p, c'\n', end - p) + 1
    while p < end:
        nl = <char *>memchr(p, c'\n', end - p)
        colon = <char *>memchr(p, c':', nl - p)
        if colon != NULL:
            if colon > p and ((colon - 1)[0] == c' ' or (colon - 1)[0] == c'\t'):
                return broken(s, b"a header name with a blank before its colon", FEED_MALFORMED)
            value = colon + 1
            size = nl - value
            while size and (value[0] == c' ' or value[0] == c'\t'):
                value += 1
                size -= 1
            while size and (value[size - 1] == c' ' or value[size - 1] == c'\r' or value[size - 1] == c'\t'):
                size -= 1
            rest = value
            if is_name(p, colon, b"transfer-encoding", 17):
                # the last coding decides; any other than chunked (gzip) makes the body unreadable as events
                while next_word(&rest, value + size, &word, &n):
                    chunked = is_word(word, n, b"chunked", 7)
                    if not is_word(word, n, b"identity", 8):
                        coded = True
                        other_coding = other_coding or not chunked
            elif is_name(p, colon, b"content-length", 14):
                parsed = decimal(value, size)
                if parsed < 0 or (length >= 0 and parsed != length):
                    return broken(s, b"a content-length that is no single number", FEED_MALFORMED)
                length = parsed
            elif is_name(p, colon, b"connection", 10):
                while next_word(&rest, value + size, &word, &n):
                    close = close or is_word(word, n, b"close", 5)
                    keep = keep or is_word(word, n, b"keep-alive", 10)
            elif is_name(p, colon, b"content-encoding", 16):
                while next_word(&rest, value + size, &word, &n):
                    other_coding = other_coding or not is_word(word, n, b"identity", 8)
            elif is_name(p, colon, b"content-type", 12):
                plain = plain or has_word(value, size, b"application/json", 16) or has_word(value, size, b"text/html", 9)
        p = nl + 1
    if status < 200:
        s.head.n = 0                 # an interim answer: the real one follows
        return FEED_MORE
    s.row[F_HEAD] = s.stamp
    if not rec_blob(rec, s.row[F_REQUEST], 0, BLOB_HEAD_KIND, s.head.p, s.head.n):
        s.row[F_FLAGS] |= C_RF_BLOB_CUT
    if other_coding:
        s.row[F_FLAGS] |= C_RF_ENCODED
    if status == 200 and not plain and not s.row[F_FLAGS] & C_RF_ENCODED:
        s.sse = 1
        s.row[F_FLAGS] |= C_RF_SSE
    if coded and length >= 0:
        return broken(s, b"both a content-length and a transfer coding", FEED_MALFORMED)
    close = close or (old and coded)     # RFC 9112 6.1: HTTP/1.0 knows no codings, so its framing may be a guess
    if not close and (keep or not old) and (chunked or length >= 0 or status == 204 or status == 304):
        s.row[F_FLAGS] |= C_RF_KEEPALIVE
    if status == 204 or status == 304:
        return message_end(s, rec)
    if chunked:
        s.row[F_FRAMING] = 1
        s.http = CHUNK_SIZE
    elif length >= 0:
        s.row[F_FRAMING] = 2
        s.remain = length
        s.http = LENGTH
        if length == 0:
            return message_end(s, rec)
    else:
        s.row[F_FRAMING] = 3
        s.http = UNTIL_CLOSE
    return FEED_MORE

cdef enum:
    BLOB_HEAD_KIND = 1
    BLOB_EVENT_KIND = 2
    BLOB_BODY_KIND = 3

cdef bint is_name(const char *p, const char *colon, const char *name, Py_ssize_t n) noexcept nogil:
    return is_word(p, colon - p, name, n)

cdef void unfold(char *p, char *end) noexcept nogil:
    # a line that starts with a blank goes on with the one before (RFC 9112 5.2)
    while True:
        p = <char *>memchr(p, c'\n', end - p)
        if p + 1 == end:
            return
        if p[1] == c' ' or p[1] == c'\t':
            p[0] = c' '
            if (p - 1)[0] == c'\r':
                (p - 1)[0] = c' '
        p += 1

cdef bint next_word(const char **at, const char *end, const char **word, Py_ssize_t *n) noexcept nogil:
    # the next element of a list with commas, without the blanks around it; empty ones are none
    cdef const char *p = at[0]
    cdef const char *last
    while p < end and (p[0] == c',' or p[0] == c' ' or p[0] == c'\t'):
        p += 1
    word[0] = p
    while p < end and p[0] != c',':
        p += 1
    at[0] = last = p
    while last > word[0] and ((last - 1)[0] == c' ' or (last - 1)[0] == c'\t'):
        last -= 1
    n[0] = last - word[0]
    return n[0] > 0

cdef bint is_word(const char *p, Py_ssize_t n, const char *word, Py_ssize_t size) noexcept nogil:
    return n == size and strncasecmp(p, word, n) == 0

cdef bint has_word(const char *p, Py_ssize_t n, const char *word, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n - size + 1):
        if strncasecmp(p + i, word, size) == 0:
            return True
    return False

cdef int64_t decimal(const char *p, Py_ssize_t n) noexcept nogil:
    cdef int64_t v = 0
    cdef Py_ssize_t i
    if n < 1 or n > 17:
        return -1
    for i in range(n):
        if not c'0' <= p[i] <= c'9':
            return -1
        v = v * 10 + (p[i] - c'0')
    return v

cdef int digits3(const char *p) noexcept nogil:
    if c'0' <= p[0] <= c'9' and c'0' <= p[1] <= c'9' and c'0' <= p[2] <= c'9':
        return (p[0] - c'0') * 100 + (p[1] - c'0') * 10 + p[2] - c'0'
    return 0

