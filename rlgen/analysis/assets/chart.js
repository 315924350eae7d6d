"use strict";

// Why no library of charts: uPlot puts 50 kB into each report, not 11, and draws on a canvas, where no text can be selected.

// Room around the curves, in pixels: for the labels of both axes.
const EDGE = { left: 46, right: 10, top: 8, bottom: 20 };
const HEIGHT = 168;
const COLOURS = 8; // `--series-0` to `--series-7` of the style

/** Returns round numbers between two numbers, as near to `count` of them as 1, 2 and 5 allow. */
function ticks(low, high, count) {
  const power = 10 ** Math.floor(Math.log10((high - low) / count || 1));
  const rows = [1, 2, 5, 10].map((factor) => {
    const step = factor * power, first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    return Array.from({ length: Math.max(0, last - first + 1) }, (_, place) => Number(((first + place) * step).toPrecision(12)));
  });
  return rows.reduce((best, row) => (Math.abs(row.length - count) <= Math.abs(best.length - count) ? row : best));
}

/** Returns labels that differ: as many digits as it takes. */
function labelled(values) {
  const texts = (digits) => values.map((value) => shown(value, digits));
  const digits = [3, 4, 5, 6].find((one) => new Set(texts(one)).size === values.length) ?? 7;
  return values.map((value, place) => [value, texts(digits)[place]]);
}

/** Returns an exponential moving average that is not biased towards 0 at its start; missing values stay missing. */
function smoothed(values, weight) {
  let sum = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

/** The charts of a page: they share the pointer and the smoothing. */
class Charts {
  constructor(pick) {
    this.pick = pick; // called with the step that was clicked; null: steps cannot be clicked
    this.all = [];
    this.weight = 0;
  }

  /** Makes the card of one chart. */
  card(chart) {
    const one = new Chart(chart, this);
    this.all.push(one);
    return one.element;
  }

  smooth(weight) {
    this.weight = weight;
    for (const chart of this.all) chart.paint();
  }

  point(x) {
    for (const chart of this.all) chart.point(x);
  }

  /** Draws again whenever a card gets another width. */
  watch() {
    const observer = new ResizeObserver((entries) => {
      for (const entry of entries) entry.target.chart.paint();
    });
    for (const chart of this.all) observer.observe(chart.element);
  }
}

class Chart {
  constructor(chart, charts) {
    this.chart = chart;
    this.charts = charts;
    this.plot = draw("svg", { class: "plot", height: HEIGHT, role: "img", "aria-label": chart.title });
    this.legend = make("div", { class: "legend" });
    this.at = make("span", { class: "at" });
    const title = make("h3", { title: chart.what || null }, chart.title, chart.unit ? make("small", {}, ` ${chart.unit}`) : null);
    this.element = make("figure", { class: "card chart", "data-title": chart.title }, make("header", {}, title, this.at), this.legend, this.plot);
    this.element.chart = this;
    this.plot.addEventListener("pointermove", (event) => charts.point(this.nearest(event)));
    this.plot.addEventListener("pointerleave", () => charts.point(null));
    if (charts.pick) this.plot.addEventListener("click", (event) => charts.pick(this.nearest(event)));
    if (charts.pick) this.plot.classList.add("clickable");
    this.point(null);
  }

  /** Returns the values that are drawn: smoothed, or each on top of those before it. */
  drawn() {
    const lines = this.chart.lines;
    if (!this.chart.stacked) return lines.map((line) => smoothed(line.values, this.charts.weight));
    const sums = this.chart.x.map(() => 0);
    return lines.map((line) => line.values.map((value, place) => (sums[place] += value ?? 0)));
  }

  /** Finds the range of the vertical axis. */
  range() {
    const { lines, log, stacked } = this.chart;
    const rows = stacked ? this.drawn() : lines.flatMap((line) => [line.values, line.low ?? [], line.high ?? []]);
    const values = rows.flat().filter((value) => value !== null && (!log || value > 0));
    if (!values.length) return [0, 1];
    let low = stacked ? 0 : values.reduce((one, other) => Math.min(one, other));
    let high = values.reduce((one, other) => Math.max(one, other));
    if (log) return [Math.floor(Math.log10(low)), Math.max(Math.ceil(Math.log10(high)), Math.floor(Math.log10(low)) + 1)];
    if (low === 0 && high === 0) return [0, 1];
    const size = Math.max(Math.abs(low), Math.abs(high));
    if (high - low < size * 1e-3) [low, high] = [low - size * 0.1, high + size * 0.1]; // what differs by rounding is a flat line
    const room = (high - low) * 0.06;
    return [stacked || (low >= 0 && low - room < 0) ? Math.min(low, 0) : low - room, high + room];
  }

  paint() {
    const width = this.element.clientWidth - 24;
    if (width < 50) return;
    const { x, log, stacked, lines } = this.chart;
    const [low, high] = this.range();
    const [first, last] = [x[0], x.at(-1)];
    this.x = (value) => EDGE.left + ((value - first) / (last - first || 1)) * (width - EDGE.left - EDGE.right);
    const place = (value) => HEIGHT - EDGE.bottom - ((value - low) / (high - low)) * (HEIGHT - EDGE.top - EDGE.bottom);
    this.y = (value) => place(log ? Math.log10(Math.max(value, 10 ** low)) : value);
    this.plot.setAttribute("width", width);
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`); // paper is narrower: there it shrinks
    this.plot.replaceChildren(...this.axes(width, low, high));
    const values = this.drawn();
    lines.forEach((line, index) => {
      const colour = `series-${index % COLOURS}`;
      if (line.low) this.plot.append(this.area(line.low, line.high, `band ${colour}`));
      if (stacked) this.plot.append(this.area(index ? values[index - 1] : values[0].map(() => 0), values[index], `stack ${colour}`));
      else if (this.charts.weight) this.plot.append(this.line(line.values, `raw ${colour}`));
    });
    if (!stacked) values.forEach((row, index) => this.plot.append(this.line(row, `line series-${index % COLOURS}`)));
    this.cursor = draw("g", { class: "cursor" });
    this.plot.append(this.cursor);
  }

  axes(width, low, high) {
    const { x, log } = this.chart;
    const labels = log ? ticks(low, high, 4).filter(Number.isInteger).map((power) => [10 ** power, `1e${power}`])
      : labelled(ticks(low, high, 4));
    const rows = labels.map(([value, label]) => [
      draw("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: this.y(value), y2: this.y(value) }),
      draw("text", { class: "tick", x: EDGE.left - 6, y: this.y(value) + 3, "text-anchor": "end" }, label),
    ]);
    const whole = this.chart.whole ?? true;
    const columns = ticks(x[0], x.at(-1), Math.max(2, Math.floor(width / 90))).filter((one) => !whole || Number.isInteger(one))
      .map((value) => draw("text", { class: "tick", x: this.x(value), y: HEIGHT - 5, "text-anchor": "middle" }, shown(value, 4)));
    return [...rows.flat(), ...columns];
  }

  line(values, name) {
    let path = "", open = false;
    values.forEach((value, place) => {
      if (value === null) open = false;
      else {
        path += `${open ? "L" : "M"}${this.x(this.chart.x[place]).toFixed(1)} ${this.y(value).toFixed(1)}${open ? "" : "h0"}`; // h0: a dot between gaps
        open = true;
      }
    });
    const alone = values.filter((value) => value !== null).length === 1;
    if (!alone) return draw("path", { class: name, d: path });
    const at = values.findIndex((value) => value !== null);
    return draw("circle", { class: `dot ${name}`, cx: this.x(this.chart.x[at]), cy: this.y(values[at]), r: 3 });
  }

  area(low, high, name) {
    const places = low.map((_, place) => place).filter((place) => low[place] !== null && high[place] !== null);
    const point = (values) => (place) => `${this.x(this.chart.x[place]).toFixed(1)} ${this.y(values[place]).toFixed(1)}`;
    const edge = [...places.map(point(high)), ...places.reverse().map(point(low))];
    return draw("path", { class: name, d: edge.length ? `M${edge.join("L")}Z` : "" });
  }

  /** Returns the place on the horizontal axis that is nearest to the pointer. */
  nearest(event) {
    const at = event.clientX - this.plot.getBoundingClientRect().left;
    return this.chart.x.reduce((best, x) => (Math.abs(this.x(x) - at) < Math.abs(this.x(best) - at) ? x : best));
  }

  /** Shows the values at a place, or the last ones. */
  point(x) {
    const places = this.chart.x;
    // Charts may have other steps: evaluations are rare.
    const at = x === null ? places.length - 1 : places.reduce((best, one, place) => (one <= x ? place : best), 0);
    this.at.textContent = `${this.chart.axis ?? "step"} ${shown(places[at], 4)}`;
    const several = this.chart.lines.length > 1;
    this.legend.replaceChildren(...this.chart.lines.map((line, index) => {
      const value = x === null ? line.values.findLast((one) => one !== null) : line.values[at];
      const band = line.low && line.low[at] !== null ? make("small", {}, ` ${shown(line.low[at])} to ${shown(line.high[at])}`) : null;
      const label = several ? [make("i", { class: `key series-${index % COLOURS}` }), `${line.label} `] : [];
      return make("span", {}, label, make("b", {}, shown(value)), band);
    }));
    if (!this.cursor) return;
    this.cursor.replaceChildren();
    if (x === null) return;
    const left = this.x(places[at]);
    this.cursor.append(draw("line", { x1: left, x2: left, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
    this.drawn().forEach((values, index) => {
      const value = values[at];
      if (value !== null) this.cursor.append(draw("circle", { class: `series-${index % COLOURS}`, cx: left, cy: this.y(value), r: 3 }));
    });
  }
}

/** Makes the switch of the smoothing. */
function smoothing(charts) {
  const input = make("input", {
    type: "range", min: 0, max: 0.95, step: 0.05, value: 0, id: "smooth",
    input: (event) => charts.smooth(Number(event.target.value)),
  });
  return make("label", { class: "control" }, "Smooth ", input);
}

/** Makes the section of all curves: a row of cards for each group of charts. */
function curves(all, charts, ...notes) {
  const groups = Map.groupBy ? Map.groupBy(all, (chart) => chart.group) : grouped(all);
  const parts = [...groups].map(([group, own]) => {
    const cards = make("div", { class: group === "Compared" ? "cards compared" : "cards" }, own.map((chart) => charts.card(chart)));
    if (group !== "Other metrics") return [make("h3", { class: "group" }, group), cards];
    const details = make("details", {}, make("summary", {}, `${group} (${own.length})`), cards);
    return [details];
  });
  return section("curves", "Curves", ...notes, make("div", { class: "controls" }, smoothing(charts)), ...parts.flat());
}

function grouped(charts) {
  const groups = new Map();
  for (const chart of charts) groups.set(chart.group, [...(groups.get(chart.group) ?? []), chart]);
  return groups;
}
