// The servers that `run` has started, and clients of them.

import OpenAI from "openai";

import { PATIENCE, tiny } from "../page/servers.mjs";

/** The server of a name: its address, its key if it has one, and how it stands. */
export function server(name) {
  const url = process.env[`PP_${name}`];
  const key = process.env[`PP_${name}_KEY`];
  const get = (path) => fetch(`${url}${path}`, { headers: key ? { authorization: `Bearer ${key}` } : {} });
  return {
    url,
    key,
    folder: tiny("llama-tied"),
    requests: async () => (await (await get("/v1/pipeline")).json()).requests,
    pages: async () => (await (await get("/v1/pipeline")).json()).kv_pages.held,
    cancelled: async () => Number(/^pp_run_answers_total\{outcome="Cancelled"\} (\d+)/m.exec(await (await get("/metrics")).text())?.[1] ?? 0),
  };
}

export const client = ({ url, key }, options) =>
  new OpenAI({ baseURL: `${url}/v1`, apiKey: key ?? "none", maxRetries: 0, timeout: PATIENCE, ...options });

/** What a condition gives, once it gives something. */
export async function until(what, condition) {
  for (const end = Date.now() + PATIENCE; ; ) {
    const value = await condition();
    if (value) return value;
    if (Date.now() > end) throw new Error(`not in time: ${what}`);
    await new Promise((done) => setTimeout(done, 20));
  }
}

/** Nobody waits, nothing runs, and no page is held. */
export const forgotten = (server) =>
  until("nothing is open", async () => {
    const { open, running, waiting } = await server.requests();
    return open + running + waiting + (await server.pages()) === 0;
  });
