#!/usr/bin/env bash
# Sets up what is missing, builds pp-run and asks a four-stage pipeline a question.
#   scripts/demo.sh [--cluster] [QUESTION]
# With --cluster three of the stages run in workers: processes of their own on the loopback, each with a home of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh

CLUSTER=
if [ "${1:-}" = --cluster ]; then
    CLUSTER=1
    shift
fi
QUESTION=${1:-What is 2+2?}

need_build_tools
need_model
say "building pp-run"
cargo build --release
PP_RUN=$(realpath "$(target_folder)/release/pp-run")
need_vulkan
MODEL=$(models_folder)/$MODEL_FILE

if [ -z "$CLUSTER" ]; then
    say "four stages of 8, 8, 7 and 7 layers"
    exec "$PP_RUN" -m "$MODEL" --stages 4 --split 8,8,7,7 -n 64 -- "$QUESTION"
fi

PP_MODELS=$(realpath "$(models_folder)")
export PP_MODELS
HOMES=$(mktemp -d)
WORKERS=()
clean_up() {
    for worker in "${WORKERS[@]}"; do kill "$worker" 2>/dev/null || true; done
    for worker in "${WORKERS[@]}"; do wait "$worker" 2>/dev/null || true; done
    rm -rf "$HOMES"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# as HOST: sets RUN to pp-run as on a machine of its own.
as() {
    local home=$HOMES/$1
    mkdir -p "$home"
    RUN=(env -u XDG_DATA_HOME HOME="$home" XDG_CONFIG_HOME="$home/.config" XDG_CACHE_HOME="$home/.cache" "$PP_RUN")
}

say "a cluster of three workers on the loopback"
as head
"${RUN[@]}" cluster init
# The code is preset, as in an installation that nobody attends; without it a worker makes one and prints it.
PP_JOIN_CODE=$(od -An -N20 -tx1 /dev/urandom | tr -d ' \n')
export PP_JOIN_CODE
for name in rig2 rig3 rig4; do
    as "$name"
    "${RUN[@]}" worker --name "$name" --listen 127.0.0.1:0 >"$HOMES/$name.log" 2>&1 &
    WORKERS+=($!)
done
as head
for name in rig2 rig3 rig4; do
    line=
    for _ in $(seq 600); do
        line=$(grep -o "cluster add $name [0-9.:]*" "$HOMES/$name.log" || true)
        [ -z "$line" ] || break
        sleep 0.1
    done
    [ -n "$line" ] || { cat "$HOMES/$name.log" >&2; fail "$name does not listen"; }
    # shellcheck disable=SC2086
    "${RUN[@]}" $line
done
"${RUN[@]}" cluster status >&2
say "four stages of 8, 8, 7 and 7 layers: the first here, one on each worker"
"${RUN[@]}" -m "$MODEL" --stages 4 --split 8,8,7,7 --workers rig2,rig3,rig4 -n 64 -- "$QUESTION"
