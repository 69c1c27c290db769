// SVG plots of values over time. The caption shows the values at the pointer, or the latest ones.
import { make, makeSvg, setText } from "./dom.js";
import { clock, span } from "./formats.js";
import { term } from "./hints.js";

const WIDTH = 600, HEIGHT = 100;

// Round a value up to 1, 2 or 5 times a power of ten.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * unit).find((step) => step >= value * 0.999999);
}

export class Plot {
  // title: caption; hint: a term of hints.js, or null; names: name of the server's values -> name of the curve, one or
  // two; format: function that formats a value; bridge: number of points without a value that a curve may cross.
  constructor(title, hint, names, format, bridge = 0) {
    this.names = Object.entries(names);
    this.format = format;
    this.bridge = bridge;
    this.at = null;
    this.shown = null;
    this.keys = this.names.map((_, at) => make("span", { class: at ? "key second" : "key first" }));
    this.time = make("span", { class: "soft" });
    this.areas = this.names.map((_, at) => makeSvg("path", { class: at ? "area second" : "area first" }));
    this.curves = this.names.map((_, at) => makeSvg("path", { class: at ? "curve second" : "curve first" }));
    this.cross = makeSvg("line", { class: "cross", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.top = make("span");
    this.begin = make("span");
    this.svg = makeSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      ...[1, HEIGHT / 2, HEIGHT - 1].map((y) => makeSvg("line", { class: "axis", x1: 0, x2: WIDTH, y1: y, y2: y })),
      ...this.areas, ...this.curves, this.cross);
    this.figure = make("figure", { tabindex: 0, "aria-label": `${title}: plot; arrow keys move through time` },
      make("figcaption", {}, hint ? term(hint, title) : make("strong", {}, title), ...this.keys, this.time),
      make("div", { class: "ticks" }, this.top), this.svg,
      make("div", { class: "ticks" }, this.begin, make("span", {}, "now")));
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.figure.addEventListener("blur", () => this.move(null));
    this.figure.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !this.shown || event.target !== this.figure) return;
      event.preventDefault();
      const count = this.shown.size;
      this.move(Math.max(0, Math.min(count - 1, (this.at ?? count) + step * (event.shiftKey ? 10 : 1))));
    });
  }

  point(event) {
    const place = this.svg.getBoundingClientRect();
    if (this.shown) {
      const count = this.shown.size;
      this.move(Math.max(0, Math.min(count - 1, Math.round((event.clientX - place.left) / place.width * (count - 1)))));
    }
  }

  move(at) {
    this.at = at;
    this.caption();
  }

  // Show values {name: [...]}, one per point, the newest last. Missing points at the beginning are empty.
  // size: number of points of the time axis; step: seconds per point; time: end of the last point, in seconds.
  show(values, { size, step, time }) {
    this.shown = { values, size, step, time };
    const seen = this.names.flatMap(([name]) => (values[name] ?? []).filter((value) => value !== null));
    const top = roundUp(seen.reduce((most, value) => Math.max(most, value), 0));
    setText(this.top, this.format(top));
    setText(this.begin, `${span(size * step)} ago`);
    this.names.forEach(([name], at) => {
      const list = values[name] ?? [], first = size - list.length;
      let path = "", area = "", open = null, last = null, missing = 0;
      const close = () => { area += open === null ? "" : `L${last} ${HEIGHT}L${open} ${HEIGHT}Z`; };
      list.forEach((value, index) => {
        if (value === null) {
          if (++missing > this.bridge) {
            close();
            open = null;
          }
          return;
        }
        missing = 0;
        const x = (WIDTH * (first + index) / (size - 1)).toFixed(1);
        const y = (HEIGHT - 1 - (HEIGHT - 2) * value / top).toFixed(1);
        path += `${open === null ? "M" : "L"}${x} ${y}${open === null ? "h.1" : ""}`;
        area += `${open === null ? "M" : "L"}${x} ${y}`;
        open ??= x;
        last = x;
      });
      close();
      this.curves[at].setAttribute("d", path);
      this.areas[at].setAttribute("d", at ? "" : area);
    });
    this.caption();
  }

  caption() {
    if (!this.shown) return;
    const { values, size, step, time } = this.shown;
    this.names.forEach(([name, title], at) => {
      const list = values[name] ?? [];
      const value = this.at === null ? list.findLast((one) => one !== null) : list[this.at - (size - list.length)];
      setText(this.keys[at], `${title} ${value === undefined || value === null ? "–" : this.format(value)}`);
    });
    setText(this.time, this.at === null ? "" : clock(time - (size - 1 - this.at) * step));
    this.cross.setAttribute("visibility", this.at === null ? "hidden" : "visible");
    const x = this.at === null ? 0 : WIDTH * this.at / (size - 1);
    this.cross.setAttribute("x1", x);
    this.cross.setAttribute("x2", x);
  }
}
