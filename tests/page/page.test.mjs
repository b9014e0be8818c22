// The page as people use it, in headless Chromium, against the real server.
//
//   cd tests/page && npm ci && PP_RUN=../../target/debug/pp-run node --test
//
// PP_MODEL: the model of the conversations (default: the demo model); PP_PICTURES: a folder for screenshots.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";

import { accessible, answered, answering, launch, open, picture, quit, say, script } from "./browser.mjs";
import { KEY, PATIENCE, cluster, keyFile, serve, tiny } from "./servers.mjs";

const HOSTILE = [
  "Look: <img src=x onerror=\"alert(1)\"> <script>alert(2)</script> <svg/onload=alert(3)>",
  "[a](javascript:alert(4)) [b](data:text/html,<script>alert(5)</script>) ![c](https://example.com/pixel.png) <a href=\"javascript:alert(6)\">d</a>",
  "```\"><img src=x onerror=alert(7)>\n</code></pre><script>alert(8)</script>\n```",
  "| <b>h</b> |\n|---|\n| <iframe src=\"javascript:alert(9)\"> |",
  "# <style>*{display:none}</style>",
];

let server;

before(async () => {
  await launch();
  server = await serve(["--stages", "4", "--max-sequences", "8", "--ctx", "1024"]);
});

after(async () => {
  await quit();
  await server?.close();
});

const answers = (page) => page.getByRole("article", { name: "Model" });
const mine = (page) => page.getByRole("article", { name: "You" });
const button = (page, name) => page.getByRole("button", { name, exact: true });

/** Set sampling through the page itself. */
async function sample(page, values) {
  await button(page, "Settings").click();
  for (const [label, value] of Object.entries(values)) await page.getByLabel(label, { exact: true }).fill(String(value));
  await button(page, "Done").click();
}

async function until(what, condition) {
  for (const end = Date.now() + PATIENCE; ; ) {
    const value = await condition();
    if (value) return value;
    assert.ok(Date.now() < end, what);
    await new Promise((done) => setTimeout(done, 100));
  }
}

const pipeline = async (url) => (await fetch(`${url}/v1/pipeline`)).json();

test("a conversation of two turns beside the pipe that answers it", async (t) => {
  const page = await open(t, server.url);
  await page.getByText("serving").waitFor();
  const { model, stages } = await pipeline(server.url);
  await page.getByText(model, { exact: true }).first().waitFor();
  assert.equal(await page.getByRole("list", { name: "Stages" }).getByRole("listitem").count(), 4);
  for (const [index, stage] of stages.entries()) {
    const lane = await page.locator(`#lane-${index}`).innerText();
    assert.ok(lane.includes(stage.device), lane);
    assert.match(lane, /layers? \d+.*weights [\d.]+ MB.*KV [\d.]+ [kM]B/);
  }
  await sample(page, { Temperature: 0, "Tokens at most": 40 });
  await say(page, "What is the capital of France?");
  await answered(page);
  const messages = [{ role: "user", content: "What is the capital of France?" }];
  const alone = await (await fetch(`${server.url}/v1/chat/completions`, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ model, messages, temperature: 0, max_tokens: 40 }),
  })).json();
  const kept = await page.evaluate(() => JSON.parse(localStorage.getItem("pp-run.conversations"))[0].messages);
  assert.equal(kept[1].text, alone.choices[0].message.content, "the page says what the server says");
  const meta = await answers(page).locator(".meta").innerText();
  assert.match(meta, /first token .*\d+ tokens.*prompt \d+/);
  assert.ok(meta.includes(`${alone.usage.completion_tokens} tokens`), meta);
  await say(page, "And of Italy?");
  await answered(page);
  assert.equal(await answers(page).count(), 2);
  assert.match(await answers(page).last().locator(".meta").innerText(), /cached/, "the second turn finds the first in the cache");
  // The pipe has worked, and says so in pictures and in words.
  const painted = () => page.locator("#lane-0 canvas").evaluate((canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, Math.round(canvas.height / 3), canvas.width, 1);
    return new Set(Array.from({ length: canvas.width }, (_, x) => data.slice(4 * x, 4 * x + 3).join())).size;
  });
  assert.ok((await painted()) >= 2, "the lane shows work");
  await page.getByText("Where the time went, as a table").click();
  const table = page.getByRole("region", { name: "Where the time went" });
  await until("the table has a row for each stage", async () => (await table.getByRole("row").count()) === 5);
  const shares = await table.getByRole("row").nth(1).getByRole("cell").allInnerTexts();
  const sum = shares.filter((cell) => cell.endsWith("%")).reduce((sum, cell) => sum + parseFloat(cell), 0);
  assert.ok(Math.abs(sum - 100) < 1, `busy and the causes add up: ${shares}`);
  assert.ok((await page.locator("#next li").count()) >= 1);
});

test("an answer can be stopped, tried again, and its question changed", async (t) => {
  const page = await open(t, server.url);
  await sample(page, { Temperature: 0, "Tokens at most": 400 });
  await say(page, "Write a long story about a river.");
  const text = answers(page).locator(".text");
  await until("the answer begins", async () => (await text.innerText()).length > 20);
  await button(page, "Stop").click();
  await answered(page);
  const stopped = await text.innerText();
  assert.match(await answers(page).locator(".meta").innerText(), /stopped/);
  await until("nothing runs any more", async () => (await pipeline(server.url)).requests.running === 0);
  assert.equal(await text.innerText(), stopped, "nothing comes after");
  await sample(page, { "Tokens at most": 12 });
  await button(page, "Retry").click();
  await answered(page);
  assert.equal(await answers(page).count(), 1);
  await button(page, "Edit").click();
  await page.getByLabel("Edit your message").fill("Say hello.");
  await button(page, "Send again").click();
  await answered(page);
  assert.deepEqual([await mine(page).count(), await answers(page).count()], [1, 1]);
  assert.equal(await mine(page).locator(".text").innerText(), "Say hello.");
});

test("a reload keeps the conversation, also what had come of an answer", async (t) => {
  const page = await open(t, server.url);
  await sample(page, { Temperature: 0, "Tokens at most": 300 });
  await say(page, "Tell me about mountains.");
  await until("some of it is there", async () => (await answers(page).locator(".text").innerText()).length > 20);
  await page.reload();
  assert.equal(await mine(page).locator(".text").innerText(), "Tell me about mountains.");
  assert.ok((await answers(page).locator(".text").innerText()).length > 10);
  await until("its request has ended", async () => (await pipeline(server.url)).requests.running === 0);
  await button(page, "New").click();
  assert.equal(await mine(page).count(), 0);
  await page.locator("#conversations summary").click();
  await page.getByRole("list", { name: "Conversations" }).getByText("Tell me about mountains.").click();
  assert.equal(await mine(page).count(), 1);
  assert.match(await page.locator("#title").innerText(), /mountains/);
});

test("a system prompt is sent, and a conversation is exported as it is", async (t) => {
  const page = await open(t, server.url);
  let body;
  await script(page, (request) => ((body = request.postDataJSON()), { events: answering("Ahoy, **friend**.") }));
  await sample(page, { "System prompt of this conversation": "You are a pirate.", "Top p": 0.5, Seed: 3 });
  await say(page, "Hello\nthere");
  await answered(page);
  assert.deepEqual(body.messages, [{ role: "system", content: "You are a pirate." }, { role: "user", content: "Hello\nthere" }]);
  assert.deepEqual([body.top_p, body.seed, body.stream, "temperature" in body], [0.5, 3, true, false]);
  const save = async (name) => {
    await page.locator("#export summary").click();
    const [download] = await Promise.all([page.waitForEvent("download"), button(page, name).click()]);
    return readFileSync(await download.path(), "utf8");
  };
  const json = JSON.parse(await save("JSON"));
  assert.deepEqual(json.messages, [...body.messages, { role: "assistant", content: "Ahoy, **friend**." }]);
  assert.match(await save("Markdown"), /## System\n\nYou are a pirate\.\n\n## You\n\nHello\nthere\n\n## Model\n\nAhoy, \*\*friend\*\*\./);
});

test("what a model says is never taken for HTML", async (t) => {
  const page = await open(t, server.url);
  await script(page, () => ({ events: answering(HOSTILE.join("\n\n")) }));
  await say(page, "<b>me</b> <img src=x onerror=alert(0)>");
  await answered(page);
  const text = answers(page).locator(".text");
  const elements = await text.evaluate((node) => [...new Set([...node.querySelectorAll("*")].map((element) => element.localName))].sort());
  assert.deepEqual(elements.filter((name) => ["img", "script", "svg", "iframe", "style", "a", "b"].includes(name)), ["a"]);
  const links = await text.evaluate((node) => [...node.querySelectorAll("a")].map((link) => link.protocol));
  assert.deepEqual(links, ["https:"], "only what leads to a page is a link");
  const shown = await text.innerText();
  for (const words of ["<img src=x onerror=\"alert(1)\">", "<script>alert(2)</script>", "javascript:alert(4)", "</code></pre><script>alert(8)</script>", "<iframe src=\"javascript:alert(9)\">", "<style>"]) {
    assert.ok(shown.includes(words), `${words} in ${shown}`);
  }
  assert.equal(await mine(page).locator(".text").innerText(), "<b>me</b> <img src=x onerror=alert(0)>");
  assert.equal(await page.locator("#live img, #live script").count(), 0, "nor where it is read out");
  await page.reload();
  assert.equal(await page.locator("#log img, #log script, #log iframe").count(), 0, "nor after a reload");
});

test("markdown is shown as such, and code can be copied", async (t) => {
  const page = await open(t, server.url, { permissions: ["clipboard-read", "clipboard-write"] });
  const text = "# One\n\nA **bold** and *slanted* `word`, ~~gone~~.\nNext line.\n\n1. a\n2. b\n   - c\n\n> quoted\n\n| x | y |\n|---|:-:|\n| 1 | 2 |\n\n```rust\nfn main() {\n    \"<&>\";\n}\n```\n\n---\n\nsnake_case_name, 2*3*4, https://example.com/a_b.\n\n```\nopen";
  await script(page, () => ({ events: answering(text) }));
  await say(page, "markdown");
  await answered(page);
  const shape = await answers(page).locator(".text").evaluate((node) => {
    const walk = (e) => `${e.localName}${e.children.length ? `(${[...e.children].map(walk).join(" ")})` : ""}`;
    return [...node.children].map(walk).join(" ");
  });
  assert.equal(shape, "h4 p(strong em code del) ol(li li(ul(li))) blockquote(p) div(table(thead(tr(th th)) tbody(tr(td td)))) figure(figcaption(span button) pre(code)) hr p(a) figure(figcaption(span button) pre(code))");
  const last = await answers(page).locator(".text > p").last().innerText();
  assert.equal(last, "snake_case_name, 2*3*4, https://example.com/a_b.");
  await answers(page).locator(".code").first().getByRole("button").click();
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "fn main() {\n    \"<&>\";\n}");
});

test("failures are told with their kind, and what failed can be tried again", async (t) => {
  const page = await open(t, server.url, { allowed: [/Failed to load resource/] });
  const replies = [
    { status: 429, headers: { "retry-after": "7" }, body: { error: { message: "the queue is full", type: "rate_limit_error", code: "queue_full" } } },
    { status: 503, body: { error: { message: "stage 1 on rig2 is down", type: "server_error", code: "pipeline_down" } } },
    { events: [...answering("Half an answ").slice(0, 3), { error: { message: "stage 1 was lost", type: "server_error" } }] },
    { events: answering("Half").slice(0, 2) },
    { events: answering("All is well.") },
  ];
  let count = 0;
  await script(page, () => replies[count++]);
  await say(page, "hello");
  const alert = page.locator(".failure");
  const told = async (...words) => {
    await answered(page);
    const text = await alert.innerText();
    for (const word of words) assert.ok(text.includes(word), `${word} in ${text}`);
    await alert.getByRole("button", { name: "Retry" }).click();
  };
  await told("the queue is full", "429", "queue_full", "7 s");
  await told("stage 1 on rig2 is down", "503");
  await answered(page);
  assert.match(await answers(page).locator(".text").innerText(), /^Half an/, "what had come stays");
  await told("stage 1 was lost");
  await told("broke off");
  await answered(page);
  assert.equal(await alert.count(), 0);
  assert.equal(await answers(page).locator(".text").innerText(), "All is well.");
  await page.route("**/v1/chat/completions", (route) => route.abort());
  await say(page, "again");
  await answered(page);
  assert.match(await alert.innerText(), /cannot be reached/);
});

test("a key is asked for, kept for the tab only, and sent", async (t) => {
  const key = keyFile();
  const locked = await serve(["-m", tiny("llama-tied"), "--device", "reference", "--api-key", key.file]);
  t.after(async () => {
    await locked.close();
    key.remove();
  });
  const page = await open(t, locked.url, { allowed: [/401/] });
  const ask = page.getByRole("dialog", { name: "This server wants an API key" });
  await ask.waitFor();
  await button(page, "Cancel").click();
  await page.getByText("needs a key").waitFor();
  // An answer without a bound fills this model's context, and leaves no room for a second turn.
  await sample(page, { "Tokens at most": 4 });
  await say(page, "hello");
  await ask.waitFor();
  assert.equal(await page.evaluate(() => document.activeElement.id), "ask-input", "the key can be typed at once");
  await page.keyboard.type("wrong-key-of-sixteen-letters");
  await page.keyboard.press("Enter");
  await page.waitForResponse((response) => response.status() === 401);
  await page.getByText("is not taken").waitFor();
  await page.getByLabel("API key", { exact: true }).last().fill(KEY);
  await page.keyboard.press("Enter");
  await page.getByText("serving").waitFor();
  await until("what was refused is asked again", async () => (await page.locator(".failure").count()) === 0);
  await answered(page);
  await say(page, "hi");
  await answered(page);
  assert.deepEqual([await page.locator(".failure").count(), await answers(page).count()], [0, 2]);
  const kept = await page.evaluate(() => [JSON.stringify(localStorage), JSON.stringify(sessionStorage)]);
  assert.deepEqual(kept.map((text) => text.includes("sixteen-letters")), [false, true]);
  await page.reload();
  await page.getByText("serving").waitFor();
});

test("everything can be done with the keyboard, and one sees where one is", async (t) => {
  const page = await open(t, server.url);
  await page.getByText("serving").waitFor();
  const seen = new Set();
  for (let i = 0; i < 40; i++) {
    await page.keyboard.press("Tab");
    const at = await page.evaluate(() => {
      const element = document.activeElement;
      const { outlineStyle, outlineWidth } = getComputedStyle(element);
      return { id: element.id || element.textContent.trim(), body: element === document.body, ring: outlineStyle !== "none" && parseFloat(outlineWidth) >= 2 };
    });
    if (at.body) break;
    assert.ok(at.ring, `${at.id} shows that it has the focus`);
    seen.add(at.id);
  }
  for (const id of ["Skip to the prompt", "theme", "new", "open-settings", "prompt", "send", "shown", "pause"]) assert.ok(seen.has(id), `${id} in ${[...seen]}`);
  await page.reload();
  await page.keyboard.press("Tab");
  await page.keyboard.press("Enter");
  assert.equal(await page.evaluate(() => document.activeElement.id), "prompt", "the first thing leads to the prompt");
  await page.keyboard.type("Write a very long poem.");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("Please.");
  await page.keyboard.press("Enter");
  await until("it is read out", async () => (await page.locator("#live").innerText()).includes("The model is answering."));
  await until("the answer begins", async () => (await answers(page).locator(".text").innerText()).length > 5);
  await page.keyboard.press("Escape");
  await answered(page);
  assert.equal(await mine(page).locator(".text").innerText(), "Write a very long poem.\nPlease.");
  assert.match(await page.locator("#live").innerText(), /The answer was stopped\.$/);
  await button(page, "Settings").focus();
  await page.keyboard.press("Enter");
  await page.getByRole("dialog", { name: "Settings" }).waitFor();
  await page.keyboard.press("Escape");
  assert.equal(await page.evaluate(() => document.activeElement.id), "open-settings", "the focus comes back");
});

test("nothing moves for those who want no motion", async (t) => {
  const page = await open(t, server.url, { reducedMotion: "reduce" });
  await page.getByText("serving").waitFor();
  const frames = () => page.evaluate(async () => {
    let count = 0;
    const real = CanvasRenderingContext2D.prototype.setTransform;
    CanvasRenderingContext2D.prototype.setTransform = function (...all) { count += 1; return real.apply(this, all); };
    await new Promise((done) => setTimeout(done, 3000));
    CanvasRenderingContext2D.prototype.setTransform = real;
    return count;
  });
  // Four lanes, once a second at most.
  assert.ok((await frames()) <= 16);
  await button(page, "Pause").click();
  assert.equal(await frames(), 0);
  await page.emulateMedia({ reducedMotion: "no-preference" });
  await button(page, "Go on").click();
  assert.ok((await frames()) > 16, "for others it does");
});

test("it is accessible in both themes and on a small screen, and looks as it should", async (t) => {
  for (const [name, options] of [
    ["light", { colorScheme: "light" }],
    ["dark", { colorScheme: "dark" }],
    ["small", { colorScheme: "light", viewport: { width: 360, height: 740 } }],
  ]) {
    const page = await open(t, server.url, options);
    await page.getByText("serving").waitFor();
    await sample(page, { Temperature: 0, "Tokens at most": 48 });
    await say(page, "What is a pipeline in a factory? Answer with a short list.");
    const others = [1, 2, 3].map((seed) => fetch(`${server.url}/v1/chat/completions`, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ messages: [{ role: "user", content: `Tell me a story about ${seed} boats.` }], seed, max_tokens: 64 }),
    }).catch(() => null));
    await answered(page);
    await new Promise((done) => setTimeout(done, 1000));
    await picture(page, name);
    await accessible(page, name);
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), true, "nothing is wider than the screen");
    if (name === "small") {
      await button(page, "Pipe").click();
      await page.locator("#lane-3").scrollIntoViewIfNeeded();
      assert.equal(await page.evaluate(() => document.querySelector("#pipe").scrollWidth <= innerWidth), true);
      await picture(page, "small-pipe");
      await accessible(page, "small, the pipe");
      await button(page, "Chat").click();
    }
    await button(page, "Settings").click();
    await accessible(page, `${name}, settings`);
    await picture(page, `${name}-settings`);
    await page.keyboard.press("Escape");
    await Promise.all(others);
  }
  const page = await open(t, server.url, { colorScheme: "dark" });
  const ground = () => page.evaluate(() => getComputedStyle(document.documentElement).backgroundColor);
  const dark = await ground();
  await page.locator("#theme").click();
  assert.notEqual(await ground(), dark, "the switch is stronger than the system");
  await page.reload();
  assert.notEqual(await ground(), dark, "and stays");
});

test("a stage that is killed is told where it was, and the chat goes on when it is back", async (t) => {
  const options = ["--stages", "3", "--max-sequences", "16", "--no-recover", "--recover-wait", "120"];
  const head = await cluster(["rig2", "rig3"], tiny("llama-33"), options);
  t.after(() => head.close());
  const page = await open(t, head.url, { allowed: [/Failed to load resource/] });
  await page.getByText("serving").waitFor();
  await sample(page, { "Tokens at most": 200, Temperature: 0 });
  // Others keep the pipe busy, so that there is time to watch.
  const others = Array.from({ length: 15 }, (_, seed) => fetch(`${head.url}/v1/chat/completions`, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ messages: [{ role: "user", content: "hello" }], seed, temperature: 1, max_tokens: 200 }),
  }).then((response) => response.status));
  await say(page, "count");
  await until("the answer begins", async () => (await answers(page).locator(".text").innerText()).length > 20);
  await picture(page, "cluster");
  await head.workers.rig3.end("SIGKILL");
  const lane = page.locator("#lane-2");
  await lane.getByRole("alert").waitFor();
  assert.match(await lane.getByRole("alert").innerText(), /^Lost: .+/);
  assert.match(await lane.innerText(), /rig3/);
  assert.match(await page.locator("#state").innerText(), /down/);
  await answered(page);
  const failure = page.locator(".failure");
  assert.match(await failure.innerText(), /stage 2|rig3/);
  const statuses = await Promise.all(others);
  assert.ok(statuses.includes(503) && statuses.every((status) => status === 503 || status === 200), `everybody is told: ${statuses}`);
  await picture(page, "lost");
  await accessible(page, "a stage is lost");
  await failure.getByRole("button", { name: "Retry" }).click();
  await failure.waitFor();
  assert.match(await failure.innerText(), /503/);
  assert.match(await failure.innerText(), /stage 2|rig3/);
  head.back("rig3");
  await page.locator("#state", { hasText: "serving" }).waitFor();
  await lane.getByRole("alert").waitFor({ state: "hidden" });
  await failure.getByRole("button", { name: "Retry" }).click();
  await failure.waitFor({ state: "detached" });
  await answered(page);
  assert.equal(await failure.count(), 0);
  assert.ok((await answers(page).locator(".text").innerText()).length > 20);
});

test("an answer outlives its stage: the page says where it was lost, and the text goes on", async (t) => {
  const head = await cluster(["rig2", "rig3"], tiny("llama-33"), ["--stages", "3", "--max-sequences", "16", "--recover-wait", "120"]);
  t.after(() => head.close());
  const page = await open(t, head.url);
  await page.getByText("serving").waitFor();
  await sample(page, { "Tokens at most": 200, Temperature: 0 });
  const ask = (seed, temperature) => fetch(`${head.url}/v1/chat/completions`, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ messages: [{ role: "user", content: "count" }], seed, temperature, max_tokens: 200 }),
  }).then((response) => response.json());
  const alone = await ask(0, 0);
  const others = Array.from({ length: 15 }, (_, seed) => ask(seed, 1));
  await say(page, "count");
  await until("the answer begins", async () => (await answers(page).locator(".text").innerText()).length > 20);
  await head.workers.rig3.end("SIGKILL");
  const lane = page.locator("#lane-2");
  await lane.getByRole("alert").waitFor();
  assert.match(await page.locator("#state").innerText(), /down/);
  head.back("rig3");
  await page.locator("#state", { hasText: "serving" }).waitFor();
  await answered(page);
  assert.equal(await page.locator(".failure").count(), 0);
  const kept = await page.evaluate(() => JSON.parse(localStorage.getItem("pp-run.conversations"))[0].messages);
  assert.equal(kept[1].text, alone.choices[0].message.content, "as if nothing had happened");
  for (const other of await Promise.all(others)) assert.match(other.choices[0].finish_reason, /^(stop|length)$/);
});
