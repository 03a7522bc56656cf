"use strict";
// The charts of Overview. They use the functions of page.js, which comes after this file.

const CHARTS = [
  { title: "Hit ratio", unit: (n) => percent(n), top: () => 1, lines: [["found", (h, i) => ratio(h.matched_per_s[i], h.missed_per_s[i])]] },
  { title: "Blocks looked up", unit: (n) => `${count(n)}/s`, lines: [["found", "matched_per_s"], ["missed", "missed_per_s"]] },
  { title: "Calls", unit: (n) => `${count(n)}/s`, lines: [["calls", "calls_per_s"]] },
  { title: "Call latency", unit: (n) => time(n), lines: [["p50", "call_p50_s"], ["p99", "call_p99_s"]] },
  { title: "Memory", unit: (n) => bytes(n), top: (h) => Math.max(...h.size_bytes), lines: [["used", "used_bytes"]] },
  { title: "Objects", unit: (n) => `${count(n)}/s`, lines: [["put", "stored_per_s"], ["evicted", "evicted_per_s"]] },
  { title: "Bytes put", unit: (n) => `${bytes(n)}/s`, lines: [["put", "stored_bytes_per_s"]] },
  { title: "Age at eviction", unit: (n) => time(n), lines: [["p50", "eviction_age_s"]] },
];

const SECONDS_SHOWN_MS = 1200e3, KEY_STEPS = { ArrowLeft: -1, ArrowRight: 1, PageUp: 10, PageDown: -10, ArrowUp: 1, ArrowDown: -1 };

const ratio = (hits, misses) => hits + misses > 0 ? hits / (hits + misses) : null;

class Chart {
  constructor(described) {
    this.described = described;
    this.chosen = null;
    this.reading = element("span", "reading");
    this.top = element("span");
    this.svg = svgElement("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", "aria-hidden": true });
    this.svg.append(svgElement("line", { x1: 0, x2: 1000, y1: 50, y2: 50 }));
    this.paths = described.lines.map((_, index) => {
      const path = svgElement("path", { class: index ? "second" : "first" });
      this.svg.append(path);
      return path;
    });
    this.cursor = svgElement("line", { class: "cursor", y1: 0, y2: 100, visibility: "hidden" });
    this.svg.append(this.cursor);
    // For screen readers a slider: a value in a range, moved with the arrow keys.
    this.plot = element("div", "plot", this.svg);
    for (const [name, value] of Object.entries({ role: "slider", tabindex: 0, "aria-label": described.title, "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0, "aria-valuetext": "nothing yet" })) this.plot.setAttribute(name, value);
    this.times = [element("time"), element("time"), element("time")];
    this.rows = element("tbody");
    this.table = element("details", "", element("summary", "", "Table"), scrollable(`${described.title}, as a table`,
      element("table", "counted from-second",
        element("thead", "", element("tr", "", ...["time", ...described.lines.map(([name]) => name)].map(headCell))), this.rows)));
    const names = described.lines.map(([name], index) => element("span", index ? "second-name" : "first-name", name, " "));
    this.element = element("div", "chart",
      element("header", "", element("h3", "", described.title), this.reading), this.plot,
      element("div", "scale axis", ...this.times),
      element("div", "scale", this.top, element("span", "", ...names)), this.table);
    this.plot.addEventListener("pointermove", (event) => this.choose(this.nearest(event.clientX)));
    this.plot.addEventListener("pointerleave", () => this.choose(null));
    this.plot.addEventListener("focus", () => this.choose(this.chosen ?? this.last()));
    this.plot.addEventListener("blur", () => this.choose(null));
    this.plot.addEventListener("keydown", (event) => this.move(event));
    this.table.addEventListener("toggle", () => this.tabulate());
  }

  draw(history) {
    const chosenAt = this.chosen == null ? null : this.history.at_ms[this.chosen];
    this.history = history;
    this.end = Date.now();
    const at = history.at_ms;
    this.values = this.described.lines.map(([, of]) => typeof of === "string" ? history[of] : at.map((_, i) => of(history, i)));
    const known = this.values.flat().filter((value) => value != null);
    const top = this.described.top && known.length ? this.described.top(history) : Math.max(0, ...known) * 1.1;
    // A short history fills the chart.
    this.spanMs = Math.min(HOUR_MS, Math.max(SPAN_MIN_MS, this.end - (at[0] ?? this.end)));
    this.times.forEach((label, index) => {
      const ms = this.end - this.spanMs * (1 - index / 2);
      put(label, this.spanMs < SECONDS_SHOWN_MS ? clock(ms) : clock(ms).slice(0, 5));
      label.dateTime = new Date(ms).toISOString();
    });
    this.values.forEach((values, index) => {
      let text = "", before = null;
      values.forEach((value, i) => {
        if (value == null) { before = null; return; }
        const joined = before != null && at[i] - before < 2.5 * HISTORY_MS;
        const point = `${this.x(at[i]).toFixed(1)} ${(98 - 96 * (top ? value / top : 0)).toFixed(1)}`;
        text += joined ? `L${point}` : `M${point}h.1`;
        before = at[i];
      });
      this.paths[index].setAttribute("d", text);
    });
    put(this.top, known.length ? `0 to ${this.described.unit(top)}` : "nothing yet");
    const kept = at.indexOf(chosenAt);
    this.choose(chosenAt == null || !at.length ? null : Math.max(0, kept));
    this.tabulate();
  }

  x(ms) { return 1000 * (1 - (this.end - ms) / this.spanMs); }

  last() { return this.history?.at_ms.length ? this.history.at_ms.length - 1 : null; }

  nearest(clientX) {
    if (this.last() == null) return null;
    const box = this.plot.getBoundingClientRect(), at = this.history.at_ms;
    const wanted = this.end - this.spanMs * (1 - (clientX - box.left) / box.width);
    return at.reduce((best, ms, i) => Math.abs(ms - wanted) < Math.abs(at[best] - wanted) ? i : best, 0);
  }

  move(event) {
    const last = this.last(), step = KEY_STEPS[event.key];
    if (last == null || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Home") this.choose(0);
    else if (event.key === "End") this.choose(last);
    else if (step) this.choose(Math.min(last, Math.max(0, (this.chosen ?? last) + step)));
    else return;
    event.preventDefault();
  }

  /** Shows the values of one point; null: of the last one. */
  choose(index) {
    this.chosen = index;
    const at = index ?? this.last();
    if (at == null) return;
    const values = this.values.map((line) => this.described.unit(line[at] ?? null));
    const when = clock(this.history.at_ms[at]);
    put(this.reading, `${index == null ? "" : `${when}  `}${values.join(" · ")}`);
    this.cursor.setAttribute("visibility", index == null ? "hidden" : "visible");
    for (const side of ["x1", "x2"]) this.cursor.setAttribute(side, this.x(this.history.at_ms[at]).toFixed(1));
    this.plot.setAttribute("aria-valuemax", this.last());
    this.plot.setAttribute("aria-valuenow", at);
    this.plot.setAttribute("aria-valuetext", `${when}: ${this.described.lines.map(([name], line) => `${name} ${values[line]}`).join(", ")}`);
  }

  /** Fills the table, the last values first, while it is open. */
  tabulate() {
    if (!this.table.open || !this.history) return;
    table(this.rows, this.history.at_ms.map((ms, i) => [[clock(ms)], ...this.values.map((values) => [this.described.unit(values[i] ?? null), "number"])]).reverse());
  }
}
