// Elements without any HTML: what is text stays text.

/** An element with properties (`on…` are listeners, `class`, `data-…` and `aria-…` attributes) and children. */
export function h(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** A text, only where it is not there already: what does not change is not announced. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function bytes(count) {
  if (count >= 1e9) return `${(count / 1e9).toFixed(1)} GB`;
  if (count >= 1e6) return `${(count / 1e6).toFixed(1)} MB`;
  if (count >= 1e3) return `${(count / 1e3).toFixed(1)} kB`;
  return `${count} B`;
}

export function seconds(value) {
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 1e-3) return `${(value * 1e3).toFixed(value >= 0.1 ? 0 : 1)} ms`;
  return `${(value * 1e6).toFixed(0)} µs`;
}

export const percent = (share) => `${(100 * share).toFixed(0)} %`;

export function rate(value) {
  return value >= 100 ? value.toFixed(0) : value.toFixed(1);
}
