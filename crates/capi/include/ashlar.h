/* ashlar.h: files of an Ashlar file system, served in the calling process by LibFS, without the kernel.
 *
 * The calls are those of POSIX with a session in front. A call does what the kernel does with the same call on a mount
 * of the same files, and each sees the other's changes at once. Differences are stated here at the call, and summed up
 * in docs/capi.md.
 *
 * RESULTS. A call returns 0 or a positive number, or a negative errno (-ENOENT). It sets no variable, so that nothing
 * comes between a call and its error, in C as in any language that can call C. ashlar_strerror() returns the text of an
 * error.
 *
 * PATHS are those of the file system itself: "/" is its root, and a slash at the beginning makes no difference. If the
 * file system is mounted on /srv/files, "mail/new" is the kernel's /srv/files/mail/new. Calls follow symbolic links, 40
 * at most (-ELOOP). They follow a link with an absolute target if the target, as a path of the kernel, lies below the
 * mount point that was given to ashlar_open_fs(). A path that leaves the file system, by a link or by "..", gives
 * -EXDEV. Calls do not see other file systems that are mounted on its directories. A path has 4095 bytes at most, a
 * name 255 (-ENAMETOOLONG). An empty path gives -ENOENT.
 *
 * POINTERS. A null pointer gives -EFAULT, unless the call gives it a meaning. Every other pointer must lead to the
 * memory that the call needs, as for any function of the C library; the caller is responsible for that.
 *
 * RIGHTS are those of the effective user, the effective group and the supplementary groups at the moment of
 * ashlar_open_fs(), by permission bits and access lists. Capabilities have no effect: user 0 may do everything, and no
 * other user more than the rights say.
 *
 * THREADS may make any calls at the same time with one session, one file or one directory stream. Only
 * ashlar_close_fs() and ashlar_closedir() must be the last call with their session or stream. A call made in a signal
 * handler may wait for ever for the call that the handler has interrupted. No call gives -EINTR.
 *
 * FORK. A session belongs to one process. In a child, every call with it gives -EBADF, except ashlar_close_fs() and
 * ashlar_closedir(): they free the child's copy, and leave the parent's session and files unchanged. A child opens a
 * session of its own.
 *
 * DURABILITY. When a call has returned, its effects survive the death of the process and of the daemon, on every kind
 * of arena. They survive a power loss as far as the arena's medium promises; on disk, from ashlar_fsync() on.
 *
 * ERRORS OF ANY CALL: -EFAULT, -EBADF (no such file, or a session of another process), -ENOMEM, and -EIO. The causes of
 * -EIO are a failure of the medium, a defect of the library, and a daemon that has not answered for two minutes. The
 * environment variable ASHLAR_PATIENCE sets another number of seconds; it counts when the session is opened.
 * ERRORS OF CALLS ON PATHS: also -ENOENT, -ENOTDIR, -EACCES (a directory may not be searched), -ELOOP, -ENAMETOOLONG,
 * -EXDEV. None of these are named again below.
 *
 * The header is C89, and C++ too. cc $(pkg-config --cflags --libs ashlar)
 */
#ifndef ASHLAR_H
#define ASHLAR_H

#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* These belong to other headers, which a program includes if it uses them: <sys/stat.h>, <sys/statvfs.h>, <sys/uio.h>,
 * <time.h>. */
struct stat;
struct statvfs;
struct iovec;
struct timespec;

/* The version of this header. ashlar_version() returns the library's own. */
#define ASHLAR_VERSION_MAJOR 0
#define ASHLAR_VERSION_MINOR 1

/* File offsets have 64 bits: on machines of 32 bits compile with -D_FILE_OFFSET_BITS=64. */
typedef char ashlar_offsets_have_64_bits[sizeof(off_t) == 8 ? 1 : -1];

/* A session: a process's connection to one file system. */
typedef struct ashlar_fs ashlar_fs;
/* A directory stream: a listing of one directory. */
typedef struct ashlar_dir ashlar_dir;

/* ---- Sessions ---------------------------------------------------------------------------------------------------- */

/* Bytes of the longest message of ashlar_open_fs(), its NUL included. */
#define ASHLAR_MESSAGE_BYTES 512

/* Opens a session with the file system that is mounted on `place`, or whose daemon listens at the socket `place`
 * (`socket` in its arena's directory). flags: 0. The call stores the session in *fs. The session ends with
 * ashlar_close_fs(), or with the process.
 *
 * If the call fails and message is not null, it stores a sentence there with the reason and the remedy, of message_size
 * bytes at most with its NUL. The session takes over the process's umask. RLIMIT_FSIZE counts as it is now, and gives
 * -EFBIG without a signal.
 *
 * -ENOENT: `place` does not exist. -ENODEV: no Ashlar is mounted there. -EROFS: it is mounted for reading only.
 * -ENOTCONN: no daemon answers. -EACCES: the process can't reach the daemon's socket. -ECONNREFUSED: the daemon
 * refuses; every user has 32 sessions at most. -EOPNOTSUPP: the process is in a user namespace, where user numbers
 * mean other users. -EINVAL: flags. */
int ashlar_open_fs(ashlar_fs **fs, const char *place, unsigned int flags, char *message, size_t message_size);

/* Ends a session, and closes its open files. Other sessions see all of its changes. Directory streams that are left
 * give -EBADF, and the caller must still close them. If fs is null, the call does nothing. Returns 0. */
int ashlar_close_fs(ashlar_fs *fs);

/* Sets the permission bits that files and directories which the session creates do not get; returns the bits before.
 * The process's own umask stays unchanged. */
int ashlar_umask(ashlar_fs *fs, mode_t mask);

/* Makes persistent all earlier changes in the arena, of this session and of all others, as syncfs(2) does. */
int ashlar_sync(ashlar_fs *fs);

/* Returns the text of an error, which is never freed. error: a negative result of a call, or an errno. */
const char *ashlar_strerror(int error);

/* Returns the library's version, "MAJOR.MINOR.PATCH". */
const char *ashlar_version(void);

/* ---- Files ------------------------------------------------------------------------------------------------------- */

/* Opens a file, and returns a number for it: the lowest free one from 2^30 on. No descriptor of the kernel has such a
 * number, so neither is mistaken for the other. flags as for open(2): an access mode, O_CREAT, O_EXCL, O_TRUNC,
 * O_APPEND, O_DIRECTORY, O_NOFOLLOW, O_TMPFILE, O_SYNC, O_DSYNC, O_NOATIME. The call accepts O_CLOEXEC, O_DIRECT,
 * O_LARGEFILE, O_NOCTTY and O_NONBLOCK, which have no effect. mode: the permission bits of a new file, less the
 * session's umask.
 *
 * -EEXIST, -EISDIR, -EPERM (O_NOATIME on another user's file), -ENOSPC, -EDQUOT; -ENXIO: a device, pipe or socket,
 * which only the kernel opens; -EMFILE: 65,536 files are open; -EINVAL: other flags (O_PATH). The library does not
 * know whether a file is being run as a program, so it never gives -ETXTBSY. */
int ashlar_open(ashlar_fs *fs, const char *path, int flags, mode_t mode);

/* Closes a file. When the last number of an open file is closed, its locks are removed. */
int ashlar_close(ashlar_fs *fs, int file);

/* Returns another number for an open file. The two share offset and locks. -EMFILE. */
int ashlar_dup(ashlar_fs *fs, int file);

/* Read and write at the open file's offset, and move it; return the number of bytes. Reads return fewer bytes only
 * at the file's end, writes only if there is no room for more. One call transfers 2 GiB - 4096 bytes at most. A
 * write of up to 1 MiB is done whole or not at all, even if the process or the daemon dies meanwhile. -EISDIR,
 * -EBADF (not opened for it), -EFBIG, -ENOSPC, -EDQUOT; -EINVAL (more than 1024 parts, or their sum is too large). */
ssize_t ashlar_read(ashlar_fs *fs, int file, void *buffer, size_t bytes);
ssize_t ashlar_write(ashlar_fs *fs, int file, const void *buffer, size_t bytes);
ssize_t ashlar_readv(ashlar_fs *fs, int file, const struct iovec *parts, int count);
ssize_t ashlar_writev(ashlar_fs *fs, int file, const struct iovec *parts, int count);

/* Read and write at a given offset in bytes; the open file's own offset stays. With O_APPEND, writes still go to the
 * end, as on Linux. -EINVAL: an offset that is negative, or that passes 2^63 - 1 with the bytes of the transfer. */
ssize_t ashlar_pread(ashlar_fs *fs, int file, void *buffer, size_t bytes, off_t offset);
ssize_t ashlar_pwrite(ashlar_fs *fs, int file, const void *buffer, size_t bytes, off_t offset);
ssize_t ashlar_preadv(ashlar_fs *fs, int file, const struct iovec *parts, int count, off_t offset);
ssize_t ashlar_pwritev(ashlar_fs *fs, int file, const struct iovec *parts, int count, off_t offset);

/* Copies bytes between two files of the session without passing them through the caller's memory; returns their number.
 * If an offset is null, the call uses and moves the open file's offset; otherwise it uses and moves *offset. flags: 0.
 * -EINVAL (the same file, and the ranges overlap), -EISDIR, -EBADF, -EFBIG, -ENOSPC, -EDQUOT. */
ssize_t ashlar_copy_file_range(ashlar_fs *fs, int from, off_t *from_offset, int to, off_t *to_offset, size_t bytes,
                               unsigned int flags);

/* Moves the offset, and returns it: SEEK_SET, SEEK_CUR, SEEK_END, SEEK_DATA, SEEK_HOLE. -EINVAL (before the beginning;
 * beyond the largest offset; a directory's end), -ENXIO (no data behind; beyond the end; a directory's data). */
off_t ashlar_lseek(ashlar_fs *fs, int file, off_t offset, int whence);

/* Make persistent all earlier changes to this file and to its names, of this session, of other processes and of mounts.
 * They also make persistent all earlier changes of the session to any file, since its log has one order. */
int ashlar_fsync(ashlar_fs *fs, int file);
int ashlar_fdatasync(ashlar_fs *fs, int file);

/* Truncate or extend a file to a size in bytes. -EINVAL (a negative size; not opened for writing; neither file nor
 * directory), -EISDIR, -EACCES, -EFBIG, -ENOSPC, -EDQUOT. */
int ashlar_truncate(ashlar_fs *fs, const char *path, off_t size);
int ashlar_ftruncate(ashlar_fs *fs, int file, off_t size);

/* Reserves, frees or zeroes a range of bytes. mode as for fallocate(2): 0, or FALLOC_FL_... of <linux/falloc.h>:
 * KEEP_SIZE, PUNCH_HOLE with KEEP_SIZE, ZERO_RANGE. COLLAPSE_RANGE and INSERT_RANGE (whole blocks of 4096 bytes) work
 * too, unlike on a mount. -EINVAL, -EBADF (not opened for writing), -EFBIG, -ENOSPC, -EDQUOT, -EOPNOTSUPP (another
 * mode). */
int ashlar_fallocate(ashlar_fs *fs, int file, int mode, off_t offset, off_t bytes);

/* Locks an open file as flock(2) does, against all processes that use flock on it, through mounts too: LOCK_SH,
 * LOCK_EX, LOCK_UN of <sys/file.h>. With LOCK_NB, it returns -EAGAIN instead of waiting. -EINVAL. */
int ashlar_flock(ashlar_fs *fs, int file, int operation);

/* Locks a number of bytes from start on, or with 0 up to the end, as F_OFD_SETLK does. The lock holds against all
 * processes that lock bytes with fcntl(2), through mounts too. type: F_RDLCK, F_WRLCK, F_UNLCK of <fcntl.h>. The
 * lock belongs to the open file, not to the process. With wait 0, the call returns -EAGAIN instead of waiting.
 * -EINVAL, -EBADF (not opened for it), -EDEADLK. */
int ashlar_lock(ashlar_fs *fs, int file, int type, off_t start, off_t bytes, int wait);

/* ---- Attributes -------------------------------------------------------------------------------------------------- */

/* Store a file's attributes; ashlar_lstat() stores those of a link itself. st_ino and st_dev are those of the mount;
 * st_dev is 0 if the session was opened by a socket. */
int ashlar_stat(ashlar_fs *fs, const char *path, struct stat *stat);
int ashlar_lstat(ashlar_fs *fs, const char *path, struct stat *stat);
int ashlar_fstat(ashlar_fs *fs, int file, struct stat *stat);

/* Store the space and the number of files of the file system, or of the subtree with a limit that contains the file.
 * f_fsid and f_flag are 0. */
int ashlar_statvfs(ashlar_fs *fs, const char *path, struct statvfs *space);
int ashlar_fstatvfs(ashlar_fs *fs, int file, struct statvfs *space);

/* Checks a right of the session's user: F_OK, or R_OK, W_OK and X_OK together. The effective user counts, as for
 * eaccess(3). -EACCES, -EINVAL. */
int ashlar_access(ashlar_fs *fs, const char *path, int mode);

/* Set the permission bits, with set-id and sticky bits. -EPERM (another user's file). */
int ashlar_chmod(ashlar_fs *fs, const char *path, mode_t mode);
int ashlar_fchmod(ashlar_fs *fs, int file, mode_t mode);

/* Set owner and group; -1 keeps one. ashlar_lchown() sets those of a link itself. -EPERM. */
int ashlar_chown(ashlar_fs *fs, const char *path, uid_t owner, gid_t group);
int ashlar_lchown(ashlar_fs *fs, const char *path, uid_t owner, gid_t group);
int ashlar_fchown(ashlar_fs *fs, int file, uid_t owner, gid_t group);

/* Set the times of access and modification, in this order; UTIME_NOW and UTIME_OMIT as for utimensat(2). Null: both
 * now. ashlar_lutimens() sets those of a link itself. -EPERM, -EACCES, -EINVAL. */
int ashlar_utimens(ashlar_fs *fs, const char *path, const struct timespec *times);
int ashlar_lutimens(ashlar_fs *fs, const char *path, const struct timespec *times);
int ashlar_futimens(ashlar_fs *fs, int file, const struct timespec *times);

/* ---- Names ------------------------------------------------------------------------------------------------------- */

/* Creates a directory. -EEXIST, -EACCES, -EMLINK, -ENOSPC, -EDQUOT. */
int ashlar_mkdir(ashlar_fs *fs, const char *path, mode_t mode);

/* Removes a directory. -ENOTEMPTY, -EBUSY (the root), -EINVAL ("."), -EACCES, -EPERM (a sticky directory). */
int ashlar_rmdir(ashlar_fs *fs, const char *path);

/* Removes a name of a file. -EISDIR, -EACCES, -EPERM. */
int ashlar_unlink(ashlar_fs *fs, const char *path);

/* Renames a file or directory. flags: 0, or of RENAME_NOREPLACE (1), RENAME_EXCHANGE (2) and RENAME_WHITEOUT (4), as
 * for renameat2(2). -EEXIST, -ENOTEMPTY, -EISDIR, -EINVAL (a directory into itself; flags), -EBUSY ("." or ".."),
 * -EACCES, -EPERM, -EMLINK, -ENOSPC, -EDQUOT; -EXDEV also if the renamed files would count against another quota. */
int ashlar_rename(ashlar_fs *fs, const char *from, const char *to, unsigned int flags);

/* Gives a file another name; does not follow a symbolic link. -EEXIST, -EPERM (a directory; another user's file that
 * fs.protected_hardlinks protects), -EMLINK, -EACCES, -ENOSPC, -EDQUOT, -EXDEV as for ashlar_rename(). */
int ashlar_link(ashlar_fs *fs, const char *from, const char *to);

/* Gives an open file a name, as linkat(2) with AT_EMPTY_PATH does. The name may be the first of a file created with
 * O_TMPFILE without O_EXCL. A file whose last name was removed gets none (-ENOENT). Other errors as for
 * ashlar_link(). */
int ashlar_flink(ashlar_fs *fs, int file, const char *to);

/* Creates a symbolic link at path with any target, of 1 to 4095 bytes. -EEXIST, -EACCES, -ENOSPC, -EDQUOT; -ENOENT: an
 * empty target. */
int ashlar_symlink(ashlar_fs *fs, const char *target, const char *path);

/* Stores the target of a link, truncated to `bytes` bytes and without a NUL; returns the stored length. -EINVAL (not a
 * link; no room). */
ssize_t ashlar_readlink(ashlar_fs *fs, const char *path, char *buffer, size_t bytes);

/* ---- Directories ------------------------------------------------------------------------------------------------- */

/* An entry of a directory. */
typedef struct ashlar_dirent {
    ino_t d_ino;          /* the inode to which it leads */
    off_t d_off;          /* the position behind it, for ashlar_seekdir() */
    unsigned char d_type; /* DT_REG, DT_DIR, DT_LNK, ... of <dirent.h>; never DT_UNKNOWN */
    char d_name[256];     /* the name, with a NUL at its end */
} ashlar_dirent;

/* Begins a listing of a directory, "." and ".." included; stores the stream in *dir. -EACCES, -EMFILE. */
int ashlar_opendir(ashlar_fs *fs, const char *path, ashlar_dir **dir);

/* Stores the next entry and returns 1, or returns 0 at the end. A name that exists during the whole listing is returned
 * exactly once. -ENOENT: the directory was removed. */
int ashlar_readdir(ashlar_dir *dir, ashlar_dirent *entry);

/* Return the position of the listing, and continue at a position: 0 is the beginning. -EINVAL: a negative position. */
off_t ashlar_telldir(ashlar_dir *dir);
int ashlar_seekdir(ashlar_dir *dir, off_t place);

/* Ends a listing. If dir is null, the call does nothing. Returns 0. */
int ashlar_closedir(ashlar_dir *dir);

/* ---- Extended attributes ----------------------------------------------------------------------------------------- */

/* Extended attributes as in xattr(7); the l forms are those of a link itself. A value has 65,536 bytes at most. The get
 * and list calls return a length in bytes; with bytes = 0 they store nothing. A list consists of names, each with a NUL
 * behind it. flags: 0, XATTR_CREATE (1) or XATTR_REPLACE (2). -ENODATA, -ERANGE (no room; a name too long), -EEXIST,
 * -E2BIG, -EPERM, -EACCES, -ENOSPC, -EDQUOT; -EOPNOTSUPP: a name to set in a namespace other than user, trusted and
 * security, unless it is an access list in system. */
ssize_t ashlar_getxattr(ashlar_fs *fs, const char *path, const char *name, void *value, size_t bytes);
ssize_t ashlar_lgetxattr(ashlar_fs *fs, const char *path, const char *name, void *value, size_t bytes);
ssize_t ashlar_fgetxattr(ashlar_fs *fs, int file, const char *name, void *value, size_t bytes);
int ashlar_setxattr(ashlar_fs *fs, const char *path, const char *name, const void *value, size_t bytes, int flags);
int ashlar_lsetxattr(ashlar_fs *fs, const char *path, const char *name, const void *value, size_t bytes, int flags);
int ashlar_fsetxattr(ashlar_fs *fs, int file, const char *name, const void *value, size_t bytes, int flags);
ssize_t ashlar_listxattr(ashlar_fs *fs, const char *path, char *list, size_t bytes);
ssize_t ashlar_llistxattr(ashlar_fs *fs, const char *path, char *list, size_t bytes);
ssize_t ashlar_flistxattr(ashlar_fs *fs, int file, char *list, size_t bytes);
int ashlar_removexattr(ashlar_fs *fs, const char *path, const char *name);
int ashlar_lremovexattr(ashlar_fs *fs, const char *path, const char *name);
int ashlar_fremovexattr(ashlar_fs *fs, int file, const char *name);

#ifdef __cplusplus
}
#endif

#endif
