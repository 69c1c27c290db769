// The playground's results: vectors as a picture and their similarities, ranked documents, generated images.
import { events, json, make, makeSvg } from "./dom.js";
import { term } from "./hints.js";
import { POINTS, cosine, picture } from "./picture.js";

const MATRIX = 12; // inputs of which all pairs are shown
const LISTED = 50; // vectors that are listed

// Bar chart of a vector: its first 256 numbers at most.
function bars(vector) {
  const shown = vector.slice(0, 256);
  const most = Math.max(...shown.map(Math.abs)) || 1;
  return makeSvg("svg", { viewBox: `0 -1 ${shown.length} 2`, preserveAspectRatio: "none", class: "bars",
    "aria-hidden": "true" },
    ...shown.map((value, at) => makeSvg("rect", { x: at, width: 0.9, y: value > 0 ? -value / most : 0,
      height: Math.abs(value) / most, class: value > 0 ? "plus" : "minus" })));
}

function matrix(rows) {
  const names = rows.map((_, at) => make("th", { scope: "col" }, String(at + 1)));
  return make("div", { class: "wide", tabindex: 0, role: "group", "aria-label": "Similarity of all pairs" },
    make("table", { class: "matrix" }, make("thead", {}, make("tr", {}, make("td"), ...names)),
      make("tbody", {}, ...rows.map((row, at) => make("tr", {}, make("th", { scope: "row" }, String(at + 1)),
        ...rows.map((other) => {
          const value = cosine(row, other), cell = make("td", {}, make("span", {}, value.toFixed(2)));
          cell.style.setProperty("--heat", `${Math.round(100 * Math.max(0, value))}%`);
          return cell;
        }))))));
}

function named({ text, url }) {
  return url ? make("figure", { class: "thumb" }, make("img", { src: url, alt: "" }), make("figcaption", {}, text))
    : make("div", {}, text);
}

// Show vectors: a picture, the similarity of all pairs, and the numbers. items: [{text, url}], one per vector.
function vectors(output, items, found) {
  const rows = found.data.map((one) => one.embedding), few = rows.length > 1 && rows.length <= MATRIX;
  const pairs = few ? [make("div", { class: "pairs" },
    make("p", {}, term("similarity", "Similarity of all pairs")), matrix(rows))] : [];
  const notes = [...(rows.length > POINTS ? [`The picture has the first ${POINTS} vectors.`] : []),
    ...(rows.length > LISTED ? [`The list has the first ${LISTED} of ${rows.length} vectors.`] : [])];
  output.replaceChildren(
    ...(rows.length > 1 ? [make("div", { class: "seen-pairs" },
      picture(items.slice(0, POINTS), rows.slice(0, POINTS)), ...pairs)] : []),
    ...(notes.length ? [make("p", { class: "soft" }, notes.join(" "))] : []),
    make("ol", { class: "inputs" }, ...rows.slice(0, LISTED).map((vector, at) => make("li", {}, named(items[at]),
      bars(vector)))));
  return `${rows.length} vector${rows.length === 1 ? "" : "s"} of ${rows[0].length} numbers`;
}

function needLines(lines, name) {
  if (!lines.length) throw new Error(`Write at least one ${name}.`);
}

// Task -> request(options): {path, body}, and run(request, options, signal): shows the result in options.output,
// returns a summary. options: model, images [{name, url}], text, lines, query, number(id), output, progress(text).
export const TASKS = {
  embed: {
    request: ({ model, lines }) => ({ path: "/v1/embeddings", body: { model, input: lines } }),
    run: async ({ path, body }, { output, lines }, signal) => {
      needLines(lines, "text");
      return vectors(output, lines.map((text) => ({ text })), await json(path, body, signal));
    },
  },
  rerank: {
    request: ({ model, query, lines }) => ({ path: "/v1/rerank", body: { model, query, documents: lines } }),
    run: async ({ path, body }, { output, lines }, signal) => {
      needLines(lines, "document");
      const found = await json(path, body, signal);
      output.replaceChildren(make("p", {}, "Best first, with the ", term("score", "score")),
        make("ol", { class: "ranking" }, ...found.results.map((one) => make("li", {},
          make("span", {}, lines[one.index]), " ", make("strong", {}, one.relevance_score.toFixed(4))))));
      return `${found.usage.total_tokens} tokens`;
    },
  },
  embed_image: {
    request: ({ model, images }) => ({ path: "/api/mpool/embed_images",
      body: { model, images: images.map((image) => image.url) } }),
    run: async ({ path, body }, { images, output }, signal) => {
      if (!images.length) throw new Error("Choose at least one image.");
      return vectors(output, images.map(({ name, url }) => ({ text: name, url })), await json(path, body, signal));
    },
  },
  image: {
    request: ({ model, text, number }) => ({ path: "/v1/images/generations", body: { model, prompt: text,
      num_inference_steps: number("steps"), seed: number("seed"), stream: true, partial_images: 3 } }),
    run: async ({ path, body }, { output, progress }, signal) => {
      if (!body.prompt.trim()) throw new Error("Write a prompt.");
      const element = make("img", { alt: `Generated for: ${body.prompt}`, class: "generated" });
      let shown = 0;
      for await (const chunk of events(path, body, signal)) {
        element.src = `data:image/${chunk.output_format};base64,${chunk.b64_json}`;
        if (!shown++) output.replaceChildren(element);
        progress(`preview ${shown}`);
      }
      return `generated with ${Math.max(0, shown - 1)} previews`;
    },
  },
};
