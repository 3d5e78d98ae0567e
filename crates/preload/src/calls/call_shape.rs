//! Shapes of system calls, by number: the places of their paths and descriptors.
//!
//! They also decide which calls the entry catches.

use crate::entry::arch::{CALLS, INTEREST_ALWAYS, INTEREST_DESCRIPTOR, INTEREST_IGNORES_FREE, INTEREST_NONE};

/// The places of a call's paths and descriptors among its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// Nothing of the call concerns the library.
    None,
    /// A descriptor comes first.
    Descriptor,
    /// A path comes first.
    Path,
    /// A directory's descriptor, then a path.
    At,
    /// Two paths.
    TwoPaths,
    /// Two directories' descriptors, each with a path after it.
    TwoAt,
    /// A path that is only text, then a path (`symlink`).
    SecondPath,
    /// A path that is only text, then a directory's descriptor and a path (`symlinkat`).
    SecondAt,
    /// A descriptor, then the address of a socket, which may be a path.
    Address,
    /// A descriptor of another kind than files' comes first: the kernel refuses the call on a LibFS descriptor.
    OtherKind,
    /// The call makes a kernel descriptor. It concerns the library only while a descriptor number is recycled.
    Maker,
    /// The call is checked each time.
    Always,
}

/// Calls that libc has no names for yet.
const CACHESTAT: i64 = 451;
const SETXATTRAT: i64 = 463;
const GETXATTRAT: i64 = 464;
const LISTXATTRAT: i64 = 465;
const REMOVEXATTRAT: i64 = 466;
const FILE_GETATTR: i64 = 468;
const FILE_SETATTR: i64 = 469;

/// Returns the shape of a call.
pub(super) const fn shape_of(number: i64) -> Shape {
    match number {
        libc::SYS_read
        | libc::SYS_write
        | libc::SYS_close
        | libc::SYS_fstat
        | libc::SYS_lseek
        | libc::SYS_pread64
        | libc::SYS_pwrite64
        | libc::SYS_readv
        | libc::SYS_writev
        | libc::SYS_preadv
        | libc::SYS_pwritev
        | libc::SYS_preadv2
        | libc::SYS_pwritev2
        | libc::SYS_dup
        | libc::SYS_flock
        | libc::SYS_fsync
        | libc::SYS_fdatasync
        | libc::SYS_ftruncate
        | libc::SYS_getdents
        | libc::SYS_getdents64
        | libc::SYS_fchmod
        | libc::SYS_fchown
        | libc::SYS_fstatfs
        | libc::SYS_fsetxattr
        | libc::SYS_fgetxattr
        | libc::SYS_flistxattr
        | libc::SYS_fremovexattr
        | libc::SYS_fadvise64
        | libc::SYS_readahead
        | libc::SYS_sync_file_range
        | libc::SYS_fallocate
        | libc::SYS_finit_module
        | libc::SYS_setns
        | libc::SYS_vmsplice
        | libc::SYS_openat2
        | libc::SYS_open_by_handle_at
        | libc::SYS_fspick
        | libc::SYS_quotactl_fd
        | CACHESTAT => Shape::Descriptor,
        libc::SYS_open
        | libc::SYS_creat
        | libc::SYS_stat
        | libc::SYS_lstat
        | libc::SYS_statfs
        | libc::SYS_access
        | libc::SYS_truncate
        | libc::SYS_mkdir
        | libc::SYS_rmdir
        | libc::SYS_unlink
        | libc::SYS_readlink
        | libc::SYS_chmod
        | libc::SYS_chown
        | libc::SYS_lchown
        | libc::SYS_utime
        | libc::SYS_utimes
        | libc::SYS_mknod
        | libc::SYS_setxattr
        | libc::SYS_lsetxattr
        | libc::SYS_getxattr
        | libc::SYS_lgetxattr
        | libc::SYS_listxattr
        | libc::SYS_llistxattr
        | libc::SYS_removexattr
        | libc::SYS_lremovexattr => Shape::Path,
        libc::SYS_openat
        | libc::SYS_newfstatat
        | libc::SYS_statx
        | libc::SYS_faccessat
        | libc::SYS_faccessat2
        | libc::SYS_mkdirat
        | libc::SYS_mknodat
        | libc::SYS_unlinkat
        | libc::SYS_readlinkat
        | libc::SYS_fchmodat
        | libc::SYS_fchownat
        | libc::SYS_utimensat
        | libc::SYS_futimesat
        | libc::SYS_name_to_handle_at
        | libc::SYS_open_tree
        | libc::SYS_mount_setattr
        | libc::SYS_fchmodat2
        | SETXATTRAT
        | GETXATTRAT
        | LISTXATTRAT
        | REMOVEXATTRAT
        | FILE_GETATTR
        | FILE_SETATTR => Shape::At,
        libc::SYS_rename | libc::SYS_link => Shape::TwoPaths,
        libc::SYS_renameat | libc::SYS_renameat2 | libc::SYS_linkat | libc::SYS_move_mount => Shape::TwoAt,
        libc::SYS_symlink => Shape::SecondPath,
        libc::SYS_symlinkat => Shape::SecondAt,
        libc::SYS_bind | libc::SYS_connect => Shape::Address,
        libc::SYS_accept
        | libc::SYS_accept4
        | libc::SYS_epoll_pwait
        | libc::SYS_epoll_pwait2
        | libc::SYS_epoll_wait
        | libc::SYS_fsmount
        | libc::SYS_getpeername
        | libc::SYS_getsockname
        | libc::SYS_getsockopt
        | libc::SYS_inotify_rm_watch
        | libc::SYS_io_uring_enter
        | libc::SYS_io_uring_register
        | libc::SYS_landlock_restrict_self
        | libc::SYS_listen
        | libc::SYS_recvfrom
        | libc::SYS_recvmmsg
        | libc::SYS_recvmsg
        | libc::SYS_sendto
        | libc::SYS_setsockopt
        | libc::SYS_shutdown
        | libc::SYS_signalfd
        | libc::SYS_signalfd4
        | libc::SYS_timerfd_gettime
        | libc::SYS_timerfd_settime => Shape::OtherKind,
        libc::SYS_pipe
        | libc::SYS_pipe2
        | libc::SYS_socket
        | libc::SYS_socketpair
        | libc::SYS_eventfd
        | libc::SYS_eventfd2
        | libc::SYS_timerfd_create
        | libc::SYS_inotify_init
        | libc::SYS_inotify_init1
        | libc::SYS_fanotify_init
        | libc::SYS_epoll_create
        | libc::SYS_epoll_create1
        | libc::SYS_memfd_create
        | libc::SYS_memfd_secret
        | libc::SYS_userfaultfd
        | libc::SYS_mq_open
        | libc::SYS_pidfd_open
        | libc::SYS_perf_event_open
        | libc::SYS_bpf
        | libc::SYS_fsopen
        | libc::SYS_landlock_create_ruleset => Shape::Maker,
        libc::SYS_mmap
        | libc::SYS_munmap
        | libc::SYS_remap_file_pages
        | libc::SYS_mprotect
        | libc::SYS_pkey_mprotect
        | libc::SYS_madvise
        | libc::SYS_mremap
        | libc::SYS_brk
        | libc::SYS_shmat
        | libc::SYS_shmdt
        | libc::SYS_poll
        | libc::SYS_ppoll
        | libc::SYS_select
        | libc::SYS_pselect6
        | libc::SYS_epoll_ctl
        | libc::SYS_fcntl
        | libc::SYS_ioctl
        | libc::SYS_dup2
        | libc::SYS_dup3
        | libc::SYS_close_range
        | libc::SYS_wait4
        | libc::SYS_waitid
        | libc::SYS_sendfile
        | libc::SYS_copy_file_range
        | libc::SYS_splice
        | libc::SYS_tee
        | libc::SYS_sendmsg
        | libc::SYS_sendmmsg
        | libc::SYS_chdir
        | libc::SYS_fchdir
        | libc::SYS_chroot
        | libc::SYS_pivot_root
        | libc::SYS_mount
        | libc::SYS_umount2
        | libc::SYS_unshare
        | libc::SYS_seccomp
        | libc::SYS_prctl
        | libc::SYS_io_uring_setup
        | libc::SYS_io_setup
        | libc::SYS_umask
        | libc::SYS_setrlimit
        | libc::SYS_prlimit64
        | libc::SYS_sync
        | libc::SYS_syncfs
        | libc::SYS_clone
        | libc::SYS_clone3
        | libc::SYS_fork
        | libc::SYS_vfork
        | libc::SYS_execve
        | libc::SYS_execveat
        | libc::SYS_exit
        | libc::SYS_exit_group
        | libc::SYS_rt_sigaction
        | libc::SYS_inotify_add_watch
        | libc::SYS_fanotify_mark
        | libc::SYS_landlock_add_rule
        | libc::SYS_kcmp
        | libc::SYS_pidfd_getfd
        | libc::SYS_fsconfig
        | libc::SYS_kexec_file_load => Shape::Always,
        _ if changes_user(number) => Shape::Always,
        _ => Shape::None,
    }
}

/// Returns whether a call changes the user or the rights of the process or the thread.
pub(super) const fn changes_user(number: i64) -> bool {
    matches!(
        number,
        libc::SYS_setuid
            | libc::SYS_setgid
            | libc::SYS_setreuid
            | libc::SYS_setregid
            | libc::SYS_setresuid
            | libc::SYS_setresgid
            | libc::SYS_setfsuid
            | libc::SYS_setfsgid
            | libc::SYS_setgroups
            | libc::SYS_capset
    )
}

/// Returns whether calls of a number are caught.
pub(crate) fn is_caught_number(number: i32) -> bool {
    number < 0 || shape_of(number.into()) != Shape::None
}

/// Which calls the entry catches, by number.
///
/// The table is made at compile time: asking for each number would show in the start of a program.
pub(super) static INTERESTS: [u8; CALLS] = interests(false);
/// The table for a report, which also counts calls on kernel descriptors and on sockets.
pub(super) static INTERESTS_COUNTED: [u8; CALLS] = interests(true);

const fn interests(is_counted: bool) -> [u8; CALLS] {
    let mut interests = [INTEREST_NONE; CALLS];
    let mut number = 0;
    while number < CALLS {
        interests[number] = match shape_of(number as i64) {
            // A trampoline whose call's number was unknown leads here too. The call must find the stack as it was.
            _ if number as i64 == libc::SYS_rt_sigreturn => INTEREST_ALWAYS,
            Shape::None | Shape::Maker => INTEREST_NONE,
            Shape::Descriptor if !is_counted => INTEREST_DESCRIPTOR,
            Shape::OtherKind => INTEREST_DESCRIPTOR,
            _ => INTEREST_ALWAYS,
        };
        if interests[number] != INTEREST_ALWAYS && ignores_free_numbers(number as i64) {
            interests[number] |= INTEREST_IGNORES_FREE;
        }
        number += 1;
    }
    interests
}

/// Returns whether a call is unaffected by which descriptor numbers are free.
///
/// A number may stay recycled while the kernel serves it.
pub(crate) const fn ignores_free_numbers(number: i64) -> bool {
    matches!(
        number,
        libc::SYS_read
            | libc::SYS_write
            | libc::SYS_pread64
            | libc::SYS_pwrite64
            | libc::SYS_readv
            | libc::SYS_writev
            | libc::SYS_lseek
            | libc::SYS_fsync
            | libc::SYS_fdatasync
            | libc::SYS_exit
            | libc::SYS_exit_group
            | libc::SYS_mmap
            | libc::SYS_munmap
            | libc::SYS_mprotect
            | libc::SYS_mremap
            | libc::SYS_madvise
            | libc::SYS_brk
            | libc::SYS_futex
            | libc::SYS_rt_sigprocmask
            | libc::SYS_clock_gettime
            | libc::SYS_gettimeofday
            | libc::SYS_nanosleep
            | libc::SYS_clock_nanosleep
            | libc::SYS_sched_yield
            | libc::SYS_getpid
            | libc::SYS_gettid
            | libc::SYS_getrandom
    )
}

/// Returns the indexes of a call's paths, each with its directory's.
///
/// A directory's index is that of the descriptor that the path begins from, if there is one.
pub(super) const fn paths_of(shape: Shape) -> &'static [(Option<usize>, usize)] {
    match shape {
        Shape::Path => &[(None, 0)],
        Shape::At => &[(Some(0), 1)],
        Shape::TwoPaths => &[(None, 0), (None, 1)],
        Shape::TwoAt => &[(Some(0), 1), (Some(2), 3)],
        Shape::SecondPath => &[(None, 1)],
        Shape::SecondAt => &[(Some(1), 2)],
        _ => &[],
    }
}

/// Returns the indexes of the descriptors that a call is about.
pub(crate) const fn descriptors_of(number: i64) -> &'static [usize] {
    match number {
        libc::SYS_mmap => &[4],
        libc::SYS_dup2 | libc::SYS_dup3 | libc::SYS_sendfile | libc::SYS_tee => &[0, 1],
        libc::SYS_copy_file_range | libc::SYS_splice => &[0, 2],
        libc::SYS_epoll_ctl => &[2],
        libc::SYS_fcntl | libc::SYS_ioctl | libc::SYS_syncfs | libc::SYS_sendmsg | libc::SYS_sendmmsg => &[0],
        _ if matches!(shape_of(number), Shape::Descriptor | Shape::OtherKind | Shape::Address) => &[0],
        _ => &[],
    }
}
