// What the user chooses: sampling, the key, the theme, what is on the screen.

import { key } from "./api.js";
import { byId, h } from "./dom.js";
import { settings } from "./store.js";

/** Sampling, with the server's names: name, what people call it, least, most, step. */
const FIELDS = [
  ["temperature", "Temperature", 0, 2, 0.1],
  ["top_p", "Top p", 0, 1, 0.05],
  ["top_k", "Top k", 0, 1000, 1],
  ["min_p", "Min p", 0, 1, 0.01],
  ["max_tokens", "Tokens at most", 1, 1048576, 1],
  ["seed", "Seed", 0, 2147483647, 1],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1],
  ["repetition_penalty", "Repetition penalty", 0.1, 10, 0.05],
];
const THEMES = ["system", "light", "dark"];

/** What is set of it, as a request has it. */
export function sampling() {
  const all = settings.all();
  const set = FIELDS.filter(([name]) => Number.isFinite(all[name])).map(([name]) => [name, all[name]]);
  return Object.fromEntries(set);
}

export function start({ system, forgetAll, onKey }) {
  const dialog = byId("settings");
  byId("open-settings").addEventListener("click", () => {
    byId("system").value = system.get();
    byId("key").value = key.get();
    byId("sampling").replaceChildren(...FIELDS.map(field));
    dialog.showModal();
  });
  dialog.addEventListener("close", () => {
    system.set(byId("system").value);
    if (byId("key").value !== key.get()) {
      key.set(byId("key").value.trim());
      onKey();
    }
  });
  byId("forget").addEventListener("click", () => {
    const button = byId("forget");
    if (button.dataset.sure) {
      forgetAll();
      dialog.close();
    }
    button.dataset.sure = button.dataset.sure ? "" : "yes";
    button.textContent = button.dataset.sure ? "Press again to forget all" : "Forget all conversations";
  });
  byId("ask-cancel").addEventListener("click", () => byId("ask-key").close(""));
  views();
  theme();
  menus();
}

function field([name, label, min, max, step]) {
  const input = h("input", { id: `s-${name}`, type: "number", min, max, step: step < 1 ? "any" : step, inputmode: "decimal" });
  input.value = settings.all()[name] ?? "";
  input.addEventListener("change", () => {
    const value = input.valueAsNumber;
    if (!input.checkValidity()) return void input.reportValidity();
    settings.set(name, Number.isFinite(value) ? value : undefined);
  });
  return h("div", {}, h("label", { for: `s-${name}` }, label), input);
}

let asking = null;

/** Asks for the key, once at a time; whether one was typed. */
export function askForKey(why) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("ask-key");
    byId("ask-input").value = "";
    byId("ask-why").textContent = why;
    dialog.returnValue = "";
    dialog.showModal();
    byId("ask-input").focus();
    const done = () => {
      asking = null;
      const typed = dialog.returnValue === "use" ? byId("ask-input").value.trim() : "";
      if (typed) key.set(typed);
      resolve(Boolean(typed));
    };
    dialog.addEventListener("close", done, { once: true });
  });
  return asking;
}

function theme() {
  const button = byId("theme");
  const apply = () => {
    const chosen = THEMES.includes(settings.all().theme) ? settings.all().theme : "system";
    if (chosen === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    button.textContent = `Theme: ${chosen}`;
    dispatchEvent(new Event("themechange"));
    return chosen;
  };
  button.addEventListener("click", () => {
    settings.set("theme", THEMES[(THEMES.indexOf(apply()) + 1) % THEMES.length]);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}

/** Where there is room for one pane only. */
function views() {
  const show = (view) => {
    document.body.dataset.view = view;
    for (const name of ["chat", "pipe"]) byId(`show-${name}`).setAttribute("aria-pressed", String(name === view));
    dispatchEvent(new Event("resize"));
  };
  byId("show-chat").addEventListener("click", () => show("chat"));
  byId("show-pipe").addEventListener("click", () => show("pipe"));
  show("chat");
}

/** Menus close when something else is wanted. */
function menus() {
  const all = document.querySelectorAll("details.menu");
  document.addEventListener("click", (event) => all.forEach((menu) => menu.contains(event.target) || (menu.open = false)));
  document.addEventListener("focusin", (event) => all.forEach((menu) => menu.contains(event.target) || (menu.open = false)));
  document.addEventListener("keydown", (event) => {
    const open = [...all].find((menu) => menu.open);
    if (event.key === "Escape" && open) {
      open.open = false;
      open.querySelector("summary").focus();
    }
  });
}
