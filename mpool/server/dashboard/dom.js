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

// Set the text of an element only if it changes: screen readers read every update aloud.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

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

// Iterate over the parsed data of server-sent events.
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
