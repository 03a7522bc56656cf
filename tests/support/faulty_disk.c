/* Makes the files below a directory those of a faulty disk, for the process that preloads this.

   FAULTY_DISK_FILES is the directory, FAULTY_DISK the file with struct control, which the test
   changes while the process runs. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 4096
#define BUFFERS 8

static volatile struct control {
    int64_t reads_fail, writes_fail, syncs_fail, halves, bytes_per_s;
    int64_t reads, writes, syncs; /* calls so far */
} none, *control = &none;

static const char *files = "";
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t free_ns; /* when the disk has done what it was asked to */

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULTY_DISK");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *at = fd < 0 ? MAP_FAILED : mmap(0, sizeof none, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        abort();
    close(fd);
    control = at;
    files = getenv("FAULTY_DISK_FILES");
}

static int is_ours(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    return length > 0 && !strncmp(path, files, strlen(files));
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Wait until a disk of this rate has moved so many bytes; changes of the rate end the wait. */
static void take_time(int64_t bytes) {
    int64_t rate = control->bytes_per_s;
    if (!rate)
        return;
    pthread_mutex_lock(&lock);
    int64_t now = now_ns(), begin = free_ns > now ? free_ns : now;
    int64_t until = free_ns = begin + bytes * 1000000000LL / rate;
    pthread_mutex_unlock(&lock);
    while ((now = now_ns()) < until && control->bytes_per_s == rate) {
        int64_t left = until - now < 5000000 ? until - now : 5000000;
        nanosleep(&(struct timespec){0, left}, 0);
    }
    if (control->bytes_per_s != rate)
        free_ns = 0;
}

static ssize_t move(int fd, int number, volatile int64_t *calls, volatile int64_t *fails,
                    const struct iovec *buffers, int count, off_t offset, int flags) {
    struct iovec some[BUFFERS];
    if (is_ours(fd)) {
        size_t bytes = 0;
        for (int i = 0; i < count; i++)
            bytes += buffers[i].iov_len;
        __atomic_add_fetch(calls, 1, __ATOMIC_RELAXED);
        take_time(bytes);
        if (*fails) {
            errno = EIO;
            return -1;
        }
        size_t left = bytes / 2 / BLOCK * BLOCK;
        if (control->halves && left && count <= BUFFERS) {
            int used = 0;
            for (; left; used++) {
                some[used] = buffers[used];
                if (some[used].iov_len > left)
                    some[used].iov_len = left;
                left -= some[used].iov_len;
            }
            buffers = some;
            count = used;
        }
    }
    return syscall(number, fd, buffers, count, offset, 0, flags);
}

ssize_t preadv64v2(int fd, const struct iovec *buffers, int count, off_t offset, int flags) {
    return move(fd, SYS_preadv2, &control->reads, &control->reads_fail, buffers, count, offset,
                flags);
}

ssize_t pwritev64v2(int fd, const struct iovec *buffers, int count, off_t offset, int flags) {
    return move(fd, SYS_pwritev2, &control->writes, &control->writes_fail, buffers, count, offset,
                flags);
}

ssize_t preadv64(int fd, const struct iovec *buffers, int count, off_t offset) {
    return preadv64v2(fd, buffers, count, offset, 0);
}

ssize_t pwritev64(int fd, const struct iovec *buffers, int count, off_t offset) {
    return pwritev64v2(fd, buffers, count, offset, 0);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) {
    return pwritev64v2(fd, &(struct iovec){(void *)data, size}, 1, offset, 0);
}

int fdatasync(int fd) {
    if (is_ours(fd)) {
        __atomic_add_fetch(&control->syncs, 1, __ATOMIC_RELAXED);
        if (control->syncs_fail) {
            errno = EIO;
            return -1;
        }
    }
    return (int)syscall(SYS_fdatasync, fd);
}
