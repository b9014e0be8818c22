// Servers for the browser to talk to: pp-run itself, alone or as the head of a cluster of processes on the loopback.

import { spawn, spawnSync } from "node:child_process";
import { randomBytes } from "node:crypto";
import { mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";

const BINARY = resolve(process.env.PP_RUN ?? "target/debug/pp-run");
const DATA = resolve(import.meta.dirname ?? new URL(".", import.meta.url).pathname, "../data");
/** How long anything may take that is waited for: much, as tests share few cores. */
export const PATIENCE = 120_000;
export const KEY = "a key of many more than sixteen letters".replaceAll(" ", "-");

export const tiny = (name) => join(DATA, "tiny", name);

/** A process with a home of its own, whose lines are kept. */
class Program {
  constructor(args, { home, environment = {} } = {}) {
    const env = { ...process.env, ...environment };
    if (home) {
      for (const name of ["XDG_DATA_HOME", "PP_MODEL", "PP_MODELS", "PP_JOIN_CODE"]) if (!(name in environment)) delete env[name];
      Object.assign(env, { HOME: home, XDG_CONFIG_HOME: join(home, ".config"), XDG_CACHE_HOME: join(home, ".cache") });
    }
    this.name = args.slice(0, 2).join(" ");
    this.text = "";
    this.child = spawn(BINARY, args, { env, stdio: ["ignore", "pipe", "pipe"] });
    for (const stream of [this.child.stdout, this.child.stderr]) stream.setEncoding("utf8").on("data", (text) => (this.text += text));
    this.ended = new Promise((done) => this.child.on("exit", (code, signal) => done(code ?? signal)));
    this.ended.then((how) => (this.how = how));
  }

  /** What it says that matches, once it has said it. */
  async says(pattern) {
    const until = Date.now() + PATIENCE;
    for (;;) {
      const match = pattern.exec(this.text);
      if (match) return match;
      if (this.how !== undefined) throw new Error(`${this.name} ended (${this.how}) without ${pattern}:\n${this.text}`);
      if (Date.now() > until) throw new Error(`${this.name} does not say ${pattern}:\n${this.text}`);
      await new Promise((done) => setTimeout(done, 20));
    }
  }

  async end(signal = "SIGTERM") {
    this.child.kill(signal);
    const timer = setTimeout(() => this.child.kill("SIGKILL"), 20_000);
    await this.ended;
    clearTimeout(timer);
  }
}

/** `pp-run serve` with these arguments on a free port: its address, and how to end it. */
export async function serve(args, options) {
  const program = new Program(["serve", "--port", "0", ...args], options);
  const [url] = await program.says(/http:\/\/127\.0\.0\.1:\d+/);
  for (const until = Date.now() + PATIENCE; ; ) {
    const ready = await fetch(`${url}/ready`).catch(() => null);
    if (ready?.ok) break;
    if (Date.now() > until || program.how !== undefined) throw new Error(`not ready:\n${program.text}`);
    await new Promise((done) => setTimeout(done, 100));
  }
  return { url, program, close: () => program.end() };
}

/** A file with the key, and its folder. */
export function keyFile() {
  const folder = mkdtempSync(join(tmpdir(), "pp-page-"));
  const file = join(folder, "key");
  writeFileSync(file, `${KEY}\n`, { mode: 0o600 });
  return { file, remove: () => rmSync(folder, { recursive: true, force: true }) };
}

/** A head with its first stage here and one on each of some workers, which are processes with homes of their own. */
export async function cluster(names, model, args) {
  const folder = mkdtempSync(join(tmpdir(), "pp-page-"));
  const home = (name) => {
    const path = join(folder, name);
    mkdirSync(path, { recursive: true });
    return path;
  };
  const run = (args) => {
    const env = { ...process.env, HOME: home("head"), XDG_CONFIG_HOME: join(home("head"), ".config"), XDG_CACHE_HOME: join(home("head"), ".cache"), PP_JOIN_CODE: code };
    const done = spawnSync(BINARY, args, { env, encoding: "utf8", timeout: PATIENCE });
    if (done.status !== 0) throw new Error(`${args.join(" ")}: ${done.stderr}`);
  };
  const code = randomBytes(20).toString("hex");
  const workers = {};
  const addresses = {};
  const begin = (name, listen) =>
    new Program(["worker", "--name", name, "--listen", listen, "--device", "reference"], { home: home(name), environment: { PP_JOIN_CODE: code } });
  /** A worker that was killed comes back where it was. */
  const back = (name) => (workers[name] = begin(name, addresses[name]));
  const close = async (server) => {
    await server?.close();
    await Promise.all(Object.values(workers).map((worker) => worker.end("SIGKILL")));
    rmSync(folder, { recursive: true, force: true });
  };
  try {
    run(["cluster", "init"]);
    for (const name of names) {
      const data = join(home(name), ".local/share/pp-run/models");
      mkdirSync(data, { recursive: true });
      symlinkSync(model, join(data, "model"));
      workers[name] = begin(name, "127.0.0.1:0");
      const [, where] = await workers[name].says(new RegExp(`cluster add ${name} ([0-9.:]+)`));
      addresses[name] = where;
      run(["cluster", "add", name, where]);
    }
    const server = await serve(["-m", model, "--device", "reference", "--workers", names.join(","), ...args], { home: home("head") });
    return { ...server, workers, back, close: () => close(server) };
  } catch (error) {
    await close();
    throw error;
  }
}
