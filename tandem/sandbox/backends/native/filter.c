/* The seccomp filter: a deny list of what reaches the kernel's less travelled parts or could make new
 * namespaces. Denied calls return EPERM (clone3 and io_uring ENOSYS, so that libraries fall back). */
#include "box.h"
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define NATIVE_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define NATIVE_ARCH AUDIT_ARCH_AARCH64
#else
#error "no seccomp table for this architecture"
#endif

#define NAMESPACE_FLAGS \
    (CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define LOW(argument) (offsetof(struct seccomp_data, args) + 8 * (argument)) /* low word: little endian */
#define FAIL_WITH(code) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (code))
#define ALLOW BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
#define DENY_NUMBER(number) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), FAIL_WITH(EPERM)
#define FIRST_UNKNOWN 467 /* open_tree_attr: what later kernels bring is closed until somebody has looked at it */
#define DENY(name) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_##name, 0, 1), FAIL_WITH(EPERM)
#define ABSENT(name) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_##name, 0, 1), FAIL_WITH(ENOSYS)

static struct sock_filter program[] = {
    LOAD(arch),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, NATIVE_ARCH, 1, 0),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    LOAD(nr),
    BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1), /* x32 numbers */
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, FIRST_UNKNOWN, 0, 1),
    FAIL_WITH(ENOSYS),
    DENY_NUMBER(457), DENY_NUMBER(458), /* statmount, listmount */

    ABSENT(clone3), ABSENT(io_uring_setup), ABSENT(io_uring_enter), ABSENT(io_uring_register),
    DENY(unshare), DENY(setns), DENY(mount), DENY(umount2), DENY(pivot_root), DENY(chroot),
    DENY(open_tree), DENY(move_mount), DENY(fsopen), DENY(fsconfig), DENY(fsmount), DENY(fspick), DENY(mount_setattr),
    DENY(ptrace), DENY(process_vm_readv), DENY(process_vm_writev), DENY(process_madvise), DENY(kcmp),
    DENY(pidfd_getfd), DENY(bpf), DENY(perf_event_open), DENY(userfaultfd), DENY(fanotify_init), DENY(fanotify_mark),
    DENY(keyctl), DENY(add_key), DENY(request_key), DENY(name_to_handle_at), DENY(open_by_handle_at),
    DENY(kexec_load), DENY(init_module), DENY(finit_module), DENY(delete_module), DENY(swapon), DENY(swapoff),
    DENY(reboot), DENY(syslog), DENY(acct), DENY(quotactl), DENY(personality), DENY(settimeofday),
    DENY(clock_settime), DENY(clock_adjtime), DENY(adjtimex), DENY(sethostname), DENY(setdomainname), DENY(vhangup),
    DENY(lookup_dcookie), DENY(nfsservctl), DENY(migrate_pages), DENY(move_pages),
#ifdef __NR_kexec_file_load
    DENY(kexec_file_load),
#endif
#ifdef __x86_64__
    DENY(iopl), DENY(ioperm), DENY(modify_ldt), DENY(uselib), DENY(ustat), DENY(_sysctl), DENY(create_module),
    DENY(get_kernel_syms), DENY(query_module), DENY(vserver), DENY(epoll_ctl_old), DENY(epoll_wait_old),
#endif

    /* clone: no new namespaces */
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_clone, 0, 4),
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, LOW(0)),
    BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, NAMESPACE_FLAGS, 0, 1),
    FAIL_WITH(EPERM),
    ALLOW,
    /* ioctl: no typing into terminals, no console buffers */
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_ioctl, 0, 5),
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, LOW(1)),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, TIOCSTI, 1, 0),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, TIOCLINUX, 0, 1),
    FAIL_WITH(EPERM),
    ALLOW,
    /* socket: unix, inet, inet6, and netlink's route family only */
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_socket, 0, 8),
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, LOW(0)),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 6, 0),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_INET, 5, 0),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_INET6, 4, 0),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_NETLINK, 0, 2),
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, LOW(2)),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 0), /* NETLINK_ROUTE */
    FAIL_WITH(EAFNOSUPPORT),
    ALLOW,
};

const char *filter_install(void) {
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return "no_new_privs";
    struct sock_fprog filter = { sizeof program / sizeof *program, program };
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) return "seccomp";
    return NULL;
}
