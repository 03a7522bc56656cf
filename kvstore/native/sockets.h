/* Sends and receives on sockets; every wait ends by a deadline. */
#ifndef KVSTORE_SOCKETS_H
#define KVSTORE_SOCKETS_H

#define LANE_HEAD 14 /* kvstore.wire.frames: u32 length, u64 call id, u8 kind, u8 name length */
#define LANE_BUFFER (32 << 10)
#define LOOK_MS 200 /* how often a waiting thread looks for signals */

/* kvstore.wire.busy_poll_gauge */
#define PREEMPTED_NS 1000000
enum { PREEMPTED = -1, MISS, HIT };

enum { ANSWERED, TIMED_OUT, NOT_SENT, BROKEN, ENDED, GARBLED, UNASKED, SIGNALLED };

/* Sets `*fd` to a socket's or stream's descriptor, -1 if that is closed. Returns 0 on an exception. */
static int descriptor_of(PyObject *socket, int *fd) {
    PyObject *number = PyObject_CallMethod(socket, "fileno", NULL);
    if (!number)
        return 0;
    *fd = (int)PyLong_AsLong(number);
    Py_DECREF(number);
    return !PyErr_Occurred();
}

/* Waits for `events`. Returns 0 (they may have come: try again), TIMED_OUT, or SIGNALLED: look for
 * signals, then try again. A signal that came just before the wait has not woken it. */
static int wait_for(int fd, short events, int64_t deadline_ns) {
    struct pollfd polled = {.fd = fd, .events = events};
    int64_t left = deadline_ns - now_ns();
    if (left <= 0)
        return TIMED_OUT;
    int64_t left_ms = left / 1000000 + 1;
    int ready = poll(&polled, 1, left_ms > LOOK_MS ? LOOK_MS : (int)left_ms);
    return !ready || (ready < 0 && errno == EINTR) ? SIGNALLED : 0;
}

/* Sends `data` from byte `*sent` on, which counts what has been sent. */
static int send_all(int fd, const char *data, size_t size, size_t *sent, int64_t deadline_ns) {
    while (*sent < size) {
        ssize_t count = send(fd, data + *sent, size - *sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count >= 0) {
            *sent += (size_t)count;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            int waited = wait_for(fd, POLLOUT, deadline_ns);
            if (waited)
                return waited;
        } else if (errno != EINTR) {
            return NOT_SENT;
        }
    }
    return ANSWERED;
}

/* Whether to poll once more; if not, sets `*spin_until` to MISS or PREEMPTED. A reply that comes during a
 * yield that ends too late is a miss: a reply to a sleeper would have come sooner. */
static int polls_again(int64_t *spin_until) {
    int64_t before = now_ns();
    sched_yield(); /* the peer may be waiting for this core */
    int64_t after = now_ns();
    if (after - before >= PREEMPTED_NS)
        *spin_until = PREEMPTED;
    else if (after >= *spin_until)
        *spin_until = MISS;
    return *spin_until > 0;
}

/* kvstore.wire.busy_poll_gauge: the outcome of polling that has left `spin_until` behind. */
static int polled(int64_t spin_until) {
    return spin_until > 0 ? HIT : (int)spin_until;
}

/* Receives until `*received` >= `wanted`; polls until `*spin_until` if that is > 0 (see polls_again). */
static int receive_some(int fd, char *into, size_t size, size_t wanted, size_t *received,
                        int64_t *spin_until, int64_t deadline_ns) {
    while (*received < wanted) {
        ssize_t count = recv(fd, into + *received, size - *received, MSG_DONTWAIT);
        if (count > 0) {
            *received += (size_t)count;
        } else if (!count) {
            return ENDED;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (*spin_until > 0) {
                if (polls_again(spin_until))
                    continue;
                return SIGNALLED; /* a signal while it polled wakes no sleep: the caller looks first */
            }
            int waited = wait_for(fd, POLLIN, deadline_ns);
            if (waited)
                return waited;
        } else if (errno != EINTR) {
            return BROKEN;
        }
    }
    return ANSWERED;
}

#endif
