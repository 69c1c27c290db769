// Elements and requests. Data of the server becomes only text nodes and attributes that hold no code.

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

// Set a text only if it differs: assistive technology reads every change aloud.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Use the origin: browsers refuse to fetch relative to an address that contains a password.
export function request(path, body, signal) {
  const options = { signal, cache: "no-store", redirect: "error" };
  if (body !== undefined) {
    options.method = "POST";
    options.headers = { "content-type": "application/json" };
    options.body = JSON.stringify(body);
  }
  return fetch(location.origin + path, options);
}

// The error in a response, in either of the server's formats.
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

// Data of server-sent events, one by one.
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
