#!/bin/sh
# Runs a command under one line that says what it does and how long it has taken; what it prints is shown only if it fails.
#
#     tools/phase.sh TEXT COMMAND [ARGUMENT...]
text=$1
shift
output=$(mktemp)
trap 'rm -f "$output"' EXIT
started=$(date +%s)
printf '%s ... ' "$text"
"$@" >"$output" 2>&1 &
child=$!
trap 'kill "$child" 2>/dev/null; echo stopped; exit 130' INT TERM
while [ -t 1 ] && kill -0 "$child" 2>/dev/null; do
    sleep 1
    printf '\r%s ... %d s ' "$text" "$(($(date +%s) - started))"
done
wait "$child"
code=$?
if [ "$code" -ne 0 ]; then
    printf 'failed after %d s:\n' "$(($(date +%s) - started))"
    cat "$output" >&2
elif [ -t 1 ]; then
    echo
else
    printf '%d s\n' "$(($(date +%s) - started))"
fi
exit "$code"
