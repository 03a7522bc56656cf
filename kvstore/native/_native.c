/* The steps of the hot path that Python is too slow for. slow.py says what each does, and does the same
 * where this module was not built; tests/unit/native/test_native.py tests both.
 *
 * A step returns what happened, and does not try again: its caller decides what comes of it. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <linux/sockios.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>

#include "siphash.h"
#include "checksum.h"

#include "rows.h"
#include "sockets.h"

#include "capability.h"
#include "tcp.h"

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
    batch->segment_bytes = (uint64_t)batch->memory.len;
    int ended = take_rows(batch, rows, &total);
    if (ended)
        return ended;
    batch->streams = batch->write && total >= STREAM_BYTES;
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

static PyObject *read_objects(PyObject *self, PyObject *args) {
    Batch batch = {.write = 0};
    unsigned long long generation, seed;
    double deadline;
    PyObject *rows, *results = NULL;
    Py_ssize_t threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*KKs#Opdn", &batch.memory, &generation, &seed, &batch.name,
                          &batch.name_size, &rows, &batch.verify, &deadline, &threads))
        return NULL;
    batch.generation = generation;
    batch.seed = seed;
    batch.deadline_ns = as_ns(deadline);
    int ended = start_batch(&batch, rows, threads);
    if (ended > 0)
        results = PyLong_FromLong(ended);
    else if (!ended)
        results = outcomes(&batch);
    release_batch(&batch);
    return results;
}

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
    batch.deadline_ns = as_ns(deadline);
    int ended = start_batch(&batch, rows, threads);
    release_batch(&batch);
    return ended < 0 ? NULL : PyLong_FromLong(ended);
}

/* --- keys -------------------------------------------------------------------------------------- */

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

static PyObject *unpack_keys(PyObject *self, PyObject *args) {
    Py_ssize_t stride;
    Py_buffer data;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*n", &data, &stride))
        return NULL;
    PyObject *keys = NULL;
    if (stride < 1)
        PyErr_SetString(PyExc_ValueError, "no stride");
    else
        keys = PyList_New(data.len / stride);
    for (Py_ssize_t index = 0; keys && index < data.len / stride; index++) {
        PyObject *key = PyBytes_FromStringAndSize((char *)data.buf + index * stride, stride);
        if (key)
            PyList_SET_ITEM(keys, index, key);
        else
            Py_CLEAR(keys);
    }
    PyBuffer_Release(&data);
    return keys;
}

#if PY_VERSION_HEX < 0x030E0000
#define Py_HashBuffer(data, size) _Py_HashBytes(data, size) /* its older name */
#endif

static PyObject *get_many(PyObject *self, PyObject *args) {
    PyObject *shards;
    Py_ssize_t mask, stride;
    Py_buffer data;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!ny*n", &PyList_Type, &shards, &mask, &data, &stride))
        return NULL;
    PyObject *result = NULL;
    if (stride < 1 || mask < 0 || mask >= PyList_GET_SIZE(shards))
        PyErr_SetString(PyExc_ValueError, "no stride, or a mask for more shards");
    else
        result = PyList_New(data.len / stride);
    /* One object, which no other code sees, holds each key in turn. Its own hash is never used. */
    PyObject *key = result ? PyBytes_FromStringAndSize(NULL, stride) : NULL;
    if (!key)
        Py_CLEAR(result);
    Py_ssize_t count = result ? PyList_GET_SIZE(result) : 0, index = 0;
    for (; index < count; index++) {
        memcpy(PyBytes_AS_STRING(key), (char *)data.buf + index * stride, (size_t)stride);
        Py_hash_t hash = Py_HashBuffer(PyBytes_AS_STRING(key), stride);
        PyObject *shard = PyList_GET_ITEM(shards, (size_t)hash & (size_t)mask);
        PyObject *found = PyDict_CheckExact(shard) ? _PyDict_GetItem_KnownHash(shard, key, hash) : NULL;
        if (PyErr_Occurred())
            break;
        PyList_SET_ITEM(result, index, found ? found : Py_None);
        __builtin_prefetch(found, 1); /* so that the next loop finds it in cache */
    }
    for (Py_ssize_t borrowed = 0; borrowed < index; borrowed++)
        Py_INCREF(PyList_GET_ITEM(result, borrowed));
    if (index < count)
        Py_CLEAR(result);
    Py_XDECREF(key);
    PyBuffer_Release(&data);
    return result;
}

/* --- the lane ----------------------------------------------------------------------------------- */

/* Sends `request`, then receives at least LANE_HEAD bytes into `into`, of LANE_BUFFER bytes. UNASKED: bytes
 * had come before. `*spin_ns`: how long to poll; afterwards as polls_again leaves it.
 * SIGNALLED: a signal's handler has raised. */
static int ask(int fd, const Py_buffer *request, char *into, size_t *received, int64_t *spin_ns,
               int64_t deadline_ns, int *number) {
    size_t sent = 0;
    int status, sending = 1;
    if (now_ns() >= deadline_ns) /* nothing is sent after the deadline */
        return TIMED_OUT;
    if (recv(fd, into, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK))
        return UNASKED; /* the other end has closed, or sent bytes unasked */
    do { /* a signal's handler runs between two attempts, and may raise */
        Py_BEGIN_ALLOW_THREADS
        status = ANSWERED;
        if (sending)
            status = send_all(fd, request->buf, (size_t)request->len, &sent, deadline_ns);
        if (!status) {
            if (sending && *spin_ns > 0)
                *spin_ns += now_ns();
            sending = 0;
            status = receive_some(fd, into, LANE_BUFFER, LANE_HEAD, received, spin_ns, deadline_ns);
        }
        if (status == NOT_SENT || status == BROKEN)
            *number = errno;
        Py_END_ALLOW_THREADS
    } while (status == SIGNALLED && !PyErr_CheckSignals());
    return status;
}

static PyObject *exchange(PyObject *self, PyObject *args) {
    int fd;
    PyObject *sock;
    Py_buffer request;
    unsigned long long call_id, length_max;
    double spin, deadline;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oy*KddK", &sock, &request, &call_id, &spin, &deadline, &length_max))
        return NULL;
    if (!descriptor_of(sock, &fd)) {
        PyBuffer_Release(&request);
        return NULL;
    }
    int64_t deadline_ns = as_ns(deadline), spin_until = (int64_t)(spin * 1e9);
    char head[LANE_BUFFER];
    size_t received = 0;
    int number = 0;
    PyObject *payload = NULL;
    int status = ask(fd, &request, head, &received, &spin_until, deadline_ns, &number);
    PyBuffer_Release(&request);
    if (status == SIGNALLED)
        return NULL;
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
        int64_t asleep = 0; /* the answer has begun to arrive: no use in polling */
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
    return Py_BuildValue("iiiN", status, polled(spin_until), kind, payload);
}

/* --- buffers ------------------------------------------------------------------------------------ */

typedef struct {
    uintptr_t start, stop;
    Py_ssize_t index;
} Span;

static int by_start(const void *left, const void *right) {
    const Span *one = left, *other = right;
    return (one->start > other->start) - (one->start < other->start);
}

static PyObject *overlap(PyObject *self, PyObject *buffers) {
    (void)self;
    if (!PyList_CheckExact(buffers)) {
        PyErr_SetString(PyExc_TypeError, "buffers come in a list");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(buffers), used = 0, index;
    Span *spans = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *spans);
    if (!spans)
        return PyErr_NoMemory();
    int in_order = 1;
    for (index = 0; index < count; index++) {
        Py_buffer buffer;
        if (PyObject_GetBuffer(PyList_GET_ITEM(buffers, index), &buffer, PyBUF_SIMPLE)) {
            PyMem_Free(spans);
            return NULL;
        }
        uintptr_t start = (uintptr_t)buffer.buf;
        if (buffer.len) {
            in_order &= !used || spans[used - 1].start <= start;
            spans[used++] = (Span){start, start + (size_t)buffer.len, index};
        }
        PyBuffer_Release(&buffer);
    }
    if (!in_order)
        qsort(spans, (size_t)used, sizeof *spans, by_start);
    for (index = 1; index < used && spans[index - 1].stop <= spans[index].start; index++)
        ;
    PyObject *found = index < used ? Py_BuildValue("nn", spans[index - 1].index, spans[index].index)
                                   : Py_NewRef(Py_None);
    PyMem_Free(spans);
    return found;
}

static PyObject *flat_views(PyObject *self, PyObject *args) {
    PyTypeObject *type;
    PyObject *given, *values, *views;
    int writable;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!Op", &PyType_Type, &type, &given, &writable) ||
        !(values = PySequence_Fast(given, "values come in a sequence")))
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(values), index;
    if (!(views = PyList_New(count)))
        count = 0;
    for (index = 0; index < count; index++) {
        PyObject *value = PySequence_Fast_GET_ITEM(values, index), *view = NULL;
        if (Py_TYPE(value) == type && !(view = PyMemoryView_FromObject(value)))
            PyErr_Clear(); /* a dtype that memoryview does not know */
        if (view) {
            const Py_buffer *buffer = PyMemoryView_GET_BUFFER(view);
            if (buffer->ndim != 1 || !buffer->len || strcmp(buffer->format, "B") ||
                !PyBuffer_IsContiguous(buffer, 'C') || (writable && buffer->readonly))
                Py_CLEAR(view);
        }
        PyList_SET_ITEM(views, index, view ? view : Py_NewRef(Py_None));
    }
    Py_DECREF(values);
    return views;
}

static PyObject *records(PyObject *self, PyObject *args) {
    Py_ssize_t width = PyTuple_GET_SIZE(args) - 1, count = -1, row, column;
    PyTypeObject *type = width > 0 ? (PyTypeObject *)PyTuple_GET_ITEM(args, 0) : NULL;
    (void)self;
    if (!type || !PyType_Check(type) || !PyType_IsSubtype(type, &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "records(named tuple, column, ...)");
        return NULL;
    }
    for (column = 1; column <= width; column++) {
        PyObject *values = PyTuple_GET_ITEM(args, column);
        if (!(PyList_CheckExact(values) || PyTuple_CheckExact(values)) ||
            (count >= 0 && count != PySequence_Fast_GET_SIZE(values))) {
            PyErr_SetString(PyExc_ValueError, "columns are lists or tuples of one length");
            return NULL;
        }
        count = PySequence_Fast_GET_SIZE(values);
    }
    PyObject *rows = PyList_New(count);
    for (row = 0; rows && row < count; row++) {
        PyObject *record = type->tp_alloc(type, width);
        if (!record) {
            Py_CLEAR(rows);
            break;
        }
        for (column = 0; column < width; column++) {
            PyObject *values = PyTuple_GET_ITEM(args, column + 1);
            PyTuple_SET_ITEM(record, column, Py_NewRef(PySequence_Fast_GET_ITEM(values, row)));
        }
        PyList_SET_ITEM(rows, row, record);
    }
    return rows;
}

/* --- the module -------------------------------------------------------------------------------- */

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
    {"revoke_writes", revoke_writes, METH_VARARGS, NULL},
    {"exchange", exchange, METH_VARARGS, NULL},
    {"flat_views", flat_views, METH_VARARGS, NULL},
    {"get_many", get_many, METH_VARARGS, NULL},
    {"overlap", overlap, METH_O, NULL},
    {"pack_keys", pack_keys, METH_O, NULL},
    {"read_objects", read_objects, METH_VARARGS, NULL},
    {"records", records, METH_VARARGS, NULL},
    {"write_objects", write_objects, METH_VARARGS, NULL},
    {"issue_capabilities", issue_capabilities, METH_VARARGS, NULL},
    {"serve", serve, METH_VARARGS, NULL},
    {"siphash", siphash_of, METH_VARARGS, NULL},
    {"compute_header_macs", compute_header_macs, METH_VARARGS, NULL},
    {"tcp_read", tcp_read, METH_VARARGS, NULL},
    {"tcp_write", tcp_write, METH_VARARGS, NULL},
    {"unpack_keys", unpack_keys, METH_VARARGS, NULL},
    {"xxh3_64", xxh3_64, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstore.native._native",
    .m_doc = "Steps of the hot path, compiled. Use kvstore.native.",
    .m_size = 0,
    .m_methods = METHODS,
};

PyMODINIT_FUNC PyInit__native(void) {
    const char *wanted = getenv("KVSTORE_NATIVE");
    if (wanted && !strcmp(wanted, "0")) {
        PyErr_SetString(PyExc_ImportError, "KVSTORE_NATIVE=0");
        return NULL;
    }
    xxh3_choose();
    PyObject *module = PyModule_Create(&MODULE);
    if (module && PyModule_AddIntConstant(module, "CLOCK", CLOCK_BOOTTIME) < 0)
        Py_CLEAR(module);
    return module;
}
