/* Calls of the table by libashlar. A program without it has them as well, to draw the same calls, and makes none. */
#define _GNU_SOURCE
#include "differ.h"
#include "library.h"

#ifndef WITH_LIBRARY

#define LEAVE_OUT(name)                     \
    long library_##name(const long *a)      \
    {                                       \
        (void)a;                            \
        stop_program("no library");         \
        return 0;                           \
    }
LIBRARY_CALLS(LEAVE_OUT)

#else

#include <ashlar.h>

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>

static ashlar_fs *fs;
static const char *mount_point;

void open_library(const char *point)
{
    char message[ASHLAR_MESSAGE_BYTES];
    mount_point = point;
    if (ashlar_open_fs(&fs, point, 0, message, sizeof message) < 0)
        stop_program(message);
}

/* A sequence begins with no file open, and with the umask that the program has. */
void reset_library(void)
{
    int number;
    for (number = 0; number < 64; number++)
        ashlar_close(fs, (1 << 30) + number);
    ashlar_umask(fs, 022);
}

/* A path of the library's: that of the world, since the library knows no working directory. */
static const char *path_of(long argument)
{
    static char paths[2][3 * PATH_MAX];
    static int next;
    const char *path = (const char *)argument;
    if (path == NULL || *path == 0)
        return path;
    next = !next;
    if (*path == '/')
        return path + strlen(mount_point);
    snprintf(paths[next], sizeof paths[next], "%s/world/%s", place + strlen(mount_point), path);
    return paths[next];
}

static int file_of(long argument)
{
    return argument >= FIRST_DESCRIPTOR && argument < 1024 ? (int)argument - FIRST_DESCRIPTOR + (1 << 30) : (int)argument;
}

static long number_of(long file)
{
    return file >= 1 << 30 ? file - (1 << 30) + FIRST_DESCRIPTOR : file;
}

#define P0 path_of(a[0])
#define P1 path_of(a[1])
#define F0 file_of(a[0])
#define CALL(name, expression)         \
    long library_##name(const long *a) \
    {                                  \
        return expression;             \
    }

CALL(open, number_of(ashlar_open(fs, P0, (int)a[1], (mode_t)a[2])))
CALL(close, ashlar_close(fs, F0))
CALL(dup, number_of(ashlar_dup(fs, F0)))
CALL(read, ashlar_read(fs, F0, (void *)a[1], (size_t)a[2]))
CALL(pread64, ashlar_pread(fs, F0, (void *)a[1], (size_t)a[2], a[3]))
CALL(readv, ashlar_readv(fs, F0, (const struct iovec *)a[1], (int)a[2]))
CALL(preadv, ashlar_preadv(fs, F0, (const struct iovec *)a[1], (int)a[2], a[3]))
CALL(write, ashlar_write(fs, F0, (const void *)a[1], (size_t)a[2]))
CALL(pwrite64, ashlar_pwrite(fs, F0, (const void *)a[1], (size_t)a[2], a[3]))
CALL(writev, ashlar_writev(fs, F0, (const struct iovec *)a[1], (int)a[2]))
CALL(pwritev, ashlar_pwritev(fs, F0, (const struct iovec *)a[1], (int)a[2], a[3]))
CALL(lseek, ashlar_lseek(fs, F0, a[1], (int)a[2]))
CALL(truncate, ashlar_truncate(fs, P0, a[1]))
CALL(ftruncate, ashlar_ftruncate(fs, F0, a[1]))
CALL(fallocate, ashlar_fallocate(fs, F0, (int)a[1], a[2], a[3]))
CALL(fsync, ashlar_fsync(fs, F0))
CALL(fdatasync, ashlar_fdatasync(fs, F0))
CALL(copy_file_range, ashlar_copy_file_range(fs, F0, (off_t *)a[1], file_of(a[2]), (off_t *)a[3], (size_t)a[4], (unsigned)a[5]))
CALL(stat, ashlar_stat(fs, P0, (struct stat *)a[1]))
CALL(lstat, ashlar_lstat(fs, P0, (struct stat *)a[1]))
CALL(fstat, ashlar_fstat(fs, F0, (struct stat *)a[1]))
CALL(chmod, ashlar_chmod(fs, P0, (mode_t)a[1]))
CALL(fchmod, ashlar_fchmod(fs, F0, (mode_t)a[1]))
CALL(chown, ashlar_chown(fs, P0, (uid_t)a[1], (gid_t)a[2]))
CALL(lchown, ashlar_lchown(fs, P0, (uid_t)a[1], (gid_t)a[2]))
CALL(fchown, ashlar_fchown(fs, F0, (uid_t)a[1], (gid_t)a[2]))
CALL(mkdir, ashlar_mkdir(fs, P0, (mode_t)a[1]))
CALL(rmdir, ashlar_rmdir(fs, P0))
CALL(unlink, ashlar_unlink(fs, P0))
CALL(link, ashlar_link(fs, P0, P1))
CALL(symlink, ashlar_symlink(fs, (const char *)a[0], P1))
CALL(readlink, ashlar_readlink(fs, P0, (char *)a[1], (size_t)a[2]))
CALL(setxattr, ashlar_setxattr(fs, P0, (const char *)a[1], (const void *)a[2], (size_t)a[3], (int)a[4]))
CALL(lsetxattr, ashlar_lsetxattr(fs, P0, (const char *)a[1], (const void *)a[2], (size_t)a[3], (int)a[4]))
CALL(fsetxattr, ashlar_fsetxattr(fs, F0, (const char *)a[1], (const void *)a[2], (size_t)a[3], (int)a[4]))
CALL(getxattr, ashlar_getxattr(fs, P0, (const char *)a[1], (void *)a[2], (size_t)a[3]))
CALL(lgetxattr, ashlar_lgetxattr(fs, P0, (const char *)a[1], (void *)a[2], (size_t)a[3]))
CALL(fgetxattr, ashlar_fgetxattr(fs, F0, (const char *)a[1], (void *)a[2], (size_t)a[3]))
CALL(listxattr, ashlar_listxattr(fs, P0, (char *)a[1], (size_t)a[2]))
CALL(llistxattr, ashlar_llistxattr(fs, P0, (char *)a[1], (size_t)a[2]))
CALL(flistxattr, ashlar_flistxattr(fs, F0, (char *)a[1], (size_t)a[2]))
CALL(removexattr, ashlar_removexattr(fs, P0, (const char *)a[1]))
CALL(lremovexattr, ashlar_lremovexattr(fs, P0, (const char *)a[1]))
CALL(fremovexattr, ashlar_fremovexattr(fs, F0, (const char *)a[1]))
CALL(flock, ashlar_flock(fs, F0, (int)a[1]))
CALL(umask, (long)ashlar_umask(fs, (mode_t)a[0]))
CALL(flink, ashlar_flink(fs, F0, P1))
CALL(eaccess, ashlar_access(fs, P0, (int)a[1]))
CALL(utimens, ashlar_utimens(fs, P0, (const struct timespec *)a[1]))
CALL(lutimens, ashlar_lutimens(fs, P0, (const struct timespec *)a[1]))
CALL(futimens, ashlar_futimens(fs, F0, (const struct timespec *)a[1]))
CALL(rename2, ashlar_rename(fs, P0, P1, (unsigned)a[2]))

long library_lock(const long *a)
{
    const struct flock *lock = (const struct flock *)a[2];
    return ashlar_lock(fs, F0, lock->l_type, lock->l_start, lock->l_len, 0);
}

static int compare_entries(const void *one, const void *other)
{
    return strcmp(one, other);
}

/* Lists a directory as the kernel's side does. */
long library_list(const long *a)
{
    enum { LISTED_MAX = 512 };
    static char names[LISTED_MAX][300];
    ashlar_dirent entry;
    ashlar_dir *stream;
    struct step *step = (struct step *)a[ARGUMENTS_MAX - 1];
    int found = 0, at;
    long result = ashlar_opendir(fs, P0, &stream);
    if (result < 0)
        return result;
    while ((result = ashlar_readdir(stream, &entry)) > 0 && found < LISTED_MAX)
        snprintf(names[found++], sizeof names[0], "%s/%d", entry.d_name, entry.d_type);
    ashlar_closedir(stream);
    qsort(names, (size_t)found, sizeof names[0], compare_entries);
    say(step, " [");
    for (at = 0; at < found; at++) {
        say_place(step, names[at], strlen(names[at]));
        say(step, " ");
    }
    say(step, "]");
    return result;
}

#endif
