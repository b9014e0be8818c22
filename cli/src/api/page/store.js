// What the browser keeps: conversations and settings in its local storage. Where there is none, they live as long as
// the page.

const CONVERSATIONS = "pp-run.conversations";
const SETTINGS = "pp-run.settings";
/** Conversations that are kept; the oldest go first. */
const KEPT = 50;

const memory = new Map();

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name) ?? memory.get(name) ?? "null") ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(name, value) {
  const text = JSON.stringify(value);
  memory.set(name, text);
  try {
    localStorage.setItem(name, text);
    return true;
  } catch {
    return false;
  }
}

const isMessage = (m) => m && typeof m.text === "string" && (m.role === "user" || m.role === "assistant");

/** Conversations, the latest first; what is none of ours is left out. */
export function conversations() {
  const all = read(CONVERSATIONS, []);
  const sound = (c) => c && typeof c.id === "string" && Array.isArray(c.messages) && c.messages.every(isMessage);
  return Array.isArray(all) ? all.filter(sound).sort((a, b) => b.changed - a.changed) : [];
}

export function fresh() {
  return { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "", system: "", messages: [], changed: Date.now() };
}

/** Keeps a conversation; makes room by forgetting the oldest. False where the browser keeps nothing. */
export function keep(conversation) {
  if (conversation.messages.length === 0 && !conversation.system) return true;
  let all = [conversation, ...conversations().filter((c) => c.id !== conversation.id)].slice(0, KEPT);
  while (!write(CONVERSATIONS, all)) {
    if (all.length <= 1) return false;
    all = all.slice(0, -1);
  }
  return true;
}

export const forget = (id) => write(CONVERSATIONS, conversations().filter((c) => c.id !== id));
export const forgetAll = () => write(CONVERSATIONS, []);

export const settings = {
  all: () => read(SETTINGS, {}),
  set: (name, value) => write(SETTINGS, { ...settings.all(), [name]: value }),
};
