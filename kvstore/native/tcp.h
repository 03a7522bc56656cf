/* Both ends of kvstore.runtime.tcp_protocol, from the first byte of a request to the last of its
 * answer. */
#ifndef KVSTORE_TCP_H
#define KVSTORE_TCP_H

#define REQUEST_HEAD 12 /* magic, u16 op, u16 0, u32 number of ranges */
#define RANGE_BYTES 16  /* u64 offset, u64 length; RECORD_BYTES with a capability */
#define STATUS_BYTES 8  /* magic, u32 status */
#define RANGES_MAX 4096
#define WRITES_BYTES (8 * (1 + RANGES_MAX))
static const uint8_t TCP_MAGIC[4] = "KVdt";
enum { OP_READ = 1, OP_WRITE = 2 };
enum { STATUS_OK = 0, STATUS_GONE = 3, STATUS_INVALID_RANGE = 4, STATUS_BAD_REQUEST = 5, STATUS_NOT_ALLOWED = 6 };
enum { REFUSED = 8 };

#define IOVECS_MAX 512
#define RECEIVED_AT_ONCE (256 << 10) /* hashed at once: it is in cache still */
#define SENT_AT_ONCE (512 << 10)     /* each is one wake-up of the other end */
#define GATHERED_MAX (32 << 10)      /* longer ranges are lent to the kernel where it takes them */
#define APART_BYTES (32 << 10)       /* a longer payload waits until its header was checked */
#define FILE_AT_ONCE (1 << 20) /* within it the kernel counts the time-out anew for every 64 KiB */
#define ARM_NS 5000000 /* how often time-outs are set: deadlines are kept to it */
#define MOVED_MIN (64 << 10)

/* A blocking socket, whose time-outs the kernel counts. */
typedef struct {
    int fd;
    int64_t deadline_ns;
    int64_t stall_ns;     /* the longest that no byte may move; 0: no such bound */
    int64_t armed_ns[2]; /* when SO_RCVTIMEO and SO_SNDTIMEO were last set */
    int64_t moved_ns;    /* when bytes last moved, or the wait for them began */
    int64_t looked_ns;   /* when signals were last looked for */
    int unsent;           /* sent bytes that the other end had not acknowledged at the last look */
    int number;           /* errno; of REFUSED the server's status */
    PyThreadState *thread; /* that runs signal handlers; NULL: a node's, which runs none */
} Wire;

static int unsent_bytes(const Wire *wire) {
    int bytes = 0;
    return ioctl(wire->fd, SIOCOUTQ, &bytes) ? 0 : bytes;
}

/* After a time-out of the kernel: whether nothing has moved for `stall_ns`. Many sent bytes may still
 * move long after the call that sent them; a few are acknowledged at once, even by the kernel of a
 * stopped process. */
static int stalled(Wire *wire) {
    int64_t now = now_ns();
    if (!wire->stall_ns || now - wire->moved_ns < wire->stall_ns)
        return 0;
    int unsent = unsent_bytes(wire), moved = wire->unsent - unsent;
    wire->unsent = unsent;
    wire->moved_ns = now;
    return moved < MOVED_MIN;
}

static int arm(Wire *wire, int sending) {
    int64_t now = now_ns(), left = wire->deadline_ns - now;
    if (left <= 0)
        return TIMED_OUT;
    if (wire->armed_ns[sending] && now - wire->armed_ns[sending] < ARM_NS)
        return ANSWERED;
    wire->armed_ns[sending] = now;
    int64_t stalls = wire->stall_ns - (now - wire->moved_ns);
    if (wire->stall_ns && left > stalls)
        left = stalls > 0 ? stalls : 0;
    int64_t longest = wire->thread ? LOOK_MS * (int64_t)1000000 : 3600000000000;
    left = left > longest ? longest : left;
    int64_t us = left / 1000 + 1;
    struct timeval time = {.tv_sec = us / 1000000, .tv_usec = us % 1000000};
    if (!setsockopt(wire->fd, SOL_SOCKET, sending ? SO_SNDTIMEO : SO_RCVTIMEO, &time, sizeof time))
        return ANSWERED;
    wire->number = errno;
    return BROKEN;
}

/* Runs the handlers of signals that have come, if this thread runs any. SIGNALLED: one has raised. */
static int run_handlers(Wire *wire) {
    if (!wire->thread)
        return ANSWERED;
    PyEval_RestoreThread(wire->thread);
    int raised = PyErr_CheckSignals();
    wire->thread = PyEval_SaveThread();
    wire->looked_ns = now_ns();
    return raised ? SIGNALLED : ANSWERED;
}

/* Returns what a failed system call means; ANSWERED: try again. Runs signal handlers, which may raise. */
static int failed(Wire *wire, int sending) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
        wire->armed_ns[sending] = 0;
        int status = run_handlers(wire);
        return status ? status : stalled(wire) ? TIMED_OUT : arm(wire, sending);
    }
    if (errno == EINTR)
        return run_handlers(wire);
    wire->number = errno;
    return BROKEN;
}

/* Called before a wait. A signal that came just before it does not wake it, nor one during hashing. */
static int begin_wait(Wire *wire) {
    wire->moved_ns = now_ns();
    return wire->moved_ns - wire->looked_ns > LOOK_MS * (int64_t)1000000 ? run_handlers(wire) : ANSWERED;
}

/* Drops `count` bytes from the front of `left` parts; returns how many parts are left. */
static size_t behind(struct iovec **parts, size_t left, size_t count) {
    while (left && count >= (*parts)->iov_len) {
        count -= (*parts)->iov_len;
        (*parts)++;
        left--;
    }
    if (left) {
        (*parts)->iov_base = (char *)(*parts)->iov_base + count;
        (*parts)->iov_len -= count;
    }
    return left;
}

static int send_parts(Wire *wire, struct iovec *parts, size_t count, int flags) {
    int status = begin_wait(wire);
    while (!status && count) {
        if ((status = arm(wire, 1)))
            return status;
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
        ssize_t sent = sendmsg(wire->fd, &message, MSG_NOSIGNAL | flags);
        if (sent >= 0) {
            count = behind(&parts, count, (size_t)sent);
            if (wire->stall_ns)
                wire->unsent = unsent_bytes(wire);
            wire->moved_ns = now_ns();
            if (count && (status = run_handlers(wire))) /* a signal may have cut it short */
                return status;
        } else
            status = failed(wire, 1);
    }
    return status;
}

/* Fills the parts. Polls until `*spin_until` if that is > 0 (see polls_again), then sleeps. */
static int receive_parts(Wire *wire, struct iovec *parts, size_t count, int64_t *spin_until) {
    int status = begin_wait(wire);
    while (!status && count) {
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
        ssize_t received;
        int polls = spin_until && *spin_until > 0;
        if (polls) {
            received = recvmsg(wire->fd, &message, MSG_DONTWAIT);
            if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
                if (!polls_again(spin_until))
                    status = run_handlers(wire); /* a signal while it polled wakes no sleep */
                continue;
            }
        } else {
            if ((status = arm(wire, 0)))
                return status;
            received = recvmsg(wire->fd, &message, MSG_WAITALL);
        }
        if (!received)
            return ENDED;
        if (received > 0) {
            count = behind(&parts, count, (size_t)received);
            wire->moved_ns = now_ns();
            if (count && !polls)
                status = run_handlers(wire); /* a signal or a time-out has cut it short */
        } else
            status = failed(wire, 0);
    }
    return status;
}

static int receive_bytes(Wire *wire, void *into, size_t size, int64_t *spin_until) {
    struct iovec part = {into, size};
    return receive_parts(wire, &part, 1, spin_until);
}

/* --- the client's end -------------------------------------------------------------------------- */

static void put64(uint8_t **at, uint64_t value) {
    memcpy(*at, &value, 8);
    *at += 8;
}

/* Puts one range of a row, with the row's capability where the request shows them. */
static void put_range(uint8_t **at, const Batch *batch, const Row *row, uint64_t offset, uint64_t length) {
    put64(at, offset);
    put64(at, length);
    if (!batch->with_capabilities)
        return;
    uint8_t capability[CAPABILITY_BYTES] = {0};
    size_t shown = row->capability_size < CAPABILITY_BYTES ? row->capability_size : CAPABILITY_BYTES;
    memcpy(capability, row->capability, shown);
    put64(at, row->offset);
    put64(at, HEADER_BYTES + row->size);
    put64(at, load64(capability));
    put64(at, load64(capability + 8));
    put64(at, batch->write ? OP_WRITE : OP_READ);
    memcpy(*at, capability + 16, SIPHASH_BYTES);
    *at += SIPHASH_BYTES;
}

/* Makes the request for all rows, of `*size` bytes; NULL: no memory. */
static uint8_t *make_request(const Batch *batch, size_t *size) {
    size_t width = batch->with_capabilities ? RECORD_BYTES : RANGE_BYTES;
    uint8_t *request = malloc(REQUEST_HEAD + 3 * width * batch->row_count);
    if (!request)
        return NULL;
    uint8_t *at = request + REQUEST_HEAD;
    for (size_t index = 0; index < batch->row_count; index++) {
        const Row *row = &batch->rows[index];
        if (!batch->write) {
            put_range(&at, batch, row, row->offset, HEADER_BYTES + row->size);
            continue;
        }
        put_range(&at, batch, row, row->offset, FIXED_BYTES);
        if (row->size)
            put_range(&at, batch, row, row->offset + HEADER_BYTES, row->size);
        put_range(&at, batch, row, row->offset, checked_size(batch, row) + header_mac_size(batch, row));
    }
    *size = (size_t)(at - request);
    uint16_t words[2] = {batch->write ? OP_WRITE : OP_READ, 0};
    uint32_t count = (uint32_t)((*size - REQUEST_HEAD) / width);
    memcpy(request, TCP_MAGIC, 4);
    memcpy(request + 4, words, 4);
    memcpy(request + 8, &count, 4);
    return request;
}

/* Receives the server's status. Returns ANSWERED, REFUSED (`number` says how) or what went wrong. */
static int receive_status(Wire *wire, int64_t *spin_until) {
    uint8_t status[STATUS_BYTES];
    int ended = receive_bytes(wire, status, sizeof status, spin_until);
    if (ended)
        return ended;
    wire->number = memcmp(status, TCP_MAGIC, 4) ? -1 : (int)load32(status + 4);
    return wire->number ? REFUSED : ANSWERED;
}

/* Receives all rows, a window at a time, and hashes each while it is in cache. The caller's memory is
 * written only after the header was checked: another object may be there, and may be longer.
 *
 * `ours` is scratch memory as large as a window, or as all rows if these are smaller. */
static int receive_windows(Wire *wire, Batch *batch, uint8_t *ours, int64_t *spin_until) {
    struct iovec parts[IOVECS_MAX];
    struct { Row *row; uint8_t *at, *to; size_t size; } pieces[IOVECS_MAX];
    Xxh3 state;
    size_t row_index = 0, part_index = 0, part_done = 0, heads_taken = 0;
    while (row_index < batch->row_count) {
        size_t count = 0, bytes = 0;
        int is_full = 0;
        while (row_index < batch->row_count && count < IOVECS_MAX && bytes < RECEIVED_AT_ONCE && !is_full) {
            Row *row = &batch->rows[row_index];
            uint8_t *at, *to;
            size_t size;
            if (heads_taken == row_index) {
                heads_taken++;
                at = to = row->found;
                size = HEADER_BYTES;
                is_full = row->size > APART_BYTES;
            } else if (part_index < row->part_count) {
                to = row->parts[part_index].at + part_done;
                at = row->size > APART_BYTES && row->status == WHOLE ? to : ours + bytes;
                size = row->parts[part_index].size - part_done;
                if (size > RECEIVED_AT_ONCE - bytes)
                    size = RECEIVED_AT_ONCE - bytes;
                part_done += size;
                if (part_done == row->parts[part_index].size) {
                    part_index++;
                    part_done = 0;
                }
            } else {
                row_index++;
                part_index = part_done = 0;
                continue;
            }
            if (!size)
                continue;
            parts[count] = (struct iovec){at, size};
            pieces[count].row = row;
            pieces[count].at = at;
            pieces[count].to = to;
            pieces[count++].size = size;
            bytes += size;
        }
        int ended = receive_parts(wire, parts, count, spin_until);
        if (ended)
            return ended;
        for (size_t index = 0; index < count; index++) {
            Row *row = pieces[index].row;
            uint8_t *at = pieces[index].at, *to = pieces[index].to;
            size_t size = pieces[index].size;
            if (at == row->found) {
                row->status = check_header(row, row->found, batch, &row->checksum);
                row->left = row->size;
                if (batch->verify)
                    xxh3_begin(&state);
            } else {
                to = to == at ? NULL : to;
                if (row->status == WHOLE && batch->verify)
                    xxh3_feed(&state, to, at, size);
                else if (row->status == WHOLE && to)
                    memcpy(to, at, size);
                row->left -= size;
            }
            if (!row->left && batch->verify && row->status == WHOLE && xxh3_end(&state) != row->checksum)
                row->status = CORRUPT;
        }
    }
    return ANSWERED;
}

static int receive_rows(Wire *wire, Batch *batch, uint64_t total, int64_t *spin_until) {
    uint64_t size = total + HEADER_BYTES * (uint64_t)batch->row_count;
    uint8_t *ours = malloc(size < RECEIVED_AT_ONCE ? size : RECEIVED_AT_ONCE);
    if (!ours) {
        wire->number = ENOMEM;
        return BROKEN;
    }
    int ended = receive_windows(wire, batch, ours, spin_until);
    free(ours);
    return ended;
}

/* Sends the request and all rows. One system call sends the request and the first rows. */
static int send_rows(Wire *wire, Batch *batch, uint8_t *request, size_t request_size) {
    static const uint8_t wiped[FIXED_BYTES];
    struct iovec parts[IOVECS_MAX];
    size_t count = 0, bytes = 0;
    parts[count++] = (struct iovec){request, request_size};
    for (size_t row_index = 0; row_index < batch->row_count; row_index++) {
        Row *row = &batch->rows[row_index];
        Xxh3 state;
        xxh3_begin(&state);
        parts[count++] = (struct iovec){(void *)wiped, FIXED_BYTES};
        for (size_t index = 0; index < row->part_count; index++) {
            uint8_t *at = row->parts[index].at;
            size_t left = row->parts[index].size;
            while (left) {
                if (count > IOVECS_MAX - 4 || bytes >= SENT_AT_ONCE) {
                    int ended = send_parts(wire, parts, count, 0);
                    if (ended)
                        return ended;
                    count = bytes = 0;
                }
                size_t size = left < PIECE_BYTES ? left : PIECE_BYTES;
                xxh3_feed(&state, NULL, at, size);
                parts[count++] = (struct iovec){at, size};
                bytes += size;
                at += size;
                left -= size;
            }
        }
        size_t size;
        pack_header(row->found, &size, row, batch, xxh3_end(&state));
        parts[count++] = (struct iovec){row->found, size};
        bytes += size;
        if (count > IOVECS_MAX - 4) {
            int ended = send_parts(wire, parts, count, 0);
            if (ended)
                return ended;
            count = bytes = 0;
        }
    }
    return send_parts(wire, parts, count, 0);
}

/* Makes the result of slow.tcp_read and tcp_write. */
static PyObject *exchange_rows(Batch *batch, int fd, uint64_t segment_bytes, PyObject *rows, double deadline,
                               double stall, double spin) {
    PyObject *results = NULL;
    uint8_t *request = NULL;
    uint64_t total = 0;
    size_t request_size = 0;
    batch->segment_bytes = segment_bytes;
    if (!PyList_CheckExact(rows)) {
        PyErr_SetString(PyExc_TypeError, "rows come in a list");
        return NULL;
    }
    if (batch->name_size > NAMESPACE_MAX) {
        PyErr_SetString(PyExc_ValueError, "too long a namespace");
        return NULL;
    }
    int ended = take_rows(batch, rows, &total), status = ANSWERED, quiesced = 1;
    Wire wire = {.fd = fd, .deadline_ns = as_ns(deadline), .stall_ns = as_ns(stall), .looked_ns = now_ns()};
    if (ended > 0)
        results = Py_BuildValue("iiiO", REFUSED, STATUS_INVALID_RANGE, 1, Py_None);
    if (ended)
        goto done;
    char unasked;
    if (recv(fd, &unasked, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) {
        results = Py_BuildValue("iiiO", UNASKED, 0, 1, Py_None);
        goto done;
    }
    if (!(request = make_request(batch, &request_size))) {
        PyErr_NoMemory();
        goto done;
    }
    wire.thread = PyEval_SaveThread();
    int64_t spin_until = 0;
    if (batch->write) {
        quiesced = 0;
        status = send_rows(&wire, batch, request, request_size);
        int number = wire.number;
        if (!status || (status == BROKEN && (number == EPIPE || number == ECONNRESET))) {
            if (!status && spin > 0)
                spin_until = now_ns() + (int64_t)(spin * 1e9);
            int answer = receive_status(&wire, &spin_until); /* says also why the server has hung up */
            quiesced = answer == ANSWERED || answer == REFUSED;
            if (!status || answer == REFUSED || answer == SIGNALLED)
                status = answer;
            else
                wire.number = number;
        }
    } else {
        struct iovec part = {request, request_size};
        status = send_parts(&wire, &part, 1, 0);
        if (!status && spin > 0)
            spin_until = now_ns() + (int64_t)(spin * 1e9);
        if (!status)
            status = receive_status(&wire, &spin_until);
        if (!status) /* polling for a long answer would keep the kernel from filling the socket */
            status = receive_rows(&wire, batch, total, total <= GATHERED_MAX ? &spin_until : NULL);
    }
    PyEval_RestoreThread(wire.thread);
    if (status == SIGNALLED)
        goto done;
    PyObject *found = status || batch->write ? Py_NewRef(Py_None) : outcomes(batch);
    if (found)
        results = Py_BuildValue("iiiN", status, status ? wire.number : polled(spin_until), quiesced, found);
done:
    free(request);
    release_batch(batch);
    return results;
}

static PyObject *tcp_read(PyObject *self, PyObject *args) {
    Batch batch = {.write = 0};
    unsigned long long size, seed;
    double deadline, stall, spin;
    PyObject *stream, *rows;
    (void)self;
    if (!PyArg_ParseTuple(args, "OKKs#Opdddp", &stream, &size, &seed, &batch.name, &batch.name_size, &rows,
                          &batch.verify, &deadline, &stall, &spin, &batch.with_capabilities))
        return NULL;
    batch.seed = seed;
    int fd;
    return descriptor_of(stream, &fd) ? exchange_rows(&batch, fd, size, rows, deadline, stall, spin) : NULL;
}

static PyObject *tcp_write(PyObject *self, PyObject *args) {
    Batch batch = {.write = 1};
    unsigned long long size, seed;
    double deadline, stall, spin;
    PyObject *stream, *rows;
    (void)self;
    if (!PyArg_ParseTuple(args, "OKKs#Odddp", &stream, &size, &seed, &batch.name, &batch.name_size, &rows,
                          &deadline, &stall, &spin, &batch.with_capabilities))
        return NULL;
    batch.seed = seed;
    int fd;
    return descriptor_of(stream, &fd) ? exchange_rows(&batch, fd, size, rows, deadline, stall, spin) : NULL;
}

/* --- the node's end ---------------------------------------------------------------------------- */

typedef struct {
    Wire wire;
    int file;
    uint8_t *memory;
    uint64_t size, generation;
    const volatile uint8_t *cut;
    int64_t stall_ns;
    uint64_t *counts; /* reads, bytes of those, writes, bytes of those */
    const uint8_t *key; /* of the segment: every range needs a capability; NULL: none does */
    uint64_t holder;    /* of the capabilities */
    uint64_t *wipe_seqs;   /* the last wipe sequence number of each extent: revoke_writes */
    uint64_t *writes;    /* the number of extents that are being written, and their offsets */
    int64_t expires_ns; /* when the first capability of the present request ends */
} Served;

static int fenced(const Served *served) {
    const uint64_t *word = (const uint64_t *)(served->memory + GENERATION_OFFSET);
    return *served->cut || __atomic_load_n(word, __ATOMIC_ACQUIRE) != served->generation;
}

/* Nothing of a request moves after one of its capabilities has ended. */
static void soon(Served *served) {
    int64_t deadline = now_ns() + served->stall_ns;
    served->wire.deadline_ns = deadline < served->expires_ns ? deadline : served->expires_ns;
}

static int send_ranges(Served *served, const uint64_t *ranges, size_t count) {
    struct iovec parts[IOVECS_MAX];
    uint8_t ok[STATUS_BYTES] = {0};
    size_t held = 0, bytes = 0;
    memcpy(ok, TCP_MAGIC, 4);
    parts[held++] = (struct iovec){ok, sizeof ok};
    for (size_t index = 0; index < count; index++) {
        uint64_t offset = ranges[2 * index], left = ranges[2 * index + 1];
        if (held == IOVECS_MAX || bytes >= RECEIVED_AT_ONCE || (held && left > GATHERED_MAX)) {
            soon(served);
            int ended = send_parts(&served->wire, parts, held, MSG_MORE);
            if (ended)
                return ended;
            held = bytes = 0;
        }
        if (left <= GATHERED_MAX) {
            parts[held++] = (struct iovec){served->memory + offset, left};
            bytes += left;
            continue;
        }
        while (left) { /* sendfile lends the pages to the kernel: a lease outlives it */
            off_t at = (off_t)offset;
            soon(served);
            int ended = arm(&served->wire, 1);
            if (ended)
                return ended;
            if (served->file < 0) { /* sendfile refuses reserved huge pages */
                struct iovec part = {served->memory + offset, left < PIECE_BYTES ? left : PIECE_BYTES};
                size_t size = part.iov_len;
                if ((ended = send_parts(&served->wire, &part, 1, index + 1 < count ? MSG_MORE : 0)))
                    return ended;
                offset += size;
                left -= size;
                continue;
            }
            ssize_t sent = sendfile(served->wire.fd, served->file, &at,
                                    left < FILE_AT_ONCE ? left : FILE_AT_ONCE);
            if (sent < 0) {
                if ((ended = failed(&served->wire, 1)))
                    return ended;
            } else if (!sent) {
                return ENDED;
            } else {
                offset += (uint64_t)sent;
                left -= (uint64_t)sent;
                if (left && now_ns() >= served->wire.deadline_ns)
                    return TIMED_OUT;
            }
        }
    }
    soon(served);
    return held ? send_parts(&served->wire, parts, held, 0) : ANSWERED;
}

static int receive_ranges(Served *served, const uint64_t *ranges, size_t count) {
    struct iovec parts[IOVECS_MAX];
    size_t index = 0;
    uint64_t done = 0;
    while (index < count) {
        size_t held = 0, bytes = 0;
        while (index < count && held < IOVECS_MAX && bytes < RECEIVED_AT_ONCE) {
            uint64_t left = ranges[2 * index + 1] - done;
            size_t size = left < RECEIVED_AT_ONCE - bytes ? (size_t)left : RECEIVED_AT_ONCE - bytes;
            if (size)
                parts[held++] = (struct iovec){served->memory + ranges[2 * index] + done, size};
            bytes += size;
            done += size;
            if (size == left) {
                index++;
                done = 0;
            }
        }
        if (fenced(served)) {
            served->wire.number = STATUS_GONE;
            return REFUSED;
        }
        soon(served);
        int ended = receive_parts(&served->wire, parts, held, NULL);
        if (ended)
            return ended;
    }
    if (served->key) /* before the client may know */
        __atomic_store_n(served->writes, 0, __ATOMIC_RELEASE);
    uint8_t ok[STATUS_BYTES] = {0};
    memcpy(ok, TCP_MAGIC, 4);
    struct iovec part = {ok, sizeof ok};
    soon(served);
    return send_parts(&served->wire, &part, 1, 0);
}

static int refused(Served *served, int status) {
    served->wire.number = status;
    return REFUSED;
}

/* Whether each record of the request has a valid capability: of this segment, generation and holder, that
 * has not expired, for an extent around its range, with a right for `op`; to write, one that is not older
 * than the last order to wipe the extent. Leaves the ranges alone, one behind the other.
 *
 * A write is noted in `writes` before the wipe sequence numbers are read, and who publishes a wipe reads `writes`
 * after that: so either this refuses the write, or the other one finds it, and ends it. */
static int take_records(Served *served, uint64_t *ranges, size_t count, int op) {
    uint64_t now_ms = (uint64_t)now_ns() / 1000000, first_ms = UINT64_MAX;
    for (size_t index = 0; index < count; index++) {
        uint64_t record[RECORD_BYTES / 8];
        uint8_t mac[SIPHASH_BYTES];
        memcpy(record, (const uint8_t *)ranges + RECORD_BYTES * index, RECORD_BYTES);
        uint64_t offset = record[0], length = record[1];
        CapabilityInput input = {.generation = served->generation, .holder = served->holder, .offset = record[2],
                         .length = record[3], .expires_ms = record[4], .wipe_seq = record[5],
                         .rights = record[6]};
        capability_mac(served->key, &input, mac);
        if (!same_mac(mac, (const uint8_t *)&record[7]) || input.expires_ms <= now_ms ||
            !(input.rights & (uint64_t)op) ||
            offset - input.offset > input.length || /* also if it begins before: that wraps */
            length > input.length - (offset - input.offset))
            return 0;
        first_ms = input.expires_ms < first_ms ? input.expires_ms : first_ms;
        if (op == OP_WRITE)
            served->writes[1 + index] = input.offset;
    }
    if (op == OP_WRITE) {
        __atomic_store_n(served->writes, count, __ATOMIC_RELEASE);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
    }
    for (size_t index = 0; index < count; index++) {
        uint64_t record[RECORD_BYTES / 8];
        memcpy(record, (const uint8_t *)ranges + RECORD_BYTES * index, RECORD_BYTES);
        if (op == OP_WRITE &&
            record[5] < __atomic_load_n(wipe_seq_of(served->wipe_seqs, record[2]), __ATOMIC_RELAXED))
            return 0;
        ranges[2 * index] = record[0];
        ranges[2 * index + 1] = record[1];
    }
    served->expires_ns = first_ms < INT64_MAX / 1000000 ? (int64_t)first_ms * 1000000 : INT64_MAX;
    if (served->expires_ns - now_ns() < served->stall_ns) /* sooner than the time-outs that are set */
        served->wire.armed_ns[0] = served->wire.armed_ns[1] = 0;
    return 1;
}

/* Serves one request. Returns TIMED_OUT with `*idle` set when none has begun. A node sleeps until one
 * comes; docs/decisions/polling.md has who polls. */
static int serve_request(Served *served, uint64_t *ranges, int *idle) {
    uint8_t head[REQUEST_HEAD];
    size_t have = 0;
    *idle = 0;
    served->expires_ns = INT64_MAX;
    soon(served);
    while (have < sizeof head) {
        int ended = arm(&served->wire, 0);
        ssize_t count = ended ? -1 : recv(served->wire.fd, head + have, sizeof head - have, 0);
        if (!ended && !count)
            return ENDED;
        if (count > 0)
            have += (size_t)count;
        else if (ended || (ended = failed(&served->wire, 0))) {
            *idle = ended == TIMED_OUT && !have;
            return ended;
        }
    }
    uint32_t count = load32(head + 8);
    int op = load16(head + 4);
    if (memcmp(head, TCP_MAGIC, 4) || load16(head + 6) || (op != OP_READ && op != OP_WRITE) || !count ||
        count > RANGES_MAX)
        return refused(served, STATUS_BAD_REQUEST);
    soon(served);
    size_t width = served->key ? RECORD_BYTES : RANGE_BYTES;
    int ended = receive_bytes(&served->wire, ranges, width * (size_t)count, NULL);
    if (ended)
        return ended;
    if (served->key && !take_records(served, ranges, count, op))
        return refused(served, STATUS_NOT_ALLOWED);
    uint64_t total = 0;
    for (size_t index = 0; index < count; index++) {
        uint64_t offset = ranges[2 * index], length = ranges[2 * index + 1];
        if (offset < SUPERBLOCK_BYTES || offset > served->size || length > served->size - offset ||
            length > served->size - total)
            return refused(served, STATUS_INVALID_RANGE);
        total += length;
    }
    if (fenced(served))
        return refused(served, STATUS_GONE);
    ended = op == OP_READ ? send_ranges(served, ranges, count) : receive_ranges(served, ranges, count);
    if (!ended) {
        __atomic_fetch_add(&served->counts[op == OP_READ ? 0 : 2], 1, __ATOMIC_RELAXED);
        __atomic_fetch_add(&served->counts[op == OP_READ ? 1 : 3], total, __ATOMIC_RELAXED);
    }
    return ended;
}

static PyObject *serve(PyObject *self, PyObject *args) {
    Served served = {0};
    Py_buffer memory, cut, counts, wipe_seqs, writes;
    unsigned long long generation, holder;
    double stall, idle;
    PyObject *stream;
    const char *key;
    Py_ssize_t key_size;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oiw*Kw*w*ddy#Kw*w*", &stream, &served.file, &memory, &generation, &cut,
                          &counts, &stall, &idle, &key, &key_size, &holder, &wipe_seqs, &writes))
        return NULL;
    PyObject *result = NULL;
    uint64_t *ranges = malloc((key_size ? RECORD_BYTES : RANGE_BYTES) * RANGES_MAX);
    if (!descriptor_of(stream, &served.wire.fd))
        goto done;
    if (!ranges) {
        PyErr_NoMemory();
        goto done;
    }
    if (memory.len < SUPERBLOCK_BYTES || (uintptr_t)memory.buf % 8 || cut.len < 1 || counts.len < 32 ||
        (uintptr_t)counts.buf % 8) {
        PyErr_SetString(PyExc_ValueError, "no segment, or too short buffers");
        goto done;
    }
    if (key_size && key_size != SIPHASH_KEY_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a key has 16 bytes");
        goto done;
    }
    if (key_size && (wipe_seqs.len != WIPE_TABLE_BYTES || (uintptr_t)wipe_seqs.buf % 8 || writes.len < WRITES_BYTES ||
                     (uintptr_t)writes.buf % 8)) {
        PyErr_SetString(PyExc_ValueError, "no table of wipe sequence numbers, or of writes in progress");
        goto done;
    }
    served.wipe_seqs = wipe_seqs.buf;
    served.writes = writes.buf;
    served.key = key_size ? (const uint8_t *)key : NULL;
    served.holder = holder;
    served.memory = memory.buf;
    served.size = (uint64_t)memory.len;
    served.generation = generation;
    served.cut = cut.buf;
    served.counts = counts.buf;
    served.stall_ns = as_ns(stall);
    int status = ANSWERED, is_idle;
    Py_BEGIN_ALLOW_THREADS
    int64_t quiet_since = now_ns();
    while (!status) {
        status = serve_request(&served, ranges, &is_idle);
        if (served.key)
            __atomic_store_n(served.writes, 0, __ATOMIC_RELEASE);
        if (!status)
            quiet_since = now_ns();
        else if (status == TIMED_OUT && is_idle && !*served.cut)
            status = now_ns() - quiet_since >= as_ns(idle) ? ENDED : ANSWERED;
    }
    Py_END_ALLOW_THREADS
    result = Py_BuildValue("ii", status, served.wire.number);
done:
    free(ranges);
    PyBuffer_Release(&memory);
    PyBuffer_Release(&cut);
    PyBuffer_Release(&counts);
    PyBuffer_Release(&wipe_seqs);
    PyBuffer_Release(&writes);
    return result;
}

#endif
