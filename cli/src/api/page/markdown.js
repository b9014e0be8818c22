// Markdown as nodes. A model's words become text nodes and a few elements that are made here; no HTML is ever read, and
// links lead to http, https and mailto only.

import { h } from "./dom.js";

const FENCE = /^\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^\s{0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s{0,3}>\s?(.*)$/;
const ROW = /^\s*\|(.+)\|\s*$/;
const DIVIDER = /^\s*\|(\s*:?-+:?\s*\|)+\s*$/;
/** Lists in lists and quotes in quotes; deeper ones are text. */
const DEPTH_MAX = 8;

/** A text as a fragment. */
export function render(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0));
  return fragment;
}

function blocks(lines, depth) {
  const nodes = [];
  let at = 0;
  const isBlock = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line) || QUOTE.test(line);
  while (at < lines.length) {
    const line = lines[at];
    let match;
    if (line.trim() === "") {
      at += 1;
    } else if ((match = FENCE.exec(line))) {
      const end = new RegExp(`^\\s{0,3}${match[1][0]}{${match[1].length},}\\s*$`);
      const from = ++at;
      while (at < lines.length && !end.test(lines[at])) at += 1;
      nodes.push(code(lines.slice(from, at).join("\n"), match[2]));
      at += 1;
    } else if ((match = HEADING.exec(line))) {
      // Below those of the page itself.
      nodes.push(h(`h${Math.min(6, match[1].length + 3)}`, { class: `h${match[1].length}` }, inline(match[2])));
      at += 1;
    } else if (RULE.test(line)) {
      nodes.push(h("hr"));
      at += 1;
    } else if (QUOTE.test(line) && depth < DEPTH_MAX) {
      const quoted = [];
      while (at < lines.length && (match = QUOTE.exec(lines[at]))) quoted.push(match[1]), (at += 1);
      nodes.push(h("blockquote", {}, blocks(quoted, depth + 1)));
    } else if (ITEM.test(line) && depth < DEPTH_MAX) {
      const [node, next] = list(lines, at, depth);
      nodes.push(node);
      at = next;
    } else if (ROW.test(line) && at + 1 < lines.length && DIVIDER.test(lines[at + 1])) {
      const [node, next] = tableOf(lines, at);
      nodes.push(node);
      at = next;
    } else {
      const from = at++;
      while (at < lines.length && lines[at].trim() !== "" && !isBlock(lines[at])) at += 1;
      nodes.push(h("p", {}, paragraph(lines.slice(from, at))));
    }
  }
  return nodes;
}

function paragraph(lines) {
  return lines.flatMap((line, i) => {
    const hard = /( {2,}|\\)$/.test(line);
    const nodes = inline(line.replace(/( {2,}|\\)$/, "").trimStart());
    if (i + 1 === lines.length) return nodes;
    return [...nodes, hard ? h("br") : "\n"];
  });
}

function list(lines, from, depth) {
  const [, indent, mark] = ITEM.exec(lines[from]);
  const ordered = /\d/.test(mark);
  const start = ordered ? parseInt(mark, 10) : null;
  const node = h(ordered ? "ol" : "ul", ordered && start !== 1 ? { start } : {});
  let at = from;
  while (at < lines.length) {
    const match = ITEM.exec(lines[at]);
    if (!match || match[1].length > indent.length + 1 || match[1].length < indent.length || /\d/.test(match[2]) !== ordered) break;
    const width = match[1].length + match[2].length + 1;
    const own = [match[3]];
    at += 1;
    while (at < lines.length) {
      const line = lines[at];
      const space = line.length - line.trimStart().length;
      if (line.trim() === "") {
        const next = lines[at + 1] ?? "";
        if (next.trim() === "" || next.length - next.trimStart().length < Math.min(width, indent.length + 2)) break;
        own.push("");
      } else if (space >= Math.min(width, indent.length + 2)) {
        own.push(line.slice(Math.min(space, width)));
      } else if (!ITEM.test(line) && lines[at - 1].trim() !== "" && !FENCE.test(line) && !HEADING.test(line)) {
        own.push(line.trimStart());
      } else break;
      at += 1;
    }
    const children = blocks(own, depth + 1);
    // A single paragraph needs no distance of its own.
    const tight = children[0]?.tagName === "P" ? [...children[0].childNodes, ...children.slice(1)] : children;
    node.append(h("li", {}, tight));
    while (at < lines.length && lines[at].trim() === "" && ITEM.test(lines[at + 1] ?? "")) at += 1;
  }
  return [node, at];
}

const cells = (line) => ROW.exec(line)[1].split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function tableOf(lines, from) {
  const head = h("tr", {}, cells(lines[from]).map((cell) => h("th", { scope: "col" }, inline(cell))));
  const body = h("tbody");
  let at = from + 2;
  while (at < lines.length && ROW.test(lines[at])) {
    body.append(h("tr", {}, cells(lines[at]).map((cell) => h("td", {}, inline(cell)))));
    at += 1;
  }
  return [h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" }, h("table", {}, h("thead", {}, head), body)), at];
}

function code(text, language) {
  const copy = h("button", { type: "button", class: "copy", onclick: () => copyText(copy, text) }, "Copy");
  return h("figure", { class: "code" }, h("figcaption", {}, h("span", {}, language || "text"), copy), h("pre", { tabindex: 0 }, h("code", {}, text)));
}

/** Copies, and says on the button whether it could. */
export async function copyText(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = before), 1500);
}

// What begins an inline element, at the place where it is tried. Unlike elsewhere, a single star within a word is a star:
// models multiply more often than they slant half a word.
const INLINE = [
  [/(`+)([^`](?:.*?[^`])?)\1(?!`)/y, (m) => h("code", {}, m[2].replace(/^ (.+) $/, "$1"))],
  [/\\([\\`*_{}[\]()#+\-.!|~<>])/y, (m) => m[1]],
  [/\*\*(?=\S)(.+?)(?<=\S)\*\*/y, (m, deeper) => h("strong", {}, deeper(m[1]))],
  [/__(?=\S)(.+?)(?<=\S)__(?!\w)/y, (m, deeper) => h("strong", {}, deeper(m[1]))],
  [/~~(?=\S)(.+?)(?<=\S)~~/y, (m, deeper) => h("del", {}, deeper(m[1]))],
  [/(?<!\w)\*(?=\S)([^*]+?)(?<=\S)\*(?!\*)/y, (m, deeper) => h("em", {}, deeper(m[1]))],
  [/(?<!\w)_(?=\S)([^_]+?)(?<=\S)_(?!\w)/y, (m, deeper) => h("em", {}, deeper(m[1]))],
  [/\[([^\]]+)\]\(([^()\s]+)(?:\s+"[^"]*")?\)/y, (m, deeper) => link(m[2], deeper(m[1])) ?? m[0]],
  [/https?:\/\/[^\s<>()[\]"']*[^\s<>()[\]"'.,;:!?]/y, (m) => link(m[0], [m[0]]) ?? m[0]],
];

function link(href, children) {
  let url;
  try {
    url = new URL(href);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

function inline(text, depth = 0) {
  const nodes = [];
  let plain = "";
  let at = 0;
  const deeper = (inner) => (depth < DEPTH_MAX ? inline(inner, depth + 1) : [inner]);
  while (at < text.length) {
    let found = null;
    if ("`\\*_~[h".includes(text[at])) {
      for (const [pattern, make] of INLINE) {
        pattern.lastIndex = at;
        const match = pattern.exec(text);
        if (match) {
          found = [match[0].length, make(match, deeper)];
          break;
        }
      }
    }
    if (!found) {
      plain += text[at++];
    } else if (typeof found[1] === "string") {
      plain += found[1];
      at += found[0];
    } else {
      if (plain) nodes.push(plain);
      plain = "";
      nodes.push(found[1]);
      at += found[0];
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}
