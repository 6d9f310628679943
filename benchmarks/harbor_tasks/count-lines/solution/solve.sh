#!/bin/bash
set -e
test "$(cat /srv/log/lines)" = 300
grep -c ERROR /srv/log/app.log > "$OUT_FOLDER/errors.txt"
