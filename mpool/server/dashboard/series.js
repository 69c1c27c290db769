// The server's history of the pool. A page that opens later shows the past; further points are fetched one by one.
import { json } from "./dom.js";

export class Series {
  // step: seconds per point.
  constructor(step) {
    this.step = step;
    this.last = -1;
    this.started = null;
    this.size = 0;
    this.time = 0;
    this.pool = {};
    this.models = new Map();
  }

  async refresh() {
    let found = await json(`/api/mpool/series?step=${this.step}&after=${this.last}`);
    if (this.started !== null && found.started !== this.started) { // the server was started again
      this.last = -1;
      this.pool = {};
      this.models.clear();
      found = await json(`/api/mpool/series?step=${this.step}`);
    }
    this.started = found.started;
    this.size = found.sizes[found.steps.indexOf(this.step)];
    this.time = found.time;
    this.append(this.pool, found.pool);
    for (const name of [...this.models.keys()]) {
      if (!found.models.some((model) => model.key === name)) this.models.delete(name);
    }
    for (const { key, values } of found.models) {
      if (!this.models.has(key)) this.models.set(key, {});
      this.append(this.models.get(key), values);
    }
    this.last = found.last;
  }

  append(held, values) {
    for (const [name, list] of Object.entries(values)) {
      held[name] = (held[name] ?? []).concat(list).slice(-this.size);
    }
  }

  // Mean of the last points of a value of the pool, or of a model, without those that are null; null if there are none.
  static mean(values, name, points) {
    const list = (values?.[name] ?? []).slice(-points).filter((value) => value !== null);
    return list.length ? list.reduce((sum, value) => sum + value, 0) / list.length : null;
  }
}
