# Scan: what does this event carry? Included by _timing.pyx.
#
# Fast path: an event that equals an earlier, fully examined text event of this answer everywhere but between the quotes
# of its text (and, where an answer counts as it goes, but for the digits of numbers). All else is examined in one pass
# over its keys: inside a JSON string every quote is escaped, so a string with a colon behind it is a key, and it means
# something only at its own place in the object. What is not certain is CH_ODD and kept raw, and a parser in the other
# process decides; what is decided here is what that parser (trace/dialects.py) would have said.

cdef struct Scan:
    int32_t nbytes
    int32_t tokens
    uint8_t channel
    uint8_t flags
    uint8_t keep
    uint8_t ends                     # the end marker of an API that has no [DONE]
    uint8_t wrong                    # an error, or no JSON object at all

cdef void scan(Stream *s, const char *p, Py_ssize_t n, Scan *out) noexcept nogil:
    cdef Py_ssize_t prefix = s.shape_prefix, suffix = s.shape.n - prefix, size
    cdef const char *text_end
    out.tokens = -1
    out.keep = out.ends = out.wrong = 0
    if s.shape.n and n >= prefix and memcmp(p, s.shape.p, prefix) == 0:
        out.flags = C_FL_CHOICES
        if s.shape_told:
            text_end = string_end(p + prefix, p + n)
            size = -1
            if same_but_numbers(text_end, p + n, s.shape.p + prefix, s.shape.p + s.shape.n,
                                s.shape.p + s.shape_told if s.shape_told > 0 else NULL, &out.tokens):
                size = text_bytes(p + prefix, text_end - p - prefix)
            if s.shape_told > 0:
                out.flags |= C_FL_USAGE
                size = size if out.tokens >= 0 else -1
        elif n >= s.shape.n and memcmp(p + n - suffix, s.shape.p + prefix, suffix) == 0:
            size = text_bytes(p + prefix, n - s.shape.n)
        else:
            size = -1
        if size >= 0:
            out.nbytes = <int32_t>size
            out.channel = s.shape_channel if size else 0
            return
    examine(s, p, n, out)


# ---------------------------------------------------------------- keys, each at its place

cdef enum:                           # objects and lists in which keys mean something, by the path that leads there
    AT_ROOT, AT_USAGE, AT_CHOICES, AT_CHOICE, AT_DELTA, AT_CALLS, AT_CALL, AT_FUNCTION, AT_ROOT_DELTA, AT_ELSEWHERE

cdef enum:
    K_CHOICES, K_USAGE, K_TOLD, K_TYPE, K_ROOT_DELTA, K_DELTA, K_FINISH, K_INDEX, K_ROLE, K_TOOLS, K_FUNCTION
    K_CONTENT, K_TEXT, K_REASONING_CONTENT, K_REASONING, K_REFUSAL, K_NAME, K_ARGUMENTS    # where text may stand
    K_BLOCK_TEXT, K_THINKING, K_PARTIAL_JSON
    K_ERROR, K_FUNCTION_CALL, K_LOGPROBS, K_IDS, K_AUDIO              # what an ordinary text event never has
    K_OTHER_USAGE, K_DETAIL, K_MESSAGE, K_RESPONSE, K_OBJECT
    N_KEYS

cdef struct Keys:
    const char *at[32]               # first byte of the value of the last such key; only where `seen` has its bit
    uint32_t seen, twice
    int choices, calls               # objects in the lists of these names
    bint escaped                     # some key is written with escapes: which one, a parser knows

cdef int key_of(int place, const char *p, Py_ssize_t n) noexcept nogil:
    if place == AT_ROOT:
        if n == 4:
            return K_TYPE if memcmp(p, b"type", 4) == 0 else -1
        if n == 5:
            return K_USAGE if memcmp(p, b"usage", 5) == 0 else K_ROOT_DELTA if memcmp(p, b"delta", 5) == 0 else \
                K_ERROR if memcmp(p, b"error", 5) == 0 else -1
        if n == 6:
            return K_OBJECT if memcmp(p, b"object", 6) == 0 else K_DETAIL if memcmp(p, b"detail", 6) == 0 else -1
        if n == 7:
            return K_CHOICES if memcmp(p, b"choices", 7) == 0 else K_MESSAGE if memcmp(p, b"message", 7) == 0 else -1
        if n == 8:
            return K_LOGPROBS if memcmp(p, b"logprobs", 8) == 0 else \
                K_RESPONSE if memcmp(p, b"response", 8) == 0 else -1
    elif place == AT_CHOICE:
        if n == 4:
            return K_TEXT if memcmp(p, b"text", 4) == 0 else -1
        if n == 5:
            return K_DELTA if memcmp(p, b"delta", 5) == 0 else K_INDEX if memcmp(p, b"index", 5) == 0 else \
                K_ERROR if memcmp(p, b"error", 5) == 0 else K_OTHER_USAGE if memcmp(p, b"usage", 5) == 0 else -1
        if n == 8:
            return K_LOGPROBS if memcmp(p, b"logprobs", 8) == 0 else -1
        if n == 9:
            return K_IDS if memcmp(p, b"token_ids", 9) == 0 else -1
        if n == 13:
            return K_FINISH if memcmp(p, b"finish_reason", 13) == 0 else -1
    elif place == AT_DELTA:
        if n == 4:
            return K_ROLE if memcmp(p, b"role", 4) == 0 else -1
        if n == 5:
            return K_AUDIO if memcmp(p, b"audio", 5) == 0 else -1
        if n == 7:
            return K_CONTENT if memcmp(p, b"content", 7) == 0 else K_REFUSAL if memcmp(p, b"refusal", 7) == 0 else -1
        if n == 9:
            return K_REASONING if memcmp(p, b"reasoning", 9) == 0 else -1
        if n == 10:
            return K_TOOLS if memcmp(p, b"tool_calls", 10) == 0 else -1
        if n == 13:
            return K_FUNCTION_CALL if memcmp(p, b"function_call", 13) == 0 else -1
        if n == 17:
            return K_REASONING_CONTENT if memcmp(p, b"reasoning_content", 17) == 0 else -1
    elif place == AT_USAGE:
        return K_TOLD if n == 17 and memcmp(p, b"completion_tokens", 17) == 0 else -1
    elif place == AT_CALL:
        return K_FUNCTION if n == 8 and memcmp(p, b"function", 8) == 0 else -1
    elif place == AT_FUNCTION:
        return K_NAME if n == 4 and memcmp(p, b"name", 4) == 0 else \
            K_ARGUMENTS if n == 9 and memcmp(p, b"arguments", 9) == 0 else -1
    elif place == AT_ROOT_DELTA:
        return K_BLOCK_TEXT if n == 4 and memcmp(p, b"text", 4) == 0 else \
            K_THINKING if n == 8 and memcmp(p, b"thinking", 8) == 0 else \
            K_PARTIAL_JSON if n == 12 and memcmp(p, b"partial_json", 12) == 0 else -1
    elif n == 5 and memcmp(p, b"usage", 5) == 0:
        return K_OTHER_USAGE         # some servers hide it well: a parser finds it
    return -1

cdef int below(int place, int key, char bracket) noexcept nogil:
    # the place that a bracket opens, behind the key `key` or as an item of a list
    if bracket == c'[':
        return AT_CHOICES if place == AT_ROOT and key == K_CHOICES else \
            AT_CALLS if place == AT_DELTA and key == K_TOOLS else AT_ELSEWHERE
    if place == AT_ROOT:
        return AT_USAGE if key == K_USAGE else AT_ROOT_DELTA if key == K_ROOT_DELTA else AT_ELSEWHERE
    if place == AT_CHOICES:
        return AT_CHOICE
    if place == AT_CHOICE:
        return AT_DELTA if key == K_DELTA else AT_ELSEWHERE
    if place == AT_CALLS:
        return AT_CALL
    return AT_FUNCTION if place == AT_CALL and key == K_FUNCTION else AT_ELSEWHERE

cdef bint find_keys(const char *p, Py_ssize_t n, Keys *keys) noexcept nogil:
    # One pass over an object. False when quotes or brackets do not match: no proof of JSON, but a cut or doubled
    # payload does not pass.
    cdef const char *end = p + n
    cdef const char *start
    cdef Py_ssize_t depth = 0
    cdef int key = -1, place = AT_ROOT
    cdef uint8_t around[8]           # the places outside of this one; what lies deeper is elsewhere
    keys.seen = keys.twice = 0
    keys.choices = keys.calls = 0
    keys.escaped = False
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
                key = key_of(place, start, n)
                if key >= 0 and p < end:
                    keys.twice |= keys.seen & <uint32_t>1 << key
                    keys.seen |= <uint32_t>1 << key
                    keys.at[key] = skip_blank(p, end)
                elif place != AT_ELSEWHERE and memchr(start, c'\\', n) != NULL:
                    keys.escaped = True
            continue
        if p[0] == c'{' or p[0] == c'[':
            if depth:
                if depth < 8:
                    around[depth] = place
                place = below(place, key, p[0]) if depth < 8 else AT_ELSEWHERE
                keys.choices += place == AT_CHOICE
                keys.calls += place == AT_CALL
            depth += 1
        elif p[0] == c'}' or p[0] == c']':
            depth -= 1
            if depth <= 0:
                return depth == 0 and p == end - 1
            place = around[depth] if depth < 8 else AT_ELSEWHERE
        p += 1
    return False


# ---------------------------------------------------------------- what they say

cdef enum:                           # what an event without choices is: 1 to 4, text of that channel of /v1/responses
    KIND_OTHER = 0, KIND_BLOCK = 8, KIND_END = 9

cdef enum:
    UNLIKE_TEXT = 1 << K_ERROR | 1 << K_FUNCTION_CALL | 1 << K_LOGPROBS | 1 << K_IDS | 1 << K_AUDIO | 1 << K_OTHER_USAGE
    UNLIKE_DELTA = 1 << K_USAGE | 1 << K_DETAIL | 1 << K_MESSAGE | 1 << K_RESPONSE | 1 << K_OBJECT

cdef void examine(Stream *s, const char *p, Py_ssize_t n, Scan *out) noexcept nogil:
    cdef const char *end = p + n
    cdef const char *text = NULL
    cdef const char *text_end = NULL
    cdef const char *value_end
    cdef const char *at
    cdef Keys keys
    cdef Py_ssize_t size = 0
    cdef int channel = 0, texts = 0, known = 0, kind = KIND_OTHER, key, first, last
    cdef bint odd
    out.channel, out.nbytes, out.flags, out.tokens, out.keep, out.ends = 0, 0, 0, -1, 0, 0
    if n == 4 and memcmp(p, b"null", 4) == 0:
        return                       # llama.cpp opens some answers with it
    if p[0] != c'{' or not find_keys(p, n, &keys):
        out.channel, out.keep, out.wrong = 15, 1, 1
        return
    odd = keys.escaped or keys.twice != 0      # which of two is meant, a parser knows
    if keys.seen >> K_USAGE & 1 and keys.at[K_USAGE][0] == c'{':
        out.flags |= C_FL_USAGE
        if keys.seen >> K_TOLD & 1:
            out.tokens = number_at(keys.at[K_TOLD], end)
            odd = odd or (out.tokens < 0 and is_set(keys.at[K_TOLD], end))
    if keys.seen & UNLIKE_TEXT:
        for key in range(K_ERROR, K_OTHER_USAGE + 1):
            odd = odd or (keys.seen >> key & 1 and is_set(keys.at[key], end))
        out.wrong = keys.seen >> K_ERROR & 1 and is_set(keys.at[K_ERROR], end)
    if keys.seen >> K_CHOICES & 1:
        odd = choice_is_odd(&keys, end, out) or odd
        first, last = K_CONTENT, K_ARGUMENTS
    else:
        kind = kind_of(keys.at[K_TYPE], end) if keys.seen >> K_TYPE & 1 else KIND_OTHER
        out.ends = kind == KIND_END and is_json(p, end)
        if kind == KIND_OTHER or kind == KIND_END:
            out.channel, out.keep = 15, 1
            return                   # an error, a stray object, or what comes around the text: a parser decides
        out.flags |= C_FL_CHOICES
        odd = odd or keys.seen & UNLIKE_DELTA != 0
        first, last = K_ROOT_DELTA, K_ROOT_DELTA
        if kind == KIND_BLOCK:
            first, last = K_BLOCK_TEXT, K_PARTIAL_JSON
    for key in range(first, last + 1):
        if not keys.seen >> key & 1:
            continue
        at = keys.at[key]
        if at[0] == c'"':
            known += 1
            value_end = string_end(at + 1, end)
            if value_end > at + 1:
                texts += 1
                # the name and the first arguments of a call come together: one text in two pieces
                odd = odd or texts > (2 if key == K_ARGUMENTS and channel == 3 else 1)
                channel = kind if key == K_ROOT_DELTA else channel_of(key)
                text = at + 1
                text_end = value_end
                size += text_bytes(text, text_end - text)
        elif at + 4 <= end and memcmp(at, b"null", 4) == 0:
            known += 1
        else:
            odd = True               # a list of parts
    if known == 0 and not out.flags & (C_FL_FINISH | C_FL_USAGE) and not keys.seen >> K_ROLE & 1:
        odd = True
    if odd or not is_json(p, end):
        out.channel, out.keep = 15, 1
        return
    if texts == 0:
        return
    out.channel, out.nbytes = channel, <int32_t>size
    s.shape.n = 0
    s.shape_told = 0
    if texts == 1 and (out.flags == C_FL_CHOICES or (out.flags == C_FL_CHOICES | C_FL_USAGE and out.tokens >= 0)):
        if not (buf_add(&s.shape, p, text - p) and buf_add(&s.shape, text_end, end - text_end)):
            s.shape.n = 0
        s.shape_prefix = text - p
        s.shape_channel = channel
        if out.flags & C_FL_USAGE:
            at = keys.at[K_TOLD]
            if at < text_end or (keys.seen >> K_INDEX & 1 and keys.at[K_INDEX] > text_end):
                s.shape.n = 0        # not where it is looked for; or a number that must not vary
            else:
                s.shape_told = s.shape_prefix + (at - text_end)
        elif kind != KIND_OTHER:
            s.shape_told = -1        # its events are numbered

cdef bint choice_is_odd(const Keys *keys, const char *end, Scan *out) noexcept nogil:
    # sets the flags of an event with choices; true unless it has one choice of the first answer, or none
    cdef const char *at = keys.at[K_CHOICES]
    cdef bint odd = False
    if at[0] != c'[':
        return True
    at = skip_blank(at + 1, end)
    if at[0] != c']':
        out.flags |= C_FL_CHOICES
        odd = at[0] != c'{' or keys.choices != 1
    else:
        odd = keys.seen & (1 << K_DETAIL | 1 << K_MESSAGE) != 0      # an error in disguise
    if keys.seen >> K_FINISH & 1 and is_set(keys.at[K_FINISH], end):
        if keys.at[K_FINISH][0] == c'"':
            out.flags |= C_FL_FINISH
            out.keep = 1
        else:
            odd = True
    if keys.seen >> K_INDEX & 1:
        at = keys.at[K_INDEX]
        odd = odd or at[0] != c'0' or (at + 1 < end and c'0' <= at[1] <= c'9')
    if keys.seen >> K_TOOLS & 1 and is_set(keys.at[K_TOOLS], end):
        odd = odd or keys.at[K_TOOLS][0] != c'[' or keys.calls != 1
    return odd

cdef int channel_of(int key) noexcept nogil:
    return 1 if key <= K_TEXT or key == K_BLOCK_TEXT else 2 if key <= K_REASONING or key == K_THINKING else \
        4 if key == K_REFUSAL else 3

cdef int kind_of(const char *at, const char *end) noexcept nogil:
    cdef Py_ssize_t n
    if at[0] != c'"':
        return KIND_OTHER
    at += 1
    n = string_end(at, end) - at
    if n == 19 and memcmp(at, b"content_block_delta", 19) == 0:
        return KIND_BLOCK
    if n == 12 and memcmp(at, b"message_stop", 12) == 0:
        return KIND_END
    if n < 9 or memcmp(at, b"response.", 9) != 0:
        return KIND_OTHER
    at += 9
    n -= 9
    if n == 17:
        return 1 if memcmp(at, b"output_text.delta", 17) == 0 else KIND_OTHER
    if n == 20:
        return 2 if memcmp(at, b"reasoning_text.delta", 20) == 0 else KIND_OTHER
    if n == 28:
        return 2 if memcmp(at, b"reasoning_summary_text.delta", 28) == 0 else KIND_OTHER
    if n == 29:
        return 3 if memcmp(at, b"function_call_arguments.delta", 29) == 0 else KIND_OTHER
    if n == 13:
        return 4 if memcmp(at, b"refusal.delta", 13) == 0 else KIND_OTHER
    return KIND_END if (n == 9 and memcmp(at, b"completed", 9) == 0) or (n == 10 and memcmp(at, b"incomplete", 10) == 0) \
        or (n == 6 and memcmp(at, b"failed", 6) == 0) else KIND_OTHER

cdef bint same_but_numbers(const char *p, const char *end, const char *q, const char *q_end, const char *told,
                           int32_t *found) noexcept nogil:
    # equal but for the digits of numbers; `found` gets the number that stands at `told` in the shape
    cdef int64_t v
    cdef const char *start
    cdef const char *here
    while p < end and q < q_end:
        if end - p >= 8 and q_end - q >= 8 and memcmp(p, q, 8) == 0 and (q > told or q + 8 <= told):
            p += 8                   # may end inside a number: one that is longer then is no match, and examined
            q += 8
        elif c'0' <= p[0] <= c'9' and c'0' <= q[0] <= c'9':
            here = p
            start = q
            v = 0
            while p < end and c'0' <= p[0] <= c'9':
                if v < 0x7fffffff:
                    v = v * 10 + (p[0] - c'0')
                p += 1
            while q < q_end and c'0' <= q[0] <= c'9':
                q += 1
            if here[0] == c'0' and p - here > 1 and (here - 1)[0] != c'.' and not (start[0] == c'0'
                                                                                 and q - start == p - here):
                return False         # 07 is no number
            if start == told:
                found[0] = <int32_t>v if v < 0x7fffffff else -1
        elif p[0] != q[0]:
            return False
        else:
            p += 1
            q += 1
    return p == end and q == q_end

cdef const char *skip_blank(const char *p, const char *end) noexcept nogil:
    while p < end - 1 and (p[0] == c' ' or p[0] == c'\n' or p[0] == c'\t' or p[0] == c'\r'):
        p += 1
    return p

cdef bint is_set(const char *at, const char *end) noexcept nogil:
    # a value that says something: not null, "", [] or {}
    if at == NULL or (end - at >= 4 and memcmp(at, b"null", 4) == 0):
        return False
    return end - at < 2 or (memcmp(at, b'""', 2) != 0 and memcmp(at, b"[]", 2) != 0 and memcmp(at, b"{}", 2) != 0)

cdef int32_t number_at(const char *at, const char *end) noexcept nogil:
    cdef int64_t v = 0
    cdef int digits = 0
    while at < end and c'0' <= at[0] <= c'9' and digits < 11:
        v = v * 10 + (at[0] - c'0')
        at += 1
        digits += 1
    if at < end and (at[0] == c'.' or at[0] | 0x20 == c'e'):
        return -1
    return <int32_t>v if digits and v < 0x7fffffff else -1

cdef const char *string_end(const char *p, const char *end) noexcept nogil:
    while p < end and p[0] != c'"':
        p += 2 if p[0] == c'\\' else 1
    return p if p < end else end
