# Scan: what does this event carry? Included by _timing.pyx.
#
# Sound without parsing: inside a JSON string every quote is escaped, so the bytes `"content":` cannot occur in one,
# and the quote in front keeps reasoning_content apart. Fast path: an event that equals an earlier, fully examined text
# event of this answer everywhere but between the quotes of its text. All else is examined; what is not certain is
# CH_ODD and kept raw.

cdef const char *TEXT_KEYS[4]
cdef Py_ssize_t TEXT_KEY_SIZES[4]
TEXT_KEYS[:] = [b'"content"', b'"reasoning_content"', b'"reasoning"', b'"text"']
TEXT_KEY_SIZES[:] = [9, 19, 11, 6]

cdef struct Scan:
    int32_t nbytes
    int32_t tokens
    uint8_t channel
    uint8_t flags
    uint8_t keep

cdef void scan(Stream *s, const char *p, Py_ssize_t n, Scan *out) noexcept nogil:
    cdef Py_ssize_t prefix = s.shape_prefix, suffix = s.shape.n - prefix, size
    cdef const char *text_end
    out.tokens = -1
    out.keep = 0
    if s.shape.n and n >= prefix and memcmp(p, s.shape.p, prefix) == 0:
        out.flags = C_FL_CHOICES
        if s.shape_told:
            text_end = string_end(p + prefix, p + n)
            out.tokens = same_but_numbers(text_end, p + n, s.shape.p + prefix, s.shape.p + s.shape.n,
                                          s.shape.p + s.shape_told)
            out.flags |= C_FL_USAGE
            size = text_bytes(p + prefix, text_end - p - prefix) if out.tokens >= 0 else -1
        elif n >= s.shape.n and memcmp(p + n - suffix, s.shape.p + prefix, suffix) == 0:
            size = text_bytes(p + prefix, n - s.shape.n)
        else:
            size = -1
        if size >= 0:
            out.nbytes = <int32_t>size
            out.channel = s.shape_channel if size else 0
            return
    examine(s, p, n, out)

cdef void examine(Stream *s, const char *p, Py_ssize_t n, Scan *out) noexcept nogil:
    cdef const char *end = p + n
    cdef const char *at
    cdef const char *text = NULL
    cdef const char *text_end = NULL
    cdef const char *value_end
    cdef Py_ssize_t size
    cdef int channel = 0, texts = 0, known = 0, i
    cdef bint odd = False
    out.channel, out.nbytes, out.flags, out.tokens, out.keep = 0, 0, 0, -1, 0
    if n == 4 and memcmp(p, b"null", 4) == 0:
        return                       # llama.cpp opens some answers with it
    if p[0] != c'{' or not balanced(p, n):
        out.channel, out.keep = 15, 1
        return
    at = value_of(p, end, b'"choices"', 9)
    if at == NULL:
        odd = True                   # another protocol, an error, or a stray object: a parser decides
    elif at + 1 < end and at[0] == c'[' and skip_blank(at + 1, end)[0] != c']':
        out.flags |= C_FL_CHOICES
    at = value_of(p, end, b'"finish_reason"', 15)
    if at != NULL and at[0] == c'"' and at + 1 < end and at[1] != c'"':
        out.flags |= C_FL_FINISH
        out.keep = 1
    at = value_of(p, end, b'"usage"', 7)
    if at != NULL and at[0] == c'{':
        out.flags |= C_FL_USAGE
        out.tokens = number_of(at, end, b'"completion_tokens"', 19)
    # what a text event never has: any of these needs a parser
    if is_set(p, end, b'"error"', 7) or is_set(p, end, b'"tool_calls"', 12) or is_set(p, end, b'"refusal"', 9) \
            or is_set(p, end, b'"function_call"', 15) or is_set(p, end, b'"logprobs"', 10) \
            or is_set(p, end, b'"token_ids"', 11) or is_set(p, end, b'"audio"', 7) or many_choices(p, end):
        odd = True
    for i in range(4):
        at = value_of(p, end, TEXT_KEYS[i], TEXT_KEY_SIZES[i])
        if at == NULL:
            continue
        if value_of(at, end, TEXT_KEYS[i], TEXT_KEY_SIZES[i]) != NULL:
            odd = True               # twice: which of them is the text is for a parser to say
        if at[0] == c'"':
            known += 1
            value_end = string_end(at + 1, end)
            if value_end > at + 1:
                texts += 1
                text = at + 1
                text_end = value_end
                channel = 1 if i == 0 or i == 3 else 2
        elif at + 4 <= end and memcmp(at, b"null", 4) == 0:
            known += 1
        else:
            odd = True               # a list of parts, or the logprobs' content
    if texts > 1 or (texts == 0 and known == 0 and not out.flags & (C_FL_FINISH | C_FL_USAGE)
                     and value_of(p, end, b'"role"', 6) == NULL):
        odd = True
    if odd:
        out.channel, out.keep = 15, 1
        return
    if texts == 0:
        return
    size = text_bytes(text, text_end - text)
    out.channel, out.nbytes = channel, <int32_t>size
    s.shape.n = 0
    s.shape_told = 0
    if out.flags == C_FL_CHOICES or (out.flags == C_FL_CHOICES | C_FL_USAGE and out.tokens >= 0):
        if not (buf_add(&s.shape, p, text - p) and buf_add(&s.shape, text_end, end - text_end)):
            s.shape.n = 0
        s.shape_prefix = text - p
        s.shape_channel = channel
        if out.flags & C_FL_USAGE:
            at = value_of(text_end, end, b'"completion_tokens"', 19)
            if at == NULL or value_of(text_end, end, b'"index"', 7) != NULL:
                s.shape.n = 0        # not where it is looked for; or a number that must not vary
            else:
                s.shape_told = s.shape_prefix + (at - text_end)

cdef int32_t same_but_numbers(const char *p, const char *end, const char *q, const char *q_end,
                              const char *told) noexcept nogil:
    # equal but for the digits of numbers: then the number that stands at `told` in the shape; else -1
    cdef int64_t v
    cdef int32_t found = -1
    cdef const char *start
    while p < end and q < q_end:
        if c'0' <= p[0] <= c'9' and c'0' <= q[0] <= c'9':
            start = q
            v = 0
            while p < end and c'0' <= p[0] <= c'9':
                if v < 0x7fffffff:
                    v = v * 10 + (p[0] - c'0')
                p += 1
            while q < q_end and c'0' <= q[0] <= c'9':
                q += 1
            if start == told:
                found = <int32_t>v if v < 0x7fffffff else -1
        elif p[0] != q[0]:
            return -1
        else:
            p += 1
            q += 1
    return found if p == end and q == q_end else -1

cdef const char *skip_blank(const char *p, const char *end) noexcept nogil:
    while p < end - 1 and (p[0] == c' ' or p[0] == c'\n' or p[0] == c'\t' or p[0] == c'\r'):
        p += 1
    return p

cdef const char *value_of(const char *p, const char *end, const char *key, Py_ssize_t n) noexcept nogil:
    # first byte of the value of the first such key; NULL where there is none. A string that equals the key's bytes
    # but is no key has no colon behind it.
    cdef const char *at
    while True:
        at = <const char *>memmem(p, end - p, key, n)
        if at == NULL:
            return NULL
        at += n
        if at >= end:
            return NULL
        at = skip_blank(at, end)
        if at[0] == c':' and at + 1 < end:
            return skip_blank(at + 1, end)
        p = at

cdef bint ends_answer(const char *p, const char *end) noexcept nogil:
    # /v1/responses and /v1/messages end with an event of their own; its type may stand anywhere in it
    cdef const char *at = p
    cdef Py_ssize_t n
    if value_of(p, end, b'"choices"', 9) != NULL:
        return False
    while True:
        at = value_of(at, end, b'"type"', 6)
        if at == NULL:
            return False
        if at[0] == c'"':
            n = string_end(at + 1, end) - at - 1
            if (n == 12 and memcmp(at + 1, b"message_stop", 12) == 0) \
                    or (n == 18 and memcmp(at + 1, b"response.completed", 18) == 0) \
                    or (n == 19 and memcmp(at + 1, b"response.incomplete", 19) == 0) \
                    or (n == 15 and memcmp(at + 1, b"response.failed", 15) == 0):
                return True

cdef bint is_set(const char *p, const char *end, const char *key, Py_ssize_t n) noexcept nogil:
    # present with a value that says something: not null, "", [] or {}
    cdef const char *at = value_of(p, end, key, n)
    if at == NULL:
        return False
    if end - at >= 4 and memcmp(at, b"null", 4) == 0:
        return False
    if end - at >= 2 and (memcmp(at, b'""', 2) == 0 or memcmp(at, b"[]", 2) == 0 or memcmp(at, b"{}", 2) == 0):
        return False
    return True

cdef bint many_choices(const char *p, const char *end) noexcept nogil:
    # one "index", and it is 0 (or none): anything else is a second choice, or a list of something
    cdef const char *at = value_of(p, end, b'"index"', 7)
    if at == NULL:
        return False
    if at[0] != c'0' or (at + 1 < end and c'0' <= at[1] <= c'9'):
        return True
    return value_of(at, end, b'"index"', 7) != NULL

cdef int32_t number_of(const char *p, const char *end, const char *key, Py_ssize_t n) noexcept nogil:
    cdef const char *at = value_of(p, end, key, n)
    cdef int64_t v = 0
    cdef int digits = 0
    if at == NULL:
        return -1
    while at < end and c'0' <= at[0] <= c'9' and digits < 10:
        v = v * 10 + (at[0] - c'0')
        at += 1
        digits += 1
    return <int32_t>v if digits and v < 0x7fffffff else -1

cdef const char *string_end(const char *p, const char *end) noexcept nogil:
    while p < end and p[0] != c'"':
        p += 2 if p[0] == c'\\' else 1
    return p if p < end else end

cdef Py_ssize_t text_bytes(const char *p, Py_ssize_t n) noexcept nogil:
    # UTF-8 bytes the JSON string decodes to; -1 when a bare quote says that it is more than one string
    cdef Py_ssize_t i = 0, size = 0
    cdef int code
    if memchr(p, c'\\', n) == NULL:
        return n if memchr(p, c'"', n) == NULL else -1
    while i < n:
        if p[i] == c'"':
            return -1
        if p[i] != c'\\':
            size += 1
            i += 1
        elif i + 1 >= n:
            return -1
        elif p[i + 1] == c'u' and i + 6 <= n:
            code = (hex_digit(p[i + 2]) << 12) | (hex_digit(p[i + 3]) << 8) | (hex_digit(p[i + 4]) << 4) \
                | hex_digit(p[i + 5])
            # each half of a surrogate pair stands for two of its four bytes
            size += 1 if code < 0x80 else 2 if code < 0x800 or 0xD800 <= code < 0xE000 else 3
            i += 6
        else:
            size += 1
            i += 2
    return size

cdef bint balanced(const char *p, Py_ssize_t n) noexcept nogil:
    # not a proof of JSON, but a cut or doubled payload does not pass
    cdef Py_ssize_t i = 0, depth = 0
    cdef const char *at
    while i < n:
        if p[i] == c'"':
            at = string_end(p + i + 1, p + n)
            if at == p + n:
                return False
            i = at - p
        elif p[i] == c'{' or p[i] == c'[':
            depth += 1
        elif p[i] == c'}' or p[i] == c']':
            depth -= 1
            if depth <= 0:
                return depth == 0 and i == n - 1
        i += 1
    return False
