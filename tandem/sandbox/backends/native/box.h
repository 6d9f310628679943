/* One small program, three roles: keeper (host side, one a supervisor), setup (a new process that turns itself
 * into a box) and agent (pid 1 of the box). No policy lives here: paths, limits and cgroup values come from the
 * caller. Everything is single-threaded; memory is bounded by the constants below. */
#ifndef TANDEM_BOX_H
#define TANDEM_BOX_H

#define _GNU_SOURCE
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { PROTOCOL = 3, AGENT_FD = 3 };

/* ---- wire.c: a cursor over a message. Strings are u32 length, bytes, NUL, and are used in place. */
struct cursor { const uint8_t *at, *end; bool bad; };
uint8_t get_u8(struct cursor *c);
uint32_t get_u32(struct cursor *c);
uint64_t get_u64(struct cursor *c);
const char *get_str(struct cursor *c, uint32_t *length);
void put_u32(uint8_t *at, uint32_t value);
void put_u64(uint8_t *at, uint64_t value);
bool write_file(const char *path, const void *data, size_t length); /* one write(2); false and errno */
bool read_small(const char *path, char *buffer, size_t size);       /* NUL-terminated; false and errno */

/* ---- agent frames: u32 length of what follows, u8 type, u32 command id, payload */
enum { FRAME_HEAD = 9, FRAME_MAX = 1 << 20 };
enum { RUN = 1, STDIN = 2, KILL = 3, SIGNAL = 4, RESIZE = 5, CONNECT = 6, LISTEN = 7, /* to the agent */
       QUIET = 8, /* and back: it stands between two frames until it hears the next */ SLEPT = 15 };
enum { HELLO = 16, FAIL = 17, STDOUT = 18, STDERR = 19, EXIT = 20, STDIN_ACK = 21,     /* from it */
       STARTED = 22, SOCKET = 23 };
enum { AS_ROOT = 1, LONG_LIVED = 2, ON_TERMINAL = 4, AS_OTHER = 8 };                              /* options of RUN */
enum { TIMED_OUT = 1, OUT_OF_MEMORY = 2, NOT_STARTED = 4, KILLED = 8 };             /* flags of EXIT */

/* ---- what a create message says; pointers go into the message */
struct box_spec {
    uint32_t id, outer_uid, outer_gid, id_count, work_id;
    const char *hostname;
    uint64_t disk_bytes, disk_inodes, num_processes, data_bytes, watch_bytes;
    struct cursor cgroups; /* u32 count of { str folder, u8 unified, u32 count of { str file, str value } } */
    struct cursor ops;     /* u32 count of { u8 op, str path, str argument, u32 mode } */
    struct cursor layers;  /* u32 count of { u8 kind, str path, str device }, top first */
};

/* ---- root.c: roots as overlays, made by the keeper. ``layer_take`` opens a layer (f folder, e EROFS image), or keeps
 * ``made_fd`` under a name. A layer's mount has plain ids. */
enum { MAX_LAYERS = 256 };
struct layer { struct layer *next; char *path, *device; int fd, references; };
struct box_root {
    int tmpfs; /* the box's quota: one upper and work folder a generation */
    uint32_t generation;
    int num_layers;
    struct layer *layers[MAX_LAYERS];
};
struct layer *layer_take(const char *path, const char *device, int kind, int made_fd, bool kept); /* or NULL, errno */
struct layer *layer_find(const char *path);
void layer_drop(struct layer *layer);
int root_tmpfs(uint64_t bytes, uint64_t inodes);
const char *root_take(struct box_root *root, struct cursor layers); /* NULL or what failed */
int root_overlay(const struct box_root *root, const struct box_spec *spec, int userns, bool trusted, const char **error);
int root_upper(const struct box_root *root); /* a detached mount of the upper as it is */
bool root_untouched(const struct box_root *root); /* nothing was written since its last snapshot */
void root_drop(struct box_root *root);
/* As the box's own root on the host, who makes its user namespace and so owns it; all powers stay. Then back. */
bool root_become(const struct box_spec *spec);
void root_return(void);
void root_forget_bases(void);

/* ---- mounts.c: detached mounts, and what this kernel needs to make overlays of them */
enum { MOUNTS_DETACHED = 'd', MOUNTS_ATTACHED = 'a', MOUNTS_STRING = 's' };
bool mount_set(int context, const char *key, const char *value);
int mount_made(int context, uint64_t attributes);
int mount_copy(int place, const char *path);
int mounts_keep(int fd);
void mounts_lose(int fd);
int mounts_overlay(const int *parts, int num_lower, const char *upper, const char *work, bool trusted);
const char *mounts_reason(void);
bool mounts_map_ids(void);
bool mounts_alone(bool nested); /* this process gets a mount namespace of its own */
const char *mounts_probe(const char *ways, const char *folder, bool trusted, bool *maps, char *found);

/* ---- push.c: a running box's upper becomes a layer, and a new one takes its place. The working folder of process
 * ``movable`` is not in the way: the caller moves it. */
const char *push_refusal(pid_t agent, const char *cgroup, pid_t movable); /* why open files forbid it, or NULL: then its
                                                                            * root is read-only until push_layer */
struct box;
const char *push_layer(struct box *box, const struct box_spec *spec, char *path, size_t size); /* whose name it writes */

/* ---- keeper.c */
enum { MAX_CGROUPS = 8 };
struct hold;
struct box {
    struct box *next;
    uint32_t id;
    pid_t pid; /* 0: buried, cgroups still to remove */
    int status, tries, num_cgroups;
    char *cgroups[MAX_CGROUPS];
    struct box_root root;
    bool trusted;     /* its overlays are made by root of the host */
    int socket;       /* the supervisor's end, kept for the next one */
    char *error;      /* never made: why */
    uint8_t *message; /* what made it */
    size_t length;
    struct hold *hold;   /* it stands still for its live fork */
    struct box *mother;  /* it was born of one, in the namespaces of this box, and ends when that one's agent does */
    int pidfd;           /* of its agent, which then is not our child; -1 otherwise */
    int num_branches;    /* boxes whose mother it is */
    bool retired;        /* killed, but for its agent: there are branches */
    bool ending;         /* its agent was sent the signal */
};
int keeper_main(int control_fd, pid_t supervisor, bool one_id, int listener, int grace_s, const char *ways, const char *folder);
void keeper_tell(char kind, uint32_t id, const void *data, size_t length);
struct box *keeper_box(uint32_t id);            /* that lives; or NULL */
const char *box_group(const struct box *box);   /* one that names all its processes; or NULL */

/* ---- birth.c: NULL or the failed step */
bool box_read_spec(struct cursor c, struct box_spec *spec);
const char *box_make(const struct box_spec *spec, struct box *box, int agent_fd);
const char *box_make_cgroups(struct box *box, struct cursor c, int *unified_fd);
const char *box_enter_cgroups(const struct box *box, struct cursor c);
int box_user_namespace(const struct box_spec *spec, pid_t pid); /* -1: none of its own */

/* ---- snapshots.c, handover.c */
void snapshot_take(uint32_t id);
void snapshot_merged(uint32_t id, const char *path, const char *first, uint32_t count);
void snapshot_hold(uint32_t id, const char *folder);
size_t snapshot_place(const struct box *box, char *answer, size_t size);
int handover_accept(int listener, int *owner); /* the next supervisor's control socket, or -1 */
void handover_tell(int control, const struct box *boxes, const char *mounts_found);

/* ---- branch.c: a copy of a held process in a box of its own; graft.c: what is mounted there. NULL or the failed step.
 * What its agent must know of it: */
struct carried {
    uint32_t id, timeout_ms, pid, work_id; /* the command's number, limit (0: none) and process */
    uint64_t watch_bytes;
    int pipes[3];                     /* our ends of stdin, stdout, stderr, -1: none */
    bool on_terminal;                 /* the first two are its terminal */
};
const char *branch_make(struct hold *hold, struct box *box, const struct box_spec *spec, int agent_fd, struct carried *carried);
int branch_agent(void); /* the program, started by the first process of a branch */

#define GRAFT_AGENT "/proc/agent"
#define GRAFT_SOCKET "/proc/keeper"
struct graft { pid_t pid, helper; int fd, listener; };
const char *graft_begin(struct graft *graft, struct box *box, const struct box_spec *spec);
const char *graft_mounted(struct graft *graft);
const char *graft_end(struct graft *graft);

/* ---- setup.c: also in parts for graft.c; ``fd`` hears in words what failed, and the process ends */
void box_main(const struct box_spec *spec, int agent_fd, int go_fd, const int *entries) __attribute__((noreturn));
void steps_open(struct cursor ops, int fd);
void steps_apply(void); /* below the working folder */
void raise_loopback(void);
void free_low_ports(int proc); /* which it closes */
uint64_t agent_powers(bool switch_user); /* the capabilities that an agent keeps */
void agent_place(int agent_fd, int *pipes); /* its socket is its only file, but for three pipes of a carried command */

/* ---- filter.c, agent.c, files.c */
const char *filter_install(void); /* NULL or the failed step */
#define GROUND_MARK ".tandem-tmp"
int guest_main(uint32_t work_id); /* guest.c */
int ground_main(int control, const char *ways, const char *hidden, const char *place, bool fresh, char **command); /* ground.c */
void agent_main(int fd, uint32_t work_id, bool switch_user, uint64_t watch_bytes, const struct carried *carried)
    __attribute__((noreturn));

enum { FILE_WRITE = 'w', FILE_READ = 'r', FILE_LIST = 'l', FILE_EXEC = 'x' };
enum { ENTRY_STAT = 's', ENTRY_LIST = 'e', ENTRY_MAKE = 'm', ENTRY_MOVE = 'v', ENTRY_REMOVE = 'd' };
int entry_operation(int kind, char **arguments); /* entries.c; the same */
#define FILES_NAME "box-files" /* the name of a process that does one: it is in the way of no live fork */
enum { STREAM_READ = 'R', STREAM_WATCH = 'i' };
int stream_operation(int kind, char **arguments); /* stream.c; of long-lived commands; the same */
int stream_put(const char *data, size_t length);         /* on stdout; 0 or an errno */
int watch_folders(const char *path, bool recursive);     /* watch.c; 0 when the folder is gone */
int make_parents(const char *path);
int file_operation(int kind, const char *path, uint64_t max_bytes); /* in the box as its user: 0 or an errno */

/* ---- command.c: one command of the box */
struct command {
    bool used, is_shim, exited, reported, gone; /* exited: the command; gone: its shim, too */
    uint32_t id;
    pid_t shim, main;            /* main: 0 until a long-lived command runs */
    bool is_long, on_terminal;
    int status;                  /* what its shim tells: see shim.c; -1: its exit code says all */
    int pipe[2], input;          /* stdout and stderr to read, stdin to write; -1 when closed */
    uint64_t cap[2], sent[2], dropped[2];
    size_t rest[2];              /* when exited: what the pipes still held at that time */
    uint8_t *pending;            /* stdin not yet written: at most STDIN_WINDOW bytes */
    uint32_t pending_start, pending_length;
    bool input_ends;             /* close stdin when nothing is pending */
    int code, flags;
    int64_t started_us, deadline_us;
};
enum { STDIN_WINDOW = 256 * 1024 };
int64_t now_us(void);
bool command_start(struct command *command, struct cursor message, uint32_t work_id, bool switch_user); /* or errno */
void command_close(struct command *command);
void command_prepare(uint32_t work_id, bool switch_user); /* a spare shim, so that the next one starts at once */
bool command_lost(pid_t pid);                             /* whether it was the spare that ended */
pid_t command_spare(void);                                /* 0: there is none */

/* What a shim says, in one write each. */
struct shim_word { uint8_t kind; int32_t value; }; /* 'S' exit code; of a long-lived command 'P' pid, 'E' errno of a
                                                    * failed start, too */

/* ---- terminal.c, ports.c: false or -1, and errno */
bool terminal_open(int *master, int *slave, uint32_t owner, uint32_t columns, uint32_t rows);
bool terminal_resize(int master, uint32_t columns, uint32_t rows);
int port_connect(uint32_t port, bool v6); /* the connection may still be under way */
int port_listen(uint32_t port, bool datagrams);

/* ---- tree.c: the processes of this pid namespace */
struct process { pid_t pid, parent; bool stands; uint64_t anonymous_bytes; };
enum { MAX_PROCESSES = 4096 };
size_t tree_scan(struct process *into, bool memory);          /* all but pid 1 */
bool tree_within(const struct process *all, size_t count, pid_t pid, pid_t root);
void tree_kill(pid_t root);                                   /* every descendant; the root itself stays */
void tree_kill_strays(const pid_t *shims, size_t num_shims);  /* children of pid 1 that are no shims, and below */
#endif
