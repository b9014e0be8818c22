#!/usr/bin/env bash
# Sets up what is missing, then checks the formatting, the lints, and every test.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh

need_build_tools
cargo fmt --version >/dev/null && cargo clippy --version >/dev/null || fail "rustfmt and clippy are missing: rustup component add rustfmt clippy"
need_model
# With the tests: built alone, what it depends on has other features, and is built twice.
say "building pp-run and its tests"
cargo test --workspace --no-run
PP_RUN=$(target_folder)/debug/pp-run
need_vulkan
need_swiftshader "$PWD/target/swiftshader"
say "cargo fmt --check"
cargo fmt --all --check
say "cargo clippy"
cargo clippy --quiet --workspace --all-targets -- --deny warnings
say "cargo test"
cargo test --workspace
say "the page in Chromium"
need_browser
npm ci --prefix tests/page --silent --no-audit --no-fund --ignore-scripts
PP_RUN=$(realpath "$PP_RUN") PP_MODEL=$(realpath "$(models_folder)/$MODEL_FILE") node --test tests/page/page.test.mjs
say "the server with other people's clients"
PP_RUN=$PP_RUN tests/clients/run
if cargo +nightly fuzz --version >/dev/null 2>&1; then
    for target in enrolment members link control payload weights; do
        say "fuzzing $target for 30 s"
        mkdir -p "target/fuzz/$target"
        cargo +nightly fuzz run "$target" "target/fuzz/$target" "fuzz/corpus/$target" -- -max_total_time=30 -verbosity=0
    done
else
    say "not fuzzing: that needs a nightly toolchain and cargo-fuzz (fuzz/README.md)"
fi
