#!/bin/bash
set -e
test "$(id -un)" = worker
test "$COLOUR" = blue
grep -c ERROR /srv/log/app.log > "$OUT_FOLDER/errors.txt"
