"""One step's sends in one go, without Python between them.

A step gives every running stream its event in the same instant; sent one by one from Python the last of 4096 would
leave 20 ms after the first. Payloads are made beforehand, so this is clockwork: send, next.
"""
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdlib cimport free, malloc

from fastload._linux cimport MSG_DONTWAIT, MSG_NOSIGNAL, send

__all__ = ["send_all"]

cdef struct Item:
    int fd
    const char *at
    Py_ssize_t size
    Py_ssize_t sent


def send_all(list fds, list payloads):
    """Send payloads[i] to the socket fds[i], in order; those of one socket stand one behind the other.

    Returns (i, bytes sent) of each that did not go out whole; -1 where the connection is broken. What follows on the
    same socket is then not tried and is returned with 0. MemoryError, ValueError.
    """
    cdef Py_ssize_t count = len(fds), i
    cdef int stuck = -1
    cdef bint rest = False
    cdef Item *items
    cdef bytes payload
    if count != len(payloads):
        raise ValueError("a socket for each payload")
    if count == 0:
        return []
    items = <Item *>malloc(count * sizeof(Item))
    if items == NULL:
        raise MemoryError
    try:
        for i in range(count):
            payload = payloads[i]
            items[i].fd = fds[i]
            items[i].at = payload
            items[i].size = len(payload)
        with nogil:
            for i in range(count):
                if items[i].fd == stuck:
                    items[i].sent = 0
                    continue
                items[i].sent = send(items[i].fd, items[i].at, items[i].size, MSG_DONTWAIT | MSG_NOSIGNAL)
                if items[i].sent < 0 and (errno == EAGAIN or errno == EINTR):
                    items[i].sent = 0
                if items[i].sent < items[i].size:
                    stuck = items[i].fd
                    rest = True
        if not rest:
            return []
        return [(i, items[i].sent) for i in range(count) if items[i].sent < items[i].size]
    finally:
        free(items)
