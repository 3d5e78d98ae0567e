/* ashlar.h: files of an Ashlar file system, served in the calling process by LibFS, without the kernel.
 *
 * The calls are those of POSIX with a session in front. What they do is what the kernel does with the same call on a mount of the
 * same files, and both see each other's work at once. What differs is said here at the call, and summed up in docs/capi.md.
 *
 * RESULTS. A call returns 0 or a positive number, or a negative errno (-ENOENT): no variable is set beside it, so that nothing comes
 * between a call and its error, in C as in any language that can call C. ashlar_strerror() has words for it.
 *
 * PATHS are those of the file system itself: "/" is its root, and whether a path begins with a slash makes no difference. So
 * "mail/new" is what the kernel calls /srv/files/mail/new where the file system is mounted on /srv/files. Symbolic links are followed,
 * 40 at most (-ELOOP). A link with an absolute target is followed where the target lies below the mount point that was given to
 * ashlar_open_fs(), as the kernel's paths say it; a path that leaves the file system, by a link or by "..", gives -EXDEV. What is
 * mounted on a directory of the file system is not seen. A path has 4095 bytes at most, a name 255 (-ENAMETOOLONG). An empty path
 * gives -ENOENT.
 *
 * POINTERS. A null pointer gives -EFAULT, where the call does not say that it means something. That every other pointer leads to what
 * the call needs is the caller's business, as for any function of the C library.
 *
 * RIGHTS are those of the effective user, the effective group and the supplementary groups at the moment of ashlar_open_fs(), by
 * permission bits and access lists. Capabilities count for nothing: user 0 may do all, and nobody else more than the rights say.
 *
 * THREADS may make any calls at the same time with one session, one file or one directory stream; only ashlar_close_fs() and
 * ashlar_closedir() must be the last call with theirs. A call made in a signal handler may wait for ever for the call that the
 * handler has interrupted. No call gives -EINTR.
 *
 * FORK. A session is its process's own. In a child every call with it gives -EBADF, except ashlar_close_fs() and ashlar_closedir(),
 * which give back what the child has of it and leave the parent's session and files as they are. A child opens a session of its own.
 *
 * DURABILITY. What a call has done when it returns survives the death of the process and of the daemon, on every kind of arena; power
 * loss as far as the arena's medium says, on disk from ashlar_fsync() on.
 *
 * ERRORS THAT ANY CALL may give: -EFAULT, -EBADF (no such file, or a session of another process), -EIO (the daemon has been away for
 * two minutes, or as many seconds as ASHLAR_PATIENCE in the environment said when the session was opened; the medium fails; or a
 * defect of the library), -ENOMEM. Calls on paths moreover: -ENOENT, -ENOTDIR, -EACCES (a
 * directory may not be searched), -ELOOP, -ENAMETOOLONG, -EXDEV. They are not named again below.
 *
 * The header is C89, and C++ too. cc $(pkg-config --cflags --libs ashlar)
 */
#ifndef ASHLAR_H
#define ASHLAR_H

#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of other headers, which a program includes where it uses them: <sys/stat.h>, <sys/statvfs.h>, <sys/uio.h>, <time.h>. */
struct stat;
struct statvfs;
struct iovec;
struct timespec;

/* The version of this header. The library's own is what ashlar_version() says. */
#define ASHLAR_VERSION_MAJOR 0
#define ASHLAR_VERSION_MINOR 1

/* File offsets have 64 bits: on machines of 32 bits compile with -D_FILE_OFFSET_BITS=64. */
typedef char ashlar_offsets_have_64_bits[sizeof(off_t) == 8 ? 1 : -1];

/* A session: a process's view of one file system. */
typedef struct ashlar_fs ashlar_fs;
/* A directory that is being listed. */
typedef struct ashlar_dir ashlar_dir;

/* ---- Sessions ------------------------------------------------------------------------------------------------------------- */

/* Room for the longest sentence of ashlar_open_fs(), its NUL included. */
#define ASHLAR_MESSAGE_BYTES 512

/* Opens a session with the file system that is mounted on `place`, or whose daemon listens at the socket `place` (`socket` in its
 * arena's directory). flags: 0. The session is stored in *fs, and ends with ashlar_close_fs(), or with the process.
 *
 * Where that fails and message is not null, it gets a sentence that says why and what to do, of message_size bytes at most with its
 * NUL. The session's umask is the process's. RLIMIT_FSIZE counts as it is now, and gives -EFBIG without a signal.
 *
 * -ENOENT: there is no `place`. -ENODEV: no Ashlar is mounted there. -EROFS: it is mounted for reading only. -ENOTCONN: no daemon
 * answers. -EACCES: its socket can't be reached. -ECONNREFUSED: it refuses; every user has 32 sessions at most. -EOPNOTSUPP: the
 * process is in a user namespace, where user numbers mean others. -EINVAL: flags. */
int ashlar_open_fs(ashlar_fs **fs, const char *place, unsigned int flags, char *message, size_t message_size);

/* Ends a session. Files that are open are closed; what was done, others see. Directory streams that are left give -EBADF and are to
 * be closed all the same. Null: nothing is done. Returns 0. */
int ashlar_close_fs(ashlar_fs *fs);

/* Sets the permission bits that are taken off what the session makes from now on; returns those before. The process's own umask
 * stays as it is. */
int ashlar_umask(ashlar_fs *fs, mode_t mask);

/* Makes persistent all that was done in the arena before, by this session and by all others, as syncfs(2) does. */
int ashlar_sync(ashlar_fs *fs);

/* Words for a result: a text that stays. Takes the error as it was returned, or an errno. */
const char *ashlar_strerror(int error);

/* The library's version, "MAJOR.MINOR.PATCH". */
const char *ashlar_version(void);

/* ---- Files ---------------------------------------------------------------------------------------------------------------- */

/* Opens a file, and returns a number for it: the lowest that is free from 2^30 on, which no descriptor of the kernel's has, so that
 * neither is taken for the other. flags as for open(2): an access mode, O_CREAT, O_EXCL, O_TRUNC, O_APPEND, O_DIRECTORY, O_NOFOLLOW,
 * O_TMPFILE, O_SYNC, O_DSYNC, O_NOATIME; O_CLOEXEC, O_DIRECT, O_LARGEFILE, O_NOCTTY and O_NONBLOCK are taken and change nothing.
 * mode: the permission bits of a file that is made, less the session's umask.
 *
 * -EEXIST, -EISDIR, -EPERM (O_NOATIME on another user's file), -ENOSPC, -EDQUOT; -ENXIO: a device, pipe or socket, which only the
 * kernel opens; -EMFILE: 65,536 files are open; -EINVAL: other flags (O_PATH). Whether a file is being run as a program is not
 * known here: there is no -ETXTBSY. */
int ashlar_open(ashlar_fs *fs, const char *path, int flags, mode_t mode);

/* Closes a file. When the last number of an open file is closed, its locks go. */
int ashlar_close(ashlar_fs *fs, int file);

/* Another number for an open file, with which it shares offset and locks. -EMFILE. */
int ashlar_dup(ashlar_fs *fs, int file);

/* Read and write at the open file's offset, which moves; return how many bytes. Reads return fewer only at the file's end, writes
 * only where there is no room for more. One call does 2 GiB - 4096 bytes at most. A write of up to 1 MiB is done whole or not at all,
 * whatever dies meanwhile. -EISDIR, -EBADF (not opened for it), -EFBIG, -ENOSPC, -EDQUOT; -EINVAL (more than 1024 parts, or their
 * sum is too large). */
ssize_t ashlar_read(ashlar_fs *fs, int file, void *buffer, size_t bytes);
ssize_t ashlar_write(ashlar_fs *fs, int file, const void *buffer, size_t bytes);
ssize_t ashlar_readv(ashlar_fs *fs, int file, const struct iovec *parts, int count);
ssize_t ashlar_writev(ashlar_fs *fs, int file, const struct iovec *parts, int count);

/* The same at a given offset in bytes; the open file's own stays. With O_APPEND writes go to the end all the same, as on Linux.
 * -EINVAL: an offset that is negative, or beyond 2^63 - 1 with what is to be transferred. */
ssize_t ashlar_pread(ashlar_fs *fs, int file, void *buffer, size_t bytes, off_t offset);
ssize_t ashlar_pwrite(ashlar_fs *fs, int file, const void *buffer, size_t bytes, off_t offset);
ssize_t ashlar_preadv(ashlar_fs *fs, int file, const struct iovec *parts, int count, off_t offset);
ssize_t ashlar_pwritev(ashlar_fs *fs, int file, const struct iovec *parts, int count, off_t offset);

/* Copies bytes between two files of the session without a way through the caller's memory; returns how many. Where an offset is null,
 * the open file's is used and moved; else *offset is. flags: 0. -EINVAL (the same file, and the ranges overlap), -EISDIR, -EBADF,
 * -EFBIG, -ENOSPC, -EDQUOT. */
ssize_t ashlar_copy_file_range(ashlar_fs *fs, int from, off_t *from_offset, int to, off_t *to_offset, size_t bytes,
                               unsigned int flags);

/* Moves the offset: SEEK_SET, SEEK_CUR, SEEK_END, SEEK_DATA, SEEK_HOLE; returns it. -EINVAL (before the beginning; beyond the largest
 * offset; a directory's end), -ENXIO (no data behind; beyond the end; a directory's data). */
off_t ashlar_lseek(ashlar_fs *fs, int file, off_t offset, int whence);

/* Make persistent all that was done to this file and to its names before, whether here, by another process or on a mount; and all that
 * the session did before, on all files: there is one order. */
int ashlar_fsync(ashlar_fs *fs, int file);
int ashlar_fdatasync(ashlar_fs *fs, int file);

/* Cut or extend a file to a size in bytes. -EINVAL (a negative size; not opened for writing; neither file nor directory), -EISDIR,
 * -EACCES, -EFBIG, -ENOSPC, -EDQUOT. */
int ashlar_truncate(ashlar_fs *fs, const char *path, off_t size);
int ashlar_ftruncate(ashlar_fs *fs, int file, off_t size);

/* Reserves, frees or zeroes a range of bytes: mode as for fallocate(2), 0 or FALLOC_FL_... of <linux/falloc.h>: KEEP_SIZE, PUNCH_HOLE with
 * KEEP_SIZE, ZERO_RANGE; COLLAPSE_RANGE and INSERT_RANGE (whole blocks of 4096 bytes), which a mount does not know. -EINVAL,
 * -EBADF (not opened for writing), -EFBIG, -ENOSPC, -EDQUOT, -EOPNOTSUPP (another mode). */
int ashlar_fallocate(ashlar_fs *fs, int file, int mode, off_t offset, off_t bytes);

/* Lock an open file as flock(2) does, against all that use flock on it, through mounts too: LOCK_SH, LOCK_EX, LOCK_UN of
 * <sys/file.h>, with LOCK_NB for -EAGAIN in place of waiting. -EINVAL. */
int ashlar_flock(ashlar_fs *fs, int file, int operation);

/* Lock a number of bytes from start on, 0: to the end, as F_OFD_SETLK does, against all that lock bytes with fcntl(2), through mounts
 * too. type: F_RDLCK, F_WRLCK, F_UNLCK of <fcntl.h>. The lock is the open file's, not the process's. wait: 0 for -EAGAIN in place of
 * waiting. -EINVAL, -EBADF (not opened for it), -EDEADLK. */
int ashlar_lock(ashlar_fs *fs, int file, int type, off_t start, off_t bytes, int wait);

/* ---- Attributes ----------------------------------------------------------------------------------------------------------- */

/* Tell of a file; lstat() of a link itself. st_ino is what the mount shows, st_dev too; 0, where the session was opened by a socket. */
int ashlar_stat(ashlar_fs *fs, const char *path, struct stat *stat);
int ashlar_lstat(ashlar_fs *fs, const char *path, struct stat *stat);
int ashlar_fstat(ashlar_fs *fs, int file, struct stat *stat);

/* Space and files of the file system, or of the subtree with a limit in which the file is. f_fsid and f_flag are 0. */
int ashlar_statvfs(ashlar_fs *fs, const char *path, struct statvfs *space);
int ashlar_fstatvfs(ashlar_fs *fs, int file, struct statvfs *space);

/* Whether the session's user may: F_OK, or R_OK, W_OK and X_OK together. Effective users count, as for eaccess(3). -EACCES, -EINVAL. */
int ashlar_access(ashlar_fs *fs, const char *path, int mode);

/* Permission bits, set-id and sticky bits included. -EPERM (another user's file). */
int ashlar_chmod(ashlar_fs *fs, const char *path, mode_t mode);
int ashlar_fchmod(ashlar_fs *fs, int file, mode_t mode);

/* Owner and group; -1 for one that stays. lchown() of a link itself. -EPERM. */
int ashlar_chown(ashlar_fs *fs, const char *path, uid_t owner, gid_t group);
int ashlar_lchown(ashlar_fs *fs, const char *path, uid_t owner, gid_t group);
int ashlar_fchown(ashlar_fs *fs, int file, uid_t owner, gid_t group);

/* Times of access and of change, in this order; UTIME_NOW and UTIME_OMIT as for utimensat(2). Null: both now. lutimens() of a link
 * itself. -EPERM, -EACCES, -EINVAL. */
int ashlar_utimens(ashlar_fs *fs, const char *path, const struct timespec *times);
int ashlar_lutimens(ashlar_fs *fs, const char *path, const struct timespec *times);
int ashlar_futimens(ashlar_fs *fs, int file, const struct timespec *times);

/* ---- Names ---------------------------------------------------------------------------------------------------------------- */

/* -EEXIST, -EACCES, -EMLINK, -ENOSPC, -EDQUOT. */
int ashlar_mkdir(ashlar_fs *fs, const char *path, mode_t mode);

/* -ENOTEMPTY, -EBUSY (the root), -EINVAL ("."), -EACCES, -EPERM (a sticky directory). */
int ashlar_rmdir(ashlar_fs *fs, const char *path);

/* -EISDIR, -EACCES, -EPERM. */
int ashlar_unlink(ashlar_fs *fs, const char *path);

/* flags: 0, or of RENAME_NOREPLACE (1), RENAME_EXCHANGE (2) and RENAME_WHITEOUT (4), as for renameat2(2). -EEXIST, -ENOTEMPTY, -EISDIR,
 * -EINVAL (a directory into itself; flags), -EBUSY ("." or ".."), -EACCES, -EPERM, -EMLINK, -ENOSPC, -EDQUOT; -EXDEV also where what
 * moves would count against another quota. */
int ashlar_rename(ashlar_fs *fs, const char *from, const char *to, unsigned int flags);

/* Another name for a file; a symbolic link is not followed. -EEXIST, -EPERM (a directory; a file of others that fs.protected_hardlinks
 * protects), -EMLINK, -EACCES, -ENOSPC, -EDQUOT, -EXDEV as for rename. */
int ashlar_link(ashlar_fs *fs, const char *from, const char *to);

/* A name for an open file, as linkat(2) with AT_EMPTY_PATH gives it: also the first one of a file made with O_TMPFILE, unless
 * with O_EXCL too, and of no file whose last name was removed (-ENOENT). As ashlar_link(). */
int ashlar_flink(ashlar_fs *fs, int file, const char *to);

/* A symbolic link at path with any target, of 1 to 4095 bytes. -EEXIST, -EACCES, -ENOSPC, -EDQUOT; -ENOENT: an empty target. */
int ashlar_symlink(ashlar_fs *fs, const char *target, const char *path);

/* Stores the target of a link, cut off after `bytes` bytes and without a NUL; returns its length. -EINVAL (no link; no room). */
ssize_t ashlar_readlink(ashlar_fs *fs, const char *path, char *buffer, size_t bytes);

/* ---- Directories ---------------------------------------------------------------------------------------------------------- */

/* An entry of a directory. */
typedef struct ashlar_dirent {
    ino_t d_ino;          /* where it leads */
    off_t d_off;          /* where the listing goes on behind it: for ashlar_seekdir() */
    unsigned char d_type; /* DT_REG, DT_DIR, DT_LNK, ... of <dirent.h>; never DT_UNKNOWN */
    char d_name[256];     /* the name, with a NUL at its end */
} ashlar_dirent;

/* Begins to list a directory, "." and ".." included; stores the stream in *dir. -EACCES, -EMFILE. */
int ashlar_opendir(ashlar_fs *fs, const char *path, ashlar_dir **dir);

/* Stores the next entry and returns 1, or 0 at the end. Each name that is there all the time is told once. -ENOENT: the directory
 * was removed. */
int ashlar_readdir(ashlar_dir *dir, ashlar_dirent *entry);

/* Where the listing stands, and go on from there: 0 is the beginning. -EINVAL: a negative place. */
off_t ashlar_telldir(ashlar_dir *dir);
int ashlar_seekdir(ashlar_dir *dir, off_t place);

/* Ends a listing. Null: nothing is done. Returns 0. */
int ashlar_closedir(ashlar_dir *dir);

/* ---- Extended attributes -------------------------------------------------------------------------------------------------- */

/* As xattr(7) says; the l forms are about a link itself. A value has 65,536 bytes at most. Getting and listing return a length in
 * bytes; with bytes = 0 they store nothing. A list is names with a NUL behind each. flags: 0, XATTR_CREATE (1) or XATTR_REPLACE (2).
 * -ENODATA, -ERANGE (no room; a name too long), -EEXIST, -E2BIG, -EPERM, -EACCES, -EOPNOTSUPP (a name that is to be set in another namespace than
 * user, trusted and security, but for the access lists of system), -ENOSPC, -EDQUOT. */
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
