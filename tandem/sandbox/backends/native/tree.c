/* Finds and kills process trees. A command's shim is a child subreaper, so whatever the command's processes do
 * (setsid, double fork) they stay descendants of the shim; the walk needs no cgroup and no privilege. */
#include "box.h"
#include <ctype.h>
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

size_t tree_scan(struct process *into, bool memory) {
    DIR *folder = opendir("/proc");
    if (!folder) return 0;
    size_t count = 0;
    long page = sysconf(_SC_PAGESIZE);
    struct dirent *entry;
    while (count < MAX_PROCESSES && (entry = readdir(folder))) {
        if (!isdigit((unsigned char)entry->d_name[0])) continue;
        char path[64], text[512];
        snprintf(path, sizeof path, "/proc/%.16s/stat", entry->d_name);
        if (!read_small(path, text, sizeof text)) continue;
        char *after = strrchr(text, ')'); /* the name before it may hold anything */
        int parent;
        char state;
        if (!after || sscanf(after + 1, " %c %d", &state, &parent) != 2) continue;
        if (state == 'Z' || state == 'X') continue;
        struct process *p = &into[count];
        p->pid = atoi(entry->d_name);
        p->parent = parent;
        p->stands = state == 'T' || state == 't';
        p->anonymous_bytes = 0;
        if (p->pid == 1) continue;
        if (memory) {
            unsigned long size, resident, shared;
            snprintf(path, sizeof path, "/proc/%.16s/statm", entry->d_name);
            if (read_small(path, text, sizeof text) && sscanf(text, "%lu %lu %lu", &size, &resident, &shared) == 3)
                p->anonymous_bytes = resident > shared ? (uint64_t)(resident - shared) * page : 0;
        }
        count++;
    }
    closedir(folder);
    return count;
}

static const struct process *find(const struct process *all, size_t count, pid_t pid) {
    for (size_t i = 0; i < count; i++)
        if (all[i].pid == pid) return &all[i];
    return NULL;
}

bool tree_within(const struct process *all, size_t count, pid_t pid, pid_t root) {
    for (size_t depth = 0; depth <= count; depth++) {
        const struct process *p = find(all, count, pid);
        if (!p) return false;
        if (p->parent == root) return true;
        pid = p->parent;
    }
    return false;
}

/* Whether a process has a box of its own, born of this one by a live fork: it has another number there. */
static bool foreign(pid_t pid) {
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    if (!read_small(path, text, sizeof text)) return false;
    char *numbers = strstr(text, "\nNSpid:\t");
    if (!numbers) return false;
    numbers += 8;
    char *end = strchr(numbers, '\n');
    if (end) *end = 0;
    return strchr(numbers, '\t') != NULL;
}

static struct process table[MAX_PROCESSES];
static pid_t stopped[MAX_PROCESSES];

/* Stop until a scan finds nobody new and all standing, then kill: a process that stands cannot fork, so the set closes
 * even against a fork bomb. The pass limit only bounds the time when thousands appear between two scans. */
static void stop_and_kill(bool (*doomed)(const struct process *, size_t, size_t, const void *), const void *argument) {
    size_t num_stopped = 0;
    for (int pass = 0; pass < 200; pass++) {
        size_t count = tree_scan(table, false), before = num_stopped;
        bool restless = false;
        for (size_t i = 0; i < count && num_stopped < MAX_PROCESSES; i++) {
            bool known = false;
            for (size_t k = 0; k < before && !known; k++) known = stopped[k] == table[i].pid;
            if (known && !table[i].stands) restless = true;
            if (known || !doomed(table, count, i, argument) || foreign(table[i].pid)) continue;
            kill(table[i].pid, SIGSTOP);
            stopped[num_stopped++] = table[i].pid;
        }
        if (num_stopped == before && !restless) break;
        if (num_stopped == before) usleep(100); /* it stops when it next runs */
    }
    for (size_t k = 0; k < num_stopped; k++) kill(stopped[k], SIGKILL);
}

static bool below(const struct process *all, size_t count, size_t i, const void *argument) {
    return tree_within(all, count, all[i].pid, *(const pid_t *)argument);
}

void tree_kill(pid_t root) { stop_and_kill(below, &root); }

struct shims { const pid_t *pids; size_t count; };

static bool stray(const struct process *all, size_t count, size_t i, const void *argument) {
    const struct shims *shims = argument;
    for (size_t k = 0; k < shims->count; k++)
        if (all[i].pid == shims->pids[k] || tree_within(all, count, all[i].pid, shims->pids[k])) return false;
    return true;
}

void tree_kill_strays(const pid_t *shims, size_t num_shims) {
    struct shims argument = { shims, num_shims };
    stop_and_kill(stray, &argument);
}
