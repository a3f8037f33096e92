/* Preloaded into a server: logs how much of each file its disk holds, so that a test can cut the power.
 *
 * Each line of $WEFT_SYNC_LOG is "<inode> <bytes>": after this fsync or fdatasync, the disk holds that many bytes of the
 * file; after this ftruncate, it holds at most so many. Only the size from before a sync counts, since a write of
 * another thread may come during it. $WEFT_SYNC_DELAY_MS delays each sync, as a busy disk does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void log_line(unsigned long inode, char what, long long bytes) {
    static __thread int log_fd = -1;
    char line[64];
    int saved = errno;
    int length = snprintf(line, sizeof line, "%lu %c %lld\n", inode, what, bytes);
    if (log_fd < 0) log_fd = open(getenv("WEFT_SYNC_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (log_fd < 0 || write(log_fd, line, length) != length) abort(); /* a lost line would look like lost data */
    errno = saved;
}

static int synced(const char *name, int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    const char *delay = getenv("WEFT_SYNC_DELAY_MS");
    struct stat before;
    int known = fstat(fd, &before) == 0 && S_ISREG(before.st_mode);
    if (known && delay) usleep(atoi(delay) * 1000);
    int result = real(fd);
    if (known && result == 0) log_line(before.st_ino, '+', before.st_size);
    return result;
}

int fsync(int fd) { return synced("fsync", fd); }
int fdatasync(int fd) { return synced("fdatasync", fd); }

static int truncated(const char *name, int fd, off_t length) {
    int (*real)(int, off_t) = (int (*)(int, off_t))dlsym(RTLD_NEXT, name);
    struct stat after;
    int result = real(fd, length);
    if (result == 0 && fstat(fd, &after) == 0) log_line(after.st_ino, '-', length);
    return result;
}

int ftruncate(int fd, off_t length) { return truncated("ftruncate", fd, length); }
int ftruncate64(int fd, off_t length) { return truncated("ftruncate64", fd, length); }
