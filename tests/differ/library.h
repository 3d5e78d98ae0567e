/* library.h: the functions of libashlar as calls of the table; null where the program does not link it. */
#ifndef LIBRARY_H
#define LIBRARY_H

#define LIBRARY_CALLS(X)                                                                                                             \
    X(open) X(close) X(dup) X(read) X(pread64) X(readv) X(preadv) X(write) X(pwrite64) X(writev) X(pwritev) X(lseek) X(truncate)       \
    X(ftruncate) X(fallocate) X(fsync) X(fdatasync) X(copy_file_range) X(stat) X(lstat) X(fstat) X(chmod) X(fchmod) X(chown) X(lchown) \
    X(fchown) X(mkdir) X(rmdir) X(unlink) X(link) X(symlink) X(readlink) X(setxattr) X(lsetxattr) X(fsetxattr) X(getxattr)            \
    X(lgetxattr) X(fgetxattr) X(listxattr) X(llistxattr) X(flistxattr) X(removexattr) X(lremovexattr) X(fremovexattr) X(flock)        \
    X(umask) X(flink) X(list) X(eaccess) X(utimens) X(lutimens) X(futimens) X(rename2) X(lock)

#define DECLARE(name) long library_##name(const long *a);
LIBRARY_CALLS(DECLARE)
#undef DECLARE

#endif
