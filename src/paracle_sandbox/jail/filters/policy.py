"""The table of system calls that the filter lets through: every form of it is made from this one.

Each known call is in exactly one place: ALLOWED, rules.RULES (allowed for some arguments),
DENIED (EPERM), ABSENT (ENOSYS) or IGNORED (done, but nothing is); a test holds the table to that.
Numbers that are in no table at all are newer than we are and get ENOSYS too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .rules import RULES, Verdict

if TYPE_CHECKING:
    from .rules import Tree

ALLOWED = {
    "files": """
        open openat openat2 creat close close_range read write readv writev pread64 pwrite64
        preadv pwritev preadv2 pwritev2 lseek dup dup2 dup3 flock fsync fdatasync
        sync_file_range truncate ftruncate fallocate fadvise64 readahead copy_file_range sendfile
        splice tee pipe pipe2""",
    "names and metadata": """
        stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 getdents
        getdents64 getcwd chdir fchdir rename renameat renameat2 mkdir mkdirat rmdir link linkat
        unlink unlinkat symlink symlinkat readlink readlinkat umask utime utimes futimesat
        utimensat""",
    # Archives restore owners and modes. The mounts are nosuid and there is no capability to
    # change an owner with, so neither gains anything.
    "owners, modes, attributes": """
        chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat setxattr lsetxattr fsetxattr
        setxattrat getxattr lgetxattr fgetxattr getxattrat listxattr llistxattr flistxattr
        listxattrat removexattr lremovexattr fremovexattr removexattrat""",
    "waiting": """
        poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait
        epoll_pwait2 eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime
        timerfd_gettime inotify_init inotify_init1 inotify_add_watch inotify_rm_watch""",
    "memory": """
        brk munmap mremap mprotect msync madvise mincore mlock mlock2 munlock mlockall
        munlockall mseal map_shadow_stack pkey_alloc pkey_free pkey_mprotect membarrier""",
    "processes": """
        fork vfork execve execveat exit exit_group wait4 waitid getpid getppid gettid getpgid
        getpgrp setpgid getsid setsid pidfd_open pidfd_send_signal set_tid_address
        set_robust_list rseq""",
    "identity, read only": """
        getuid geteuid getresuid getgid getegid getresgid getgroups capget""",
    "signals": """
        rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigqueueinfo
        rt_tgsigqueueinfo rt_sigsuspend sigaltstack kill tkill tgkill pause restart_syscall""",
    "locks between threads": "futex futex_waitv futex_wake futex_wait futex_requeue",
    "time": """
        time gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep alarm getitimer
        setitimer timer_create timer_settime timer_gettime timer_getoverrun timer_delete times""",
    # Raising a hard limit or a priority needs a capability that nobody inside has. Calls that can
    # change these of another process are in rules. Affinity stays: the C library gives it to
    # threads by their number, and no processor belongs to the guest alone anyway.
    "limits and scheduling": """
        getrlimit setrlimit getrusage getpriority ioprio_get sched_yield sched_getaffinity
        sched_setaffinity sched_getparam sched_getscheduler sched_getattr sched_get_priority_max
        sched_get_priority_min sched_rr_get_interval getcpu""",
    "sockets": """
        bind listen accept accept4 connect getsockname getpeername getsockopt shutdown sendto
        recvfrom sendmsg recvmsg sendmmsg recvmmsg""",
    "machine": "uname sysinfo getrandom",
    # A program may confine itself further, never less. (Not by seccomp, see ABSENT.)
    "own sandboxes": "landlock_create_ruleset landlock_add_rule landlock_restrict_self",
    # Made by the kernel's own trampoline when the host traces a library. Refusing them crashes
    # the traced program; made by anybody else they end in SIGILL.
    "probes": "uretprobe uprobe",
}

DENIED = {
    "mounts and namespaces": """
        mount umount2 move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick
        mount_setattr pivot_root chroot unshare setns statmount listmount listns""",
    "other processes": """
        ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp
        pidfd_getfd get_robust_list""",
    "identity": "setfsuid setfsgid setgroups capset",
    "large kernel interfaces": """
        bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register io_setup
        io_destroy io_submit io_cancel io_getevents io_pgetevents fanotify_init fanotify_mark
        keyctl add_key request_key""",
    "page cache, NUMA and hidden memory": """
        vmsplice remap_file_pages memfd_secret cachestat mbind set_mempolicy get_mempolicy
        set_mempolicy_home_node migrate_pages move_pages""",
    "shared between processes by name": """
        shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv msgctl
        mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr""",
    # Handles reach files that no path leads to; file_setattr makes files that cannot be deleted.
    "files by handle, file flags": """
        name_to_handle_at open_by_handle_at lookup_dcookie file_getattr file_setattr""",
    # The policy is in memory that the filter cannot read; sched_setscheduler has it in a register.
    "real-time scheduling": "sched_setattr",
    "the machine": """
        init_module finit_module delete_module create_module query_module get_kernel_syms
        kexec_load kexec_file_load reboot swapon swapoff iopl ioperm modify_ldt syslog vhangup
        acct quotactl quotactl_fd sethostname setdomainname clock_settime clock_adjtime adjtimex
        settimeofday lsm_get_self_attr lsm_set_self_attr lsm_list_modules""",
    "dead or never built": """
        uselib ustat sysfs _sysctl nfsservctl getpmsg putpmsg afs_syscall tuxcall security vserver
        set_thread_area get_thread_area epoll_ctl_old epoll_wait_old""",
}

ABSENT = {
    # Its flags are in memory. glibc falls back to clone on ENOSYS, and on nothing else.
    "clone with flags in memory": "clone3",
    # Filters can be stacked, and their compiled code is memory of the kernel that is charged to
    # nobody and of which the machine has a limited amount. Programs that confine themselves know
    # kernels without the call, and then ask prctl.
    "filters of their own": "seccomp",
}

IGNORED = {
    # They flush every file system of the host, or the one that a file of /usr is on. The files of
    # a sandbox do not outlive a crash of the host whatever is done.
    "flushes of whole file systems": "sync syncfs",
}


def names(groups: Mapping[str, str]) -> list[str]:
    return [name for group in groups.values() for name in group.split()]


def table() -> dict[str, Tree]:
    """Every known call and what becomes of it."""
    return {
        **dict.fromkeys(names(ALLOWED), Verdict.ALLOW),
        **dict.fromkeys(names(DENIED), Verdict.DENY),
        **dict.fromkeys(names(ABSENT), Verdict.ABSENT),
        **dict.fromkeys(names(IGNORED), Verdict.IGNORE),
        **RULES,
    }
