# Scan: what does this event carry? Included by _timing.pyx.
#
# Fast path: an event that equals an earlier, fully examined text event of this answer everywhere but between the quotes
# of its text (and, with continuous usage, but for the digits of numbers). All else is examined in one pass over its
# keys: inside a JSON string every quote is escaped, so a string with a colon behind it is a key. What is not certain is
# CH_ODD and kept raw, and a parser in the other process decides. Known limit: a key is taken wherever it stands, so a
# text key outside `choices` counts as text.

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

cdef enum:
    K_CHOICES, K_FINISH, K_USAGE, K_TOLD, K_INDEX, K_ROLE
    K_CONTENT, K_REASONING_CONTENT, K_REASONING, K_TEXT                   # where text may stand
    K_ERROR, K_TOOLS, K_REFUSAL, K_FUNCTION, K_LOGPROBS, K_IDS, K_AUDIO   # what an ordinary text event never has
    N_KEYS

cdef struct Keys:
    const char *at[17]               # first byte of the value of the first such key, NULL where there is none
    uint8_t twice[17]

cdef int key_of(const char *p, Py_ssize_t n) noexcept nogil:
    if n == 4:
        return K_TEXT if memcmp(p, b"text", 4) == 0 else K_ROLE if memcmp(p, b"role", 4) == 0 else -1
    if n == 5:
        return K_INDEX if memcmp(p, b"index", 5) == 0 else K_USAGE if memcmp(p, b"usage", 5) == 0 else \
            K_ERROR if memcmp(p, b"error", 5) == 0 else K_AUDIO if memcmp(p, b"audio", 5) == 0 else -1
    if n == 7:
        return K_CONTENT if memcmp(p, b"content", 7) == 0 else K_CHOICES if memcmp(p, b"choices", 7) == 0 else \
            K_REFUSAL if memcmp(p, b"refusal", 7) == 0 else -1
    if n == 8:
        return K_LOGPROBS if memcmp(p, b"logprobs", 8) == 0 else -1
    if n == 9:
        return K_REASONING if memcmp(p, b"reasoning", 9) == 0 else K_IDS if memcmp(p, b"token_ids", 9) == 0 else -1
    if n == 10:
        return K_TOOLS if memcmp(p, b"tool_calls", 10) == 0 else -1
    if n == 13:
        return K_FINISH if memcmp(p, b"finish_reason", 13) == 0 else \
            K_FUNCTION if memcmp(p, b"function_call", 13) == 0 else -1
    if n == 17:
        return K_TOLD if memcmp(p, b"completion_tokens", 17) == 0 else \
            K_REASONING_CONTENT if memcmp(p, b"reasoning_content", 17) == 0 else -1
    return -1

cdef bint find_keys(const char *p, Py_ssize_t n, Keys *keys) noexcept nogil:
    # One pass over an object. False when quotes or brackets do not match: no proof of JSON, but a cut or doubled
    # payload does not pass. A string with a colon behind it is a key, wherever it stands.
    cdef const char *end = p + n
    cdef const char *start
    cdef Py_ssize_t depth = 0
    cdef int key
    memset(keys, 0, sizeof(Keys))
    while p < end:
        if p[0] == c'"':
            start = p + 1
            p = string_end(start, end)
            if p == end:
                return False
            n = p - start
            p = skip_blank(p + 1, end)
            if p < end and p[0] == c':':
                p += 1
                key = key_of(start, n)
                if key >= 0 and p < end:
                    if keys.at[key] == NULL:
                        keys.at[key] = skip_blank(p, end)
                    else:
                        keys.twice[key] = 1
            continue
        if p[0] == c'{' or p[0] == c'[':
            depth += 1
        elif p[0] == c'}' or p[0] == c']':
            depth -= 1
            if depth <= 0:
                return depth == 0 and p == end - 1
        p += 1
    return False

cdef void examine(Stream *s, const char *p, Py_ssize_t n, Scan *out) noexcept nogil:
    cdef const char *end = p + n
    cdef const char *at
    cdef const char *text = NULL
    cdef const char *text_end = NULL
    cdef const char *value_end
    cdef Keys keys
    cdef Py_ssize_t size
    cdef int channel = 0, texts = 0, known = 0, i
    cdef bint odd = False
    out.channel, out.nbytes, out.flags, out.tokens, out.keep = 0, 0, 0, -1, 0
    if n == 4 and memcmp(p, b"null", 4) == 0:
        return                       # llama.cpp opens some answers with it
    if p[0] != c'{' or not find_keys(p, n, &keys):
        out.channel, out.keep = 15, 1
        return
    at = keys.at[K_CHOICES]
    if at == NULL:
        odd = True                   # another protocol, an error, or a stray object: a parser decides
    elif at + 1 < end and at[0] == c'[' and skip_blank(at + 1, end)[0] != c']':
        out.flags |= C_FL_CHOICES
    at = keys.at[K_FINISH]
    if at != NULL and at[0] == c'"' and at + 1 < end and at[1] != c'"':
        out.flags |= C_FL_FINISH
        out.keep = 1
    at = keys.at[K_USAGE]
    if at != NULL and at[0] == c'{':
        out.flags |= C_FL_USAGE
        if keys.at[K_TOLD] > at:
            out.tokens = number_at(keys.at[K_TOLD], end)
    for i in range(K_ERROR, N_KEYS):
        odd = odd or is_set(keys.at[i], end)
    # one "index", and it is 0 (or none): anything else is a second choice, or a list of something
    at = keys.at[K_INDEX]
    if at != NULL and (keys.twice[K_INDEX] or at[0] != c'0' or (at + 1 < end and c'0' <= at[1] <= c'9')):
        odd = True
    for i in range(K_CONTENT, K_TEXT + 1):
        at = keys.at[i]
        if at == NULL:
            continue
        if keys.twice[i]:
            odd = True               # which of them is the text is for a parser to say
        if at[0] == c'"':
            known += 1
            value_end = string_end(at + 1, end)
            if value_end > at + 1:
                texts += 1
                text = at + 1
                text_end = value_end
                channel = 1 if i == K_CONTENT or i == K_TEXT else 2
        elif at + 4 <= end and memcmp(at, b"null", 4) == 0:
            known += 1
        else:
            odd = True               # a list of parts, or the logprobs' content
    if texts > 1 or (texts == 0 and known == 0 and not out.flags & (C_FL_FINISH | C_FL_USAGE)
                     and keys.at[K_ROLE] == NULL):
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
            at = keys.at[K_TOLD]
            if at < text_end or keys.twice[K_TOLD] or keys.at[K_INDEX] > text_end:
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

cdef bint is_set(const char *at, const char *end) noexcept nogil:
    # a value that says something: not null, "", [] or {}
    if at == NULL or (end - at >= 4 and memcmp(at, b"null", 4) == 0):
        return False
    return end - at < 2 or (memcmp(at, b'""', 2) != 0 and memcmp(at, b"[]", 2) != 0 and memcmp(at, b"{}", 2) != 0)

cdef int32_t number_at(const char *at, const char *end) noexcept nogil:
    cdef int64_t v = 0
    cdef int digits = 0
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
