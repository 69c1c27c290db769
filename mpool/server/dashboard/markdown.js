// Markdown as elements: headings, paragraphs, lists, tables, quotes, code. Texts become text nodes, so a model cannot
// inject HTML; links open only http and https addresses, and images are never loaded.
import { copyButton, make } from "./dom.js";
import { highlight } from "./highlight.js";

const DEPTH = 6, SPAN = 2000;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\n]*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*?)[ \t#]*$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

const isBlank = (line) => line.trim() === "";
const isTable = (lines, at) => lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-")
  && lines[at + 1].includes("|") && lines[at + 1].length < SPAN && DELIMITERS.test(lines[at + 1]);
// The expressions take time quadratic in the length of a line: longer lines are text.
const fenceOf = (line) => (line.length < SPAN ? FENCE.exec(line) : null);
const headingOf = (line) => (line.length < SPAN ? HEADING.exec(line) : null);
const isRule = (line) => line.length < SPAN && RULE.test(line);
const beginsBlock = (lines, at) => fenceOf(lines[at]) || headingOf(lines[at]) || isRule(lines[at])
  || QUOTE.test(lines[at]) || ITEM.test(lines[at]) || isTable(lines, at);

// ---- blocks ---------------------------------------------------------------------------------------------------------

// Split a text into blocks {kind, lines, begin}. begin: number of the first line.
function* blocks(text) {
  const lines = text.split("\n");
  for (let at = 0; at < lines.length;) {
    const line = lines[at], begin = at;
    if (isBlank(line)) {
      at++;
      continue;
    }
    const fence = fenceOf(line);
    let kind = "paragraph";
    if (fence) {
      kind = "code";
      const end = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}[ \\t]*$`);
      for (at++; at < lines.length && !end.test(lines[at]); at++);
      at++;
    } else if (headingOf(line)) {
      kind = "heading";
      at++;
    } else if (isRule(line)) {
      kind = "rule";
      at++;
    } else if (QUOTE.test(line)) {
      kind = "quote";
      for (at++; at < lines.length && QUOTE.test(lines[at]); at++);
    } else if (ITEM.test(line)) {
      kind = "list";
      for (at++; at < lines.length; at++) {
        const next = isBlank(lines[at]) ? lines[at + 1] ?? "" : lines[at];
        if (isBlank(next) || (!ITEM.test(next) && !/^\s{2,}/.test(next)
          && (isBlank(lines[at]) || beginsBlock(lines, at)))) break;
      }
    } else if (isTable(lines, at)) {
      kind = "table";
      for (at += 2; at < lines.length && lines[at].includes("|"); at++);
    } else {
      for (at++; at < lines.length && !isBlank(lines[at]) && !beginsBlock(lines, at); at++);
    }
    yield { kind, lines: lines.slice(begin, at), begin };
  }
}

// Source text as text nodes and spans of one colour.
export const coloured = (text, language) => highlight(text, language).map(([kind, part]) =>
  (kind ? make("span", { class: `hl-${kind}` }, part) : part));

// A block of source text with its language and a button that copies it.
export const codeBlock = (text, language) => make("div", { class: "code" },
  make("div", { class: "code-head" }, make("span", {}, language || "text"),
    copyButton("Copy", () => text, { class: "small" })),
  make("pre", { tabindex: 0, role: "group", "aria-label": "Code" }, make("code", {}, ...coloured(text, language))));

function code(lines) {
  const [, mark, info] = FENCE.exec(lines[0]);
  const end = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \\t]*$`);
  const closed = lines.length > 1 && end.test(lines.at(-1));
  return codeBlock(lines.slice(1, closed ? -1 : undefined).join("\n"), info.trim().split(/[\s{,]/)[0].slice(0, 40));
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((part) => part.trim());

function table(lines, depth) {
  const sides = cells(lines[1]).map((part) =>
    (!part.endsWith(":") ? null : part.startsWith(":") ? "centre" : "right"));
  const row = (line, tag) => make("tr", {}, ...cells(line).map((part, at) =>
    make(tag, { class: sides[at] }, ...inline(part, depth))));
  return make("div", { class: "wide", tabindex: 0, role: "group", "aria-label": "Table" }, make("table", {},
    make("thead", {}, row(lines[0], "th")), make("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")))));
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]), ordered = /\d/.test(first[2]), items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= first[1].length + 1) items.push([line.slice(found[0].length)]);
    else items[items.length - 1].push(line.replace(new RegExp(`^\\s{1,${first[0].length}}`), ""));
  }
  const made = items.map((own) => {
    const parts = depth < DEPTH ? [...blocks(own.join("\n"))] : [{ kind: "paragraph", lines: own }];
    const [head, ...rest] = parts;
    return make("li", {}, ...(head?.kind === "paragraph" ? inline(head.lines.join("\n"), depth) : head
      ? [block(head, depth + 1)] : []), ...rest.map((part) => block(part, depth + 1)));
  });
  return make(ordered ? "ol" : "ul", ordered ? { start: parseInt(first[2], 10) } : {}, ...made);
}

function block({ kind, lines }, depth = 0) {
  if (kind === "code") return code(lines);
  if (kind === "rule") return make("hr");
  if (kind === "table") return table(lines, depth);
  if (kind === "list") return list(lines, depth);
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    return make(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text, depth)); // the page has h1 and h2
  }
  if (kind === "quote") {
    const own = lines.map((line) => line.replace(QUOTE, "")).join("\n");
    return make("blockquote", {}, ...(depth < DEPTH ? [...blocks(own)].map((part) => block(part, depth + 1)) : [own]));
  }
  return make("p", {}, ...inline(lines.join("\n"), depth));
}

// ---- inside of a block ----------------------------------------------------------------------------------------------

// An escaped character, code, a link or image, bold, strikethrough, italics. Every part is bounded.
const INLINE = new RegExp([
  String.raw`\\([\\\x60*_{}\[\]()#+\-.!~|>])`,
  String.raw`(\x60+)([^\x60]|[^\x60][^]{0,${SPAN}}?[^\x60])\2(?!\x60)`,
  String.raw`!?\[([^\]\n]{1,500})\]\(([^()\s]{1,${SPAN}})\)`,
  String.raw`(\*\*|__|~~)(?=\S)([^]{1,${SPAN}}?\S?)\6`,
  String.raw`(?<![\w*])([*_])(?=[^\s*_])([^*_\n]{1,${SPAN}}?)\8(?![\w*])`,
].join("|"), "g");
const PART = 20_000; // longer texts are shown without links and emphasis

function isWeb(address) {
  try {
    return ["http:", "https:"].includes(new URL(address).protocol);
  } catch {
    return false;
  }
}

function inline(text, depth) {
  if (depth > DEPTH || text.length > PART) return [text];
  const found = [];
  let seen = 0;
  for (const match of text.matchAll(INLINE)) {
    const [all, escaped, , literal, label, address, mark, strong, , emphasis] = match;
    if (match.index > seen) found.push(text.slice(seen, match.index));
    seen = match.index + all.length;
    if (escaped !== undefined) found.push(escaped);
    else if (literal !== undefined) found.push(make("code", {}, literal));
    else if (label !== undefined) {
      found.push(!all.startsWith("!") && isWeb(address)
        ? make("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, label) : all);
    } else if (strong !== undefined) found.push(make(mark === "~~" ? "s" : "strong", {}, ...inline(strong, depth + 1)));
    else found.push(make("em", {}, ...inline(emphasis, depth + 1)));
  }
  if (seen < text.length) found.push(text.slice(seen));
  return found;
}

const MOST = 20_000; // cost of a text; the blocks beyond are plain text
const PLAIN = 10_000; // characters of a part of plain text: a part that does not change costs the browser nothing
// Upper bound of what a block costs the browser: elements, more for those of a line, and the length.
const cost = (kind, source) => 5 + source.length / 50 + (kind === "code" ? 10 + source.length / 8
  : 4 * (source.match(/\n/g)?.length ?? 0) + (source.match(/[|*_`~[]/g)?.length ?? 0));

// Split a text into parts, at the ends of lines if they are not far.
function plain(text) {
  const found = [];
  for (let at = 0; at < text.length;) {
    const line = text.indexOf("\n", at + PLAIN) + 1, end = line && line < at + 2 * PLAIN ? line : at + PLAIN;
    found.push({ kind: "plain", source: text.slice(at, end) });
    at = end;
  }
  return found;
}

// The blocks [{kind, source, lines}] to show of a text.
function shown(text) {
  const found = [];
  let left = MOST;
  for (const { kind, lines, begin } of blocks(text)) {
    const source = lines.join("\n");
    left -= cost(kind, source);
    if (left <= 0) return [...found, ...plain(text.split("\n").slice(begin).join("\n"))];
    found.push({ kind, source, lines });
  }
  return found;
}

// Show a text that grows: only the blocks that changed are made again.
export function render(parent, text) {
  const old = parent.blocks ?? [];
  parent.blocks = shown(text).map((part, at) => {
    const same = old[at]?.kind === part.kind && old[at].source === part.source;
    const element = same ? old[at].element
      : part.kind === "plain" ? make("p", { class: "plain" }, part.source) : block(part);
    if (!same && old[at]) old[at].element.replaceWith(element);
    else if (!same) parent.append(element);
    return { kind: part.kind, source: part.source, element };
  });
  for (const gone of old.slice(parent.blocks.length)) gone.element.remove();
}
