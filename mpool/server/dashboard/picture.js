// Vectors as a picture: points on their two principal components. The chosen point shows its text and its neighbours.
import { make, setText } from "./dom.js";
import { term } from "./hints.js";
import { principal } from "./components.js";

export const POINTS = 300; // vectors in a picture
const NAMED = 40; // points that have a label
const EDGE = 8, NEAREST = 2;

export function cosine(one, other) {
  const dot = (left, right) => left.reduce((sum, value, at) => sum + value * right[at], 0);
  return dot(one, other) / (Math.sqrt(dot(one, one) * dot(other, other)) || 1);
}

// Coordinates in percent of the picture. Both axes have the same scale, unless that makes the picture flat.
function scaled(points) {
  const sides = [0, 1].map((axis) => {
    const values = points.map((point) => point[axis]);
    return [Math.min(...values), Math.max(...values)];
  });
  const widths = sides.map(([low, high]) => high - low), most = Math.max(...widths) || 1;
  return points.map((point) => [0, 1].map((axis) => {
    const spread = Math.max(widths[axis], most / 2), middle = (sides[axis][0] + sides[axis][1]) / 2;
    const part = 0.5 + (point[axis] - middle) / spread;
    return EDGE + (100 - 2 * EDGE) * (axis ? 1 - part : part);
  }));
}

const overlap = (one, other) => one[0] < other[2] && other[0] < one[2] && one[1] < other[3] && other[1] < one[3];

// Show the labels that have room beside their points.
function place(field, points) {
  const { width, height } = field.getBoundingClientRect();
  if (!width) return;
  const taken = points.map(({ x, y, size }) =>
    [(x * width) / 100 - size, (y * height) / 100 - size, (x * width) / 100 + size, (y * height) / 100 + size]);
  points.forEach(({ button, label }, at) => {
    const [left, top, right, bottom] = taken[at], middle = (top + bottom) / 2;
    const own = Math.min(label.textContent.length * 6.6 + 8, 260);
    const boxes = { right: [right, middle - 10, right + own, middle + 10],
      left: [left - own, middle - 10, left, middle + 10] };
    const side = Object.keys(boxes).find((name) => {
      const box = boxes[name];
      return box[0] >= 0 && box[2] <= width && !taken.some((other, index) => index !== at && overlap(box, other));
    });
    button.dataset.side = side ?? ((left + right) / 2 < width / 2 ? "right" : "left");
    button.classList.toggle("named", side !== undefined && points.length <= NAMED);
    if (side) taken.push(boxes[side]);
  });
}

// items: [{text, url}], url: of an image or absent. vectors: one per item.
export function picture(items, vectors) {
  const { points: raw, shares } = principal(vectors), at = scaled(raw), caption = make("p", { class: "told" });
  const points = items.map(({ text, url }, index) => {
    const label = make("span", { class: "label" }, text.slice(0, 300));
    const button = make("button", { type: "button", class: url ? "point seen" : "point", tabindex: -1,
      "aria-label": `${index + 1}: ${text.slice(0, 300)}` },
    url ? make("img", { src: url, alt: "" }) : String(index + 1), label);
    button.style.left = `${at[index][0]}%`;
    button.style.top = `${at[index][1]}%`;
    return { button, label, x: at[index][0], y: at[index][1], size: url ? 24 : 12 };
  });
  const field = make("div", { class: "field", role: "group",
    "aria-label": "Picture of the vectors. Arrow keys move between points." },
    ...points.map(({ button }) => button));
  const hint = "Point at one, or use the arrow keys: its text and the most similar ones are shown here.";

  function choose(index) {
    const likeness = vectors.map((vector) => cosine(vectors[index], vector));
    const near = likeness.map((value, other) => [value, other]).filter(([, other]) => other !== index)
      .sort((one, other) => other[0] - one[0]).slice(0, NEAREST);
    points.forEach(({ button }, other) => {
      button.tabIndex = other === index ? 0 : -1;
      button.classList.toggle("chosen", other === index);
      button.style.setProperty("--heat", `${Math.round(100 * Math.max(0, likeness[other]))}%`);
    });
    field.classList.add("compared");
    caption.replaceChildren(make("strong", {}, `${index + 1}. ${items[index].text.slice(0, 1000)}`),
      ...(near.length ? [make("br"), "Most similar: ", near.map(([value, other]) =>
        `${other + 1}. ${items[other].text.slice(0, 60)} (${value.toFixed(2)})`).join(" \u00b7 ")] : []));
  }
  const clear = () => {
    field.classList.remove("compared");
    points.forEach(({ button }) => button.classList.remove("chosen"));
    setText(caption, hint);
  };

  // Arrow keys go to the next point in their direction's order: every point is reached.
  function move(event) {
    const axis = { ArrowLeft: "x", ArrowRight: "x", ArrowUp: "y", ArrowDown: "y" }[event.key];
    const edge = { Home: 0, End: -1 }[event.key];
    if (!axis && edge === undefined) return;
    event.preventDefault();
    const order = points.map((_, index) => index)
      .sort((one, other) => points[one][axis ?? "x"] - points[other][axis ?? "x"]);
    const now = order.indexOf(points.findIndex(({ button }) => button === document.activeElement));
    const step = ["ArrowRight", "ArrowDown"].includes(event.key) ? 1 : -1;
    const next = edge ?? (now + step + order.length) % order.length;
    points[order.at(next)].button.focus();
  }
  points.forEach(({ button }, index) => {
    button.addEventListener("focus", () => choose(index));
    button.addEventListener("pointerenter", () => choose(index));
    button.addEventListener("click", () => button.focus()); // Safari does not focus a button that is clicked
  });
  field.addEventListener("keydown", move);
  field.addEventListener("pointerleave", () => {
    const focused = points.findIndex(({ button }) => button === document.activeElement);
    if (focused < 0) clear();
    else choose(focused);
  });
  field.addEventListener("focusout", (event) => field.contains(event.relatedTarget) || clear());
  points[0].button.tabIndex = 0;
  clear();
  new ResizeObserver(() => place(field, points)).observe(field);
  const share = (value) => `${(100 * value).toFixed(0)} %`;
  return make("figure", { class: "picture" }, field, make("figcaption", {}, caption, make("small", {},
    term("components", "Principal components"), `: ${share(shares[0])} of the variance from left to right, `
    + `${share(shares[1])} from bottom to top.`)));
}
