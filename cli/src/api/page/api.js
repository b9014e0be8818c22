// The server: requests with the key, errors with a type, and streams of events.

/** What went wrong, as the server has it or as the network does. */
export class ApiError extends Error {
  constructor(message, { status = 0, type = "", code = "", retryAfter = 0 } = {}) {
    super(message);
    Object.assign(this, { status, type, code, retryAfter });
  }
}

const KEY = "pp-run.key";
/** Of a stream: characters of a line at most. */
const LINE_MAX = 1 << 22;

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

async function refused(response) {
  const text = await response.text().catch(() => "");
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    // A proxy's own words, perhaps: the status must do.
  }
  const message = typeof error.message === "string" ? error.message : `The server says ${response.status} ${response.statusText}`;
  const retryAfter = Number(response.headers.get("retry-after")) || 0;
  return new ApiError(message, { status: response.status, type: error.type, code: error.code, retryAfter });
}

/** A request below /v1; its response, once it has succeeded. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?", { type: "network" });
  }
  if (!response.ok) throw await refused(response);
  return response;
}

/** The data of each event of a stream (WHATWG HTML 9.2), as they come. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      if (rest.length > LINE_MAX) throw new ApiError("The server sends a line without an end.", { type: "stream" });
      for (const line of lines) {
        if (line === "") {
          if (data.length > 0) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The connection to the server was lost.", { type: "network" });
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** A chat completion, piece by piece: `{text}`, `{thought}`, `{reason}` and `{usage}`. */
export async function* complete(body, signal) {
  const response = await call("v1/chat/completions", { body: { ...body, stream: true, stream_options: { include_usage: true } }, signal });
  let ended = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message ?? "The answer broke off.", event.error);
    const choice = event.choices?.[0];
    if (choice?.delta?.reasoning_content) yield { thought: choice.delta.reasoning_content };
    if (choice?.delta?.content) yield { text: choice.delta.content };
    if (choice?.finish_reason) {
      ended = true;
      yield { reason: choice.finish_reason };
    }
    if (event.usage) yield { usage: event.usage };
  }
  if (!ended) throw new ApiError("The answer broke off: the server closed the connection.", { type: "network" });
}
