/* The steps of the hot path that Python is too slow for. Everything here has a twin in Python, named
 * beside it, which is used where this module was not built; tests/unit/test_native.py compares them.
 *
 * Nothing here decides: what is refused, retried or waited for is said by the callers. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "xxh3.h"

/* kvstore.memory.header; tests compare what is packed there with what is read here. */
#define HEADER_BYTES 1024
#define FIXED_BYTES 64
#define SUPERBLOCK_BYTES 4096
#define GENERATION_OFFSET 16
#define CHECKED_FROM 16
#define FORMAT_VERSION 2
#define NAMESPACE_MAX 128
#define KEY_MAX 256
#define DESCRIPTOR_MAX 320
static const uint8_t MAGIC[8] = "KVextnt\x01";

#define PIECE_BYTES (256 << 10) /* between two looks at the clock and the generation */
#define UNLOCKED_BYTES (512 << 10) /* from here on the interpreter's lock is given up meanwhile */
#define THREAD_BYTES (2 << 20) /* a thread costs 20 us to start: not for less than this */
#define THREADS_MAX 16
#define BUFFERS_MAX 1024 /* parts of one object's payload */

/* How a batch ended, and what became of a row (kvstore.native says what they mean). */
enum { DONE = 0, GONE = 1, LATE = 2, OUTSIDE = 3 };
enum { WHOLE = 0, STALE = 1, CORRUPT = 2 };

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline uint16_t load16(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, 2);
    return value;
}

/* --- rows: objects of one batch on one segment ------------------------------------------------- */

typedef struct {
    uint8_t *at;
    size_t size;
} Part;

typedef struct {
    uint64_t offset, size, epoch, counter;
    const uint8_t *key, *parent, *descriptor; /* the last two: writes only */
    size_t key_size, parent_size, descriptor_size;
    Part *parts;
    size_t part_count;
    int copied; /* whether the payload moves at all */
    /* what comes out of a read */
    int status;
    uint16_t found_at, found_size;
    uint8_t found[HEADER_BYTES];
} Row;

typedef struct {
    Py_buffer memory;
    const char *name;
    Py_ssize_t name_size;
    uint64_t generation, seed;
    int64_t deadline_ns;
    int verify, write;
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
        return GONE;
    return now_ns() >= batch->deadline_ns ? LATE : DONE;
}

/* twin: kvstore.memory.header.unpack, and kvstore.client.objects.is_of. Reads shared memory once:
 * what is checked is what is kept. */
static int check_header(Row *row, const uint8_t *place, const Batch *batch, uint64_t *checksum) {
    uint8_t *head = row->found;
    memcpy(head, place, FIXED_BYTES);
    size_t name = load16(head + 20), key = load16(head + 22);
    size_t parent = load16(head + 24), descriptor = load16(head + 26);
    size_t end = FIXED_BYTES + name + key + parent + descriptor;
    if (memcmp(head, MAGIC, 8) || load16(head + 16) != FORMAT_VERSION || load16(head + 18) ||
        end > HEADER_BYTES || parent > KEY_MAX || descriptor > DESCRIPTOR_MAX ||
        name != (size_t)batch->name_size || key != row->key_size ||
        load64(head + 32) != row->size || load64(head + 40) != row->epoch ||
        load64(head + 48) != row->counter)
        return STALE;
    memcpy(head + FIXED_BYTES, place + FIXED_BYTES, end - FIXED_BYTES);
    if (memcmp(head + FIXED_BYTES, batch->name, name) ||
        memcmp(head + FIXED_BYTES + name, row->key, key) ||
        xxh3(head + CHECKED_FROM, end - CHECKED_FROM, batch->seed ^ row->offset) != load64(head + 8))
        return STALE;
    row->found_at = (uint16_t)(end - descriptor);
    row->found_size = (uint16_t)descriptor;
    *checksum = load64(head + 56);
    return WHOLE;
}

/* twin: kvstore.memory.header.pack_into */
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
}

/* Payload between the segment (`place`) and the row's parts; its checksum in `state` if wanted. */
static int move_payload(const Batch *batch, const Row *row, uint8_t *place, Xxh3 *state) {
    for (size_t index = 0; index < row->part_count; index++) {
        uint8_t *part = row->parts[index].at;
        size_t left = row->parts[index].size;
        while (left) {
            size_t size = left < PIECE_BYTES ? left : PIECE_BYTES;
            uint8_t *to = batch->write ? place : part, *from = batch->write ? part : place;
            int ended = interrupted(batch);
            if (ended)
                return ended;
            if (state)
                xxh3_feed(state, to, from, size);
            else
                memcpy(to, from, size);
            part += size;
            place += size;
            left -= size;
        }
    }
    return DONE;
}

static int read_row(const Batch *batch, Row *row) {
    uint8_t *place = (uint8_t *)batch->memory.buf + row->offset;
    uint64_t checksum = 0;
    int ended = interrupted(batch);
    if (ended)
        return ended;
    row->status = check_header(row, place, batch, &checksum);
    if (row->status != WHOLE || !row->copied)
        return DONE;
    Xxh3 state;
    if (batch->verify)
        xxh3_begin(&state, 0);
    ended = move_payload(batch, row, place + HEADER_BYTES, batch->verify ? &state : NULL);
    if (!ended && batch->verify && xxh3_end(&state) != checksum)
        row->status = CORRUPT;
    return ended;
}

static int write_row(const Batch *batch, Row *row) {
    uint8_t *place = (uint8_t *)batch->memory.buf + row->offset;
    int ended = interrupted(batch);
    if (ended)
        return ended;
    memset(place, 0, FIXED_BYTES); /* wiped first: a whole header means a whole payload */
    atomic_thread_fence(memory_order_seq_cst);
    Xxh3 state;
    xxh3_begin(&state, 0);
    ended = move_payload(batch, row, place + HEADER_BYTES, &state);
    if (ended)
        return ended;
    uint8_t head[HEADER_BYTES];
    size_t size;
    pack_header(head, &size, row, batch, xxh3_end(&state));
    ended = interrupted(batch);
    if (ended)
        return ended;
    atomic_thread_fence(memory_order_seq_cst);
    memcpy(place, head, size);
    return DONE;
}

static void *run_batch(void *argument) {
    Batch *batch = argument;
    while (!atomic_load(&batch->ended)) {
        size_t index = atomic_fetch_add(&batch->next, 1);
        if (index >= batch->row_count)
            break;
        Row *row = &batch->rows[index];
        int ended = batch->write ? write_row(batch, row) : read_row(batch, row);
        if (ended)
            atomic_store(&batch->ended, ended);
    }
    return NULL;
}

static void run_threads(Batch *batch, int threads) {
    pthread_t started[THREADS_MAX];
    int count = 0;
    if (threads > 1) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (count < threads - 1 && !pthread_create(&started[count], NULL, run_batch, batch))
            count++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    run_batch(batch);
    while (count)
        pthread_join(started[--count], NULL);
}

static void release_batch(Batch *batch) {
    for (size_t index = 0; index < batch->held_count; index++)
        PyBuffer_Release(&batch->held[index]);
    PyMem_Free(batch->held);
    PyMem_Free(batch->parts);
    PyMem_Free(batch->rows);
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
        PyErr_SetString(PyExc_ValueError, "a key, parent or descriptor is too long");
        return -1;
    }
    *at = (const uint8_t *)data;
    *size = (size_t)length;
    return 0;
}

/* A list of buffers whose sizes add up to the row's, or None: the payload stays where it is. */
static int take_parts(Batch *batch, Row *row, PyObject *buffers) {
    row->copied = buffers != Py_None;
    if (!row->copied)
        return 0;
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

/* Rows as (offset, size, epoch, counter, key, buffers or None[, parent, descriptor]). Returns -1 on
 * an exception, OUTSIDE when one is not within the segment. */
static int take_rows(Batch *batch, PyObject *rows, uint64_t *total) {
    Py_ssize_t count = PyList_GET_SIZE(rows), width = batch->write ? 8 : 6, buffers = 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *row = PyList_GET_ITEM(rows, index);
        if (!PyTuple_CheckExact(row) || PyTuple_GET_SIZE(row) != width) {
            PyErr_SetString(PyExc_TypeError, "a row is a tuple of 6 (to read) or 8 (to write)");
            return -1;
        }
        PyObject *parts = PyTuple_GET_ITEM(row, 5);
        if (parts == Py_None)
            continue;
        if (!PyList_CheckExact(parts) || PyList_GET_SIZE(parts) > BUFFERS_MAX) {
            PyErr_SetString(PyExc_TypeError, "buffers come in a list, of at most 1024");
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
    uint64_t room = (uint64_t)batch->memory.len;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *source = PyList_GET_ITEM(rows, index);
        Row *row = &batch->rows[index];
        if (take_number(source, 0, &row->offset) || take_number(source, 1, &row->size) ||
            take_number(source, 2, &row->epoch) || take_number(source, 3, &row->counter) ||
            take_bytes(source, 4, KEY_MAX, &row->key, &row->key_size) ||
            take_parts(batch, row, PyTuple_GET_ITEM(source, 5)))
            return -1;
        if (batch->write &&
            (take_bytes(source, 6, KEY_MAX, &row->parent, &row->parent_size) ||
             take_bytes(source, 7, DESCRIPTOR_MAX, &row->descriptor, &row->descriptor_size)))
            return -1;
        if (row->offset < SUPERBLOCK_BYTES || row->offset > room || room - row->offset < HEADER_BYTES ||
            room - row->offset - HEADER_BYTES < row->size)
            return OUTSIDE;
        batch->row_count++;
        *total += row->copied ? row->size : 0;
    }
    return DONE;
}

static int start_batch(Batch *batch, PyObject *rows, Py_ssize_t threads) {
    if (!PyList_CheckExact(rows)) {
        PyErr_SetString(PyExc_TypeError, "rows come in a list");
        return -1;
    }
    if (batch->memory.len < SUPERBLOCK_BYTES || (uintptr_t)batch->memory.buf % 8 ||
        batch->name_size > NAMESPACE_MAX) {
        PyErr_SetString(PyExc_ValueError, "not a segment, or too long a namespace");
        return -1;
    }
    uint64_t total = 0;
    int ended = take_rows(batch, rows, &total);
    if (ended)
        return ended;
    threads = threads > THREADS_MAX ? THREADS_MAX : threads;
    if (threads > (Py_ssize_t)batch->row_count)
        threads = (Py_ssize_t)batch->row_count;
    if (threads > (Py_ssize_t)(total / THREAD_BYTES))
        threads = (Py_ssize_t)(total / THREAD_BYTES);
    if (total >= UNLOCKED_BYTES) {
        Py_BEGIN_ALLOW_THREADS
        run_threads(batch, (int)threads);
        Py_END_ALLOW_THREADS
    } else {
        run_batch(batch);
    }
    return atomic_load(&batch->ended);
}

PyDoc_STRVAR(read_objects_doc,
"read_objects(memory, generation, seed, namespace, rows, verify, deadline, threads)\n"
"See kvstore.native.kinds.Fast.");

static PyObject *read_objects(PyObject *self, PyObject *args) {
    Batch batch = {.write = 0};
    unsigned long long generation, seed;
    double deadline;
    PyObject *rows, *results = NULL;
    Py_ssize_t threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "w*KKs#Opdn", &batch.memory, &generation, &seed, &batch.name,
                          &batch.name_size, &rows, &batch.verify, &deadline, &threads))
        return NULL;
    batch.generation = generation;
    batch.seed = seed;
    batch.deadline_ns = deadline > 9e9 ? INT64_MAX : (int64_t)(deadline * 1e9);
    int ended = start_batch(&batch, rows, threads);
    if (ended > 0)
        results = PyLong_FromLong(ended);
    else if (!ended && (results = PyList_New((Py_ssize_t)batch.row_count))) {
        for (size_t index = 0; index < batch.row_count; index++) {
            Row *row = &batch.rows[index];
            PyObject *item = row->status == WHOLE
                ? PyBytes_FromStringAndSize((char *)row->found + row->found_at, row->found_size)
                : PyLong_FromLong(row->status);
            if (!item) {
                Py_CLEAR(results);
                break;
            }
            PyList_SET_ITEM(results, (Py_ssize_t)index, item);
        }
    }
    release_batch(&batch);
    return results;
}

PyDoc_STRVAR(write_objects_doc,
"write_objects(memory, generation, seed, namespace, rows, deadline, threads)\n"
"See kvstore.native.kinds.Fast.");

static PyObject *write_objects(PyObject *self, PyObject *args) {
    Batch batch = {.write = 1};
    unsigned long long generation, seed;
    double deadline;
    PyObject *rows;
    Py_ssize_t threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "w*KKs#Odn", &batch.memory, &generation, &seed, &batch.name,
                          &batch.name_size, &rows, &deadline, &threads))
        return NULL;
    batch.generation = generation;
    batch.seed = seed;
    batch.deadline_ns = deadline > 9e9 ? INT64_MAX : (int64_t)(deadline * 1e9);
    int ended = start_batch(&batch, rows, threads);
    release_batch(&batch);
    return ended < 0 ? NULL : PyLong_FromLong(ended);
}

/* --- keys -------------------------------------------------------------------------------------- */

PyDoc_STRVAR(pack_keys_doc, "pack_keys(keys)\nSee kvstore.native.kinds.Fast.");

/* twin: kvstore.wire.packed.pack_keys */
static PyObject *pack_keys(PyObject *self, PyObject *keys) {
    (void)self;
    PyObject *items = PySequence_Fast(keys, "keys are a sequence");
    if (!items)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(items), stride = -1, total = 0;
    PyObject **all = PySequence_Fast_ITEMS(items), *result = NULL;
    for (Py_ssize_t index = 0; index < count; index++) {
        Py_ssize_t size = PyBytes_CheckExact(all[index]) ? PyBytes_GET_SIZE(all[index]) : 0;
        if (size < 1 || size > KEY_MAX || (stride >= 0 && size != stride))
            goto irregular;
        stride = size;
        total += size;
    }
    if (!count)
        goto irregular;
    PyObject *data = PyBytes_FromStringAndSize(NULL, total);
    if (data) {
        char *at = PyBytes_AS_STRING(data);
        for (Py_ssize_t index = 0; index < count; index++, at += stride)
            memcpy(at, PyBytes_AS_STRING(all[index]), (size_t)stride);
        result = Py_BuildValue("Nn", data, stride);
    }
    Py_DECREF(items);
    return result;
irregular:
    Py_DECREF(items);
    Py_RETURN_NONE;
}

static Py_ssize_t slot_of(PyTypeObject *type, const char *name) {
    PyObject *descriptor = PyObject_GetAttrString((PyObject *)type, name);
    if (!descriptor)
        return -1;
    Py_ssize_t at = -1;
    if (Py_TYPE(descriptor) == &PyMemberDescr_Type)
        at = ((PyMemberDescrObject *)descriptor)->d_member->offset;
    else
        PyErr_Format(PyExc_TypeError, "%s.%s is no slot", type->tp_name, name);
    Py_DECREF(descriptor);
    return at;
}

#define SLOT(object, at) (*(PyObject **)((char *)(object) + (at)))

static int is_true_attribute(PyObject *object, const char *name) {
    PyObject *value = PyObject_GetAttrString(object, name);
    int truth = value ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    return truth;
}

PyDoc_STRVAR(presence_doc, "presence(shards, mask, data, stride, record, segment)\n"
                           "See kvstore.native.kinds.Fast.");

/* twin: kvstore.master.state.records.NamespaceTable.presence */
static PyObject *presence(PyObject *self, PyObject *args) {
    PyObject *shards;
    PyTypeObject *record_type, *segment_type;
    Py_ssize_t mask, stride;
    Py_buffer data;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!ny*nO!O!", &PyList_Type, &shards, &mask, &data, &stride, &PyType_Type,
                          &record_type, &PyType_Type, &segment_type))
        return NULL;
    PyObject *result = NULL;
    Py_ssize_t segment_at, writer_at, alive_at;
    if ((segment_at = slot_of(record_type, "segment")) < 0 ||
        (writer_at = slot_of(record_type, "writer")) < 0 ||
        (alive_at = slot_of(segment_type, "alive")) < 0)
        goto done;
    if (stride < 1 || mask < 0 || mask >= PyList_GET_SIZE(shards)) {
        PyErr_SetString(PyExc_ValueError, "no stride, or a mask for more shards");
        goto done;
    }
    Py_ssize_t count = data.len / stride;
    result = PyBytes_FromStringAndSize(NULL, count);
    char *out = result ? PyBytes_AS_STRING(result) : NULL;
    for (Py_ssize_t index = 0; result && index < count; index++) {
        PyObject *key = PyBytes_FromStringAndSize((char *)data.buf + index * stride, stride);
        Py_hash_t hash = key ? PyObject_Hash(key) : -1;
        PyObject *shard = PyList_GET_ITEM(shards, (size_t)hash & (size_t)mask);
        PyObject *record = key && PyDict_CheckExact(shard)
            ? _PyDict_GetItem_KnownHash(shard, key, hash) : NULL;
        Py_XDECREF(key);
        int state = 0;
        if (record && Py_TYPE(record) == record_type) {
            PyObject *segment = SLOT(record, segment_at);
            int complete = 0;
            if (segment && segment != Py_None)
                complete = Py_TYPE(segment) == segment_type && SLOT(segment, alive_at) == Py_True
                    ? 1 : is_true_attribute(record, "complete");
            if (complete > 0)
                state = 1;
            else if (!complete) {
                int writer = SLOT(record, writer_at) ? PyObject_IsTrue(SLOT(record, writer_at)) : 0;
                state = writer > 0 ? 2 : 0;
            }
        }
        if (PyErr_Occurred())
            Py_CLEAR(result);
        else
            out[index] = (char)state;
    }
done:
    PyBuffer_Release(&data);
    return result;
}

/* --- sockets ----------------------------------------------------------------------------------- */

#define LANE_HEAD 14 /* kvstore.wire.frames: u32 length, u64 call id, u8 kind, u8 name length */
#define LANE_BUFFER (32 << 10)

enum { ANSWERED = 0, TIMED_OUT = 1, NOT_SENT = 2, BROKEN = 3, ENDED = 4, GARBLED = 5, UNASKED = 6, SIGNALLED = 7 };

/* Waits for `events`; 0, TIMED_OUT or SIGNALLED. */
static int wait_for(int fd, short events, int64_t deadline_ns) {
    struct pollfd polled = {.fd = fd, .events = events};
    int64_t left = deadline_ns - now_ns();
    if (left <= 0)
        return TIMED_OUT;
    int64_t left_ms = left / 1000000 + 1;
    int ready = poll(&polled, 1, left_ms > 3600000 ? 3600000 : (int)left_ms);
    return ready < 0 && errno == EINTR ? SIGNALLED : 0;
}

/* Sends all of it, from `*sent` on. */
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

/* Receives at least `wanted` bytes; polls until `*spin_until`, which is 0 once that was in vain. */
static int receive_some(int fd, char *into, size_t room, size_t wanted, size_t *received,
                        int64_t *spin_until, int64_t deadline_ns) {
    while (*received < wanted) {
        ssize_t count = recv(fd, into + *received, room - *received, MSG_DONTWAIT);
        if (count > 0) {
            *received += (size_t)count;
        } else if (!count) {
            return ENDED;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (*spin_until && now_ns() < *spin_until)
                continue;
            *spin_until = 0;
            int waited = wait_for(fd, POLLIN, deadline_ns);
            if (waited)
                return waited;
        } else if (errno != EINTR) {
            return BROKEN;
        }
    }
    return ANSWERED;
}

PyDoc_STRVAR(exchange_doc, "exchange(fd, request, call_id, spin, deadline, length_max)\n"
                           "See kvstore.native.kinds.Fast.");

/* twin: kvstore.client.stub._LaneConnection.exchange */
static PyObject *exchange(PyObject *self, PyObject *args) {
    int fd;
    Py_buffer request;
    unsigned long long call_id, length_max;
    double spin, deadline;
    (void)self;
    if (!PyArg_ParseTuple(args, "iy*KddK", &fd, &request, &call_id, &spin, &deadline, &length_max))
        return NULL;
    int64_t deadline_ns = deadline > 9e9 ? INT64_MAX : (int64_t)(deadline * 1e9), spin_until = 0;
    char head[LANE_BUFFER];
    size_t sent = 0, received = 0;
    int status, number = 0, sending = 1;
    PyObject *payload = NULL;
    if (recv(fd, head, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) {
        PyBuffer_Release(&request); /* its end, or the reply to a call that was given up */
        return Py_BuildValue("iiiO", UNASKED, 0, 0, Py_None);
    }
    do { /* a signal's handler runs between two attempts, and may raise */
        Py_BEGIN_ALLOW_THREADS
        status = ANSWERED;
        if (sending)
            status = send_all(fd, request.buf, (size_t)request.len, &sent, deadline_ns);
        if (!status) {
            if (sending && spin > 0)
                spin_until = now_ns() + (int64_t)(spin * 1e9);
            sending = 0;
            status = receive_some(fd, head, sizeof head, LANE_HEAD, &received, &spin_until, deadline_ns);
        }
        if (status == NOT_SENT || status == BROKEN)
            number = errno;
        Py_END_ALLOW_THREADS
        if (status == SIGNALLED && PyErr_CheckSignals()) {
            PyBuffer_Release(&request);
            return NULL;
        }
    } while (status == SIGNALLED);
    PyBuffer_Release(&request);
    if (status)
        return Py_BuildValue("iiiO", status, number, 0, Py_None);
    uint64_t length = load32((uint8_t *)head) + (uint64_t)4;
    int kind = (uint8_t)head[12];
    if (length > length_max + 4 || length < LANE_HEAD || head[13] || received > length)
        return Py_BuildValue("iiiO", GARBLED, 0, 0, Py_None);
    size_t size = (size_t)length - LANE_HEAD, have = received - LANE_HEAD;
    if (!(payload = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size)))
        return NULL;
    char *into = PyBytes_AS_STRING(payload);
    memcpy(into, head + LANE_HEAD, have);
    while (have < size) {
        int64_t asleep = 0; /* it has begun to come: no use in polling */
        Py_BEGIN_ALLOW_THREADS
        status = receive_some(fd, into, size, size, &have, &asleep, deadline_ns);
        number = status == BROKEN ? errno : 0;
        Py_END_ALLOW_THREADS
        if (status == SIGNALLED && PyErr_CheckSignals()) {
            Py_DECREF(payload);
            return NULL;
        }
        if (status && status != SIGNALLED) {
            Py_DECREF(payload);
            return Py_BuildValue("iiiO", status, number, 0, Py_None);
        }
    }
    uint64_t answered = load64((uint8_t *)head + 4);
    if (answered != call_id)
        status = GARBLED;
    else
        status = ANSWERED;
    return Py_BuildValue("iiiN", status, spin_until != 0, kind, payload);
}

/* --- the module -------------------------------------------------------------------------------- */

PyDoc_STRVAR(xxh3_64_doc, "xxh3_64(data, seed=0)\nSee kvstore.native.kinds.Fast.");

static PyObject *xxh3_64(PyObject *self, PyObject *args) {
    Py_buffer data;
    unsigned long long seed = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*|K", &data, &seed))
        return NULL;
    uint64_t hash;
    if (data.len >= UNLOCKED_BYTES) {
        Py_BEGIN_ALLOW_THREADS
        hash = xxh3(data.buf, (size_t)data.len, seed);
        Py_END_ALLOW_THREADS
    } else {
        hash = xxh3(data.buf, (size_t)data.len, seed);
    }
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLongLong(hash);
}

static PyMethodDef METHODS[] = {
    {"exchange", exchange, METH_VARARGS, exchange_doc},
    {"pack_keys", pack_keys, METH_O, pack_keys_doc},
    {"presence", presence, METH_VARARGS, presence_doc},
    {"read_objects", read_objects, METH_VARARGS, read_objects_doc},
    {"write_objects", write_objects, METH_VARARGS, write_objects_doc},
    {"xxh3_64", xxh3_64, METH_VARARGS, xxh3_64_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstore.native.fast",
    .m_doc = "Steps of the hot path, compiled. Use kvstore.native.",
    .m_size = 0,
    .m_methods = METHODS,
};

PyMODINIT_FUNC PyInit_fast(void) {
    const char *wanted = getenv("KVSTORE_NATIVE");
    if (wanted && !strcmp(wanted, "0")) {
        PyErr_SetString(PyExc_ImportError, "KVSTORE_NATIVE=0");
        return NULL;
    }
    xxh3_choose();
    return PyModule_Create(&MODULE);
}
