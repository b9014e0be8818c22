#!/usr/bin/env bash
# Sets up what is missing, then checks the formatting, the lints, and every test.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh

need_build_tools
cargo fmt --version >/dev/null && cargo clippy --version >/dev/null || fail "rustfmt and clippy are missing: rustup component add rustfmt clippy"
need_model
say "building pp-run"
cargo build
PP_RUN=$(target_folder)/debug/pp-run
need_vulkan
need_swiftshader "$PWD/target/swiftshader"
say "cargo fmt --check"
cargo fmt --all --check
say "cargo clippy"
cargo clippy --quiet --workspace --all-targets -- --deny warnings
say "cargo test"
exec cargo test --workspace
