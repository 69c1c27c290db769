// The playground's conversation: turns of the user and the model, with images, reasoning and streamed Markdown.
import { button, byId, copyButton, events, make, paced, setText } from "./dom.js";
import { render } from "./markdown.js";

// Turns {role, content, images, reasoning, element}. A turn of the assistant that failed has the error.
let turns = [];
let attached = []; // images [{name, url}] of the next message
const list = byId("turns");

// Keep the newest text in view, unless the reader has scrolled up.
function follow(change) {
  const below = list.scrollHeight - list.scrollTop - list.clientHeight;
  change();
  if (below < 60) list.scrollTop = list.scrollHeight;
}

const thumbs = (images) => images.map(({ name, url }) => make("img", { src: url, alt: name }));

function userTurn(content, images) {
  const element = make("article", { class: "turn user", "aria-label": "You" },
    ...(images.length ? [make("div", { class: "thumbs" }, ...thumbs(images))] : []), make("pre", {}, content));
  return { role: "user", content, images, element };
}

function assistantTurn(model) {
  const answer = make("div", { class: "markdown" }), thought = make("pre"), facts = make("small", { class: "soft" });
  const thinking = make("details", { class: "thought", hidden: "" }, make("summary", {}, "Reasoning"), thought);
  const turn = { role: "assistant", content: "", reasoning: "", images: [] };
  turn.error = make("p", { class: "bad", role: "alert", hidden: "" });
  turn.facts = facts;
  turn.tools = make("span", { class: "turn-tools", hidden: "" }, copyButton("Copy", () => turn.content, { class: "small" }),
    " ", button("Try again", () => byId("form").dispatchEvent(new CustomEvent("again")), { class: "small again" }));
  turn.element = make("article", { class: "turn assistant", "aria-label": model },
    make("small", { class: "soft" }, model), thinking, answer, turn.error,
    make("footer", {}, facts, " ", turn.tools));
  let shownThought = 0;
  turn.draw = paced(() => follow(() => {
    if (turn.reasoning.length > shownThought) {
      thinking.hidden = false;
      thought.append(turn.reasoning.slice(shownThought));
      shownThought = turn.reasoning.length;
    }
    render(answer, turn.content);
  }));
  return turn;
}

function add(turn) {
  byId("turns").querySelector(".empty")?.remove();
  for (const old of list.querySelectorAll(".again")) old.hidden = true;
  turns.push(turn);
  follow(() => list.append(turn.element));
  list.scrollTop = list.scrollHeight;
}

// Remove the last turn if the model wrote it.
export function dropAnswer() {
  if (turns.at(-1)?.role === "assistant") turns.pop().element.remove();
}

export function clear() {
  turns = [];
  list.replaceChildren(make("p", { class: "empty" }, "Ask something. The conversation stays in this page only."));
  attach([]);
}

// ---- images of the next message -------------------------------------------------------------------------------------

export function attach(images) {
  attached = images;
  byId("attached").replaceChildren(...images.map((image, at) => make("li", {}, ...thumbs([image]),
    button("\u00d7", () => attach(attached.filter((_, index) => index !== at)),
      { class: "small", "aria-label": `Remove ${image.name}` }))));
}

export const isEmpty = () => !turns.length && !byId("message").value.trim() && !attached.length;

// ---- requests -------------------------------------------------------------------------------------------------------

function message({ role, content, images }) {
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return { role, content: parts.length ? [...parts, { type: "text", text: content }] : content };
}

// The request that sends the message, or the last one again if there is no message. options: fields of the request.
export function request(options) {
  const content = byId("message").value.trim(), system = byId("system").value.trim();
  const known = turns.filter((turn) => turn.role === "user" || turn.content);
  const next = content || attached.length ? [{ role: "user", content, images: attached }] : [];
  while (!next.length && known.at(-1)?.role === "assistant") known.pop();
  return { path: "/v1/chat/completions", body: {
    model: options.model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...[...known, ...next].map(message)],
    ...options.sampling, stream: true, stream_options: { include_usage: true } } };
}

// Send the message, or the last one again, and show the answer while it arrives. Returns "done" or "stopped".
export async function send(options, signal) {
  const sent = request(options), content = byId("message").value.trim();
  if (!sent.body.messages.some((one) => one.role === "user")) throw new Error("Write a message.");
  if (content || attached.length) {
    add(userTurn(content, attached));
    byId("message").value = "";
    attach([]);
  }
  const turn = assistantTurn(options.model);
  add(turn);
  turn.element.setAttribute("aria-busy", "true");
  const began = performance.now();
  let usage = null, first = null;
  try {
    for await (const chunk of events(sent.path, sent.body, signal)) {
      usage = chunk.usage ?? usage;
      for (const { delta } of chunk.choices) {
        if (delta.reasoning_content) turn.reasoning += delta.reasoning_content;
        if (delta.content) turn.content += delta.content;
        if (delta.reasoning_content || delta.content) {
          first ??= performance.now();
          turn.draw.soon();
        }
      }
    }
  } catch (error) {
    if (!signal.aborted) {
      setText(turn.error, error.message);
      turn.error.hidden = false;
      throw error;
    }
  } finally {
    turn.draw.now();
    turn.element.removeAttribute("aria-busy");
    turn.tools.hidden = false;
    const seconds = (performance.now() - began) / 1000;
    follow(() => setText(turn.facts, summary(usage, seconds, first === null ? null : first - began)));
  }
  return signal.aborted ? "stopped" : "done";
}

function summary(usage, seconds, first) {
  if (!usage) return `${seconds.toFixed(2)} s`;
  return `${usage.prompt_tokens} prompt tokens, ${usage.completion_tokens} completion tokens in ${seconds.toFixed(2)} s`
    + ` (${(usage.completion_tokens / seconds).toFixed(0)}/s${first === null ? "" : `, first after ${first.toFixed(0)} ms`})`;
}

clear();
