/* Preloaded before libfaketime, whose clock_nanosleep (0.9.10) answers EINVAL to a time of a clock
 * that it leaves alone: to every time.sleep of Python 3.11. No process here sleeps until a time of
 * the wall clock. */
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left)
{
    int before = errno;
    int failed = syscall(SYS_clock_nanosleep, clock, flags, until, left) ? errno : 0;
    errno = before;
    return failed;
}
