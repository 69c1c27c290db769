// Small SVG plots of samples over time. The caption has the latest figures as text.
import { draw, make, say } from "./dom.js";

const WIDTH = 300, HEIGHT = 100;

// The next round figure at or above a value: 1, 2 or 5 times a power of ten.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * unit).find((step) => step >= value * 0.999999);
}

export class Plot {
  // title: of the plot; names: of its one or two curves; format: turns a figure into text; seconds: the time it covers.
  constructor(title, names, format, seconds) {
    this.names = names;
    this.format = format;
    this.seconds = seconds;
    this.keys = names.map((name, at) => make("span", { class: at ? "key-second" : "key-first" }));
    this.curves = names.map((name, at) => draw("path", { class: at ? "curve second" : "curve first" }));
    this.top = make("span");
    this.svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      ...[1, HEIGHT / 2, HEIGHT - 1].map((y) => draw("line", { class: "axis", x1: 0, x2: WIDTH, y1: y, y2: y })),
      ...this.curves);
    this.figure = make("figure", {}, make("figcaption", {}, make("strong", {}, title), ...this.keys),
      make("div", { class: "ticks" }, this.top), this.svg,
      make("div", { class: "ticks" }, make("span", {}, `${seconds / 60} min ago`), make("span", {}, "now")));
  }

  // samples: [{time, values}], the newest last; a value of null is a gap.
  show(samples) {
    const now = samples.length ? samples[samples.length - 1].time : 0;
    const seen = samples.flatMap((sample) => sample.values.filter((value) => value !== null));
    const top = roundUp(Math.max(0, ...seen));
    say(this.top, this.format(top));
    this.curves.forEach((curve, at) => {
      let path = "", open = false;
      for (const sample of samples) {
        const value = sample.values[at];
        if (value === null) {
          open = false;
          continue;
        }
        const x = WIDTH * (1 - (now - sample.time) / this.seconds);
        const y = HEIGHT - 1 - (HEIGHT - 2) * value / top;
        path += `${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}${open ? "" : "h.1"}`;
        open = true;
      }
      curve.setAttribute("d", path);
      const last = samples.map((sample) => sample.values[at]).filter((value) => value !== null).pop();
      say(this.keys[at], `${this.names[at]} ${last === undefined ? "–" : this.format(last)}`);
    });
  }
}
