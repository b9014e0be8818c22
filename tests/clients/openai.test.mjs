// OpenAI's client for Node. A test's title is the feature that it shows, as in the table of README.md.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

import { cluster } from "../page/servers.mjs";
import { client, forgotten, server, until } from "./servers.mjs";

const toy = server("TOY");
const small = server("SMALL");
const ask = { model: "llama-tied", messages: [{ role: "user", content: "run of run" }], max_tokens: 12, temperature: 0 };
const goOn = { model: "llama-tied", prompt: "run of run", max_tokens: 12, temperature: 0 };
const long = { model: "llama-33", messages: [{ role: "user", content: "run" }], max_tokens: 200, logit_bias: { 0: -100, 2: -100 } };
const content = (answer) => answer.choices[0].message.content;

async function all(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

/** The error of a call, in OpenAI's shape. */
async function refused(kind, promise, status, code, param = null) {
  const error = await promise.then(() => assert.fail("it was not refused"), (error) => error);
  assert.ok(error instanceof kind, `${error}`);
  assert.deepEqual([error.status, error.code, error.param], [status, code, param], error.message);
  assert.ok(error.message && error.type && error.requestID);
  return error;
}

test("chat", async () => {
  const answer = await client(toy).chat.completions.create(ask);
  assert.deepEqual([answer.object, answer.choices.length, answer.choices[0].finish_reason], ["chat.completion", 1, "length"]);
  assert.equal(answer.choices[0].message.role, "assistant");
  assert.equal(answer.usage.completion_tokens, 12);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + 12);
});

test("chat, streamed", async () => {
  const whole = await client(toy).chat.completions.create(ask);
  const chunks = await all(await client(toy).chat.completions.create({ ...ask, stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), content(whole));
  assert.equal(chunks[0].choices[0].delta.role, "assistant");
  assert.deepEqual(chunks.map((chunk) => chunk.choices[0].finish_reason).filter(Boolean), ["length"]);
});

test("chat, by the client's `stream` helper", async () => {
  const text = content(await client(toy).chat.completions.create(ask));
  const stream = client(toy).chat.completions.stream({ ...ask, stop: text.slice(8, 10) });
  let heard = "";
  stream.on("content", (delta) => (heard += delta));
  assert.equal(await stream.finalContent(), heard);
  assert.equal(heard, text.split(text.slice(8, 10))[0]);
});

test("`stream_options.include_usage`", async () => {
  const chunks = await all(await client(toy).chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } }));
  const last = chunks.pop();
  assert.deepEqual([last.choices, last.usage.completion_tokens], [[], 12]);
  assert.ok(chunks.every((chunk) => chunk.usage === null));
});

test("completion", async () => {
  const answer = await client(toy).completions.create(goOn);
  assert.deepEqual([answer.object, answer.usage.completion_tokens], ["text_completion", 12]);
});

test("completion, streamed", async () => {
  const whole = await client(toy).completions.create(goOn);
  const chunks = await all(await client(toy).completions.create({ ...goOn, stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole.choices[0].text);
});

test("`n`, streamed and not", async () => {
  const wanted = { ...ask, n: 2, temperature: 1.2, seed: 4 };
  const whole = await client(toy).chat.completions.create(wanted);
  const texts = ["", ""];
  for (const chunk of await all(await client(toy).chat.completions.create({ ...wanted, stream: true })))
    texts[chunk.choices[0].index] += chunk.choices[0].delta.content ?? "";
  assert.deepEqual(texts, whole.choices.map((choice) => choice.message.content));
});

test("`stop`, as a text and as several, streamed and not", async () => {
  const { text } = (await client(toy).completions.create(goOn)).choices[0];
  const stop = text.slice(4, 6);
  for (const value of [stop, ["not to be found", stop]]) {
    const { choices } = await client(toy).completions.create({ ...goOn, stop: value });
    assert.deepEqual([choices[0].text, choices[0].finish_reason], [text.split(stop)[0], "stop"]);
    const chunks = await all(await client(toy).completions.create({ ...goOn, stop: value, stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), choices[0].text);
  }
});

test("`seed`: the same gives the same answer, another another", async () => {
  const [one, again, other] = await Promise.all([7, 7, 8].map((seed) => client(toy).chat.completions.create({ ...ask, temperature: 1.5, seed })));
  assert.equal(content(one), content(again));
  assert.notEqual(content(one), content(other));
});

test("`logprobs` and `top_logprobs` of a chat, streamed and not", async () => {
  const wanted = { ...ask, logprobs: true, top_logprobs: 2 };
  const [choice] = (await client(toy).chat.completions.create(wanted)).choices;
  assert.equal(choice.logprobs.content.length, 12);
  const spelt = Buffer.from(choice.logprobs.content.flatMap((token) => token.bytes)).toString("utf8");
  assert.equal(spelt, choice.message.content);
  const chunks = await all(await client(toy).chat.completions.create({ ...wanted, stream: true }));
  assert.deepEqual(chunks.flatMap((chunk) => chunk.choices[0].logprobs?.content ?? []), choice.logprobs.content);
});

test("`max_tokens` and `max_completion_tokens`", async () => {
  for (const field of ["max_tokens", "max_completion_tokens"]) {
    const { max_tokens: _, ...rest } = ask;
    const answer = await client(toy).chat.completions.create({ ...rest, [field]: 5 });
    assert.equal(answer.usage.completion_tokens, 5);
  }
});

test("models", async () => {
  const listed = await all(client(toy).models.list());
  assert.deepEqual(listed.map((model) => model.id), ["llama-tied"]);
  assert.deepEqual(await client(toy).models.retrieve("llama-tied"), listed[0]);
});

test("raw responses, and `x-request-id`", async () => {
  const { data, response, request_id } = await client(toy).chat.completions.create(ask, { headers: { "x-request-id": "mine-2" } }).withResponse();
  assert.deepEqual([request_id, response.headers.get("x-request-id"), data._request_id], ["mine-2", "mine-2", "mine-2"]);
});

test("16 requests at once, each as alone", async () => {
  const asks = Array.from({ length: 16 }, (_, i) => ({ ...ask, max_tokens: 8 + i, messages: [{ role: "user", content: `run ${i}` }] }));
  const alone = [];
  for (const one of asks) alone.push(content(await client(toy).chat.completions.create(one)));
  const together = await Promise.all(asks.map((one) => client(toy).chat.completions.create(one)));
  assert.deepEqual(together.map(content), alone);
});

test("`BadRequestError` with `param`", async () => {
  for (const [fields, param] of [[{ temperature: -1 }, "temperature"], [{ n: 0 }, "n"], [{ messages: [] }, "messages"], [{ stop: 5 }, "stop"]])
    await refused(OpenAI.BadRequestError, client(toy).chat.completions.create({ ...ask, ...fields }), 400, "invalid_value", param);
});

test("embeddings are refused", async () => {
  await refused(OpenAI.BadRequestError, client(toy).embeddings.create({ model: "llama-tied", input: "run" }), 400, "unsupported_parameter", "model");
});

test("`AuthenticationError` without the key", async () => {
  const keyed = server("KEYED");
  await refused(OpenAI.AuthenticationError, client(keyed, { apiKey: "wrong" }).models.list(), 401, "invalid_api_key");
  assert.equal((await client(keyed).chat.completions.create(ask)).choices.length, 1);
});

test("`NotFoundError` for another model", async () => {
  await refused(OpenAI.NotFoundError, client(toy).chat.completions.create({ ...ask, model: "gpt-5" }), 404, "model_not_found", "model");
});

test("`NotFoundError` for other APIs: responses, assistants, files, images", async () => {
  await refused(OpenAI.NotFoundError, client(toy).responses.create({ model: "llama-tied", input: "run" }), 404, "unknown_url");
  await refused(OpenAI.NotFoundError, client(toy).files.list(), 404, "unknown_url");
});

test("`APIStatusError` 413 for a body that is too large", async () => {
  await refused(OpenAI.APIError, client(small).chat.completions.create({ ...long, user: "x".repeat(5000) }), 413, "request_too_large");
});

test("a full queue is retried after Retry-After", async () => {
  await forgotten(small);
  const streams = [];
  for (const state of ["running", "waiting"]) {
    streams.push(await client(small).chat.completions.create({ ...long, stream: true }));
    await until(state, async () => (await small.requests())[state] === 1);
  }
  await refused(OpenAI.RateLimitError, client(small).chat.completions.create(long), 429, "queue_full");
  const responses = [];
  const fetching = async (url, init) => {
    const response = await fetch(url, init);
    responses.push({ status: response.status, after: Number(response.headers.get("retry-after")), at: Date.now(), retry: init.headers.get("x-stainless-retry-count") });
    if (response.status === 429) for (const stream of streams) stream.controller.abort();
    return response;
  };
  await client(small, { maxRetries: 5, fetch: fetching }).chat.completions.create({ ...long, max_tokens: 1 });
  assert.deepEqual([responses[0].status, responses.at(-1).status], [429, 200]);
  assert.deepEqual(responses.map(({ retry }) => retry), responses.map((_, index) => `${index}`));
  // It may come later, never earlier; timers are good to a millisecond.
  assert.ok(responses[0].after >= 1 && responses[1].at - responses[0].at >= responses[0].after * 1000 - 2);
  await forgotten(small);
});

test("a stream that is closed is cancelled", async () => {
  for (const close of [(stream) => stream.controller.abort(), null]) {
    await forgotten(small);
    const before = await small.cancelled();
    const stream = await client(small).chat.completions.create({ ...long, stream: true });
    for await (const _ of stream) {
      await until("it is open", async () => (await small.requests()).open === 1);
      close?.(stream);
      // The iterator's end closes it as well.
      break;
    }
    await forgotten(small);
    assert.equal(await small.cancelled(), before + 1);
  }
});

test("a client that waits no longer is forgotten", async () => {
  const before = await small.cancelled();
  await assert.rejects(client(small, { timeout: 200 }).chat.completions.create(long), OpenAI.APIConnectionTimeoutError);
  await forgotten(small);
  assert.equal(await small.cancelled(), before + 1);
});

test("`InternalServerError` 503 with the stage that is lost", async (t) => {
  const { url, workers, close } = await cluster(["rig2"], toy.folder, ["--stages", "2", "--no-recover", "--recover-wait", "600"]);
  t.after(close);
  const at = client({ url });
  assert.equal((await at.chat.completions.create(ask)).choices.length, 1);
  await workers.rig2.end("SIGKILL");
  const error = await until("it is down", () => at.chat.completions.create(ask).then(() => null, (error) => error));
  assert.ok(error instanceof OpenAI.InternalServerError, `${error}`);
  assert.deepEqual([error.status, error.code, error.error.stage], [503, "pipeline_down", 1], error.message);
  assert.ok(Number(error.headers.get("retry-after")) > 0);
});
