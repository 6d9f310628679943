/* Keeper side: a box held still for its live fork. The one interpreter or shell in it waits for input, and nothing
 * else runs but the agent and its shim: what stands in the way is named. All three are stopped, so that files and
 * memory are of one moment. */
#include "box.h"
#include "hold.h"
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static char text[512];

static const char *say(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    return text;
}

struct facts { pid_t inner, parent; int threads; bool dead, traps; char name[20]; unsigned long long permitted, effective; };

static bool learn(pid_t pid, struct facts *facts) {
    char path[64], status[4096];
    unsigned long long blocked = 0, ignored = 0;
    *facts = (struct facts){ 0 };
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    if (!read_small(path, status, sizeof status)) return false;
    for (char *line = status, *end; line; line = end ? end + 1 : NULL) {
        if ((end = strchr(line, '\n'))) *end = 0;
        sscanf(line, "Name:\t%15[^\n]", facts->name);
        sscanf(line, "PPid:\t%d", &facts->parent);
        sscanf(line, "Threads:\t%d", &facts->threads);
        sscanf(line, "SigBlk:\t%llx", &blocked);
        sscanf(line, "SigIgn:\t%llx", &ignored);
        sscanf(line, "CapPrm:\t%llx", &facts->permitted);
        sscanf(line, "CapEff:\t%llx", &facts->effective);
        if (!strncmp(line, "State:\tZ", 8) || !strncmp(line, "State:\tX", 8)) facts->dead = true;
        if (!strncmp(line, "NSpid:", 6) && strrchr(line, '\t')) facts->inner = atoi(strrchr(line, '\t'));
    }
    facts->traps = (blocked | ignored) >> (SIGTRAP - 1) & 1;
    return facts->inner > 0;
}

/* A shell remembers its number, and its copy must have it. All else must not: libraries tell by it that they are a copy,
 * and seed their random generators anew (OpenSSL does). */
static bool is_shell(const char *name) {
    static const char *const shells[] = { "sh", "bash", "rbash", "dash", "ash", "busybox", "zsh", "ksh", "mksh", "fish", "tcsh", "csh" };
    for (size_t i = 0; i < sizeof shells / sizeof *shells; i++)
        if (!strcmp(name, shells[i])) return true;
    return false;
}

/* The process with this number in the box, if it is the only one beside the agent and its shim. */
static const char *find(struct hold *hold, pid_t agent, const char *cgroup, pid_t inner) {
    char path[PATH_MAX], line[32], beside[64] = "";
    pid_t others[4];
    struct facts facts, own = { 0 };
    size_t num_others = 0;
    hold->main.pid = 0;
    pid_t main = 0;
    snprintf(path, sizeof path, "%s/cgroup.procs", cgroup);
    FILE *members = fopen(path, "re");
    if (!members) return "it is gone";
    while (fgets(line, sizeof line, members)) {
        pid_t pid = atoi(line);
        if (pid == agent || pid <= 0 || !learn(pid, &facts) || facts.dead) continue;
        if (facts.parent == agent && !strcmp(facts.name, FILES_NAME)) continue;
        if (facts.inner == inner) main = pid, own = facts;
        else if (num_others < 4) others[num_others++] = pid;
    }
    fclose(members);
    if (!main) return say("its process %d has ended", inner);
    hold->between = own.parent == agent ? 0 : own.parent;
    for (size_t i = 0; i < num_others; i++)
        if (others[i] != hold->between && learn(others[i], &facts))
            snprintf(beside, sizeof beside, "%s (process %d)", facts.name, facts.inner);
    if (*beside) return say("%s runs beside its process %d: a live fork copies one process", beside, inner);
    if (own.threads > 1) return say("its process %d (%s) has %d threads: only one of them could be copied", inner, own.name, own.threads);
    if (own.traps) return say("its process %d (%s) blocks or ignores SIGTRAP", inner, own.name);
    hold->target = main;
    hold->number = is_shell(own.name) ? inner : inner + 1;
    hold->permitted = own.permitted;
    hold->effective = own.effective;
    return NULL;
}

static bool harmless(const struct stat *info) { /* null, zero, full, random, urandom */
    unsigned number = minor(info->st_rdev);
    return S_ISCHR(info->st_mode) && major(info->st_rdev) == 1 && (number == 3 || number == 5 || (number > 6 && number < 10));
}

static bool is_terminal(const struct stat *info) {
    return S_ISCHR(info->st_mode) && major(info->st_rdev) >= 136 && major(info->st_rdev) <= 143; /* of a devpts */
}

static const char *look_at_terminal(struct hold *hold) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/0", hold->target);
    int fd = open(path, O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    bool good = fd >= 0 && !ioctl(fd, TCGETS, hold->termios) && !ioctl(fd, TIOCGWINSZ, hold->window);
    if (fd >= 0) close(fd);
    return good ? NULL : say("its terminal does not tell its settings: %s", strerror(errno));
}

/* Its standard streams are pipes, or one terminal, that are made anew; of anything else the copy would share its parent's. */
static const char *look_at_files(struct hold *hold) {
    char path[64], name[256];
    snprintf(path, sizeof path, "/proc/%d/fd", hold->target);
    DIR *folder = opendir(path);
    if (!folder) return "it is gone";
    const char *problem = NULL;
    struct dirent *entry;
    hold->streams[0] = hold->streams[1] = hold->streams[2] = -1;
    ino_t pipes[3] = { 0 };
    dev_t terminal = 0;
    while (!problem && (entry = readdir(folder))) {
        struct stat info;
        if (!isdigit((unsigned char)entry->d_name[0]) || fstatat(dirfd(folder), entry->d_name, &info, 0)) continue;
        int fd = atoi(entry->d_name);
        if (harmless(&info)) continue;
        if (fd < 3 && S_ISFIFO(info.st_mode)) {
            pipes[fd] = info.st_ino;
            hold->streams[fd] = fd;
            continue;
        }
        if (is_terminal(&info) && (!terminal || terminal == info.st_rdev) && hold->num_on_terminal < MAX_ON_TERMINAL) {
            terminal = info.st_rdev;
            hold->on_terminal[hold->num_on_terminal++] = fd;
            continue;
        }
        ssize_t length = readlinkat(dirfd(folder), entry->d_name, name, sizeof name - 1);
        name[length < 0 ? 0 : length] = 0;
        problem = say("it holds %.200s open (descriptor %d)", name, fd);
    }
    closedir(folder);
    bool has_terminal = false;
    for (int i = 0; i < hold->num_on_terminal; i++) has_terminal = has_terminal || !hold->on_terminal[i];
    if (!problem && has_terminal) problem = look_at_terminal(hold);
    else if (!problem && hold->streams[0] < 0) problem = "it has no stdin to answer on: start it with stdin";
    else if (!problem && hold->num_on_terminal) problem = "its terminal is not its stdin";
    if (pipes[1] && pipes[1] == pipes[2]) hold->streams[2] = 1; /* 2>&1 */
    return problem;
}

/* Memory that is shared now or, being no file, can be again: a page that nobody may write at the moment may be made
 * writable in both. A file that was opened for writing keeps its box from becoming a layer. */
static bool is_shared(const char *rights, const char *name) {
    if (rights[3] != 's') return false;
    size_t length = strlen(name);
    return rights[1] == 'w' || *name != '/' || (length > 10 && !strcmp(name + length - 10, " (deleted)"));
}

static const char *look_at_memory(struct hold *hold) {
    static char line[PATH_MAX + 128], name[PATH_MAX];
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/maps", hold->target);
    FILE *maps = fopen(path, "re");
    if (!maps) return "it is gone";
    const char *problem = NULL;
    while (!problem && fgets(line, sizeof line, maps)) {
        char rights[8] = "";
        *name = 0;
        if (sscanf(line, "%*s %7s %*s %*s %*s %4095[^\n]", rights, name) >= 1 && is_shared(rights, name))
            problem = say("it shares memory that it writes (%.200s)", *name ? name : "anonymous");
    }
    fclose(maps);
    return problem;
}

static const char *learn_of_libc(struct hold *hold) {
    struct __attribute__((packed)) { uint64_t at; uint32_t size, signature, flags, padding; } rseq = { 0 };
    hold->scratch = (trace_stack(&hold->main) - 512 - SCRATCH) & ~63ull; /* below the red zone */
    if (!trace_read(&hold->main, hold->scratch, hold->old, SCRATCH)) return "its stack cannot be read";
    if (trace_call(&hold->main, __NR_prctl, PR_GET_TID_ADDRESS, hold->scratch, 0, 0, 0) ||
        !trace_read(&hold->main, hold->scratch, &hold->tid_at, sizeof hold->tid_at))
        return "this kernel does not tell where it keeps its number";
    if (ptrace(0x420f /* PTRACE_GET_RSEQ_CONFIGURATION */, hold->target, sizeof rseq, &rseq) == sizeof rseq)
        hold->rseq_at = rseq.at, hold->rseq_size = rseq.size, hold->rseq_signature = rseq.signature;
    syscall(__NR_get_robust_list, hold->target, &hold->robust_at, &hold->robust_size);
    return trace_write(&hold->main, hold->scratch, hold->old, SCRATCH) ? NULL : "its stack cannot be written";
}

static const char *stop_all(struct hold *hold, pid_t agent, const char *cgroup, pid_t inner, bool *busy) {
    const char *problem = find(hold, agent, cgroup, inner);
    if (problem) return problem;
    if (!trace_stop(&hold->agent, agent)) return say("its agent does not stop: %s", strerror(errno));
    if ((problem = find(hold, agent, cgroup, inner))) return problem; /* again, now that it starts nothing */
    if (hold->between && !trace_stop(&hold->shim, hold->between)) return say("its shim does not stop: %s", strerror(errno));
    if (!trace_stop(&hold->main, hold->target)) return say("its process does not stop: %s", strerror(errno));
    int waiting = 0;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/0", hold->target);
    int input = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (input >= 0) ioctl(input, FIONREAD, &waiting), close(input);
    *busy = waiting || hold->main.pending || !trace_waits_for_input(&hold->main);
    if (*busy) return say("its process %d does not wait for input on its stdin", inner);
    if ((problem = look_at_files(hold)) || (problem = look_at_memory(hold))) return problem;
    snprintf(path, sizeof path, "/proc/%d/cwd", hold->target);
    ssize_t length = readlink(path, hold->folder, sizeof hold->folder - 1);
    hold->folder[length < 0 ? 0 : length] = 0;
    struct stat info;
    if (hold->folder[0] != '/' || stat(path, &info) || !info.st_nlink || length >= (ssize_t)sizeof hold->folder - 1)
        return "its working folder is gone, or its name too long";
    /* It works for us for a moment, and on a busy machine each of its steps would wait its turn. */
    errno = 0;
    hold->nice = getpriority(PRIO_PROCESS, hold->target);
    if (!errno) setpriority(PRIO_PROCESS, hold->target, -20);
    if (!trace_arm(&hold->main)) return say("it cannot be traced: %s", strerror(errno));
    return learn_of_libc(hold);
}

struct hold *hold_take(pid_t agent, const char *cgroup, pid_t inner, const char **problem, bool *busy) {
    struct hold *hold = calloc(1, sizeof *hold);
    *busy = false;
    *problem = hold ? NULL : "no memory";
    if (hold && !cgroup) *problem = "it has no control group";
    if (*problem) return free(hold), NULL;
    trace_begin();
    *problem = stop_all(hold, agent, cgroup, inner, busy);
    trace_end();
    if (!*problem) return hold;
    hold_end(hold);
    return NULL;
}

/* Its working folder lay on the root that a snapshot put away. */
const char *hold_return_folder(struct hold *hold) {
    trace_begin();
    bool good = trace_write(&hold->main, hold->scratch, hold->folder, strlen(hold->folder) + 1) &&
                !trace_call(&hold->main, __NR_chdir, hold->scratch, 0, 0, 0, 0);
    good = trace_write(&hold->main, hold->scratch, hold->old, SCRATCH) && good;
    trace_end();
    return good ? NULL : "its working folder is out of its reach";
}

void hold_end(struct hold *hold) {
    if (!hold) return;
    if (hold->main.pid) setpriority(PRIO_PROCESS, hold->main.pid, hold->nice);
    if (hold->main.pid && hold->scratch) trace_go_on(&hold->main, false);
    else if (hold->main.pid) {
        if (hold->main.mask) ptrace(PTRACE_SETSIGMASK, hold->main.pid, sizeof hold->main.mask, &hold->main.mask);
        trace_leave(&hold->main);
    }
    trace_leave(&hold->shim);
    trace_leave(&hold->agent);
    free(hold);
}
