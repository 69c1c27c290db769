// Elements and requests. What comes from the server only ever becomes text nodes and attributes that hold no code.

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
export const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Sets a text only if it is another one: assistive technology reads out what changes.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// By the origin: where the address has a password in it, browsers refuse to fetch relative to it.
export function request(path, body, signal) {
  const options = { signal, cache: "no-store", redirect: "error" };
  if (body !== undefined) {
    options.method = "POST";
    options.headers = { "content-type": "application/json" };
    options.body = JSON.stringify(body);
  }
  return fetch(location.origin + path, options);
}

// The error that an answer tells of, in either of the server's shapes.
export function errorOf(found) {
  const error = found && found.error;
  return new Error(typeof error === "string" ? error : (error && error.message) || "The server gave no reason.");
}

export async function json(path, body, signal) {
  const response = await request(path, body, signal);
  const found = await response.json();
  if (!response.ok) throw errorOf(found);
  return found;
}

// Data of server-sent events, as they come.
export async function* events(path, body, signal) {
  const response = await request(path, body, signal);
  if (!response.ok) throw errorOf(await response.json());
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += decoder.decode(value, { stream: true });
      for (let end = held.indexOf("\n\n"); end >= 0; end = held.indexOf("\n\n")) {
        const lines = held.slice(0, end).split("\n");
        held = held.slice(end + 2);
        const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (!data.length) continue;
        if (data[0] === "[DONE]") return;
        const found = JSON.parse(data.join("\n"));
        if (found.error) throw errorOf(found);
        yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
