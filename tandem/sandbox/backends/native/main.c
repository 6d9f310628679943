#include "box.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv) {
    if (argc >= 4 && !strcmp(argv[1], "keeper")) {
        int control = atoi(argv[2]), supervisor = atoi(argv[3]);
        char **folders = calloc(argc, sizeof *folders); /* argv + 4 and its NULL */
        if (!folders) return 1;
        for (int i = 4; i < argc; i++) folders[i - 4] = strdup(argv[i]);
        /* Boxes are made without exec and show this memory as their /proc/1/cmdline: nothing of the host in it. */
        for (int i = 1; i < argc; i++) memset(argv[i], 0, strlen(argv[i]));
        return keeper_main(control, supervisor, folders);
    }
    fprintf(stderr, "tandem-box: started by tandem, not by hand\n");
    return 2;
}
