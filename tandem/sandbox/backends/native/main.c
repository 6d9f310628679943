#include "box.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv) {
    if (argc == 9 && !strcmp(argv[1], "keeper")) {
        int control = atoi(argv[2]), supervisor = atoi(argv[3]), listener = atoi(argv[5]), grace_s = atoi(argv[6]);
        bool one_id = !strcmp(argv[4], "one");
        char ways[8], *folder = strdup(argv[8]);
        snprintf(ways, sizeof ways, "%s", argv[7]);
        /* Boxes are made without exec and show this memory as their /proc/1/cmdline: nothing of the host in it. */
        for (int i = 1; i < argc; i++) memset(argv[i], 0, strlen(argv[i]));
        return keeper_main(control, supervisor, one_id, listener, grace_s, ways, folder);
    }
    if (argc == 2 && !strcmp(argv[1], "agent")) return branch_agent();
    if (argc == 3 && !strcmp(argv[1], "guest")) return guest_main(atoi(argv[2]));
    if (argc > 7 && !strcmp(argv[1], "ground"))
        return ground_main(atoi(argv[2]), argv[3], argv[4], argv[5], !strcmp(argv[6], "fresh"), argv + 7);
    fprintf(stderr, "tandem-box: started by tandem, not by hand\n");
    return 2;
}
