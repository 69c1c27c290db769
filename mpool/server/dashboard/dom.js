// Helpers for elements and HTTP requests. Data from the server is only used for text nodes and for attributes that
// cannot contain code.

export const byId = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const makeSvg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

export function button(title, action, attributes = {}) {
  const made = make("button", { type: "button", ...attributes }, title);
  made.addEventListener("click", () => action(made));
  return made;
}

// Set the text of an element only if it changes: screen readers read every update aloud.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setBadge(element, text, kind) {
  setText(element, text);
  element.className = `badge ${kind}`;
}

// Show the state of the playground. A conversation shows the usual states itself.
export function say(state) {
  setText(byId("progress"), state);
  byId("progress").classList.toggle("usual", ["running", "done", "stopped"].includes(state));
}

// Update the children of an element that show rows: keep the child of a row that stays, so that neither the focus nor
// a button under the pointer is lost. key(row) names a row, create(row) makes its child, update(child, row) shows the
// row, and empty() makes the only child if there are no rows.
export function keyed(parent, rows, key, create, update, empty) {
  const old = new Map([...parent.children].filter((child) => child.dataset.key !== undefined)
    .map((child) => [child.dataset.key, child]));
  const shown = rows.map((row) => {
    const name = key(row);
    const child = old.get(name) ?? create(row);
    child.dataset.key = name;
    update(child, row);
    return child;
  });
  const wanted = shown.length ? shown : [empty()];
  if (!shown.length && parent.children.length === 1 && !old.size) return;
  wanted.forEach((child, at) => {
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] ?? null);
  });
  while (parent.children.length > wanted.length) parent.lastChild.remove();
}

// Call draw() soon, but for at most a third of the time: after a call that took t, the next one waits for 2 t.
// A timer and not an animation frame, because hidden tabs have no frames.
export function paced(draw) {
  let timer = null, wait = 30;
  const run = () => {
    timer = null;
    const begin = performance.now();
    draw();
    wait = Math.max(30, 2 * (performance.now() - begin));
  };
  return {
    soon: () => { timer ??= setTimeout(run, wait); },
    now: () => { clearTimeout(timer); run(); },
  };
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return;
  } catch { /* only pages of https and of this machine have a clipboard: use the selection */ }
  const area = make("textarea", { class: "offscreen", readonly: "" });
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("The browser does not allow copying: select the text instead.");
}

// A button that copies what text() returns, and says so for two seconds.
export function copyButton(title, text, attributes = {}) {
  return button(title, async (made) => {
    try {
      await copy(await text());
      setText(made, "Copied");
    } catch (error) {
      setText(made, error.message);
    }
    setTimeout(() => setText(made, title), 2000);
  }, attributes);
}

// ---- requests -------------------------------------------------------------------------------------------------------

// Use an absolute URL: browsers refuse to fetch relative to a page address that contains a password.
export function request(path, body, signal) {
  const options = { signal, cache: "no-store", redirect: "error" };
  if (body !== undefined) {
    options.method = "POST";
    options.headers = { "content-type": "application/json" };
    options.body = JSON.stringify(body);
  }
  return fetch(location.origin + path, options);
}

// Error in a response of OpenAI's or Ollama's protocol.
export function errorOf(found) {
  const error = found && found.error;
  const text = typeof error === "string" ? error : error && error.message;
  return new Error(text || "The server returned no error message.");
}

export async function json(path, body, signal) {
  const response = await request(path, body, signal);
  const found = await response.json();
  if (!response.ok) throw errorOf(found);
  return found;
}

const BUSY_MS = 25;

// Iterate over the parsed data of server-sent events. Events that are already there arrive without a pause, so the
// iteration lets the browser paint and handle clicks after every 25 ms: fast streams would block the page otherwise.
export async function* events(path, body, signal) {
  const response = await request(path, body, signal);
  if (!response.ok) throw errorOf(await response.json());
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let held = "", began = performance.now();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += decoder.decode(value, { stream: true });
      let start = 0;
      for (let end = held.indexOf("\n\n"); end >= 0; end = held.indexOf("\n\n", start)) {
        const lines = held.slice(start, end).split("\n");
        start = end + 2;
        const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (!data.length) continue;
        if (data[0] === "[DONE]") return;
        const found = JSON.parse(data.join("\n"));
        if (found.error) throw errorOf(found);
        yield found;
        if (performance.now() - began > BUSY_MS) {
          await new Promise((resolve) => setTimeout(resolve));
          began = performance.now();
          signal?.throwIfAborted();
        }
      }
      held = held.slice(start);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
