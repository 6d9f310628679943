#!/bin/bash
wanted=$(grep -c ERROR /srv/log/app.log)
mkdir -p /logs/verifier
if [ "$(cat /srv/out/errors.txt)" = "$wanted" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
