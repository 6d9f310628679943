/* What changes in a folder. A watch holds no folder open, so that it is never in the way of a snapshot; when one gives
 * the box a new root, its watches are made again there, and what is found is compared with what was known: nothing that
 * happened in between is missed, though a rename is then a removal and a creation, many writes are one, and what came
 * just then may be told twice. */
#include "box.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

/* ``heard``: the batch of events that told of it last. What was seen while the root may have been replaced is not known. */
struct known { char *name; struct timespec modified, changed; off_t size; mode_t mode; uid_t uid; gid_t gid; uint64_t heard; };
struct folder { int number; char *path; struct known *entries; size_t count, room; };
struct folders { struct folder *all; size_t count; };
enum how { QUIETLY, AS_NEW, COMPARED };

static struct folders now, before; /* before: what was known under the last root, while watches are made again */
static int events = -1;
static const char *top;
static bool below; /* folders in folders, too */
static bool over;  /* the watch of the top has ended: it is gone, or under another root */
static uint64_t batch = 1; /* 0: in none */

/* In one write: what is told comes whole to whoever reads as it comes. */
static int say(char kind, const char *path) {
    static char text[PATH_MAX + 2];
    int length = snprintf(text, sizeof text, "%c%s", kind, path);
    return length < (int)sizeof text ? stream_put(text, length + 1) : ENAMETOOLONG;
}

static const char *joined(char *into, const char *folder, const char *name) {
    int length = snprintf(into, PATH_MAX, "%s/%s", strcmp(folder, "/") ? folder : "", name);
    return length < PATH_MAX ? into : NULL;
}

static bool holds(const char *folder, const char *path) {
    size_t length = strlen(folder);
    return !strncmp(path, folder, length) && path[length] == '/';
}

static bool passing(int error) { /* as in a listing: who is gone or closed to this user is left out */
    return error == ENOENT || error == EACCES || error == ENOTDIR || error == ELOOP;
}

/* ---- what is known of a folder: its entries by name, sorted */
static int by_name(const void *a, const void *b) {
    return strcmp(((const struct known *)a)->name, ((const struct known *)b)->name);
}

static int by_path(const void *a, const void *b) {
    return strcmp(((const struct folder *)a)->path, ((const struct folder *)b)->path);
}

static void empty(struct folder *folder) {
    while (folder->count) free(folder->entries[--folder->count].name);
    free(folder->entries);
    free(folder->path);
}

static void lose(struct folders *folders, size_t at) {
    empty(&folders->all[at]);
    folders->all[at] = folders->all[--folders->count];
}

static size_t place_of(const struct folder *folder, const char *name, bool *there) {
    size_t low = 0, high = folder->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        int order = strcmp(folder->entries[middle].name, name);
        if (!order) return *there = true, middle;
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return *there = false, low;
}

static bool make_room(struct folder *folder) {
    if (folder->count < folder->room) return true;
    size_t room = folder->room ? 2 * folder->room : 16;
    struct known *more = realloc(folder->entries, room * sizeof *more);
    if (!more) return false;
    folder->entries = more;
    folder->room = room;
    return true;
}

static void fill(struct known *entry, const struct stat *info) {
    entry->modified = info->st_mtim;
    entry->changed = info->st_ctim;
    entry->size = info->st_size;
    entry->mode = info->st_mode;
    entry->uid = info->st_uid;
    entry->gid = info->st_gid;
}

/* After an event: what ``path`` is by now. */
static int note(struct folder *folder, const char *name, const char *path, bool gone) {
    struct stat info = { 0 };
    bool there;
    size_t at = place_of(folder, name, &there);
    if (gone) {
        if (!there) return 0;
        free(folder->entries[at].name);
        memmove(folder->entries + at, folder->entries + at + 1, (--folder->count - at) * sizeof *folder->entries);
        return 0;
    }
    if (lstat(path, &info)) info = (struct stat){ 0 }; /* its removal is still to be heard of */
    if (!there) {
        char *copy = strdup(name);
        if (!copy || !make_room(folder)) return ENOMEM;
        memmove(folder->entries + at + 1, folder->entries + at, (folder->count++ - at) * sizeof *folder->entries);
        folder->entries[at] = (struct known){ .name = copy };
    }
    fill(&folder->entries[at], &info);
    folder->entries[at].heard = batch;
    return 0;
}

static int read_folder(struct folder *folder, DIR *from) {
    struct dirent *entry;
    while ((entry = readdir(from))) {
        struct stat info;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (fstatat(dirfd(from), entry->d_name, &info, AT_SYMLINK_NOFOLLOW)) continue;
        char *copy = strdup(entry->d_name);
        if (!copy || !make_room(folder)) return ENOMEM;
        struct known *last = &folder->entries[folder->count++];
        *last = (struct known){ .name = copy };
        fill(last, &info);
    }
    qsort(folder->entries, folder->count, sizeof *folder->entries, by_name);
    return 0;
}

/* ---- watching */
static int watch_folder(const char *path, enum how how, bool first);

/* A folder went, and with it what was known to be in it. */
static int say_gone(const char *path, bool was_folder) {
    struct folder key = { .path = (char *)path };
    struct folder *old = was_folder ? bsearch(&key, before.all, before.count, sizeof key, by_path) : NULL;
    int error = 0;
    for (size_t i = 0; old && !error && i < old->count; i++) {
        char inner[PATH_MAX];
        if (joined(inner, path, old->entries[i].name)) error = say_gone(inner, S_ISDIR(old->entries[i].mode));
    }
    return error ? error : say('d', path);
}

static bool same_time(struct timespec a, struct timespec b) { return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec; }

/* The time of a folder's own change tells nothing: the first change in it under a new root moves it, too. */
static int compare(const struct known *old, const struct known *new, const char *path) {
    int error = 0;
    bool is_folder = S_ISDIR(new->mode);
    bool rights = (old->mode && old->mode != new->mode) || old->uid != new->uid || old->gid != new->gid;
    bool wrote = !is_folder && (old->heard == batch || old->size != new->size || !same_time(old->modified, new->modified));
    if (wrote) error = say('w', path);
    if (!error && (rights || (!is_folder && !wrote && !same_time(old->changed, new->changed)))) error = say('a', path);
    return error;
}

/* ``old`` NULL: all of it is new. Its folders are watched by this, as new ones or compared. */
static int tell_difference(const struct folder *old, const struct folder *new) {
    size_t i = 0, j = 0;
    int error = 0;
    while (!error && ((old && i < old->count) || j < new->count)) {
        const struct known *was = old && i < old->count ? &old->entries[i] : NULL;
        const struct known *is = j < new->count ? &new->entries[j] : NULL;
        int order = !was ? 1 : !is ? -1 : strcmp(was->name, is->name);
        char path[PATH_MAX];
        i += order <= 0;
        j += order >= 0;
        if (!joined(path, new->path, order > 0 ? is->name : was->name)) continue;
        bool replaced = !order && was->mode && (was->mode & S_IFMT) != (is->mode & S_IFMT);
        bool is_new = order > 0 || replaced || was->heard == batch;
        if (order < 0 || replaced) error = say_gone(path, S_ISDIR(was->mode));
        if (!error && (order > 0 || replaced)) error = say('c', path);
        if (!error && !order && !replaced) error = compare(was, is, path);
        if (error || order < 0 || !below || !S_ISDIR(is->mode)) continue;
        error = watch_folder(path, old == new ? QUIETLY : is_new ? AS_NEW : COMPARED, false);
        if (passing(error)) error = 0;
    }
    return error;
}

/* What a new folder holds by now is told: it may have come before the watch. What came just then is told twice. */
static int watch_folder(const char *path, enum how how, bool first) {
    uint32_t mask = IN_CREATE | IN_MODIFY | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB | IN_ONLYDIR;
    int number = inotify_add_watch(events, path, mask | (first ? 0 : IN_DONT_FOLLOW));
    if (number < 0) return errno;
    DIR *from = opendir(path);
    struct folder made = { .number = number, .path = strdup(path) };
    int error = made.path ? 0 : ENOMEM;
    if (!error && from) error = read_folder(&made, from);
    if (from) closedir(from);
    size_t at = 0;
    while (at < now.count && now.all[at].number != number) at++;
    if (!error && at < now.count && holds(now.all[at].path, path)) error = ELOOP; /* a mount of its own parent */
    struct folder *more = error || at < now.count ? now.all : realloc(now.all, (now.count + 1) * sizeof *now.all);
    if (error || !more) return empty(&made), error ? error : ENOMEM;
    now.all = more;
    if (at < now.count) empty(&now.all[at]); /* it is watched by another name */
    else now.count++;
    now.all[at] = made;
    struct folder key = { .path = (char *)path };
    const struct folder *old = how == COMPARED ? bsearch(&key, before.all, before.count, sizeof key, by_path) : NULL;
    if (how == QUIETLY || (how == COMPARED && !old)) old = &made; /* nothing is told: its folders are watched */
    return tell_difference(old, &made);
}

static void leave(const char *path) {
    for (size_t at = now.count; at-- > 0;)
        if (!strcmp(path, now.all[at].path) || holds(path, now.all[at].path)) {
            inotify_rm_watch(events, now.all[at].number);
            lose(&now, at);
        }
}

static int tell(const struct inotify_event *event) {
    static const struct { uint32_t bit; char kind; } kinds[] = {
        { IN_CREATE, 'c' }, { IN_MODIFY, 'w' }, { IN_DELETE, 'd' }, { IN_MOVED_FROM, 'm' }, { IN_MOVED_TO, 'c' },
        { IN_ATTRIB, 'a' } };
    char changed[PATH_MAX];
    size_t at = 0;
    if (event->mask & IN_Q_OVERFLOW) return EOVERFLOW;
    while (at < now.count && now.all[at].number != event->wd) at++;
    if (at == now.count) return 0; /* of a folder that was moved away */
    if (event->mask & IN_IGNORED) { /* removed, or its root is unmounted: what was known is needed then */
        now.all[at].number = -1;
        over = over || !strcmp(now.all[at].path, top);
        return 0;
    }
    if (!event->len) snprintf(changed, sizeof changed, "%s", now.all[at].path);
    else if (!joined(changed, now.all[at].path, event->name)) return 0;
    int error = 0;
    for (size_t i = 0; !error && i < sizeof kinds / sizeof *kinds; i++)
        if (event->mask & kinds[i].bit) error = say(kinds[i].kind, changed);
    if (!error && event->len) error = note(&now.all[at], event->name, changed, event->mask & (IN_DELETE | IN_MOVED_FROM));
    if (error || !below || !(event->mask & IN_ISDIR)) return error;
    if (event->mask & (IN_MOVED_FROM | IN_DELETE)) leave(changed);
    if (!(event->mask & (IN_CREATE | IN_MOVED_TO))) return 0;
    error = watch_folder(changed, AS_NEW, false);
    return passing(error) ? 0 : error; /* gone again */
}

static int tell_all(ssize_t *length) {
    static char buffer[1 << 16] __attribute__((aligned(8)));
    int error = 0;
    *length = read(events, buffer, sizeof buffer);
    for (ssize_t at = 0; !error && at < *length;) {
        struct inotify_event *event = (struct inotify_event *)(buffer + at);
        at += sizeof *event + event->len;
        error = tell(event);
    }
    return error;
}

static int begin(const char *path, struct stat *root, enum how how) {
    struct stat last = *root;
    if (events >= 0) close(events);
    if ((events = inotify_init1(IN_CLOEXEC | IN_NONBLOCK)) < 0 || stat(path, root)) return errno;
    before = now;
    now = (struct folders){ 0 };
    over = false;
    if (before.count) qsort(before.all, before.count, sizeof *before.all, by_path);
    int error = watch_folder(path, how, true);
    if (!error && how == COMPARED && (last.st_mode != root->st_mode || last.st_uid != root->st_uid || last.st_gid != root->st_gid))
        error = say('a', path);
    while (before.count) lose(&before, before.count - 1);
    free(before.all);
    return error;
}

/* Ends with 0 when the folder itself is gone. */
int watch_folders(const char *path, bool recursive) {
    struct stat root = { 0 }, here;
    ssize_t length;
    top = path;
    below = recursive;
    int mounts = open("/proc/self/mountinfo", O_RDONLY | O_CLOEXEC), error = begin(path, &root, QUIETLY);
    if (error || (error = say('k', path))) return error;
    while (!error) {
        struct pollfd sources[] = { { events, POLLIN, 0 }, { mounts, POLLPRI, 0 }, { 0, POLLIN, 0 } };
        if (poll(sources, 3, -1) < 0 && errno != EINTR) return errno;
        batch++;
        if ((error = tell_all(&length))) return error;
        if (sources[2].revents) return 0;
        if (stat(path, &here)) return errno == ENOENT || errno == ENOTDIR ? 0 : errno;
        if (!over && here.st_dev == root.st_dev && here.st_ino == root.st_ino) {
            root = here;
            continue;
        }
        while (!error && length > 0) error = tell_all(&length); /* no more come: nothing changes the old root */
        if (!error) error = begin(path, &root, COMPARED);
    }
    return passing(error) && access(path, F_OK) ? 0 : error;
}
