/* The calls, what is printed of what they fill, and the states in which places may answer differently. */
#define _GNU_SOURCE
#include "differ.h"
#include "library.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef SYS_fchmodat2
#define SYS_fchmodat2 452
#endif

static long answer(long result)
{
    return result < 0 ? -(long)errno : result;
}

/* ---- Calls of several steps ---- */

static int compare_names(const void *one, const void *other)
{
    return strcmp(*(char *const *)one, *(char *const *)other);
}

/* Lists a directory to its end; the order of names is the file system's own. */
static long list_directory(struct step *step)
{
    enum { LISTED_MAX = 512 };
    char bytes[32768], *names[LISTED_MAX];
    long found = 0, at, calls_made = 0, result;
    size_t room = (size_t)step->arguments[1];
    for (;;) {
        result = answer(syscall(SYS_getdents64, (int)step->arguments[0], bytes, room));
        if (result <= 0 || ++calls_made > LISTED_MAX)
            break;
        for (at = 0; at < result && found < LISTED_MAX;) {
            struct dirent64 *entry = (struct dirent64 *)(bytes + at);
            char name[300];
            snprintf(name, sizeof name, "%s/%d", entry->d_name, entry->d_type);
            names[found++] = strdup(name);
            at += entry->d_reclen;
        }
    }
    /* With too little room it is chance which names come before the one that does not fit, and which are left. */
    if (result < 0 && found > 0)
        syscall(SYS_lseek, (int)step->arguments[0], 0, SEEK_SET);
    qsort(names, (size_t)found, sizeof *names, compare_names);
    say(step, " [");
    for (at = 0; at < found; at++) {
        if (result == 0) {
            say_place(step, names[at], strlen(names[at]));
            say(step, " ");
        }
        free(names[at]);
    }
    say(step, "]");
    return result;
}

static sigjmp_buf bus_error;

static void leave_mapping(int signal)
{
    (void)signal;
    siglongjmp(bus_error, 1);
}

/* Maps a page or two, looks at them, perhaps writes to them and has them written back. */
static long use_mapping(struct step *step)
{
    static const int protections[] = {PROT_READ, PROT_READ, PROT_READ | PROT_WRITE, PROT_NONE, PROT_WRITE, PROT_READ | PROT_EXEC};
    static const int kinds[] = {MAP_SHARED, MAP_PRIVATE, MAP_SHARED, MAP_PRIVATE, MAP_SHARED_VALIDATE, 0};
    static const long offsets[] = {0, 0, 0, 4096, 100, -4096, 65536};
    unsigned long drawn = (unsigned long)step->arguments[1];
    int protection = protections[drawn % 6], kind = kinds[drawn / 6 % 6];
    long offset = offsets[drawn / 36 % 7], length = drawn / 252 % 8 == 0 ? 0 : 1 + (long)(drawn % 8191), result;
    volatile char *mapped;
    struct sigaction action = {0}, before;
    say(step, " {%ld, prot %d, kind %d, %ld}", length, protection, kind, offset);
    result = answer(syscall(SYS_mmap, NULL, length, protection, kind, (int)step->arguments[0], offset));
    if (result < 0 && result > -4096)
        return result;
    mapped = (volatile char *)result;
    action.sa_handler = leave_mapping;
    action.sa_flags = SA_NODEFER;
    sigaction(SIGBUS, &action, &before);
    if (sigsetjmp(bus_error, 1) != 0)
        say(step, " SIGBUS");
    else {
        if (protection & PROT_READ)
            say(step, " %016lx", hash_bytes(1, (const void *)mapped, (size_t)(length < 512 ? length : 512)));
        if (protection & PROT_WRITE) {
            mapped[length / 2] = (char)drawn;
            mapped[0] = 'M';
        }
        if (drawn & 0x8000)
            say(step, " ftruncate %ld", answer(syscall(SYS_ftruncate, (int)step->arguments[0], length / 2)));
        say(step, " msync %ld", answer(syscall(SYS_msync, mapped, length, drawn & 0x4000 ? MS_SYNC : MS_ASYNC)));
    }
    sigaction(SIGBUS, &before, NULL);
    return answer(syscall(SYS_munmap, mapped, length));
}

/* Moves bytes from a file through a pipe into another file. */
static long splice_through_pipe(struct step *step)
{
    int pipe_ends[2];
    long in = -1, out = -1, bytes = step->arguments[2] % 60000;
    if (pipe2(pipe_ends, O_NONBLOCK) < 0)
        return answer(-1);
    in = answer(syscall(SYS_splice, (int)step->arguments[0], NULL, pipe_ends[1], NULL, bytes, SPLICE_F_NONBLOCK));
    out = answer(syscall(SYS_splice, pipe_ends[0], NULL, (int)step->arguments[1], NULL, bytes, SPLICE_F_NONBLOCK));
    close(pipe_ends[0]);
    close(pipe_ends[1]);
    say(step, " in %ld, out", in);
    return out;
}

/* Names the file to which a descriptor leads by what /proc says of it. */
static long link_by_proc(struct step *step)
{
    char text[64];
    snprintf(text, sizeof text, "/proc/self/fd/%d", (int)step->arguments[0]);
    return answer(syscall(SYS_linkat, AT_FDCWD, text, AT_FDCWD, step->arguments[1], AT_SYMLINK_FOLLOW));
}

static long open_by_proc(struct step *step)
{
    char text[64];
    snprintf(text, sizeof text, "/proc/self/fd/%d", (int)step->arguments[0]);
    return answer(syscall(SYS_openat, AT_FDCWD, text, step->arguments[1], step->arguments[2]));
}

/* The kernel's calls for functions of libashlar with other names. */

static long link_descriptor(struct step *step)
{
    return answer(syscall(SYS_linkat, step->arguments[0], "", AT_FDCWD, step->arguments[1], AT_EMPTY_PATH));
}

static long list_path(struct step *step)
{
    long result, number = answer(syscall(SYS_open, step->arguments[0], O_RDONLY | O_DIRECTORY, 0));
    if (number < 0)
        return number;
    step->arguments[0] = number;
    step->arguments[1] = 32768;
    result = list_directory(step);
    close((int)number);
    return result;
}

static long ask_effective_access(struct step *step)
{
    return answer(syscall(SYS_faccessat2, AT_FDCWD, step->arguments[0], step->arguments[1], AT_EACCESS));
}

static long change_times(struct step *step)
{
    return answer(syscall(SYS_utimensat, AT_FDCWD, step->arguments[0], step->arguments[1], 0));
}

static long change_times_of_link(struct step *step)
{
    return answer(syscall(SYS_utimensat, AT_FDCWD, step->arguments[0], step->arguments[1], AT_SYMLINK_NOFOLLOW));
}

static long change_times_of_file(struct step *step)
{
    return answer(syscall(SYS_utimensat, step->arguments[0], NULL, step->arguments[1], 0));
}

static long rename_with_flags(struct step *step)
{
    return answer(syscall(SYS_renameat2, AT_FDCWD, step->arguments[0], AT_FDCWD, step->arguments[1], step->arguments[2]));
}

/* ---- The table ---- */

#define K(name, kinds, weight) {#name, kinds, weight, SYS_##name, NULL, NULL}
#define S(name, kinds, weight, function) {#name, kinds, weight, 0, function, NULL}
#define B(name, kinds, weight) {#name, kinds, weight, SYS_##name, NULL, library_##name}
#define L(name, kinds, weight, function) {#name, kinds, weight, 0, function, library_##name}

const struct call calls[] = {
    B(open, "pom", 40),
    K(openat, "dpom", 50),
    K(creat, "pm", 5),
    K(openat2, "dpB", 14),
    B(close, "f", 22),
    K(close_range, "NNr", 1),
    B(dup, "f", 5),
    K(dup2, "fN", 6),
    K(dup3, "fNC", 4),
    K(fcntl, "fc", 45),
    B(read, "fR", 25),
    B(pread64, "fRi", 20),
    B(readv, "fV", 8),
    B(preadv, "fViz", 6),
    K(preadv2, "fV-zF", 7),
    B(write, "fW", 28),
    B(pwrite64, "fWi", 22),
    B(writev, "fv", 9),
    B(pwritev, "fviz", 6),
    K(pwritev2, "fv-zF", 8),
    B(lseek, "fiw", 24),
    B(truncate, "pi", 10),
    B(ftruncate, "fi", 12),
    B(fallocate, "fkii", 16),
    B(fsync, "f", 3),
    B(fdatasync, "f", 3),
    K(sync_file_range, "fiiG", 3),
    K(fadvise64, "fiig", 4),
    K(readahead, "fil", 3),
    B(copy_file_range, "fjfjlr", 12),
    K(sendfile, "ffjl", 9),
    S(splice, "ffs", 3, splice_through_pipe),
    B(stat, "pS", 14),
    B(lstat, "pS", 10),
    B(fstat, "fS", 12),
    K(newfstatat, "dpSA", 14),
    K(statx, "dpAX", 16),
    K(access, "pa", 8),
    K(faccessat, "dpa", 4),
    K(faccessat2, "dpaE", 9),
    B(chmod, "pm", 9),
    B(fchmod, "fm", 6),
    K(fchmodat, "dpm", 4),
    K(fchmodat2, "dpmM", 6),
    B(chown, "puu", 6),
    B(lchown, "puu", 5),
    B(fchown, "fuu", 5),
    K(fchownat, "dpuuA", 6),
    K(utimensat, "dpTA", 14),
    B(mkdir, "pm", 12),
    K(mkdirat, "dpm", 7),
    K(mknod, "pKD", 5),
    K(mknodat, "dpKD", 5),
    B(rmdir, "p", 11),
    B(unlink, "p", 13),
    K(unlinkat, "dpU", 10),
    K(rename, "pp", 14),
    K(renameat, "dpdp", 8),
    K(renameat2, "dpdpQ", 14),
    B(link, "pp", 12),
    K(linkat, "dpdpL", 14),
    B(symlink, "tp", 8),
    K(symlinkat, "tdp", 5),
    B(readlink, "pR", 6),
    K(readlinkat, "dpR", 6),
    S(getdents64, "fb", 12, list_directory),
    B(setxattr, "pnxe", 6),
    B(lsetxattr, "pnxe", 4),
    B(fsetxattr, "fnxe", 6),
    B(getxattr, "pny", 6),
    B(lgetxattr, "pny", 4),
    B(fgetxattr, "fny", 6),
    B(listxattr, "pY", 5),
    B(llistxattr, "pY", 4),
    B(flistxattr, "fY", 5),
    B(removexattr, "pn", 4),
    B(lremovexattr, "pn", 3),
    B(fremovexattr, "fn", 4),
    B(flock, "fO", 4),
    K(ioctl, "fI", 10),
    K(statfs, "pP", 4),
    K(fstatfs, "fP", 4),
    B(umask, "m", 3),
    K(chdir, "p", 4),
    K(fchdir, "f", 3),
    K(getcwd, "R", 3),
    K(syncfs, "f", 1),
    S(mmap, "fq", 6, use_mapping),
    S(link_by_proc, "fp", 3, link_by_proc),
    S(open_by_proc, "fom", 3, open_by_proc),
    /* Those that libashlar alone has under these names. */
    L(flink, "fp", 0, link_descriptor),
    L(list, "p", 0, list_path),
    L(eaccess, "pa", 0, ask_effective_access),
    L(utimens, "pT", 0, change_times),
    L(lutimens, "pT", 0, change_times_of_link),
    L(futimens, "fT", 0, change_times_of_file),
    L(rename2, "ppQ", 0, rename_with_flags),
    {"lock", "fH", 0, SYS_fcntl, NULL, library_lock},
};
const size_t calls_count = sizeof calls / sizeof *calls;

/* ---- Exceptions ---- */

static int is_called(const struct step *step, const char *name)
{
    return strcmp(step->call->name, name) == 0;
}

static int is_one_of(const struct step *step, const char *const *names)
{
    for (; *names != NULL; names++)
        if (is_called(step, *names))
            return 1;
    return 0;
}

static int describe(long descriptor, struct stat *found)
{
#ifdef WITH_LIBRARY
    long arguments[ARGUMENTS_MAX] = {descriptor, (long)found};
    return library_fstat(arguments) == 0;
#else
    return fstat((int)descriptor, found) == 0;
#endif
}

static int is_one_file(long one, long other)
{
    struct stat first, second;
    return describe(one, &first) && describe(other, &second) && first.st_ino == second.st_ino;
}

static long size_of(long descriptor)
{
    struct stat found;
    return describe(descriptor, &found) && S_ISREG(found.st_mode) ? (long)found.st_size : 0;
}

/* Whether a transfer of a file that is open with O_DIRECT is of whole blocks of the buffer, as ext4 asks for. It reads
 * whole blocks, too, where the file ends, and appends none behind a part of one. */
static int is_whole_blocks(const struct step *step)
{
    long offset = lseek((int)step->arguments[0], 0, SEEK_CUR);
    if (size_of(step->arguments[0]) % 4096 != 0)
        return 0;
    if (strstr(step->call->name, "read") != NULL &&
        (is_called(step, "read") ? offset : step->arguments[3]) + step->arguments[2] > size_of(step->arguments[0]))
        return 0;
    if ((unsigned long)step->arguments[2] > BUFFER_BYTES && !is_called(step, "fallocate"))
        return 0;
    return offset % 4096 == 0 && step->arguments[1] % 4096 == 0 && step->arguments[2] % 4096 == 0 && step->arguments[3] % 4096 == 0;
}

/* Whether a call goes by the offset of the open file. */
static int has_offset(const struct step *step)
{
    static const long locks[] = {F_GETLK, F_SETLK, F_OFD_GETLK, F_OFD_SETLK};
    size_t at;
    if (!is_called(step, "fcntl"))
        return !is_called(step, "preadv2") || step->arguments[3] == -1;
    for (at = 0; at < sizeof locks / sizeof *locks; at++)
        if (step->arguments[1] == locks[at])
            return 1;
    return 0;
}

/* Whether a descriptor leads to a file without a name that it does not hold: an O_PATH descriptor, or one of a FIFO,
 * device or socket. */
static int is_lost(long descriptor)
{
    struct stat found;
    if (profile == PROFILE_CAPI)
        return 0;
    if (fstat((int)descriptor, &found) < 0)
        return errno == ESTALE;
    return found.st_nlink == 0 &&
           ((!S_ISREG(found.st_mode) && !S_ISDIR(found.st_mode)) || (fcntl((int)descriptor, F_GETFL) & O_PATH));
}

/* Whether the sequence has reserved or zeroed ranges. Of a write that is cut short, ext4 and a file system in memory
 * reserve more. */
int has_reserved;

const char *find_exception(const struct step *step)
{
    static const char *const vectors[] = {"readv", "preadv", "preadv2", "writev", "pwritev", "pwritev2", "copy_file_range", "sendfile",
                                          "splice", "mmap", NULL};
    static const char *const transfers[] = {"read", "pread64", "write", "pwrite64", "fallocate", NULL};
    static const char *const by_offset[] = {"read", "readv", "preadv2", "fcntl", NULL};
    static const char *const copies[] = {"copy_file_range", "sendfile", NULL};
    const long *arguments = step->arguments;
    struct stat found;
    int flags, is_transfer = is_one_of(step, transfers), is_vector = is_one_of(step, vectors);

    if (strchr("fd", step->call->kinds[0]) != NULL && !is_called(step, "close") && is_lost(arguments[0]))
        return "a mount forgets what only such a descriptor leads to";
    if (is_called(step, "creat") && syscall(SYS_stat, arguments[0], &found) == 0 && S_ISFIFO(found.st_mode))
        return "waits for a reader";
    if (profile != PROFILE_CAPI && (is_transfer || is_vector)) {
        flags = fcntl((int)arguments[0], F_GETFL);
        if (flags >= 0 && (flags & O_DIRECT) && (is_vector || !is_whole_blocks(step)))
            return "ext4 asks for whole blocks with O_DIRECT";
        if (is_one_of(step, copies)) {
            flags = fcntl((int)arguments[is_called(step, "sendfile") ? 1 : 2], F_GETFL);
            if (flags >= 0 && (flags & O_DIRECT))
                return "ext4 asks for whole blocks with O_DIRECT";
        }
    }
    /* Copies of sparse files are as long as the files. */
    if (is_called(step, "copy_file_range") && (unsigned long)arguments[4] > 1 << 20 && size_of(arguments[0]) > 1 << 21)
        return "copies too much for a test";
    if (is_called(step, "sendfile") && (unsigned long)arguments[3] > 1 << 20 && size_of(arguments[1]) > 1 << 21)
        return "copies too much for a test";
    if ((is_called(step, "sendfile") || is_called(step, "splice")) && is_one_file(arguments[0], arguments[1]))
        return "copies over what it copies";
    if (is_called(step, "fallocate") && !(arguments[1] & FALLOC_FL_PUNCH_HOLE) && arguments[3] > 1 << 21)
        return "takes more room than there is";
    if (is_called(step, "lseek") && describe(arguments[0], &found) && S_ISDIR(found.st_mode) &&
        (arguments[1] != 0 || arguments[2] != SEEK_SET))
        return "offsets of directories are each file system's own";
    if (is_called(step, "ioctl") && arguments[1] == FICLONE && describe(arguments[0], &found) && describe(arguments[2], &found))
        return "ext4 has no files that share blocks";
    if (is_called(step, "lseek") && (arguments[2] == SEEK_DATA || arguments[2] == SEEK_HOLE) && has_reserved)
        return "each file system shows reserved ranges as it likes";
    if (is_called(step, "lseek") && arguments[2] == SEEK_DATA && size_of(arguments[0]) > LONG_MAX - 4096)
        return "a file system in memory finds no data in the last page that a file can have";
    if ((is_called(step, "sendfile") || is_called(step, "splice")) &&
        describe(arguments[is_called(step, "sendfile")], &found) && S_ISDIR(found.st_mode))
        return "offsets of directories are each file system's own";
    if (is_one_of(step, by_offset) && has_offset(step) && describe(arguments[0], &found) && S_ISDIR(found.st_mode))
        return "offsets of directories are each file system's own";
    return NULL;
}

/* ---- Results ---- */

static void say_buffer(struct step *step, const struct output *output, long result)
{
    if (is_called(step, "readlink") || is_called(step, "readlinkat") || is_called(step, "getcwd")) {
        if (result > 0 && (size_t)result <= output->bytes) {
            say(step, " \"");
            say_place(step, output->at, (size_t)result);
            say(step, "\"");
        }
        return;
    }
    say(step, " %016lx", hash_bytes(7, output->at, output->bytes));
}

/* Names of extended attributes, in an order of their own. */
static void say_names(struct step *step, const char *list, long bytes)
{
    char *names[64];
    long at, found = 0;
    for (at = 0; at < bytes && found < 64; at += (long)strlen(list + at) + 1)
        names[found++] = (char *)list + at;
    qsort(names, (size_t)found, sizeof *names, compare_names);
    for (at = 0; at < found; at++) {
        say(step, " ");
        say_place(step, names[at], strlen(names[at]));
    }
}

static void say_output(struct step *step, const struct output *output, long result)
{
    const struct flock *lock = output->at;
    const struct statfs *space = output->at;
    switch (output->kind) {
    case 'R':
    case 'V':
        say_buffer(step, output, result);
        break;
    case 'j':
        say(step, " &%ld", *(const long *)output->at);
        break;
    default:
        break;
    }
    if (result < 0)
        return;
    switch (output->kind) {
    case 'S':
        say_stat(step, output->at);
        break;
    case 'X':
        say_statx(step, output->at, (unsigned)step->arguments[3]);
        break;
    case 'P':
        say(step, " names of %ld", (long)space->f_namelen);
        break;
    case 'y':
        if ((size_t)result <= output->bytes)
            say(step, " %016lx", hash_bytes(7, output->at, (size_t)result));
        break;
    case 'Y':
        if ((size_t)result <= output->bytes)
            say_names(step, output->at, result);
        break;
    case 'K':
        say(step, " type %d", lock->l_type);
        if (lock->l_type != F_UNLCK)
            say(step, " whence %d, %ld, %ld, pid %s", lock->l_whence, (long)lock->l_start, (long)lock->l_len,
                lock->l_pid == getpid() ? "own" : lock->l_pid == -1 ? "-1" : "other");
        break;
    case 'I':
        say(step, " %d", *(const int *)output->at);
        break;
    default:
        break;
    }
}

static int may_fail_for_pointer(const struct step *step)
{
    static const char *const writes[] = {"write", "pwrite64", "writev", "pwritev", "pwritev2", NULL};
    return is_one_of(step, writes);
}

/* Before it looks at the pointer of a write, ext4 has changed the times, the set-id bits, and the size if the offset is
 * behind the end. So that all places go on alike, each gets the size that it had, and the time of now. */
static void settle_refused_write(long descriptor, long size)
{
#ifdef WITH_LIBRARY
    long to_size[ARGUMENTS_MAX] = {descriptor, size}, to_now[ARGUMENTS_MAX] = {descriptor, 0};
    library_ftruncate(to_size);
    library_futimens(to_now);
#else
    syscall(SYS_ftruncate, (int)descriptor, size);
    syscall(SYS_utimensat, (int)descriptor, NULL, NULL, 0);
#endif
}

/* Whether a write has ended before its last byte, at memory that it could not read. */
int is_cut_short(const struct step *step, long result)
{
    const struct iovec *parts = (const struct iovec *)step->arguments[1];
    long at, bytes = 0;
    if (result <= 0 || !may_fail_for_pointer(step))
        return 0;
    if (is_called(step, "write") || is_called(step, "pwrite64"))
        return result != step->arguments[2];
    for (at = 0; at < step->arguments[2]; at++)
        bytes += (long)parts[at].iov_len;
    return result != bytes;
}

#ifndef WITH_LIBRARY
static long make_system_call(const struct step *step)
{
    enum { TRIES = 100 };
    const long *a = step->arguments;
    long result = -EAGAIN;
    int tries;
    /* openat2 gives up where any process has moved or mounted something meanwhile. */
    for (tries = 0; tries < TRIES && (tries == 0 || (result == -EAGAIN && is_called(step, "openat2"))); tries++)
        result = answer(syscall(step->call->number, a[0], a[1], a[2], a[3], a[4], a[5]));
    return result;
}
#endif

long make_call(struct step *step)
{
    const long *a = step->arguments;
    struct stat before;
    long result;
    int is_write = may_fail_for_pointer(step) && describe(a[0], &before) && S_ISREG(before.st_mode);
#ifdef WITH_LIBRARY
    result = step->call->library(a);
#else
    if (step->call->kernel != NULL)
        return step->call->kernel(step);
    result = make_system_call(step);
#endif
    if (is_write && result == -EFAULT)
        settle_refused_write(a[0], before.st_size);
    return result;
}

void say_result(struct step *step, long result)
{
    int at;
    if (result < 0)
        say(step, " = -%s", strerrorname_np((int)-result) ? strerrorname_np((int)-result) : "?");
    else
        say(step, " = %ld", result);
    for (at = 0; at < step->outputs_used; at++)
        say_output(step, &step->outputs[at], result);
}
