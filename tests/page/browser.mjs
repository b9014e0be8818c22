// A browser that is quick to complain: whatever a page's policy forbids, and whatever its scripts throw, fails the test.

import { existsSync, mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import assert from "node:assert/strict";

import { chromium } from "playwright-core";

import { PATIENCE } from "./servers.mjs";

const CHROMIUM = process.env.PP_CHROMIUM ?? "/usr/bin/chromium";
/** Where pictures go, if anywhere. */
const PICTURES = process.env.PP_PICTURES;
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

let browser;

export async function launch() {
  assert.ok(existsSync(CHROMIUM), `${CHROMIUM} is missing: apt-get install chromium, or say with PP_CHROMIUM where one is`);
  // As root a browser has no sandbox; what it is shown here is our own.
  browser = await chromium.launch({ executablePath: CHROMIUM, args: process.getuid() === 0 ? ["--no-sandbox"] : [] });
}

export const quit = () => browser?.close();

/** A page of a fresh browser profile; what it did wrong is told when the test is over. `allowed`: refusals of requests
    that the browser logs and the test wants. */
export async function open(t, url, { allowed = [], ...options } = {}) {
  const context = await browser.newContext({ viewport: { width: 1440, height: 900 }, colorScheme: "light", ...options });
  context.setDefaultTimeout(PATIENCE);
  const faults = [];
  const note = (text) => allowed.some((pattern) => pattern.test(text)) || faults.push(text);
  await context.exposeFunction("violated", (what) => note(`policy: ${what}`));
  await context.addInitScript(() => addEventListener("securitypolicyviolation", (event) => window.violated(`${event.violatedDirective} ${event.blockedURI}`)));
  context.on("weberror", (error) => note(`script: ${error.error().message}`));
  context.on("console", (message) => message.type() === "error" && note(`console: ${message.text()}`));
  context.on("dialog", (dialog) => note(`a dialog: ${dialog.message()}`) && dialog.dismiss());
  context.on("request", (request) => new URL(request.url()).origin === new URL(url).origin || /^(data|blob):/.test(request.url()) || note(`a request elsewhere: ${request.url()}`));
  t.after(async () => {
    await context.close();
    assert.deepEqual(faults, []);
  });
  const page = await context.newPage();
  await page.goto(url);
  return page;
}

/** Answers requests for chat completions with a script: status and body, or the data of events. */
export function script(page, answer) {
  return page.route("**/v1/chat/completions", async (route) => {
    const { status = 200, headers = {}, body, events } = await answer(route.request());
    if (!events) return route.fulfill({ status, headers, contentType: "application/json", body: JSON.stringify(body) });
    const lines = events.map((event) => `data: ${typeof event === "string" ? event : JSON.stringify(event)}\n\n`);
    return route.fulfill({ status, headers, contentType: "text/event-stream", body: lines.join("") });
  });
}

/** The events of an answer. */
export const answering = (text) => [
  { choices: [{ index: 0, delta: { role: "assistant", content: "" } }] },
  // In pieces of which some end within a word.
  ...(text.match(/[\s\S]{1,7}/g) ?? []).map((content) => ({ choices: [{ index: 0, delta: { content } }] })),
  { choices: [{ index: 0, delta: {}, finish_reason: "stop" }] },
  { choices: [], usage: { prompt_tokens: 37, completion_tokens: 12, prompt_tokens_details: { cached_tokens: 32 } } },
  "[DONE]",
];

export async function say(page, text) {
  await page.getByLabel("Your message").fill(text);
  await page.keyboard.press("Enter");
}

/** Until no answer is under way. */
export const answered = (page) => page.getByRole("button", { name: "Send", exact: true }).waitFor();

/** What axe finds wrong, as text. */
export async function accessible(page, where) {
  await page.evaluate(AXE);
  const found = await page.evaluate(async () => {
    const { violations } = await window.axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"] });
    return violations.map(({ id, help, nodes }) => `${id}: ${help}: ${nodes.map((node) => `${node.target} ${node.failureSummary}`).join("; ")}`);
  });
  assert.deepEqual(found, [], where);
}

export async function picture(page, name) {
  if (!PICTURES) return;
  mkdirSync(PICTURES, { recursive: true });
  await page.screenshot({ path: join(PICTURES, `${name}.png`) });
}
