// OpenAI's client for Node: answers of a given form, and calls of tools, as OpenAI's documentation has them.

import assert from "node:assert/strict";
import { before, test } from "node:test";

import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

import { client, server } from "./servers.mjs";

const real = server("REAL");
const Visit = z.object({ city: z.enum(["Paris", "Rome"]), days: z.array(z.number().int().min(1).max(9)).min(2).max(3), note: z.literal("none").nullable() });
const tool = zodFunction({ name: "get_weather", description: "The weather of a city", parameters: Visit });
const messages = [{ role: "user", content: "How is the weather in Paris? Answer in JSON." }];
let ask;

before(async () => {
  const [model] = (await client(real).models.list()).data;
  ask = { model: model.id, messages, temperature: 0, max_tokens: 120 };
});

test("`response_format` json_schema, streamed and not", async () => {
  const response_format = zodResponseFormat(Visit, "visit");
  const [choice] = (await client(real).chat.completions.create({ ...ask, response_format })).choices;
  assert.equal(choice.finish_reason, "stop");
  Visit.parse(JSON.parse(choice.message.content));
  let text = "";
  for await (const chunk of await client(real).chat.completions.create({ ...ask, response_format, stream: true })) text += chunk.choices[0].delta.content ?? "";
  assert.equal(text, choice.message.content);
});

test("`parse` with a zod schema", async () => {
  const answer = await client(real).chat.completions.parse({ ...ask, response_format: zodResponseFormat(Visit, "visit") });
  Visit.parse(answer.choices[0].message.parsed);
});

test("`tool_choice` required", async () => {
  const [choice] = (await client(real).chat.completions.create({ ...ask, tools: [tool], tool_choice: "required" })).choices;
  assert.equal(choice.finish_reason, "tool_calls");
  for (const call of choice.message.tool_calls) {
    assert.deepEqual([call.type, call.function.name], ["function", "get_weather"]);
    Visit.parse(JSON.parse(call.function.arguments));
  }
});

test("tools, streamed", async () => {
  const whole = (await client(real).chat.completions.create({ ...ask, tools: [tool], tool_choice: "required" })).choices[0].message.tool_calls;
  const final = await client(real).chat.completions.stream({ ...ask, tools: [tool], tool_choice: "required" }).finalChatCompletion();
  const shown = (calls) => calls.map((call) => [call.function.name, call.function.arguments]);
  assert.deepEqual(shown(final.choices[0].message.tool_calls), shown(whole));
});

test("the second turn, with the tools' results", async () => {
  const said = (await client(real).chat.completions.create({ ...ask, tools: [tool], tool_choice: "required" })).choices[0].message;
  const results = said.tool_calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: '{"sky": "clear"}' }));
  const answer = await client(real).chat.completions.create({ ...ask, max_tokens: 24, messages: [...messages, said, ...results], tools: [tool], tool_choice: "none" });
  assert.ok(answer.choices[0].message.content);
});

test("tools that the client runs itself (`runTools`)", async () => {
  const called = [];
  const runnable = { type: "function", function: { name: "get_weather", description: "The weather of a city", parameters: tool.function.parameters, parse: JSON.parse, function: (visit) => { called.push(visit); return "clear"; } } };
  const runner = client(real).chat.completions.runTools({ ...ask, tools: [runnable], tool_choice: { type: "function", function: { name: "get_weather" } } }, { maxChatCompletions: 2 });
  await runner.done();
  assert.ok(called.length >= 1);
  called.forEach((visit) => Visit.parse(visit));
});
