# JSON without a parser: is this text whole, and how long is that string? Included by _timing.pyx.
#
# Strict where parsers differ: what is True here is JSON to every one of them, and the rest is for them to judge.

cdef enum:
    MOST_LEVELS = 64                 # of brackets in brackets
    MOST_NUMBER = 1000               # characters of one number: Python takes no more than some thousand

cdef bint is_json(const char *p, const char *end) noexcept nogil:
    # A whole JSON text. False also for what only some parsers take (NaN, bytes that are not UTF-8, endless numbers).
    cdef uint64_t lists = 0          # a bit for each level: is it a list?
    cdef Py_ssize_t size
    cdef int depth = 0
    while True:
        p = skip_blank(p, end)
        if p >= end:
            return False
        if p[0] == c'{' or p[0] == c'[':
            if depth == MOST_LEVELS:
                return False
            depth += 1
            lists = lists << 1 | (p[0] == c'[')
            p = skip_blank(p + 1, end)
            if p >= end:
                return False
            if lists & 1 and p[0] != c']':
                continue
            if not lists & 1 and p[0] != c'}':
                p = behind_key(p, end)
                if p == NULL:
                    return False
                continue
        elif p[0] == c'"':
            p = string_over(p + 1, end, &size)
            if p == NULL or p == end:
                return False
            p += 1
        else:
            p = word_over(p, end)
            if p == NULL:
                return False
        while True:                  # behind a value, or before the bracket that closes nothing
            if depth == 0:
                return p == end
            p = skip_blank(p, end)
            if p >= end:
                return False
            if p[0] == c',':
                p += 1
                if not lists & 1:
                    p = behind_key(skip_blank(p, end), end)
                    if p == NULL:
                        return False
                break
            if p[0] != (c']' if lists & 1 else c'}'):
                return False
            p += 1
            lists >>= 1
            depth -= 1

cdef const char *behind_key(const char *p, const char *end) noexcept nogil:
    cdef Py_ssize_t size
    if p >= end or p[0] != c'"':
        return NULL
    p = string_over(p + 1, end, &size)
    if p == NULL or p == end:
        return NULL
    p = skip_blank(p + 1, end)
    if p == end or p[0] != c':':
        return NULL
    return p + 1

cdef const char *word_over(const char *p, const char *end) noexcept nogil:
    # behind a number, true, false or null; NULL when it is none
    cdef const char *start = p
    if end - p >= 4 and (memcmp(p, b"null", 4) == 0 or memcmp(p, b"true", 4) == 0):
        return p + 4
    if end - p >= 5 and memcmp(p, b"false", 5) == 0:
        return p + 5
    if p < end and p[0] == c'-':
        p += 1
    if p < end and p[0] == c'0':
        p += 1
    else:
        p = digits_over(p, end)
    if p != NULL and p < end and p[0] == c'.':
        p = digits_over(p + 1, end)
    if p != NULL and p < end and p[0] | 0x20 == c'e':
        p += 1
        if p < end and (p[0] == c'+' or p[0] == c'-'):
            p += 1
        p = digits_over(p, end)
    if p == NULL or p - start > MOST_NUMBER:
        return NULL
    return p

cdef const char *digits_over(const char *p, const char *end) noexcept nogil:
    cdef const char *start = p
    while p < end and c'0' <= p[0] <= c'9':
        p += 1
    if p == start:
        return NULL
    return p

cdef Py_ssize_t text_bytes(const char *p, Py_ssize_t n) noexcept nogil:
    # UTF-8 bytes the JSON string decodes to; -1 when it is none, or more than one
    cdef Py_ssize_t size
    return size if string_over(p, p + n, &size) == p + n else -1

cdef const char *string_over(const char *p, const char *end, Py_ssize_t *size) noexcept nogil:
    # The first bare quote, `end` without one, NULL where the bytes can be in no JSON string; `size` gets the bytes of
    # UTF-8 that the string before it decodes to.
    cdef const char *start = p
    cdef Py_ssize_t less = 0         # what escapes are longer than what they stand for
    cdef uint8_t c
    cdef int code, more
    while True:
        while end - p >= 8 and fl_plain8(p):
            p += 8
        while p < end and fl_plain[<uint8_t>p[0]]:
            p += 1
        if p == end or p[0] == c'"':
            size[0] = p - start - less
            return p
        c = <uint8_t>p[0]
        if c == c'\\':
            if end - p < 2:
                return NULL
            if p[1] == c'u':
                code = hex4(p + 2) if end - p >= 6 else -1
                if code < 0:
                    return NULL
                # each half of a surrogate pair stands for two of its four bytes
                less += 5 if code < 0x80 else 4 if code < 0x800 or 0xD800 <= code < 0xE000 else 3
                p += 6
            elif memchr(b'"\\/bfnrt', p[1], 8) != NULL:
                less += 1
                p += 2
            else:
                return NULL
        else:
            more = 0 if c < 0xC2 else 1 if c < 0xE0 else 2 if c < 0xF0 else 3 if c < 0xF5 else 0
            if more == 0 or end - p <= more or not is_utf8(p, more):
                return NULL
            p += more + 1

cdef bint is_utf8(const char *p, int more) noexcept nogil:
    # `more` bytes go on with the first, and the character has no shorter form, is no surrogate and is not past the end
    cdef uint8_t c = <uint8_t>p[0], d = <uint8_t>p[1]
    cdef int i
    for i in range(1, more + 1):
        if <uint8_t>p[i] & 0xC0 != 0x80:
            return False
    return not ((c == 0xE0 and d < 0xA0) or (c == 0xED and d > 0x9F) or (c == 0xF0 and d < 0x90)
                or (c == 0xF4 and d > 0x8F))

cdef int hex4(const char *p) noexcept nogil:
    cdef int i, digit, code = 0
    for i in range(4):
        digit = hex_digit(p[i])
        if digit < 0:
            return -1
        code = code << 4 | digit
    return code
