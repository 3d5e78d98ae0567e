/* compare MOUNT DIRECTORY: every function of ashlar.h, beside the kernel's call on the mount.
 *
 * The same calls are made in DIRECTORY/ours through the library and in DIRECTORY/theirs through the mount. Results and
 * errors must be equal. Then the two trees must be the same, and on one and the same file both sides must report the
 * same. Prints the differences, and how much was compared. The caller must be able to write DIRECTORY.
 */
#define _GNU_SOURCE
#include <ashlar.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

static ashlar_fs *fs;
static const char *mount_point, *directory;
static int compared, different;

/* The library's path of a file, and the kernel's path of its counterpart. A few can be in use at once. */
static const char *path_in(const char *start, const char *side, const char *path)
{
    static char paths[16][PATH_MAX + 512];
    static int next;
    next = (next + 1) % 16;
    snprintf(paths[next], sizeof paths[next], "%s%s/%s/%s", start, directory, side, path);
    return paths[next];
}

static const char *ours(const char *path)
{
    return path_in("", "ours", path);
}

static const char *theirs(const char *path)
{
    char start[PATH_MAX];
    snprintf(start, sizeof start, "%s/", mount_point);
    return path_in(start, "theirs", path);
}

/* The kernel's path of a file of the library's. */
static const char *ours_there(const char *path)
{
    char start[PATH_MAX];
    snprintf(start, sizeof start, "%s/", mount_point);
    return path_in(start, "ours", path);
}

static long kernel(long result)
{
    return result < 0 ? -(long)errno : result;
}

static void same(const char *what, int line, long our, long their)
{
    compared++;
    if (our == their)
        return;
    different++;
    printf("line %d: %s: ours %ld (%s), the kernel's %ld (%s)\n", line, what, our, our < 0 ? ashlar_strerror((int)our) : "",
           their, their < 0 ? strerror((int)-their) : "");
}

/* Makes both calls, in order, and compares their results. */
#define SAME(our, their)                                   \
    do {                                                   \
        long our_result = (long)(our);                     \
        errno = 0;                                         \
        same(#our, __LINE__, our_result, kernel(their));   \
    } while (0)
/* Compares only errors, since each side returns a number of its own. */
#define SAME_ERROR(our, their)                                                                        \
    do {                                                                                              \
        long our_result = (long)(our), their_result;                                                  \
        errno = 0;                                                                                    \
        their_result = kernel(their);                                                                 \
        same(#our, __LINE__, our_result < 0 ? our_result : 0, their_result < 0 ? their_result : 0);   \
    } while (0)
#define IS(our, expected) same(#our, __LINE__, (long)(our), (long)(expected))

/* One file on each side. */
struct pair {
    int our, their;
};

static struct pair open_both(const char *path, int flags, mode_t mode)
{
    struct pair pair;
    char what[100];
    pair.our = ashlar_open(fs, ours(path), flags, mode);
    errno = 0;
    pair.their = open(theirs(path), flags, mode);
    snprintf(what, sizeof what, "opening %.40s with %o", path, (unsigned)flags);
    same(what, __LINE__, pair.our < 0 ? pair.our : 0, pair.their < 0 ? kernel(pair.their) : 0);
    return pair;
}

static void close_both(struct pair pair)
{
    if (pair.our >= 0 && pair.their >= 0)
        SAME(ashlar_close(fs, pair.our), close(pair.their));
}

static void opening(void)
{
    static const int flags[] = {O_RDONLY, O_WRONLY, O_RDWR, O_RDWR | O_CREAT | O_EXCL, O_RDONLY | O_DIRECTORY, O_WRONLY | O_TRUNC,
                                O_RDONLY | O_NOFOLLOW, O_WRONLY | O_APPEND, O_RDONLY | O_TRUNC, O_RDONLY | O_CREAT,
                                O_RDWR | O_TMPFILE, O_RDONLY | O_TMPFILE, O_WRONLY | O_CREAT | O_NOFOLLOW, O_RDONLY | O_NOATIME};
    static const char *const paths[] = {"file", "missing", "directory", "link", "dangling", "loop", "file/", "directory/", "missing/",
                                        "file/below", "missing/below", "directory/../file", "directory/.", "link/", "dangling/",
                                        "directory_link/", "./file", "directory//inner", "none_may", "only_read"};
    size_t path, flag;
    char name[64];
    struct pair pair;

    close_both(open_both("file", O_WRONLY | O_CREAT, 0666));
    SAME(ashlar_mkdir(fs, ours("directory"), 0777), mkdir(theirs("directory"), 0777));
    close_both(open_both("directory/inner", O_WRONLY | O_CREAT, 0666));
    close_both(open_both("none_may", O_WRONLY | O_CREAT | O_EXCL, 0));
    close_both(open_both("only_read", O_WRONLY | O_CREAT | O_EXCL, 0400));
    SAME(ashlar_symlink(fs, "file", ours("link")), symlink("file", theirs("link")));
    SAME(ashlar_symlink(fs, "nowhere", ours("dangling")), symlink("nowhere", theirs("dangling")));
    SAME(ashlar_symlink(fs, "loop", ours("loop")), symlink("loop", theirs("loop")));
    SAME(ashlar_symlink(fs, "directory", ours("directory_link")), symlink("directory", theirs("directory_link")));
    for (path = 0; path < sizeof paths / sizeof *paths; path++)
        for (flag = 0; flag < sizeof flags / sizeof *flags; flag++) {
            close_both(open_both(paths[path], flags[flag], 0644));
            /* Remove everything that a call has created, so that each starts from the same state. */
            SAME(ashlar_unlink(fs, ours("nowhere")), unlink(theirs("nowhere")));
            SAME(ashlar_unlink(fs, ours("missing")), unlink(theirs("missing")));
        }
    memset(name, 'n', sizeof name);
    name[63] = 0;
    {
        char longer[5000];
        memset(longer, 'n', sizeof longer);
        longer[256] = 0;
        close_both(open_both(longer, O_RDONLY | O_CREAT, 0600));
        longer[255] = 0;
        close_both(open_both(longer, O_RDONLY | O_CREAT, 0600));
        longer[255] = 'n';
        longer[256] = 'n';
        longer[4999] = 0;
        close_both(open_both(longer, O_RDONLY, 0));
    }
    /* A file without a name gets one, unless its flags forbid it. */
    pair = open_both(".", O_RDWR | O_TMPFILE, 0640);
    SAME(ashlar_write(fs, pair.our, "unnamed", 7), write(pair.their, "unnamed", 7));
    SAME(ashlar_flink(fs, pair.our, ours("file")), linkat(pair.their, "", AT_FDCWD, theirs("file"), AT_EMPTY_PATH));
    SAME(ashlar_flink(fs, pair.our, ours("named")), linkat(pair.their, "", AT_FDCWD, theirs("named"), AT_EMPTY_PATH));
    close_both(pair);
    pair = open_both(".", O_RDWR | O_TMPFILE | O_EXCL, 0640);
    SAME(ashlar_flink(fs, pair.our, ours("never")), linkat(pair.their, "", AT_FDCWD, theirs("never"), AT_EMPTY_PATH));
    close_both(pair);
    IS(ashlar_open(fs, ours("file"), O_PATH, 0), -EINVAL);
    IS(ashlar_open(fs, "", O_RDONLY, 0), -ENOENT);
    IS(ashlar_open(fs, NULL, O_RDONLY, 0), -EFAULT);
    IS(ashlar_open(NULL, "file", O_RDONLY, 0), -EFAULT);
    IS(ashlar_close(fs, 3), -EBADF);
    IS(ashlar_close(fs, -1), -EBADF);
}

static void transfer(void)
{
    char our[64], their[64], large[10000];
    struct iovec parts[2], room_our[2], room_their[2];
    struct pair pair, other, append;
    off_t offset = 4;
    loff_t their_offset = 4;
    int duplicate, their_duplicate;

    memset(large, 'l', sizeof large);
    pair = open_both("data", O_RDWR | O_CREAT | O_TRUNC, 0644);
    SAME(ashlar_write(fs, pair.our, "0123456789", 10), write(pair.their, "0123456789", 10));
    SAME(ashlar_write(fs, pair.our, NULL, 0), write(pair.their, NULL, 0));
    SAME(ashlar_write(fs, pair.our, NULL, 5), write(pair.their, NULL, 5));
    SAME(ashlar_read(fs, pair.our, our, 5), read(pair.their, their, 5));
    SAME(ashlar_lseek(fs, pair.our, 2, SEEK_SET), lseek(pair.their, 2, SEEK_SET));
    SAME(ashlar_read(fs, pair.our, our, 5), read(pair.their, their, 5));
    IS(memcmp(our, their, 5), 0);
    SAME(ashlar_read(fs, pair.our, NULL, 5), read(pair.their, NULL, 5));
    SAME(ashlar_lseek(fs, pair.our, -3, SEEK_CUR), lseek(pair.their, -3, SEEK_CUR));
    SAME(ashlar_lseek(fs, pair.our, -30, SEEK_CUR), lseek(pair.their, -30, SEEK_CUR));
    SAME(ashlar_lseek(fs, pair.our, 20000, SEEK_END), lseek(pair.their, 20000, SEEK_END));
    SAME(ashlar_lseek(fs, pair.our, LLONG_MAX, SEEK_CUR), lseek(pair.their, LLONG_MAX, SEEK_CUR));
    SAME(ashlar_lseek(fs, pair.our, 0, 77), lseek(pair.their, 0, 77));
    SAME(ashlar_write(fs, pair.our, "end", 3), write(pair.their, "end", 3));
    SAME(ashlar_lseek(fs, pair.our, 0, SEEK_DATA), lseek(pair.their, 0, SEEK_DATA));
    SAME(ashlar_lseek(fs, pair.our, 0, SEEK_HOLE), lseek(pair.their, 0, SEEK_HOLE));
    SAME(ashlar_lseek(fs, pair.our, 5000, SEEK_DATA), lseek(pair.their, 5000, SEEK_DATA));
    SAME(ashlar_lseek(fs, pair.our, 900000, SEEK_DATA), lseek(pair.their, 900000, SEEK_DATA));
    SAME(ashlar_lseek(fs, pair.our, -1, SEEK_HOLE), lseek(pair.their, -1, SEEK_HOLE));
    SAME(ashlar_pread(fs, pair.our, our, 20, 4), pread(pair.their, their, 20, 4));
    IS(memcmp(our, their, 20), 0);
    SAME(ashlar_pread(fs, pair.our, our, 20, -4), pread(pair.their, their, 20, -4));
    SAME(ashlar_pread(fs, pair.our, our, 20, 900000), pread(pair.their, their, 20, 900000));
    SAME(ashlar_pwrite(fs, pair.our, large, sizeof large, 3), pwrite(pair.their, large, sizeof large, 3));
    SAME(ashlar_pwrite(fs, pair.our, large, 5, -3), pwrite(pair.their, large, 5, -3));
    SAME(ashlar_pwrite(fs, pair.our, large, 5, LLONG_MAX - 2), pwrite(pair.their, large, 5, LLONG_MAX - 2));

    parts[0].iov_base = "one ";
    parts[0].iov_len = 4;
    parts[1].iov_base = "two";
    parts[1].iov_len = 3;
    room_our[0].iov_base = our;
    room_their[0].iov_base = their;
    room_our[0].iov_len = room_their[0].iov_len = 2;
    room_our[1].iov_base = our + 2;
    room_their[1].iov_base = their + 2;
    room_our[1].iov_len = room_their[1].iov_len = 9;
    SAME(ashlar_lseek(fs, pair.our, 1, SEEK_SET), lseek(pair.their, 1, SEEK_SET));
    SAME(ashlar_writev(fs, pair.our, parts, 2), writev(pair.their, parts, 2));
    SAME(ashlar_pwritev(fs, pair.our, parts, 2, 30), pwritev(pair.their, parts, 2, 30));
    SAME(ashlar_writev(fs, pair.our, parts, -1), writev(pair.their, parts, -1));
    SAME(ashlar_writev(fs, pair.our, parts, 2000), writev(pair.their, parts, 2000));
    SAME(ashlar_writev(fs, pair.our, parts, 0), writev(pair.their, parts, 0));
    SAME(ashlar_lseek(fs, pair.our, 0, SEEK_SET), lseek(pair.their, 0, SEEK_SET));
    SAME(ashlar_readv(fs, pair.our, room_our, 2), readv(pair.their, room_their, 2));
    IS(memcmp(our, their, 11), 0);
    SAME(ashlar_preadv(fs, pair.our, room_our, 2, 28), preadv(pair.their, room_their, 2, 28));
    IS(memcmp(our, their, 11), 0);
    SAME(ashlar_preadv(fs, pair.our, room_our, 2, 20012), preadv(pair.their, room_their, 2, 20012));
    SAME(ashlar_lseek(fs, pair.our, 0, SEEK_CUR), lseek(pair.their, 0, SEEK_CUR));

    /* Duplicates share the offset. */
    duplicate = ashlar_dup(fs, pair.our);
    their_duplicate = dup(pair.their);
    SAME(ashlar_lseek(fs, duplicate, 5, SEEK_SET), lseek(their_duplicate, 5, SEEK_SET));
    SAME(ashlar_read(fs, pair.our, our, 3), read(pair.their, their, 3));
    SAME(ashlar_lseek(fs, duplicate, 0, SEEK_CUR), lseek(their_duplicate, 0, SEEK_CUR));
    SAME(ashlar_close(fs, duplicate), close(their_duplicate));
    IS(ashlar_dup(fs, duplicate), -EBADF);

    append = open_both("data", O_WRONLY | O_APPEND, 0);
    SAME(ashlar_write(fs, append.our, "appended", 8), write(append.their, "appended", 8));
    SAME(ashlar_lseek(fs, append.our, 0, SEEK_CUR), lseek(append.their, 0, SEEK_CUR));
    SAME(ashlar_pwrite(fs, append.our, "too", 3, 0), pwrite(append.their, "too", 3, 0));
    SAME(ashlar_read(fs, append.our, our, 3), read(append.their, their, 3));
    other = open_both("copy", O_RDWR | O_CREAT | O_SYNC, 0600);
    SAME(ashlar_copy_file_range(fs, pair.our, &offset, other.our, NULL, 5000, 0),
         copy_file_range(pair.their, &their_offset, other.their, NULL, 5000, 0));
    SAME(offset, their_offset);
    SAME(ashlar_lseek(fs, other.our, 0, SEEK_CUR), lseek(other.their, 0, SEEK_CUR));
    SAME(ashlar_copy_file_range(fs, pair.our, NULL, append.our, NULL, 5, 0),
         copy_file_range(pair.their, NULL, append.their, NULL, 5, 0));
    SAME(ashlar_copy_file_range(fs, other.our, NULL, pair.our, &offset, 5, 1),
         copy_file_range(other.their, NULL, pair.their, &their_offset, 5, 1));
    SAME(ashlar_write(fs, other.our, "synced", 6), write(other.their, "synced", 6));
    close_both(append);

    SAME(ashlar_fsync(fs, pair.our), fsync(pair.their));
    SAME(ashlar_fdatasync(fs, pair.our), fdatasync(pair.their));
    IS(ashlar_sync(fs), 0);
    SAME(ashlar_ftruncate(fs, pair.our, 15000), ftruncate(pair.their, 15000));
    SAME(ashlar_ftruncate(fs, pair.our, -1), ftruncate(pair.their, -1));
    SAME(ashlar_truncate(fs, ours("data"), 12000), truncate(theirs("data"), 12000));
    SAME(ashlar_truncate(fs, ours("directory"), 0), truncate(theirs("directory"), 0));
    SAME(ashlar_truncate(fs, ours("only_read"), 0), truncate(theirs("only_read"), 0));
    SAME(ashlar_truncate(fs, ours("data"), -1), truncate(theirs("data"), -1));
    SAME(ashlar_fallocate(fs, pair.our, 0, 20000, 9000), fallocate(pair.their, 0, 20000, 9000));
    SAME(ashlar_fallocate(fs, pair.our, FALLOC_FL_KEEP_SIZE, 40000, 9), fallocate(pair.their, FALLOC_FL_KEEP_SIZE, 40000, 9));
    SAME(ashlar_fallocate(fs, pair.our, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 4096),
         fallocate(pair.their, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 4096));
    SAME(ashlar_fallocate(fs, pair.our, FALLOC_FL_ZERO_RANGE, 100, 50), fallocate(pair.their, FALLOC_FL_ZERO_RANGE, 100, 50));
    SAME(ashlar_fallocate(fs, pair.our, 0, -1, 50), fallocate(pair.their, 0, -1, 50));
    SAME(ashlar_fallocate(fs, pair.our, 0, 0, 0), fallocate(pair.their, 0, 0, 0));
    SAME(ashlar_fallocate(fs, pair.our, FALLOC_FL_PUNCH_HOLE, 0, 5), fallocate(pair.their, FALLOC_FL_PUNCH_HOLE, 0, 5));
    close_both(other);
    close_both(pair);
    /* A mount can't do this: it removes a block. */
    pair.our = ashlar_open(fs, ours("blocks"), O_RDWR | O_CREAT, 0600);
    IS(ashlar_write(fs, pair.our, large, 8192), 8192);
    IS(ashlar_fallocate(fs, pair.our, FALLOC_FL_COLLAPSE_RANGE, 0, 4096), 0);
    IS(ashlar_lseek(fs, pair.our, 0, SEEK_END), 4096);
    IS(ashlar_close(fs, pair.our), 0);
    IS(ashlar_unlink(fs, ours("blocks")), 0);

    /* A removed file lives on while it's open. */
    pair = open_both("removed", O_RDWR | O_CREAT, 0600);
    SAME(ashlar_unlink(fs, ours("removed")), unlink(theirs("removed")));
    SAME(ashlar_write(fs, pair.our, "still", 5), write(pair.their, "still", 5));
    SAME(ashlar_pread(fs, pair.our, our, 64, 0), pread(pair.their, their, 64, 0));
    SAME(ashlar_flink(fs, pair.our, ours("again")), linkat(pair.their, "", AT_FDCWD, theirs("again"), AT_EMPTY_PATH));
    close_both(pair);
    pair = open_both("directory", O_RDONLY | O_DIRECTORY, 0);
    SAME(ashlar_read(fs, pair.our, our, 5), read(pair.their, their, 5));
    SAME(ashlar_fsync(fs, pair.our), fsync(pair.their));
    SAME(ashlar_lseek(fs, pair.our, 0, SEEK_DATA), lseek(pair.their, 0, SEEK_DATA));
    close_both(pair);
}

static void locks(void)
{
    struct pair first = open_both("locked", O_RDWR | O_CREAT, 0644), second = open_both("locked", O_RDONLY, 0);
    int there = open(ours_there("locked"), O_RDWR);
    struct flock lock;

    SAME(ashlar_flock(fs, first.our, LOCK_EX), flock(first.their, LOCK_EX));
    SAME(ashlar_flock(fs, second.our, LOCK_SH | LOCK_NB), flock(second.their, LOCK_SH | LOCK_NB));
    SAME(ashlar_flock(fs, second.our, 77), flock(second.their, 77));
    /* The kernel's locks on the same file respect the library's. */
    IS(kernel(flock(there, LOCK_SH | LOCK_NB)), -EAGAIN);
    SAME(ashlar_flock(fs, first.our, LOCK_UN), flock(first.their, LOCK_UN));
    IS(kernel(flock(there, LOCK_EX | LOCK_NB)), 0);
    IS(ashlar_flock(fs, second.our, LOCK_SH | LOCK_NB), -EAGAIN);
    IS(kernel(flock(there, LOCK_UN)), 0);

    memset(&lock, 0, sizeof lock);
    lock.l_type = F_WRLCK;
    lock.l_start = 10;
    lock.l_len = 5;
    SAME(ashlar_lock(fs, first.our, F_WRLCK, 10, 5, 0), fcntl(first.their, F_OFD_SETLK, &lock));
    IS(kernel(fcntl(there, F_OFD_SETLK, &lock)), -EAGAIN);
    lock.l_type = F_RDLCK;
    SAME(ashlar_lock(fs, second.our, F_RDLCK, 10, 5, 0), fcntl(second.their, F_OFD_SETLK, &lock));
    lock.l_type = F_WRLCK;
    SAME(ashlar_lock(fs, second.our, F_WRLCK, 50, 5, 0), (lock.l_start = 50, fcntl(second.their, F_OFD_SETLK, &lock)));
    IS(kernel(fcntl(there, F_OFD_SETLK, &lock)), 0);
    IS(ashlar_lock(fs, first.our, F_WRLCK, 0, 0, 0), -EAGAIN);
    lock.l_start = -1;
    SAME(ashlar_lock(fs, first.our, F_WRLCK, -1, 5, 0), fcntl(first.their, F_OFD_SETLK, &lock));
    /* Locks end with the open file. */
    close_both(first);
    lock.l_start = 10;
    IS(kernel(fcntl(there, F_OFD_SETLK, &lock)), 0);
    close(there);
    close_both(second);
}

static void attributes(void)
{
    struct timespec times[2];
    struct pair pair = open_both("file", O_RDWR, 0);
    struct statvfs our, their;
    uid_t user = geteuid(), other = user == 0 ? 4321 : 0;

    SAME(ashlar_chmod(fs, ours("file"), 06751), chmod(theirs("file"), 06751));
    SAME(ashlar_write(fs, pair.our, "strips", 6), write(pair.their, "strips", 6));
    SAME(ashlar_fchmod(fs, pair.our, 0640), fchmod(pair.their, 0640));
    SAME(ashlar_chmod(fs, ours("dangling"), 0640), chmod(theirs("dangling"), 0640));
    SAME(ashlar_chown(fs, ours("file"), other, -1), chown(theirs("file"), other, -1));
    SAME(ashlar_chown(fs, ours("link"), -1, -1), chown(theirs("link"), -1, -1));
    SAME(ashlar_fchown(fs, pair.our, -1, getegid()), fchown(pair.their, -1, getegid()));
    SAME(ashlar_lchown(fs, ours("link"), user, -1), lchown(theirs("link"), user, -1));
    SAME(ashlar_chown(fs, ours("missing"), user, -1), chown(theirs("missing"), user, -1));

    times[0].tv_sec = 1000000000;
    times[0].tv_nsec = 123456789;
    times[1].tv_sec = -5;
    times[1].tv_nsec = 7;
    SAME(ashlar_utimens(fs, ours("link"), times), utimensat(AT_FDCWD, theirs("link"), times, 0));
    SAME(ashlar_lutimens(fs, ours("link"), times), utimensat(AT_FDCWD, theirs("link"), times, AT_SYMLINK_NOFOLLOW));
    times[0].tv_nsec = UTIME_OMIT;
    times[1].tv_sec = 77;
    SAME(ashlar_futimens(fs, pair.our, times), futimens(pair.their, times));
    times[1].tv_nsec = 1000000000;
    SAME(ashlar_futimens(fs, pair.our, times), futimens(pair.their, times));
    times[1].tv_nsec = UTIME_NOW;
    SAME(ashlar_utimens(fs, ours("copy"), times), utimensat(AT_FDCWD, theirs("copy"), times, 0));
    SAME(ashlar_utimens(fs, ours("none_may"), NULL), utimensat(AT_FDCWD, theirs("none_may"), NULL, 0));
    SAME(ashlar_utimens(fs, ours("missing"), NULL), utimensat(AT_FDCWD, theirs("missing"), NULL, 0));

    SAME(ashlar_access(fs, ours("file"), F_OK), access(theirs("file"), F_OK));
    SAME(ashlar_access(fs, ours("file"), R_OK | W_OK), access(theirs("file"), R_OK | W_OK));
    SAME(ashlar_access(fs, ours("file"), X_OK), access(theirs("file"), X_OK));
    SAME(ashlar_access(fs, ours("none_may"), R_OK), access(theirs("none_may"), R_OK));
    SAME(ashlar_access(fs, ours("only_read"), W_OK), access(theirs("only_read"), W_OK));
    SAME(ashlar_access(fs, ours("missing"), F_OK), access(theirs("missing"), F_OK));
    SAME(ashlar_access(fs, ours("file"), 99), access(theirs("file"), 99));

    IS(ashlar_statvfs(fs, ours("file"), &our), 0);
    IS(statvfs(ours_there("file"), &their), 0);
    IS(our.f_bsize == their.f_bsize && our.f_frsize == their.f_frsize && our.f_blocks == their.f_blocks &&
           our.f_namemax == their.f_namemax && our.f_files == their.f_files,
       1);
    IS(ashlar_fstatvfs(fs, pair.our, &our), 0);
    close_both(pair);
    /* The library permits another user the same as the kernel: the files below are root's. */
    IS(ashlar_chmod(fs, "/", 0755), user == 0 ? 0 : -EPERM);
    IS(ashlar_umask(fs, 0077), 0022);
    IS(ashlar_umask(fs, 0022), 0077);
}

static void names(void)
{
    char our[PATH_MAX], their[PATH_MAX];

    SAME(ashlar_mkdir(fs, ours("made/"), 02775), mkdir(theirs("made/"), 02775));
    SAME(ashlar_mkdir(fs, ours("made"), 0775), mkdir(theirs("made"), 0775));
    SAME(ashlar_mkdir(fs, ours("none/made"), 0775), mkdir(theirs("none/made"), 0775));
    SAME(ashlar_mkdir(fs, ours("file/made"), 0775), mkdir(theirs("file/made"), 0775));
    SAME(ashlar_mkdir(fs, ours("dangling"), 0775), mkdir(theirs("dangling"), 0775));
    SAME(ashlar_mkdir(fs, ours("made/."), 0775), mkdir(theirs("made/."), 0775));
    SAME(ashlar_mkdir(fs, ours("made/inner"), 0700), mkdir(theirs("made/inner"), 0700));
    SAME(ashlar_rmdir(fs, ours("made")), rmdir(theirs("made")));
    SAME(ashlar_rmdir(fs, ours("made/.")), rmdir(theirs("made/.")));
    SAME(ashlar_rmdir(fs, ours("made/..")), rmdir(theirs("made/..")));
    SAME(ashlar_rmdir(fs, ours("file")), rmdir(theirs("file")));
    SAME(ashlar_rmdir(fs, ours("directory_link")), rmdir(theirs("directory_link")));
    SAME(ashlar_rmdir(fs, ours("missing")), rmdir(theirs("missing")));
    IS(ashlar_rmdir(fs, "/"), -EBUSY);
    SAME(ashlar_unlink(fs, ours("made")), unlink(theirs("made")));
    SAME(ashlar_unlink(fs, ours("made/")), unlink(theirs("made/")));
    SAME(ashlar_unlink(fs, ours("file/")), unlink(theirs("file/")));
    SAME(ashlar_unlink(fs, ours("missing")), unlink(theirs("missing")));
    SAME(ashlar_unlink(fs, ours("made/.")), unlink(theirs("made/.")));

    SAME(ashlar_link(fs, ours("file"), ours("hard")), link(theirs("file"), theirs("hard")));
    SAME(ashlar_link(fs, ours("file"), ours("hard")), link(theirs("file"), theirs("hard")));
    SAME(ashlar_link(fs, ours("file"), ours("new/")), link(theirs("file"), theirs("new/")));
    SAME(ashlar_link(fs, ours("made"), ours("hard2")), link(theirs("made"), theirs("hard2")));
    SAME(ashlar_link(fs, ours("link"), ours("hard_link")), link(theirs("link"), theirs("hard_link")));
    SAME(ashlar_link(fs, ours("missing"), ours("hard2")), link(theirs("missing"), theirs("hard2")));
    SAME(ashlar_symlink(fs, "", ours("empty")), symlink("", theirs("empty")));
    SAME(ashlar_symlink(fs, "x", ours("file")), symlink("x", theirs("file")));
    SAME(ashlar_symlink(fs, "x", ours("slash/")), symlink("x", theirs("slash/")));
    SAME(ashlar_readlink(fs, ours("directory_link"), our, sizeof our), readlink(theirs("directory_link"), their, sizeof their));
    IS(memcmp(our, their, 9), 0);
    SAME(ashlar_readlink(fs, ours("directory_link"), our, 4), readlink(theirs("directory_link"), their, 4));
    SAME(ashlar_readlink(fs, ours("file"), our, 4), readlink(theirs("file"), their, 4));
    SAME(ashlar_readlink(fs, ours("missing"), our, 4), readlink(theirs("missing"), their, 4));
    IS(ashlar_readlink(fs, ours("link"), NULL, 4), -EFAULT);
    IS(ashlar_readlink(fs, ours("link"), our, 0), -EINVAL);

#define RENAME(from, to, flags) \
    SAME(ashlar_rename(fs, ours(from), ours(to), flags), renameat2(AT_FDCWD, theirs(from), AT_FDCWD, theirs(to), flags))
    RENAME("hard", "moved", 0);
    RENAME("moved", "file", 0);
    RENAME("moved", "made", 0);
    RENAME("made", "moved", 0);
    RENAME("made", "made/inner/deeper", 0);
    RENAME("made/inner", "made", 0);
    RENAME("missing", "other", 0);
    RENAME("file", "new/", 0);
    RENAME("file/", "new", 0);
    RENAME("made/", "built/", 0);
    RENAME("built", "directory", 0);
    RENAME("file", "moved", 1);
    RENAME("copy", "built", 2);
    RENAME("built", "copy", 2);
    RENAME("copy", "nothing", 2);
    RENAME("copy", "built", 3);
    RENAME("copy", "built", 64);
    RENAME("built/.", "x", 0);
    RENAME("built", "directory/..", 0);
    RENAME("built", "directory/..", 1);
    RENAME("copy", "copied", 4);
    IS(ashlar_rename(fs, ours("file"), NULL, 0), -EFAULT);
}

static void leaving(void)
{
    char target[PATH_MAX * 2];
    struct stat stat;

    /* Stay inside by an absolute path, stay inside by "..", and leave. */
    snprintf(target, sizeof target, "%s/%s/ours/file", mount_point, directory);
    IS(ashlar_symlink(fs, target, ours("absolute")), 0);
    IS(ashlar_stat(fs, ours("absolute"), &stat), 0);
    IS(ashlar_symlink(fs, "/etc/passwd", ours("elsewhere")), 0);
    IS(ashlar_stat(fs, ours("elsewhere"), &stat), -EXDEV);
    IS(ashlar_lstat(fs, ours("elsewhere"), &stat), 0);
    IS(ashlar_open(fs, ours("elsewhere"), O_RDONLY, 0), -EXDEV);
    IS(ashlar_stat(fs, "..", &stat), -EXDEV);
    IS(ashlar_stat(fs, "/", &stat), 0);
    IS(ashlar_stat(fs, "///", &stat), 0);
    IS(ashlar_unlink(fs, ours("absolute")), 0);
    IS(ashlar_unlink(fs, ours("elsewhere")), 0);
    IS(mkfifo(ours_there("pipe"), 0600), 0);
    IS(ashlar_open(fs, ours("pipe"), O_RDWR, 0), -ENXIO);
    IS(ashlar_unlink(fs, ours("pipe")), 0);
}

static void xattrs(void)
{
    char our[300], their[300], name[300];
    struct pair pair = open_both("file", O_RDWR, 0);

    memset(name, 'n', sizeof name);
    memcpy(name, "user.", 5);
    name[299] = 0;
    SAME(ashlar_setxattr(fs, ours("file"), "user.one", "value", 5, 0), setxattr(theirs("file"), "user.one", "value", 5, 0));
    SAME(ashlar_setxattr(fs, ours("file"), "user.one", "x", 1, XATTR_CREATE), setxattr(theirs("file"), "user.one", "x", 1, XATTR_CREATE));
    SAME(ashlar_setxattr(fs, ours("file"), "user.no", "x", 1, XATTR_REPLACE), setxattr(theirs("file"), "user.no", "x", 1, XATTR_REPLACE));
    SAME(ashlar_setxattr(fs, ours("file"), "user.one", "x", 1, 9), setxattr(theirs("file"), "user.one", "x", 1, 9));
    SAME(ashlar_setxattr(fs, ours("file"), name, "x", 1, 0), setxattr(theirs("file"), name, "x", 1, 0));
    SAME(ashlar_setxattr(fs, ours("file"), "strange.one", "x", 1, 0), setxattr(theirs("file"), "strange.one", "x", 1, 0));
    SAME(ashlar_setxattr(fs, ours("file"), "trusted.one", "x", 1, 0), setxattr(theirs("file"), "trusted.one", "x", 1, 0));
    SAME(ashlar_setxattr(fs, ours("only_read"), "user.one", "x", 1, 0), setxattr(theirs("only_read"), "user.one", "x", 1, 0));
    SAME(ashlar_lsetxattr(fs, ours("link"), "user.one", "x", 1, 0), lsetxattr(theirs("link"), "user.one", "x", 1, 0));
    SAME(ashlar_fsetxattr(fs, pair.our, "user.two", "second", 6, 0), fsetxattr(pair.their, "user.two", "second", 6, 0));
    SAME(ashlar_getxattr(fs, ours("link"), "user.one", our, 300), getxattr(theirs("link"), "user.one", their, 300));
    SAME(ashlar_getxattr(fs, ours("file"), "user.one", our, 3), getxattr(theirs("file"), "user.one", their, 3));
    SAME(ashlar_getxattr(fs, ours("file"), "user.one", NULL, 0), getxattr(theirs("file"), "user.one", NULL, 0));
    SAME(ashlar_getxattr(fs, ours("file"), "user.none", our, 300), getxattr(theirs("file"), "user.none", their, 300));
    SAME(ashlar_getxattr(fs, ours("file"), "strange.one", our, 300), getxattr(theirs("file"), "strange.one", their, 300));
    SAME(ashlar_getxattr(fs, ours("file"), "trusted.one", our, 300), getxattr(theirs("file"), "trusted.one", their, 300));
    SAME(ashlar_setxattr(fs, ours("file"), "user.", "x", 1, 0), setxattr(theirs("file"), "user.", "x", 1, 0));
    SAME(ashlar_getxattr(fs, ours("file"), "user.", our, 300), getxattr(theirs("file"), "user.", their, 300));
    SAME(ashlar_removexattr(fs, ours("file"), "strange"), removexattr(theirs("file"), "strange"));
    SAME(ashlar_removexattr(fs, ours("file"), "system.posix_acl_access"), removexattr(theirs("file"), "system.posix_acl_access"));
    SAME(ashlar_lgetxattr(fs, ours("link"), "system.posix_acl_access", our, 300),
         lgetxattr(theirs("link"), "system.posix_acl_access", their, 300));
    SAME(ashlar_getxattr(fs, ours("missing"), "", our, 300), getxattr(theirs("missing"), "", their, 300));
    SAME(ashlar_setxattr(fs, ours("missing"), "user.one", our, 65537, 0), setxattr(theirs("missing"), "user.one", our, 65537, 0));
    SAME(ashlar_pread(fs, pair.our, NULL, 5, -1), pread(pair.their, NULL, 5, -1));
    SAME(ashlar_read(fs, -1, NULL, 5), read(-1, NULL, 5));
    SAME(ashlar_writev(fs, -1, NULL, 2000), writev(-1, NULL, 2000));
    SAME(ashlar_getxattr(fs, ours("file"), "", our, 300), getxattr(theirs("file"), "", their, 300));
    SAME(ashlar_getxattr(fs, ours("none_may"), "user.one", our, 300), getxattr(theirs("none_may"), "user.one", their, 300));
    SAME(ashlar_lgetxattr(fs, ours("link"), "user.one", our, 300), lgetxattr(theirs("link"), "user.one", their, 300));
    SAME(ashlar_fgetxattr(fs, pair.our, "user.two", our, 300), fgetxattr(pair.their, "user.two", their, 300));
    IS(memcmp(our, their, 6), 0);
    SAME(ashlar_listxattr(fs, ours("link"), our, 300), listxattr(theirs("link"), their, 300));
    SAME(ashlar_listxattr(fs, ours("file"), our, 3), listxattr(theirs("file"), their, 3));
    SAME(ashlar_llistxattr(fs, ours("link"), our, 300), llistxattr(theirs("link"), their, 300));
    SAME(ashlar_flistxattr(fs, pair.our, NULL, 0), flistxattr(pair.their, NULL, 0));
    SAME(ashlar_removexattr(fs, ours("link"), "user.one"), removexattr(theirs("link"), "user.one"));
    SAME(ashlar_removexattr(fs, ours("file"), "user.one"), removexattr(theirs("file"), "user.one"));
    SAME(ashlar_lremovexattr(fs, ours("link"), "user.one"), lremovexattr(theirs("link"), "user.one"));
    SAME(ashlar_fremovexattr(fs, pair.our, "user.three"), fremovexattr(pair.their, "user.three"));
    IS(ashlar_setxattr(fs, ours("file"), NULL, "x", 1, 0), -EFAULT);
    close_both(pair);
}

/* Both trees have the same names, and the inodes that the names lead to are equal. */
static void same_trees(const char *below)
{
    const char *const sides[] = {ours_there(below), theirs(below)};
    struct dirent **entries[2];
    struct stat stat[2];
    int count[2], side, index;
    char path[PATH_MAX];

    for (side = 0; side < 2; side++) {
        char place[PATH_MAX * 2];
        snprintf(place, sizeof place, "%s", sides[side]);
        count[side] = scandir(place, &entries[side], NULL, alphasort);
    }
    IS(count[0], count[1]);
    for (index = 0; index < count[0] && index < count[1]; index++) {
        const char *name = entries[0][index]->d_name;
        IS(strcmp(name, entries[1][index]->d_name), 0);
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
            continue;
        snprintf(path, sizeof path, "%s%s%s", below, *below ? "/" : "", name);
        IS(lstat(ours_there(path), &stat[0]), 0);
        IS(lstat(theirs(path), &stat[1]), 0);
        if (stat[0].st_mode != stat[1].st_mode || stat[0].st_nlink != stat[1].st_nlink || stat[0].st_size != stat[1].st_size ||
            stat[0].st_uid != stat[1].st_uid || stat[0].st_gid != stat[1].st_gid || stat[0].st_blocks != stat[1].st_blocks) {
            printf("%s: modes %o %o, links %ld %ld, sizes %ld %ld, owners %d:%d %d:%d, blocks %ld %ld\n", path, stat[0].st_mode,
                   stat[1].st_mode, (long)stat[0].st_nlink, (long)stat[1].st_nlink, (long)stat[0].st_size, (long)stat[1].st_size,
                   (int)stat[0].st_uid, (int)stat[0].st_gid, (int)stat[1].st_uid, (int)stat[1].st_gid, (long)stat[0].st_blocks,
                   (long)stat[1].st_blocks);
            different++;
        }
        if (S_ISDIR(stat[0].st_mode))
            same_trees(path);
    }
}

/* The library and the kernel report the same about one file. */
static void same_file(const char *path, unsigned char kind)
{
    struct stat our, their;
    char our_bytes[70000], their_bytes[70000];

    IS(ashlar_lstat(fs, ours(path), &our), 0);
    IS(lstat(ours_there(path), &their), 0);
    IS(kind, IFTODT(our.st_mode));
#define FIELD(field) IS(our.field, their.field)
    FIELD(st_dev);
    FIELD(st_ino);
    FIELD(st_mode);
    FIELD(st_nlink);
    FIELD(st_uid);
    FIELD(st_gid);
    FIELD(st_rdev);
    FIELD(st_size);
    FIELD(st_blksize);
    FIELD(st_blocks);
    FIELD(st_atim.tv_sec);
    FIELD(st_atim.tv_nsec);
    FIELD(st_mtim.tv_sec);
    FIELD(st_mtim.tv_nsec);
    FIELD(st_ctim.tv_sec);
    FIELD(st_ctim.tv_nsec);
    if (S_ISREG(our.st_mode) && access(ours_there(path), R_OK) == 0) {
        int file = ashlar_open(fs, ours(path), O_RDONLY, 0), there = open(ours_there(path), O_RDONLY);
        long count = ashlar_read(fs, file, our_bytes, sizeof our_bytes);
        IS(count, read(there, their_bytes, sizeof their_bytes));
        IS(count >= 0 ? memcmp(our_bytes, their_bytes, count) : -1, 0);
        IS(ashlar_fstat(fs, file, &our), 0);
        IS(our.st_ino, their.st_ino);
        IS(ashlar_close(fs, file), 0);
        close(there);
    }
}

/* The library lists the same names as the kernel, in the same order. */
static void same_listing(const char *below)
{
    ashlar_dir *dir;
    ashlar_dirent entry;
    DIR *there = opendir(ours_there(below));
    struct dirent *expected;
    char path[PATH_MAX];
    off_t second = 0;
    int count = 0;

    IS(ashlar_opendir(fs, ours(below), &dir), 0);
    while ((expected = readdir(there)) != NULL) {
        int more = ashlar_readdir(dir, &entry);
        IS(more, 1);
        if (more != 1)
            break;
        IS(strcmp(entry.d_name, expected->d_name), 0);
        IS(entry.d_type, expected->d_type);
        IS(entry.d_off, expected->d_off);
        /* Only the kernel knows the directory above the root of a mount. */
        IS(entry.d_ino, expected->d_ino);
        if (++count == 2)
            second = ashlar_telldir(dir);
        if (strcmp(entry.d_name, ".") == 0 || strcmp(entry.d_name, "..") == 0)
            continue;
        snprintf(path, sizeof path, "%s%s%s", below, *below ? "/" : "", entry.d_name);
        same_file(path, entry.d_type);
        if (entry.d_type == DT_DIR && ashlar_access(fs, ours(path), R_OK | X_OK) == 0)
            same_listing(path);
    }
    IS(ashlar_readdir(dir, &entry), 0);
    IS(ashlar_readdir(dir, &entry), 0);
    IS(ashlar_seekdir(dir, 0), 0);
    IS(ashlar_readdir(dir, &entry), 1);
    IS(strcmp(entry.d_name, "."), 0);
    IS(ashlar_seekdir(dir, second), 0);
    IS(ashlar_readdir(dir, &entry), count > 2 ? 1 : 0);
    IS(ashlar_seekdir(dir, -1), -EINVAL);
    IS(ashlar_readdir(dir, NULL), -EFAULT);
    IS(ashlar_closedir(dir), 0);
    closedir(there);
}

static void many_entries(void)
{
    enum { COUNT = 3000 };
    static char seen[COUNT];
    ashlar_dir *dir;
    ashlar_dirent entry;
    char name[64];
    int number, more, count = 0;

    IS(ashlar_mkdir(fs, ours("many"), 0755), 0);
    for (number = 0; number < COUNT; number++) {
        snprintf(name, sizeof name, "many/%d", number);
        close(open(ours_there(name), O_CREAT | O_WRONLY, 0600));
    }
    IS(ashlar_opendir(fs, ours("many"), &dir), 0);
    while ((more = ashlar_readdir(dir, &entry)) == 1)
        if (entry.d_name[0] != '.') {
            IS(seen[atoi(entry.d_name)]++, 0);
            count++;
        }
    IS(more, 0);
    IS(count, COUNT);
    IS(ashlar_closedir(dir), 0);
    for (number = 0; number < COUNT; number++) {
        snprintf(name, sizeof name, "many/%d", number);
        IS(ashlar_unlink(fs, ours(name)), 0);
    }
    IS(ashlar_rmdir(fs, ours("many")), 0);
    SAME(ashlar_opendir(fs, ours("file"), &dir), -(errno = ENOTDIR, 1));
    SAME(ashlar_opendir(fs, ours("missing"), &dir), -(errno = ENOENT, 1));
}

enum { THREADS = 4, APPENDS = 500 };

static void *append(void *file)
{
    int number;
    for (number = 0; number < APPENDS; number++)
        if (ashlar_write(fs, *(int *)file, "twelve bytes", 12) != 12)
            return file;
    return NULL;
}

/* Threads share a session, a file and its offset. */
static void threads(void)
{
    pthread_t running[THREADS];
    int file = ashlar_open(fs, ours("appended"), O_WRONLY | O_CREAT, 0644), number;
    struct stat stat;
    void *failed;

    for (number = 0; number < THREADS; number++)
        IS(pthread_create(&running[number], NULL, append, &file), 0);
    for (number = 0; number < THREADS; number++) {
        IS(pthread_join(running[number], &failed), 0);
        IS(failed == NULL, 1);
    }
    IS(lstat(ours_there("appended"), &stat), 0);
    IS(stat.st_size, THREADS * APPENDS * 12);
    IS(ashlar_close(fs, file), 0);
    IS(ashlar_unlink(fs, ours("appended")), 0);
}

/* Whether the process has a file of a session mapped, or a session's file or connection open. */
static int has_mapped_session(void)
{
    char line[4096];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");

    while (maps && fgets(line, sizeof line, maps))
        found |= strstr(line, "/sessions/") != NULL || strstr(line, "/segments/") != NULL;
    fclose(maps);
    return found;
}

static int has_open_session(void)
{
    char name[64], leads_to[4096];
    int number, found = 0;

    for (number = 3; number < 1024; number++) {
        ssize_t length;

        snprintf(name, sizeof name, "/proc/self/fd/%d", number);
        length = readlink(name, leads_to, sizeof leads_to - 1);
        leads_to[length < 0 ? 0 : length] = 0;
        found |= strstr(leads_to, "/sessions/") != NULL || strncmp(leads_to, "socket:", 7) == 0;
    }
    return found;
}

/* A child has nothing of its parent's session, and can open one of its own. */
static void children(void)
{
    int file = ashlar_open(fs, ours("file"), O_RDONLY, 0), status = -1;
    char byte;
    ashlar_dir *dir;
    pid_t child;

    IS(ashlar_opendir(fs, ours(""), &dir), 0);
    child = fork();
    if (child == 0) {
        ashlar_fs *own;
        ashlar_dirent entry;
        int wrong = has_mapped_session() || has_open_session() || ashlar_read(fs, file, &byte, 1) != -EBADF || ashlar_readdir(dir, &entry) != -EBADF ||
                    ashlar_sync(fs) != -EBADF || ashlar_closedir(dir) != 0 || ashlar_close_fs(fs) != 0;
        wrong = wrong || ashlar_open_fs(&own, mount_point, 0, NULL, 0) != 0 || ashlar_mkdir(own, ours("by_child"), 0755) != 0 ||
                ashlar_close_fs(own) != 0;
        _exit(wrong);
    }
    IS(waitpid(child, &status, 0), child);
    IS(status, 0);
    child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0)
        _exit(has_mapped_session());
    IS(waitpid(child, &status, 0), child);
    IS(status, 0);
    IS(has_mapped_session() && has_open_session(), 1);
    IS(ashlar_read(fs, file, &byte, 1), 1);
    IS(ashlar_rmdir(fs, ours("by_child")), 0);
    IS(ashlar_close(fs, file), 0);
    IS(ashlar_closedir(dir), 0);
}

static void sessions(void)
{
    ashlar_fs *other;
    ashlar_dir *dir;
    ashlar_dirent entry;
    char message[ASHLAR_MESSAGE_BYTES], small[8];
    int file;

    IS(ashlar_open_fs(NULL, mount_point, 0, NULL, 0), -EFAULT);
    IS(ashlar_open_fs(&other, NULL, 0, NULL, 0), -EFAULT);
    IS(ashlar_open_fs(&other, mount_point, 5, NULL, 0), -EINVAL);
    IS(ashlar_open_fs(&other, "/nowhere/at/all", 0, small, sizeof small), -ENOENT);
    IS(strlen(small), 7);
    IS(ashlar_open_fs(&other, "/", 0, message, sizeof message), -ENODEV);
    IS(strstr(message, "no Ashlar") != NULL, 1);
    IS(ashlar_open_fs(&other, mount_point, 0, message, sizeof message), 0);
    /* Two sessions of one process are two clients: each sees the other's changes at once. */
    file = ashlar_open(other, ours("shared"), O_RDWR | O_CREAT, 0644);
    IS(ashlar_write(other, file, "shared", 6), 6);
    IS(ashlar_truncate(fs, ours("shared"), 3), 0);
    IS(ashlar_pread(other, file, message, 64, 0), 3);
    IS(ashlar_unlink(fs, ours("shared")), 0);
    IS(ashlar_opendir(other, ours(""), &dir), 0);
    IS(ashlar_close_fs(other), 0);
    IS(ashlar_readdir(dir, &entry), -EBADF);
    IS(ashlar_closedir(dir), 0);
    IS(ashlar_closedir(NULL), 0);
    IS(ashlar_close_fs(NULL), 0);
    IS(ashlar_umask(NULL, 0), -EFAULT);
    IS(strcmp(ashlar_strerror(-ENOENT), strerror(ENOENT)), 0);
    IS(atoi(ashlar_version()), ASHLAR_VERSION_MAJOR);
}

int main(int argc, char **argv)
{
    char message[ASHLAR_MESSAGE_BYTES];

    if (argc != 3) {
        fprintf(stderr, "usage: compare MOUNT DIRECTORY\n");
        return 2;
    }
    mount_point = argv[1];
    directory = argv[2];
    umask(0022);
    if (ashlar_open_fs(&fs, mount_point, 0, message, sizeof message) < 0) {
        fprintf(stderr, "compare: %s\n", message);
        return 1;
    }
    SAME(ashlar_mkdir(fs, ours(""), 0755), mkdir(theirs(""), 0755));
    opening();
    transfer();
    locks();
    attributes();
    names();
    leaving();
    xattrs();
    many_entries();
    threads();
    children();
    sessions();
    same_trees("");
    same_listing("");
    IS(ashlar_close_fs(fs), 0);
    printf("%d results compared, %d different\n", compared, different);
    return different != 0;
}
