#!/usr/bin/env bash
# Sets up what is missing, builds pp-run and asks a four-stage pipeline a question.
#   scripts/demo.sh [QUESTION]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh

need_build_tools
need_model
say "building pp-run"
cargo build --release
PP_RUN=$(target_folder)/release/pp-run
need_vulkan
say "four stages of 8, 8, 7 and 7 layers"
exec "$PP_RUN" -m "$(models_folder)/$MODEL_FILE" --stages 4 --split 8,8,7,7 -n 64 -- "${1:-What is 2+2?}"
