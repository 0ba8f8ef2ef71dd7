# TLS of one connection without its socket: records in, plain bytes out, and back. Part of _client.pyx.
#
# Goals    the kernel's stamp belongs to the read that completed a record, so records are opened in the very read that
#          brought them, before anything else is read.
# Plan     Python's ssl over two MemoryBIOs, made and shaken hands with by load/connections. What a read brought goes in;
#          everything that is whole comes out in one piece, so that the grammar sees one read as one read.
# Warning  an exception costs more than a record: after the first, read() is asked only while there is something to find.
from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.memoryview cimport PyMemoryView_FromMemory

import ssl

cdef enum:
    TLS_ROOM = 32768                 # a read leaves so much of the plain buffer for the record begun before it
    TLS_OPEN = 0
    TLS_ENDED = 1                    # the peer said that nothing follows
    TLS_BROKEN = 2                   # and `why`

cdef class _Tls:
    """`session` is an ssl.SSLObject over the MemoryBIOs `incoming` and `outgoing`, its handshake done."""
    cdef object session, incoming, outgoing, session_read, incoming_write
    cdef bytes sealed, why
    cdef int state
    cdef bint partial                # the last read ended inside a record

    def __init__(self, session, incoming, outgoing):
        self.session, self.incoming, self.outgoing = session, incoming, outgoing
        self.session_read, self.incoming_write = session.read, incoming.write
        self.sealed = self.why = b""

    cdef Py_ssize_t unseal(self, records, plain, Py_ssize_t room):
        """Bytes of plain text that `records` completed, written to the memoryview `plain`; `state` tells what came
        behind them."""
        cdef Py_ssize_t n = 0
        self.partial = False
        try:
            self.incoming_write(records)
            n = self.session_read(room, plain)
            while n and self.incoming.pending:
                got = self.session_read(room - n, plain[n:])
                if got == 0:
                    self.state = TLS_ENDED
                    return n
                n += got
            if n == 0:
                self.state = TLS_ENDED
        except ssl.SSLWantReadError:
            self.partial = True          # or what came last was not for us: a ticket
        except ssl.SSLZeroReturnError:
            self.state = TLS_ENDED
        except ssl.SSLError as error:
            self.state = TLS_BROKEN
            self.why = b"TLS: " + (error.reason or str(error)).lower().replace("_", " ").encode()
        return n

    cdef bint seal(self, const char *p, Py_ssize_t n):
        """Make `sealed` of n plain bytes, after whatever TLS itself has to say first. False when TLS is broken."""
        cdef Py_ssize_t at = 0
        view = memoryview(p[:n])
        try:
            while at < n:
                at += self.session.write(view[at:])
            self.sealed = self.outgoing.read()
        except ssl.SSLError:
            return False
        return True
