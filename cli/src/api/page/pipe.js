// The pipe: its stages as lanes, what they do and why they do not, figures, and what to do next.

import { call, events, key } from "./api.js";
import { byId, bytes, h, percent, rate, seconds, setText } from "./dom.js";
import { CAUSES, Gantt, TICKS } from "./gantt.js";
import { askForKey } from "./settings.js";

/** Before the server is asked again, at first and at most. */
const AGAIN_MS = [500, 8000];
/** A server that says nothing for so long is gone. */
const SILENCE_MS = 15000;

const gantt = new Gantt();
let wakeUp = () => {};
/** The latest of the server's own words about the pipe. */
let pipeline = null;
let last = { figures: null, counters: null };

/** Asks anew at once: there is another key. */
export const wake = () => wakeUp();

export function watch({ onModel }) {
  legend();
  const pause = byId("pause");
  pause.addEventListener("click", () => {
    gantt.pause(!gantt.paused);
    pause.setAttribute("aria-pressed", String(gantt.paused));
    pause.textContent = gantt.paused ? "Go on" : "Pause";
  });
  byId("shown").addEventListener("change", axis);
  axis();
  keepWatching((name) => {
    setText(byId("model"), name);
    byId("model").title = name;
    onModel(name);
  });
  return {
    answered: (figures) => {
      last.figures = figures;
      showFigures();
    },
  };
}

function axis() {
  const shown = Number(byId("shown").value);
  gantt.zoom(shown);
  const ago = (tick) => (shown * (TICKS - tick)) / TICKS;
  const label = (tick) => (ago(tick) === 0 ? "now" : ago(tick) < 1 ? `−${Math.round(1e3 * ago(tick))} ms` : `−${ago(tick)} s`);
  byId("axis").replaceChildren(...Array.from({ length: TICKS + 1 }, (_, tick) => h("span", {}, label(tick))));
}

async function keepWatching(onModel) {
  let wait = AGAIN_MS[0];
  for (;;) {
    const controller = new AbortController();
    let timer = 0;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => controller.abort(), SILENCE_MS);
    };
    try {
      const response = await call("v1/pipeline/events", { signal: controller.signal });
      wait = AGAIN_MS[0];
      alive();
      for await (const data of events(response)) {
        alive();
        take(JSON.parse(data), onModel);
      }
      say("away", "connection lost");
    } catch (error) {
      if (error.status === 401) {
        say("away", "needs a key");
        const typed = await askForKey(key.get() ? "The key that you gave is not taken." : "Chat and pipe are for those who have it.");
        // Who does not want to say it is not asked again, until there is one.
        if (!typed) await new Promise((resolve) => (wakeUp = resolve));
        continue;
      } else {
        say("away", error.status ? error.message : "not connected");
      }
    } finally {
      clearTimeout(timer);
    }
    await new Promise((resolve) => {
      const later = setTimeout(resolve, wait);
      wakeUp = () => {
        clearTimeout(later);
        resolve();
      };
    });
    wait = Math.min(2 * wait, AGAIN_MS[1]);
  }
}

function take(event, onModel) {
  if (event.type === "pipeline") {
    const before = pipeline;
    pipeline = event.pipeline;
    onModel(pipeline.model);
    if (!before || before.epoch !== pipeline.epoch || before.stages.length !== pipeline.stages.length) lanes();
    stages();
    words();
  } else if (event.type === "tick") {
    gantt.tick(event);
    last.counters = event.counters;
    event.stages.forEach((stage, index) => {
      const busy = byId(`busy-${index}`);
      if (busy) setText(busy, percent(stage.busy));
    });
    showFigures();
  }
}

function say(kind, text) {
  const state = byId("state");
  state.dataset.kind = kind;
  setText(state, text);
}

/** A lane for each stage. */
function lanes() {
  const canvases = [];
  const items = pipeline.stages.map((stage, index) => {
    const canvas = h("canvas", { role: "img", "aria-label": `Stage ${index}: what it did in the last seconds; the table below says it in numbers` });
    canvases.push(canvas);
    return h(
      "li",
      { id: `lane-${index}` },
      h(
        "p",
        { class: "head" },
        h("b", {}, `Stage ${index}`),
        h("span", { class: "device", id: `device-${index}` }),
        h("span", { class: "num", id: `busy-${index}` }),
      ),
      canvas,
      h("p", { class: "foot", id: `foot-${index}` }),
      h("p", { class: "lost", id: `lost-${index}`, role: "alert", hidden: true }),
    );
  });
  byId("lanes").replaceChildren(...items);
  gantt.reset(canvases);
}

const range = ([from, to]) => (to - from === 1 ? `layer ${from}` : `layers ${from}–${to - 1}`);

function stages() {
  const { stages: all, state, reason, split, wire, activations, kv } = pipeline;
  setText(byId("facts"), [`${all.length} ${all.length === 1 ? "stage" : "stages"}`, `split ${split.join("·")}`, `wire ${wire}`, `activations ${activations}`, `KV ${kv}`].join("   "));
  if (state === "running") say("well", "serving");
  else say("down", state === "down" ? "the pipe is down" : state);
  all.forEach((stage, index) => {
    const place = stage.worker ? `${stage.worker}: ${stage.device}` : stage.device;
    setText(byId(`device-${index}`), place);
    byId(`device-${index}`).title = `${place} (${stage.device_id})`;
    const memory = [range(stage.layers), `weights ${bytes(stage.weight_bytes)}`, `KV ${bytes(stage.kv_bytes)}`, `in all ${bytes(stage.device_bytes)}`];
    const hop = pipeline.trace?.hop_seconds?.[index];
    if (hop > 0) memory.push(`hop to it ${seconds(hop)}`);
    setText(byId(`foot-${index}`), memory.join("   "));
    const lost = byId(`lost-${index}`);
    byId(`lane-${index}`).classList.toggle("is-lost", stage.state === "lost");
    lost.hidden = stage.state !== "lost";
    setText(lost, stage.state === "lost" ? `Lost: ${stage.reason ?? reason ?? "it does not answer"}` : "");
  });
}

/** Figures of now, of the last answer, and of the trace. */
function showFigures() {
  const c = last.counters;
  const trace = pipeline?.trace;
  const rows = [];
  if (c) {
    rows.push(["answers", `${rate(c.tokens_per_s)}`, "tokens/s"]);
    rows.push(["prompts", `${rate(c.prompt_tokens_per_s)}`, "tokens/s"]);
  }
  rows.push(["first token", last.figures ? seconds(last.figures.first) : "–", "of your last answer"]);
  if (trace) {
    rows.push(["busy", percent(trace.busy), `of ${percent(trace.law.busy)} by the law`]);
    rows.push(["in flight", trace.in_flight.toFixed(1), `micro-batches; ${trace.law.knee} fill the pipe`]);
    rows.push(["S(B)", trace.law.speedup_max ? `${trace.law.speedup_max.toFixed(2)}×` : "–", "most, against one device"]);
  }
  if (c) {
    rows.push(["requests", `${c.running}`, c.waiting ? `running, ${c.waiting} waiting` : "running"]);
    rows.push(["KV pages", percent((c.held_pages + c.idle_pages) / Math.max(1, c.pages)), `${c.held_pages} held, ${c.idle_pages} cached of ${c.pages}`]);
  }
  const box = byId("figures");
  while (box.children.length > rows.length) box.lastElementChild.remove();
  rows.forEach(([name, value, unit], index) => {
    const cell = box.children[index] ?? box.appendChild(h("div", {}, h("dt"), h("dd"), h("dd", { class: "unit" })));
    [name, value, unit].forEach((text, part) => setText(cell.children[part], text));
  });
}

/** What to do, and the table. */
function words() {
  const { trace, state, reason } = pipeline;
  const actions = trace?.actions ?? [];
  const next = byId("next");
  let lines = actions.map((action) => [action.words, action.kind !== "none" && action.gain > 1 && Number.isFinite(action.gain) ? `up to ${action.gain.toFixed(2)}×` : ""]);
  if (state === "down") lines = [[reason ?? "The pipe is down.", ""], ["Another one is opened in its place as soon as that works. `pp-run cluster status` and what the worker itself says tell more.", ""]];
  else if (pipeline.restarts > 0) lines.push([`The pipe was opened anew (${pipeline.restarts}×), for this: ${pipeline.last_failure}`, ""]);
  if (lines.length === 0) lines.push(["Ask something: the trace says then what would make the pipe faster.", ""]);
  const text = JSON.stringify(lines);
  if (next.dataset.is !== text) {
    next.dataset.is = text;
    next.replaceChildren(...lines.map(([what, gain]) => h("li", {}, h("span", {}, what), gain ? h("span", { class: "num" }, gain) : null)));
  }
  table(trace);
  showFigures();
}

function table(trace) {
  const head = h("tr", {}, ["Stage", "Micro-batches", "Busy", ...CAUSES.map((cause) => cause[2]), "A micro-batch"].map((name) => h("th", { scope: "col" }, name)));
  const rows = (trace?.stages ?? []).map((stage, index) => {
    const shares = ["busy", ...CAUSES.map((cause) => cause[0])].map((name) => h("td", {}, `${(100 * (stage.shares[name] ?? 0)).toFixed(1)} %`));
    return h("tr", {}, h("th", { scope: "row" }, String(index)), h("td", {}, String(stage.micro_batches)), shares, h("td", {}, seconds(stage.step_seconds)));
  });
  const about = trace ? `Of the last ${seconds(trace.seconds)} in which the pipe worked: shares of each stage’s time` : "Nothing has been computed yet";
  byId("table").replaceChildren(h("caption", {}, about), h("thead", {}, head), h("tbody", {}, rows));
}

function legend() {
  const groups = h("li", {}, h("span", { class: "chips", "aria-hidden": "true" }, [0, 1, 2, 3].map((group) => h("i", { class: `chip g${group}` }, String(group)))), "busy: the number is the group’s");
  const causes = CAUSES.map(([name, sign, text, meaning]) => h("li", { title: meaning }, h("i", { class: `chip low c-${name}`, "aria-hidden": "true" }, sign), text, h("span", { class: "sr" }, `: ${meaning}`)));
  byId("legend").replaceChildren(groups, ...causes);
}
