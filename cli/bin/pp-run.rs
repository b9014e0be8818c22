//! The `pp-run` command.

fn main() -> std::process::ExitCode {
    pp_cli::main()
}
