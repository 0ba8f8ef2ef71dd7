# What Linux and its C library declare: shared by the engine and the ground-truth server. Nothing of ours.
from libc.stdint cimport uint32_t, uint64_t

cdef extern from "<errno.h>" nogil:
    enum: ECANCELED, EINPROGRESS

cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        uint64_t u64
    cdef struct epoll_event:
        uint32_t events
        epoll_data_t data
    int epoll_create1(int flags)
    int epoll_ctl(int epfd, int op, int fd, epoll_event *event)
    int epoll_wait(int epfd, epoll_event *events, int maxevents, int timeout)
    enum: EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLLIN, EPOLLOUT, EPOLLERR, EPOLLHUP, EPOLLRDHUP

cdef extern from "<sys/timerfd.h>" nogil:
    cdef struct timespec:
        long tv_sec
        long tv_nsec
    cdef struct itimerspec:
        timespec it_interval
        timespec it_value
    int timerfd_create(int clockid, int flags)
    int timerfd_settime(int fd, int flags, const itimerspec *new, itimerspec *old)
    enum: TFD_NONBLOCK, TFD_CLOEXEC, TFD_TIMER_ABSTIME, TFD_TIMER_CANCEL_ON_SET

cdef extern from "<sys/socket.h>" nogil:
    cdef struct iovec:
        void *iov_base
        size_t iov_len
    cdef struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
        void *msg_control
        size_t msg_controllen
        int msg_flags
    cdef struct cmsghdr:
        int cmsg_level
        int cmsg_type
    ssize_t recvmsg(int fd, msghdr *msg, int flags)
    ssize_t send(int fd, const void *buf, size_t n, int flags)
    int socket(int domain, int kind, int protocol)
    int accept4(int fd, void *address, void *size, int flags)
    int setsockopt(int fd, int level, int name, const void *value, unsigned int n)
    cdef struct sockaddr:
        pass
    int connect(int fd, const sockaddr *address, unsigned int n)
    int getsockopt(int fd, int level, int name, void *value, unsigned int *n)
    cmsghdr *CMSG_FIRSTHDR(msghdr *msg)
    unsigned char *CMSG_DATA(cmsghdr *c)
    enum: AF_INET, SOCK_DGRAM, SOCK_STREAM, SOCK_NONBLOCK, SOCK_CLOEXEC
    enum: SOL_SOCKET, SO_ERROR, SO_TIMESTAMPNS, MSG_DONTWAIT, MSG_NOSIGNAL

cdef extern from "<netinet/tcp.h>" nogil:
    cdef struct tcp_info:
        uint32_t tcpi_rtt
        uint32_t tcpi_total_retrans
    enum: IPPROTO_TCP "6", TCP_CONGESTION, TCP_INFO, TCP_NODELAY
