/* Objects of one batch on one segment: headers, payloads, and how a batch comes from Python. */
#ifndef KVSTORE_ROWS_H
#define KVSTORE_ROWS_H

/* As in kvstore.memory.header; tests compare what one packs with what the other reads. */
#define HEADER_BYTES 1024
#define FIXED_BYTES 64
#define SUPERBLOCK_BYTES 4096
#define GENERATION_OFFSET 16
#define CHECKED_FROM 16
#define FORMAT_VERSION 1
#define NAMESPACE_MAX 128
#define KEY_MAX 256
#define DESCRIPTOR_MAX 320
#define CAPABILITY_BYTES 32 /* u64 expiry, u64 order, MAC: capability.h */
#define HEADER_MAC_BYTES 16      /* of a header, behind its capability in a row: capability.h */
static const uint8_t MAGIC[8] = "KVextnt\x01";

#define PIECE_BYTES (256 << 10) /* before each, a look at clock and generation */
#define UNLOCKED_BYTES (512 << 10) /* from here on the GIL is given up meanwhile */
#define THREAD_BYTES (4 << 20) /* a thread costs 20 us, and a core that the master may need */
#define STREAM_BYTES (4 << 20) /* from here on copies bypass the caches, which they would only empty */
#define THREADS_MAX 16

/* How a batch ended, and what became of a row (kvstore.native.interface says what they mean). */
enum { DONE = 0, UNMOUNTED = 1, LATE = 2, OUTSIDE = 3 };
enum { WHOLE = 0, STALE = 1, CORRUPT = 2 };

/* As kvstore.runtime.clock.uptime, in nanoseconds. */
static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* A time of kvstore.runtime.clock.uptime, or a duration, in nanoseconds; it may be infinite. */
static int64_t as_ns(double seconds) {
    return seconds > 9e9 ? INT64_MAX : (int64_t)(seconds * 1e9);
}

static inline uint16_t load16(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, 2);
    return value;
}

typedef struct {
    uint8_t *at;
    size_t size;
} Part;

typedef struct {
    uint64_t offset, size, epoch, counter;
    const uint8_t *key, *parent, *descriptor; /* the last two: writes only */
    size_t key_size, parent_size, descriptor_size;
    const uint8_t *capability; /* of CAPABILITY_BYTES, of none, or with a header MAC behind it */
    size_t capability_size;
    Part *parts;
    size_t part_count;
    int copied; /* whether buffers hold the payload; otherwise it stays in the segment */
    /* of a read; a tcp write has its packed header in `found` */
    int status;
    uint64_t checksum, left; /* by a tcp read: the header's checksum, payload bytes to come */
    uint16_t found_at, found_size;
    uint8_t found[HEADER_BYTES];
} Row;

typedef struct {
    Py_buffer memory; /* of the segment, where it is mapped */
    uint64_t segment_bytes;
    const char *name;
    Py_ssize_t name_size;
    uint64_t generation, seed;
    int64_t deadline_ns;
    int verify, write, streams;
    int with_capabilities; /* over tcp: whether the request shows the rows' capabilities */
    Row *rows;
    size_t row_count;
    Part *parts;
    Py_buffer *held;
    size_t held_count;
    _Atomic size_t next;
    _Atomic int ended;
} Batch;

static int interrupted(const Batch *batch) {
    const uint8_t *word = (const uint8_t *)batch->memory.buf + GENERATION_OFFSET;
    if (__atomic_load_n((const uint64_t *)word, __ATOMIC_ACQUIRE) != batch->generation)
        return UNMOUNTED;
    return now_ns() >= batch->deadline_ns ? LATE : DONE;
}

/* WHOLE: as kvstore.native.object_headers.header_of, the row's header is at `header`; otherwise STALE. Reads shared
 * memory once, into `row->found`: what is checked is what is kept. */
static int check_header(Row *row, const uint8_t *header, const Batch *batch, uint64_t *checksum) {
    uint8_t *head = row->found;
    if (header != head)
        memcpy(head, header, FIXED_BYTES);
    READ_ONCE();
    size_t name = load16(head + 20), key = load16(head + 22);
    size_t parent = load16(head + 24), descriptor = load16(head + 26);
    size_t end = FIXED_BYTES + name + key + parent + descriptor;
    if (memcmp(head, MAGIC, 8) || load16(head + 16) != FORMAT_VERSION || load16(head + 18) ||
        end > HEADER_BYTES || parent > KEY_MAX || descriptor > DESCRIPTOR_MAX ||
        name != (size_t)batch->name_size || key != row->key_size ||
        load64(head + 32) != row->size || load64(head + 40) != row->epoch ||
        load64(head + 48) != row->counter)
        return STALE;
    if (header != head)
        memcpy(head + FIXED_BYTES, header + FIXED_BYTES, end - FIXED_BYTES);
    READ_ONCE();
    if (memcmp(head + FIXED_BYTES, batch->name, name) ||
        memcmp(head + FIXED_BYTES + name, row->key, key) ||
        xxh3(head + CHECKED_FROM, end - CHECKED_FROM, batch->seed ^ row->offset) != load64(head + 8))
        return STALE;
    row->found_at = (uint16_t)(end - descriptor);
    row->found_size = (uint16_t)descriptor;
    *checksum = load64(head + 56);
    return WHOLE;
}

/* Bytes of the header that the row's write leaves, without its MAC. */
static size_t checked_size(const Batch *batch, const Row *row) {
    return FIXED_BYTES + (size_t)batch->name_size + row->key_size + row->parent_size + row->descriptor_size;
}

/* Bytes of its MAC: a header without room for it has none. */
static size_t header_mac_size(const Batch *batch, const Row *row) {
    int has_header_mac = row->capability_size == CAPABILITY_BYTES + HEADER_MAC_BYTES;
    return has_header_mac && checked_size(batch, row) + HEADER_MAC_BYTES <= HEADER_BYTES ? HEADER_MAC_BYTES : 0;
}

/* As kvstore.native.object_headers.write_header; sets `*size` to the bytes of the header and its MAC. */
static void pack_header(uint8_t *head, size_t *size, const Row *row, const Batch *batch, uint64_t checksum) {
    uint16_t sizes[6] = {FORMAT_VERSION, 0, (uint16_t)batch->name_size, (uint16_t)row->key_size,
                         (uint16_t)row->parent_size, (uint16_t)row->descriptor_size};
    uint64_t numbers[4] = {row->size, row->epoch, row->counter, checksum};
    memcpy(head, MAGIC, 8);
    memcpy(head + 16, sizes, sizeof sizes);
    memset(head + 28, 0, 4);
    memcpy(head + 32, numbers, sizeof numbers);
    uint8_t *at = head + FIXED_BYTES;
    memcpy(at, batch->name, (size_t)batch->name_size);
    at += batch->name_size;
    memcpy(at, row->key, row->key_size);
    at += row->key_size;
    memcpy(at, row->parent, row->parent_size);
    at += row->parent_size;
    memcpy(at, row->descriptor, row->descriptor_size);
    at += row->descriptor_size;
    *size = (size_t)(at - head);
    uint64_t sum = xxh3(head + CHECKED_FROM, *size - CHECKED_FROM, batch->seed ^ row->offset);
    memcpy(head + 8, &sum, 8);
    size_t header_mac = header_mac_size(batch, row);
    memcpy(at, row->capability + CAPABILITY_BYTES * (header_mac > 0), header_mac);
    *size += header_mac;
}

/* Hashes a payload that stays in the segment: a caller reads it there, or has put it there. */
static int hash_payload(const Batch *batch, const Row *row, const uint8_t *payload, Xxh3 *state) {
    size_t left = (size_t)row->size;
    while (left) {
        size_t size = left < PIECE_BYTES ? left : PIECE_BYTES;
        int ended = interrupted(batch);
        if (ended)
            return ended;
        xxh3_feed(state, NULL, payload, size);
        payload += size;
        left -= size;
    }
    return DONE;
}

/* Copies a payload between the segment (`payload`) and the row's parts; hashes it if `state` is given. */
static int move_payload(const Batch *batch, const Row *row, uint8_t *payload, Xxh3 *state) {
    if (!row->copied)
        return hash_payload(batch, row, payload, state);
    for (size_t index = 0; index < row->part_count; index++) {
        uint8_t *part = row->parts[index].at;
        size_t left = row->parts[index].size;
        while (left) {
            size_t size = left < PIECE_BYTES ? left : PIECE_BYTES;
            uint8_t *to = batch->write ? payload : part, *from = batch->write ? part : payload;
            int ended = interrupted(batch);
            if (ended)
                return ended;
            if (state)
                xxh3_feed(state, to, from, size);
            else
                memcpy(to, from, size);
            part += size;
            payload += size;
            left -= size;
        }
    }
    return DONE;
}

static int read_row(const Batch *batch, Row *row) {
    uint8_t *header = (uint8_t *)batch->memory.buf + row->offset;
    uint64_t checksum = 0;
    int ended = interrupted(batch);
    if (ended)
        return ended;
    row->status = check_header(row, header, batch, &checksum);
    if (row->status != WHOLE || (!row->copied && !batch->verify))
        return DONE;
    Xxh3 state;
    if (batch->verify)
        xxh3_begin(&state);
    ended = move_payload(batch, row, header + HEADER_BYTES, batch->verify ? &state : NULL);
    if (!ended && batch->verify && xxh3_end(&state) != checksum)
        row->status = CORRUPT;
    return ended;
}

static int write_row(const Batch *batch, Row *row) {
    uint8_t *header = (uint8_t *)batch->memory.buf + row->offset;
    int ended = interrupted(batch);
    if (ended)
        return ended;
    memset(header, 0, FIXED_BYTES); /* first: a valid header promises a whole payload */
    atomic_thread_fence(memory_order_seq_cst);
    Xxh3 state;
    xxh3_begin(&state);
    state.streams = batch->streams;
    ended = move_payload(batch, row, header + HEADER_BYTES, &state);
    if (ended)
        return ended;
    if (state.streams)
        stream_fence();
    uint8_t head[HEADER_BYTES];
    size_t size;
    pack_header(head, &size, row, batch, xxh3_end(&state));
    ended = interrupted(batch);
    if (ended)
        return ended;
    atomic_thread_fence(memory_order_seq_cst);
    memcpy(header, head, size);
    return DONE;
}

static void release_batch(Batch *batch) {
    for (size_t index = 0; index < batch->held_count; index++)
        PyBuffer_Release(&batch->held[index]);
    PyMem_Free(batch->held);
    PyMem_Free(batch->parts);
    PyMem_Free(batch->rows);
    if (batch->memory.obj)
        PyBuffer_Release(&batch->memory);
}

static int take_number(PyObject *row, Py_ssize_t index, uint64_t *number) {
    *number = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(row, index));
    return *number == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static int take_bytes(PyObject *row, Py_ssize_t index, size_t most, const uint8_t **at, size_t *size) {
    char *data;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(PyTuple_GET_ITEM(row, index), &data, &length))
        return -1;
    if ((size_t)length > most) {
        PyErr_SetString(PyExc_ValueError, "a key, parent, descriptor or capability is too long");
        return -1;
    }
    *at = (const uint8_t *)data;
    *size = (size_t)length;
    return 0;
}

/* Takes a row's list of buffers, as large as its payload, or None: the payload stays in the segment. */
static int take_parts(Batch *batch, Row *row, PyObject *buffers) {
    row->copied = buffers != Py_None;
    if (!row->copied && batch->memory.obj)
        return 0;
    if (!row->copied) {
        PyErr_SetString(PyExc_ValueError, "this row needs buffers");
        return -1;
    }
    Py_ssize_t count = PyList_GET_SIZE(buffers);
    uint64_t size = 0;
    row->parts = batch->parts + batch->held_count;
    row->part_count = (size_t)count;
    for (Py_ssize_t index = 0; index < count; index++) {
        Py_buffer *view = &batch->held[batch->held_count];
        int flags = batch->write ? PyBUF_SIMPLE : PyBUF_WRITABLE;
        if (PyObject_GetBuffer(PyList_GET_ITEM(buffers, index), view, flags))
            return -1;
        Part *part = &batch->parts[batch->held_count++];
        part->at = view->buf;
        part->size = (size_t)view->len;
        size += part->size;
    }
    if (size != row->size) {
        PyErr_SetString(PyExc_ValueError, "buffers and payload differ in size");
        return -1;
    }
    return 0;
}

/* Takes rows: (offset, size, epoch, counter, key, buffers or None[, parent, descriptor], capability).
 * Returns -1 on an exception, OUTSIDE when a row is not within the segment. `*total`: the bytes to copy
 * or hash. */
static int take_rows(Batch *batch, PyObject *rows, uint64_t *total) {
    Py_ssize_t count = PyList_GET_SIZE(rows), width = batch->write ? 9 : 7, buffers = 0;
    size_t capability_max = CAPABILITY_BYTES + (batch->write ? HEADER_MAC_BYTES : 0);
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *row = PyList_GET_ITEM(rows, index);
        if (!PyTuple_CheckExact(row) || PyTuple_GET_SIZE(row) != width) {
            PyErr_SetString(PyExc_TypeError, "a row is a tuple of 7 (to read) or 9 (to write)");
            return -1;
        }
        PyObject *parts = PyTuple_GET_ITEM(row, 5);
        if (parts == Py_None)
            continue;
        if (!PyList_CheckExact(parts)) {
            PyErr_SetString(PyExc_TypeError, "buffers come in a list");
            return -1;
        }
        buffers += PyList_GET_SIZE(parts);
    }
    batch->rows = PyMem_Calloc((size_t)count + 1, sizeof(Row));
    batch->parts = PyMem_Calloc((size_t)buffers + 1, sizeof(Part));
    batch->held = PyMem_Calloc((size_t)buffers + 1, sizeof(Py_buffer));
    if (!batch->rows || !batch->parts || !batch->held) {
        PyErr_NoMemory();
        return -1;
    }
    uint64_t segment_bytes = batch->segment_bytes;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *source = PyList_GET_ITEM(rows, index);
        Row *row = &batch->rows[index];
        if (take_number(source, 0, &row->offset) || take_number(source, 1, &row->size) ||
            take_number(source, 2, &row->epoch) || take_number(source, 3, &row->counter) ||
            take_bytes(source, 4, KEY_MAX, &row->key, &row->key_size) ||
            take_bytes(source, width - 1, capability_max, &row->capability, &row->capability_size) ||
            take_parts(batch, row, PyTuple_GET_ITEM(source, 5)))
            return -1;
        if (batch->write &&
            (take_bytes(source, 6, KEY_MAX, &row->parent, &row->parent_size) ||
             take_bytes(source, 7, DESCRIPTOR_MAX, &row->descriptor, &row->descriptor_size)))
            return -1;
        if (row->offset < SUPERBLOCK_BYTES || row->offset > segment_bytes ||
            segment_bytes - row->offset < HEADER_BYTES ||
            segment_bytes - row->offset - HEADER_BYTES < row->size)
            return OUTSIDE;
        batch->row_count++;
        *total += row->copied || batch->write || batch->verify ? row->size : 0;
    }
    return DONE;
}

/* Makes the list that a read returns: per row its descriptor, or STALE or CORRUPT. */
static PyObject *outcomes(const Batch *batch) {
    PyObject *results = PyList_New((Py_ssize_t)batch->row_count);
    for (size_t index = 0; results && index < batch->row_count; index++) {
        const Row *row = &batch->rows[index];
        PyObject *item = row->status == WHOLE
            ? PyBytes_FromStringAndSize((const char *)row->found + row->found_at, row->found_size)
            : PyLong_FromLong(row->status);
        if (item)
            PyList_SET_ITEM(results, (Py_ssize_t)index, item);
        else
            Py_CLEAR(results);
    }
    return results;
}

#endif
