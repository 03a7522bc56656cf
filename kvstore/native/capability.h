/* Capabilities and header MACs, which the master makes and a node checks: kvstore.runtime.tcp_protocol and
 * kvstore.memory.header say what they are. */
#ifndef KVSTORE_CAPABILITY_H
#define KVSTORE_CAPABILITY_H

#define RECORD_BYTES 72     /* u64 offset, length, extent's offset, its length, expiry, wipe number, rights; MAC */
#define MOUNT_BYTES 32      /* the segment's key, u64 generation, u64 expiry */
#define EXTENT_ALIGN 1024
#define WIPE_TABLE_BITS 18       /* of the number of words in kinds.WIPE_TABLE_BYTES */
#define WIPE_TABLE_BYTES ((Py_ssize_t)8 << WIPE_TABLE_BITS)

/* What the MAC covers. */
typedef struct {
    uint8_t tag[8];
    uint64_t generation, holder, offset, length, expires_ms, wipe_seq, rights;
} CapabilityInput;

static const uint8_t CAPABILITY_TAG[8] = "KVcap\0\0\2";

static void capability_mac(const uint8_t *key, CapabilityInput *input, uint8_t mac[SIPHASH_BYTES]) {
    memcpy(input->tag, CAPABILITY_TAG, sizeof CAPABILITY_TAG);
    siphash(key, (const uint8_t *)input, sizeof *input, mac);
}

/* Whether two MACs are equal; takes the same time wherever they differ. */
static int same_mac(const uint8_t *one, const uint8_t *other) {
    uint64_t left[2], right[2];
    memcpy(left, one, sizeof left);
    memcpy(right, other, sizeof right);
    return !((left[0] ^ right[0]) | (left[1] ^ right[1]));
}

static PyObject *siphash_of(PyObject *self, PyObject *args) {
    Py_buffer key, data;
    uint8_t mac[SIPHASH_BYTES];
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*", &key, &data))
        return NULL;
    int is_key = key.len == SIPHASH_KEY_BYTES;
    if (is_key)
        siphash(key.buf, data.buf, (size_t)data.len, mac);
    else
        PyErr_SetString(PyExc_ValueError, "a key has 16 bytes");
    PyBuffer_Release(&key);
    PyBuffer_Release(&data);
    return is_key ? PyBytes_FromStringAndSize((const char *)mac, sizeof mac) : NULL;
}

/* Where the last wipe sequence number of an extent is. Extents that share a word share the higher one. */
static uint64_t *wipe_seq_of(uint64_t *wipe_seqs, uint64_t offset) {
    return wipe_seqs + (offset / EXTENT_ALIGN * UINT64_C(0x9E3779B97F4A7C15) >> (64 - WIPE_TABLE_BITS));
}

static PyObject *revoke_writes(PyObject *self, PyObject *args) {
    Py_buffer wipe_seqs;
    PyObject *offsets, *items;
    unsigned long long wipe_seq;
    (void)self;
    if (!PyArg_ParseTuple(args, "w*OK", &wipe_seqs, &offsets, &wipe_seq))
        return NULL;
    if (wipe_seqs.len != WIPE_TABLE_BYTES || (uintptr_t)wipe_seqs.buf % 8)
        PyErr_SetString(PyExc_ValueError, "no table of wipe sequence numbers");
    else if ((items = PySequence_Fast(offsets, "offsets come in a sequence"))) {
        for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(items); index++) {
            uint64_t offset = PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(items, index));
            if (PyErr_Occurred())
                break;
            uint64_t *word = wipe_seq_of(wipe_seqs.buf, offset);
            if (*word < wipe_seq)
                __atomic_store_n(word, wipe_seq, __ATOMIC_RELAXED);
        }
        Py_DECREF(items);
        __atomic_thread_fence(__ATOMIC_SEQ_CST); /* pairs with that of take_records */
    }
    PyBuffer_Release(&wipe_seqs);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *issue_capabilities(PyObject *self, PyObject *args) {
    PyObject *mounts, *columns[3], *items[3] = {NULL, NULL, NULL}, *result = NULL;
    unsigned long long holder, wipe_seq, rights;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!OOOKKK", &PyDict_Type, &mounts, &columns[0], &columns[1], &columns[2],
                          &holder, &wipe_seq, &rights))
        return NULL;
    for (int index = 0; index < 3; index++)
        if (!(items[index] = PySequence_Fast(columns[index], "a column is a sequence")))
            goto done;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(items[0]);
    if (PySequence_Fast_GET_SIZE(items[1]) != count || PySequence_Fast_GET_SIZE(items[2]) != count) {
        PyErr_SetString(PyExc_ValueError, "columns of different length");
        goto done;
    }
    if (!(result = PyBytes_FromStringAndSize(NULL, count * CAPABILITY_BYTES)))
        goto done;
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(result);
    memset(at, 0, (size_t)count * CAPABILITY_BYTES);
    for (Py_ssize_t index = 0; index < count; index++, at += CAPABILITY_BYTES) {
        PyObject *mount = PyDict_GetItemWithError(mounts, PySequence_Fast_GET_ITEM(items[0], index));
        if (!mount && !PyErr_Occurred())
            continue;
        uint64_t offset = PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(items[1], index));
        uint64_t size = PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(items[2], index));
        if (mount && (!PyBytes_Check(mount) || PyBytes_GET_SIZE(mount) != MOUNT_BYTES))
            PyErr_SetString(PyExc_ValueError, "a mount has 32 bytes");
        if (PyErr_Occurred()) {
            Py_CLEAR(result);
            goto done;
        }
        const uint8_t *key = (const uint8_t *)PyBytes_AS_STRING(mount);
        CapabilityInput input = {.generation = load64(key + 16), .holder = holder, .offset = offset,
                         .length = HEADER_BYTES + size, .expires_ms = load64(key + 24), .wipe_seq = wipe_seq,
                         .rights = rights};
        memcpy(at, &input.expires_ms, 8);
        memcpy(at + 8, &input.wipe_seq, 8);
        capability_mac(key, &input, at + 16);
    }
done:
    for (int index = 0; index < 3; index++)
        Py_XDECREF(items[index]);
    return result;
}

#define HEADER_MAC_COLUMNS 7
#define HEADER_MAC_INPUT_BYTES 48 /* tag, u64 offset, payload bytes, epoch, counter, bytes of the namespace */

static const uint8_t HEADER_MAC_TAG[8] = "KVhead\0\1";

/* The input of one header's MAC, into `message`; returns its bytes, 0 on an exception. */
static size_t header_mac_input(uint8_t *message, PyObject *const items[HEADER_MAC_COLUMNS], Py_ssize_t index) {
    uint64_t numbers[5];
    for (int column = 1; column < 5; column++) {
        numbers[column - 1] = PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(items[column], index));
        if (PyErr_Occurred())
            return 0;
    }
    Py_ssize_t name_size, key_size;
    const char *name = PyUnicode_AsUTF8AndSize(PySequence_Fast_GET_ITEM(items[5], index), &name_size);
    char *key;
    if (!name || PyBytes_AsStringAndSize(PySequence_Fast_GET_ITEM(items[6], index), &key, &key_size))
        return 0;
    if (name_size > NAMESPACE_MAX || key_size > KEY_MAX) {
        PyErr_SetString(PyExc_ValueError, "a namespace or key is too long");
        return 0;
    }
    numbers[4] = (uint64_t)name_size;
    memcpy(message, HEADER_MAC_TAG, sizeof HEADER_MAC_TAG);
    memcpy(message + sizeof HEADER_MAC_TAG, numbers, sizeof numbers);
    memcpy(message + HEADER_MAC_INPUT_BYTES, name, (size_t)name_size);
    memcpy(message + HEADER_MAC_INPUT_BYTES + name_size, key, (size_t)key_size);
    return (size_t)(HEADER_MAC_INPUT_BYTES + name_size + key_size);
}

static PyObject *compute_header_macs(PyObject *self, PyObject *args) {
    PyObject *mounts, *columns[HEADER_MAC_COLUMNS], *items[HEADER_MAC_COLUMNS] = {NULL}, *result = NULL;
    uint8_t message[HEADER_MAC_INPUT_BYTES + NAMESPACE_MAX + KEY_MAX];
    (void)self;
    if (!PyArg_ParseTuple(args, "O!OOOOOOO", &PyDict_Type, &mounts, &columns[0], &columns[1], &columns[2],
                          &columns[3], &columns[4], &columns[5], &columns[6]))
        return NULL;
    for (int column = 0; column < HEADER_MAC_COLUMNS; column++) {
        if (!(items[column] = PySequence_Fast(columns[column], "a column is a sequence")))
            goto done;
        if (PySequence_Fast_GET_SIZE(items[column]) != PySequence_Fast_GET_SIZE(items[0])) {
            PyErr_SetString(PyExc_ValueError, "columns of different length");
            goto done;
        }
    }
    Py_ssize_t count = PySequence_Fast_GET_SIZE(items[0]);
    if (!(result = PyBytes_FromStringAndSize(NULL, count * HEADER_MAC_BYTES)))
        goto done;
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(result);
    memset(at, 0, (size_t)count * HEADER_MAC_BYTES);
    for (Py_ssize_t index = 0; index < count; index++, at += HEADER_MAC_BYTES) {
        PyObject *key = PyDict_GetItemWithError(mounts, PySequence_Fast_GET_ITEM(items[0], index));
        if (!key && !PyErr_Occurred())
            continue;
        if (key && (!PyBytes_Check(key) || PyBytes_GET_SIZE(key) != SIPHASH_KEY_BYTES))
            PyErr_SetString(PyExc_ValueError, "a key has 16 bytes");
        size_t size = PyErr_Occurred() ? 0 : header_mac_input(message, items, index);
        if (!size) {
            Py_CLEAR(result);
            goto done;
        }
        siphash((const uint8_t *)PyBytes_AS_STRING(key), message, size, at);
    }
done:
    for (int column = 0; column < HEADER_MAC_COLUMNS; column++)
        Py_XDECREF(items[column]);
    return result;
}

#endif
