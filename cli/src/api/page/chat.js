// The chat: a conversation, its answers as they stream, and what can be done with each.

import { ApiError, complete, key } from "./api.js";
import { byId, h, seconds, setText } from "./dom.js";
import { askForKey, sampling } from "./settings.js";
import { copyText, render } from "./markdown.js";
import * as store from "./store.js";

/** Between two pictures of an answer that comes. */
const REDRAW_MS = 80;
/** How often an answer that comes is kept. */
const KEEP_MS = 1000;
const TITLE_MAX = 60;

let conversation = store.conversations()[0] ?? store.fresh();
/** The answer that is under way. */
let running = null;
let model = "";
const log = byId("log");
const prompt = byId("prompt");

/** Called with the figures of each answer. */
let heard = () => {};
/** Called when there is another key. */
let keyed = () => {};

export function start({ onAnswer, onKey }) {
  heard = onAnswer;
  keyed = onKey;
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else send();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!running) send();
    }
  });
  prompt.addEventListener("input", grow);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open], details.menu[open]")) running.abort();
  });
  byId("new").addEventListener("click", () => show(store.fresh(), true));
  byId("export-md").addEventListener("click", () => save("md", "text/markdown", asMarkdown()));
  byId("export-json").addEventListener("click", () => save("json", "application/json", asJson()));
  byId("conversations").addEventListener("toggle", list);
  addEventListener("pagehide", () => store.keep(conversation));
  show(conversation);
}

export function setModel(name) {
  model = name;
}

export const system = {
  get: () => conversation.system,
  set: (text) => {
    conversation.system = text;
    keep();
  },
};

export function forgetAll() {
  store.forgetAll();
  show(store.fresh(), true);
}

function keep() {
  conversation.changed = Date.now();
  if (!store.keep(conversation)) announce("The browser has no room to keep this conversation.");
}

function show(other, focus = false) {
  running?.abort();
  conversation = other;
  log.replaceChildren(...other.messages.map((message, index) => article(message, index)));
  if (other.messages.length === 0) log.append(greeting());
  setText(byId("title"), other.title || "New conversation");
  byId("conversations").open = false;
  log.scrollTop = log.scrollHeight;
  if (focus) prompt.focus();
}

function greeting() {
  const ask = (text) => h("button", { type: "button", onclick: () => ((prompt.value = text), prompt.focus(), grow()) }, text);
  return h(
    "div",
    { class: "empty" },
    h("p", {}, "Ask, and watch the pipe work."),
    h("p", { class: "hint" }, "What you write goes to this server and nowhere else; conversations are kept in this browser."),
    h("p", { class: "tries" }, ["What is a pipeline?", "Write a haiku about waiting.", "Explain bubbles in pipeline parallelism."].map(ask)),
  );
}

function list() {
  const all = store.conversations();
  const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
  const item = (other) =>
    h(
      "li",
      { "aria-current": other.id === conversation.id ? "true" : null },
      h("button", { type: "button", class: "open", onclick: () => show(other, true) }, h("span", {}, other.title || "Untitled"), h("time", {}, when.format(other.changed))),
      h("button", { type: "button", class: "quiet", "aria-label": `Forget ${other.title || "Untitled"}`, onclick: () => forget(other) }, "Forget"),
    );
  byId("list").replaceChildren(...(all.length ? all.map(item) : [h("li", { class: "hint" }, "Nothing is kept yet.")]));
}

function forget(other) {
  store.forget(other.id);
  if (other.id === conversation.id) show(store.fresh());
  list();
  byId("conversations").open = true;
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function send() {
  const text = prompt.value.trim();
  if (!text) return;
  prompt.value = "";
  grow();
  ask(text);
}

function ask(text) {
  if (conversation.messages.length === 0) {
    log.replaceChildren();
    conversation.title = text.replace(/\s+/g, " ").slice(0, TITLE_MAX);
    setText(byId("title"), conversation.title);
  }
  add({ role: "user", text });
  answer();
}

function add(message) {
  conversation.messages.push(message);
  const element = article(message, conversation.messages.length - 1);
  log.append(element);
  keep();
  return element;
}

/** Drops what comes from a message on. */
function cut(index) {
  running?.abort();
  conversation.messages.length = index;
  while (log.children.length > index) log.lastElementChild.remove();
}

async function answer() {
  const controller = new AbortController();
  const message = { role: "assistant", text: "" };
  const body = {
    model: model || undefined,
    messages: [
      ...(conversation.system.trim() ? [{ role: "system", content: conversation.system }] : []),
      ...conversation.messages.filter((m) => m.text !== "").map((m) => ({ role: m.role, content: m.text })),
    ],
    ...sampling(),
  };
  const element = add(message);
  element.classList.add("coming");
  const view = new View(element, message);
  running = controller;
  byId("send").textContent = "Stop";
  log.scrollTop = log.scrollHeight;
  const clock = new Clock();
  try {
    for await (const piece of complete(body, controller.signal)) {
      if (piece.text || piece.thought) clock.tick();
      message.text += piece.text ?? "";
      if (piece.thought) message.thought = (message.thought ?? "") + piece.thought;
      if (piece.reason) message.reason = piece.reason;
      if (piece.usage) clock.usage = piece.usage;
      view.changed();
    }
  } catch (error) {
    if (error.name === "AbortError") message.reason = "stopped";
    else message.error = told(error);
  }
  // Another answer may be under way by now: this one was cut off for it.
  if (running === controller) {
    running = null;
    byId("send").textContent = "Send";
  }
  element.classList.remove("coming");
  message.figures = clock.figures();
  view.finish();
  if (conversation.messages.includes(message)) keep();
  if (message.figures) heard(message.figures);
  if (message.error?.status === 401) needKey();
}

const told = (error) =>
  error instanceof ApiError
    ? { message: error.message, status: error.status, type: error.type, code: error.code, retryAfter: error.retryAfter }
    : { message: `This page has a fault: ${error.message}`, type: "page" };

async function needKey() {
  const typed = await askForKey(key.get() ? "The key that you gave is not taken." : "Type the one that it was started with.");
  if (typed) keyed();
  const last = conversation.messages.length - 1;
  if (typed && conversation.messages[last]?.error?.status === 401) again(last);
}

/** Answers again what a message answered. */
function again(index) {
  cut(index);
  answer();
}

/** When the pieces of an answer came. */
class Clock {
  begin = performance.now();
  first = 0;
  last = 0;
  pieces = 0;
  usage = null;

  tick() {
    this.last = performance.now();
    this.first ||= this.last;
    this.pieces += 1;
  }

  figures() {
    if (!this.first) return null;
    const tokens = this.usage?.completion_tokens ?? this.pieces;
    const decode = (this.last - this.first) / 1e3;
    return {
      first: (this.first - this.begin) / 1e3,
      rate: decode > 0 && tokens > 1 ? (tokens - 1) / decode : null,
      tokens,
      prompt: this.usage?.prompt_tokens ?? null,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
    };
  }
}

/** An answer that grows: drawn now and then, read out by sentences. */
class View {
  drawn = 0;
  kept = performance.now();
  said = 0;
  timer = 0;

  constructor(element, message) {
    Object.assign(this, { element, message });
    setText(byId("live"), "");
    announce("The model is answering.");
  }

  changed() {
    const now = performance.now();
    if (now - this.kept > KEEP_MS) {
      this.kept = now;
      keep();
    }
    if (this.timer) return;
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.draw();
      this.say(/^[\s\S]*[.!?:\n](?=\s)/);
    }, Math.max(0, this.drawn + REDRAW_MS - now));
  }

  draw() {
    this.drawn = performance.now();
    const stick = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    fill(this.element.querySelector(".text"), this.message);
    if (stick) log.scrollTop = log.scrollHeight;
  }

  /** Reads out what is new, as far as it ends as it should. */
  say(end) {
    const fresh = end.exec(this.message.text.slice(this.said))?.[0] ?? "";
    this.said += fresh.length;
    announce(fresh.trim());
  }

  finish() {
    clearTimeout(this.timer);
    if (!this.element.isConnected) return;
    this.say(/^[\s\S]+/);
    const index = conversation.messages.indexOf(this.message);
    const stick = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    this.element.replaceWith(article(this.message, index));
    if (stick) log.scrollTop = log.scrollHeight;
    const { error, reason } = this.message;
    announce(error ? error.message : reason === "stopped" ? "The answer was stopped." : "The answer is complete.");
  }
}

function announce(text) {
  if (text) byId("live").append(h("p", {}, text));
}

function fill(element, message) {
  const parts = [];
  if (message.thought) parts.push(h("details", { class: "thought" }, h("summary", {}, "Thoughts"), render(message.thought)));
  parts.push(message.role === "user" ? h("p", { class: "plain" }, message.text) : render(message.text));
  const open = element.querySelector(".thought")?.open;
  element.replaceChildren(...parts);
  if (open) element.querySelector(".thought").open = true;
}

function article(message, index) {
  const mine = message.role === "user";
  const text = h("div", { class: "text" });
  fill(text, message);
  const copy = h("button", { type: "button", onclick: () => copyText(copy, message.text) }, "Copy");
  const element = h(
    "article",
    { class: `message ${message.role}`, "aria-label": mine ? "You" : "Model" },
    h("h3", { class: "who" }, mine ? "You" : "Model"),
    text,
    message.error ? failure(message.error, index) : null,
    h(
      "footer",
      {},
      copy,
      mine
        ? h("button", { type: "button", onclick: () => edit(element, message, index) }, "Edit")
        : h("button", { type: "button", onclick: () => again(index) }, "Retry"),
      h("span", { class: "meta" }, mine ? "" : meta(message)),
    ),
  );
  return element;
}

function meta({ figures, reason }) {
  const parts = [];
  if (reason === "length") parts.push("ended at the token limit");
  if (reason === "stopped") parts.push("stopped");
  if (figures) {
    parts.push(`first token ${seconds(figures.first)}`);
    if (figures.rate) parts.push(`${figures.rate.toFixed(1)} tokens/s`);
    parts.push(`${figures.tokens} tokens`);
    if (figures.prompt !== null) parts.push(`prompt ${figures.prompt}${figures.cached ? `, ${figures.cached} cached` : ""}`);
  }
  return parts.join(" · ");
}

function failure(error, index) {
  const kind = [error.status || "", error.code || error.type].filter(Boolean).join(" ");
  const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  return h(
    "div",
    { class: "failure", role: "alert" },
    h("p", {}, h("strong", {}, error.message), wait),
    h("p", { class: "row" }, h("code", {}, kind || "error"), h("button", { type: "button", class: "strong", onclick: () => again(index) }, "Retry")),
  );
}

function edit(element, message, index) {
  const area = h("textarea", { "aria-label": "Edit your message", rows: Math.min(12, message.text.split("\n").length + 1) });
  area.value = message.text;
  const back = () => {
    const old = article(message, index);
    form.closest("article").replaceWith(old);
    old.querySelector("footer button:nth-of-type(2)").focus();
  };
  const form = h(
    "form",
    {
      class: "edit",
      onsubmit: (event) => {
        event.preventDefault();
        const text = area.value.trim();
        if (!text) return;
        cut(index);
        ask(text);
        prompt.focus();
      },
      onkeydown: (event) => {
        if (event.key === "Escape") event.stopPropagation(), back();
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
      },
    },
    area,
    h("p", { class: "row" }, h("button", { type: "submit", class: "strong" }, "Send again"), h("button", { type: "button", onclick: back }, "Cancel"), h("span", { class: "hint" }, "What came after it is dropped")),
  );
  element.querySelector(".text").replaceChildren(form);
  element.querySelector("footer").remove();
  area.focus();
}

function asJson() {
  const { title, system: instructions, messages } = conversation;
  const plain = messages.map(({ role, text }) => ({ role, content: text }));
  const first = instructions.trim() ? [{ role: "system", content: instructions }] : [];
  return `${JSON.stringify({ title, model, messages: [...first, ...plain] }, null, 2)}\n`;
}

function asMarkdown() {
  const parts = [`# ${conversation.title || "Conversation"}`, model && `Model: ${model}`];
  if (conversation.system.trim()) parts.push("## System", conversation.system);
  for (const message of conversation.messages) parts.push(message.role === "user" ? "## You" : "## Model", message.text);
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}

function save(ending, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const name = (conversation.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40);
  h("a", { href: url, download: `${name || "conversation"}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
  byId("export").open = false;
}
