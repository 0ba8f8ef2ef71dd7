"""A timer that an event loop can wait for, exact to the kernel's."""

import ctypes
import os
import struct


class Timer:
    """A timer of the kernel, armed at absolute monotonic times; readable by an event loop through `fd`.

    Loop timers will not do: uvloop rounds them to whole milliseconds, and so does epoll's timeout.
    """

    _CLOCK_MONOTONIC = 1
    _ABSOLUTE = 1

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(self._CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self.armed_ns: int | None = None

    def arm(self, at_ns: int | None) -> None:
        """Fire once at `at_ns` (at once if that has passed); None: not at all."""
        if at_ns == self.armed_ns:
            return
        seconds, nanoseconds = divmod(at_ns or 0, 1_000_000_000)  # all zero disarms
        spec = struct.pack("@4l", 0, 0, seconds, nanoseconds)  # struct itimerspec: interval, then value
        if self._libc.timerfd_settime(self.fd, self._ABSOLUTE, spec, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")
        self.armed_ns = at_ns

    def fired(self) -> int | None:
        """The time it was armed for, if it has gone off; it is disarmed then."""
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            return None
        at_ns, self.armed_ns = self.armed_ns, None
        return at_ns

    def close(self) -> None:
        os.close(self.fd)
