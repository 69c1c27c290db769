// The playground's conversation: messages of the user, and the answers of one model or of two side by side.
import { button, byId, make } from "./dom.js";
import { answerOf, stream } from "./answers.js";
import { images, setImages, thumbs } from "./images.js";

const IDEAS = ["Explain what an embedding is, with an example.",
  "Write a Python function that merges two sorted lists.",
  "Compare SQLite and PostgreSQL in a table."];

let exchanges = []; // [{user: {content, images} or null, answers: [one per column], element}]
const list = byId("turns");

// Keep the newest text in view, unless the reader has scrolled up.
function follow(change) {
  const below = list.scrollHeight - list.scrollTop - list.clientHeight;
  change();
  if (below < 60) list.scrollTop = list.scrollHeight;
}

export function clear() {
  exchanges = [];
  list.replaceChildren(make("div", { class: "empty" },
    make("p", {}, "Ask something. The conversation stays in this page only."),
    make("p", { class: "ideas" }, ...IDEAS.map((idea) => button(idea, () => {
      byId("message").value = idea;
      byId("message").dispatchEvent(new Event("input"));
      byId("message").focus();
    })))));
  setImages([]);
}

// ---- requests -------------------------------------------------------------------------------------------------------

function asMessage({ content, images: seen }) {
  const parts = seen.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: parts.length ? [...parts, { type: "text", text: content }] : content };
}

// The messages of an answer: its text and tool calls, and the results of these.
function asMessages(answer) {
  if (!answer || (!answer.content && !answer.calls.length)) return [];
  const calls = answer.calls.map(({ id, name, arguments: given }) => ({ id, type: "function",
    function: { name, arguments: given } }));
  return [{ role: "assistant", content: answer.content || null, ...(calls.length ? { tool_calls: calls } : {}) },
    ...answer.calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result.value }))];
}

function draft() {
  const content = byId("message").value.trim();
  return content || images.length ? { content, images } : null;
}

const hasCalls = (exchange) => exchange?.answers.some((answer) => answer?.calls.length) ?? false;

// The request that sends the message, the results of tool calls, or the last message again. A column without an answer
// of its own has that of the first one.
export function request({ model, sampling }, column = 0, again = false) {
  const user = again ? null : draft(), system = byId("system").value.trim(), last = exchanges.at(-1);
  const messages = exchanges.flatMap((exchange) => {
    const answer = exchange.answers[column] ?? exchange.answers[0];
    const asked = exchange.user ? [asMessage(exchange.user)] : [];
    const repeated = exchange === last && (again || (!user && !answer?.calls.length));
    return repeated ? asked : [...asked, ...asMessages(answer)];
  });
  return { path: "/v1/chat/completions", body: { model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages,
      ...(user ? [asMessage(user)] : [])],
    ...sampling, stream: true, stream_options: { include_usage: true } } };
}

function answerFor(model, column) {
  return answerOf(model, follow, () => byId("form").dispatchEvent(new CustomEvent("again", { detail: column })));
}

function add(user, answers) {
  const asked = user && make("article", { class: "turn user", "aria-label": "You" },
    ...(user.images.length ? [make("div", { class: "thumbs" }, ...thumbs(user.images))] : []),
      make("pre", {}, user.content));
  const element = make("div", { class: "exchange" }, ...(asked ? [asked] : []),
    make("div", { class: "columns" }, ...answers.map((answer) => answer.element)));
  list.querySelector(".empty")?.remove();
  for (const old of list.querySelectorAll(".again")) old.hidden = true;
  exchanges.push({ user, answers, element });
  list.append(element);
  list.scrollTop = list.scrollHeight;
}

async function ended(streams, signal) {
  const failed = (await Promise.allSettled(streams)).find((one) => one.status === "rejected");
  if (failed) throw failed.reason;
  return signal.aborted ? "stopped" : "done";
}

// Send the message to every model, and show the answers while they arrive. all: {model, sampling} per column.
// Returns "done" or "stopped".
export async function send(all, signal) {
  const user = draft();
  if (!user && !hasCalls(exchanges.at(-1))) throw new Error("Write a message.");
  const requests = all.map((options, column) => request(options, column));
  const answers = all.map(({ model }, column) => answerFor(model, column));
  add(user, answers);
  byId("message").value = "";
  byId("message").dispatchEvent(new Event("input"));
  setImages([]);
  return ended(answers.map((answer, column) => stream(answer, requests[column], signal)), signal);
}

// Ask again for the last answer of a column.
export async function repeat(options, column, signal) {
  const { answers } = exchanges.at(-1), asked = request(options, column, true);
  const answer = answerFor(options.model, column);
  answers[column].element.replaceWith(answer.element);
  answers[column] = answer;
  return ended([stream(answer, asked, signal)], signal);
}

export const modelOf = (column) => exchanges.at(-1).answers[column].model;

clear();
