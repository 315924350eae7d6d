"use strict";

const PAGE = 50; // rollouts of one page of the list
const BARS = 24; // of the histogram
const EMPTY = { step: ["", ""], reward: ["", ""], length: ["", ""], finish: "", text: "", sort: "step", down: false };

/** Shows a message of a conversation but its last turn: what the model said, or what it was answered, which is not learned from. */
function spoken({ role, name, text }) {
  const sampled = role === "assistant";
  const title = [role, name].filter(Boolean).join(" ") + (sampled ? "" : ", not learned from");
  return [make("h4", {}, visible(title)), make("pre", { class: sampled ? "completion" : "data" }, visible(text))];
}

/** The browser of rollouts: filters, a histogram, a list, and one rollout token by token. */
class Rollouts {
  constructor(facts) {
    this.facts = facts;
    this.shown = "reward"; // the column that is filtered, drawn and listed: of all rewards together, or "reward/NAME"
    this.filter = structuredClone(EMPTY);
    this.page = 0;
    this.texts = []; // by chunk, promises
    this.tokens = [];
    this.count = make("output", { id: "count" });
    this.histogram = draw("svg", { class: "histogram", height: 110, role: "group", "aria-label": "Rewards" });
    this.drawn = []; // places of the rows that the histogram counts
    this.list = make("ol", { id: "list", class: "list" });
    this.pages = make("div", { class: "pages" });
    this.detail = make("article", { id: "detail", class: "card detail" }, make("p", { class: "note" }, "Choose a rollout."));
  }

  /** Unpacks the table of all rows. */
  async open() {
    this.rows = await unpackJson("rows");
    let chunk = 0, row = 0, token = 0;
    this.places = this.rows.length.map((length, place) => {
      if (row === this.facts.chunks[chunk]) [chunk, row, token] = [chunk + 1, 0, 0];
      const at = { chunk, row: row++, token, place };
      token += length;
      return at;
    });
    await this.apply();
    new ResizeObserver(() => this.bars(this.drawn)).observe(this.histogram.parentElement);
    const linked = decodeURIComponent(location.hash).match(/^#rollout=(\d+)\.(\d+)\.(\d+)$/);
    const wanted = linked && this.places.find(({ place }) => this.key(place) === linked.slice(1).join("."));
    if (wanted) await this.choose(wanted.place);
    if (wanted) find("rollouts").scrollIntoView();
  }

  /** Unpacks all texts before anybody searches, one chunk after another so that the page stays quick. */
  async prefetch() {
    for (const place of this.facts.chunks.keys()) await this.text(place);
    document.body.dataset.texts = "ready";
  }

  key(place) {
    return `${this.rows.step[place]}.${this.rows.group_id[place]}.${this.rows.sample_index[place]}`;
  }

  text(chunk) {
    return (this.texts[chunk] ??= unpackJson(`texts-${chunk}`).then((texts) => {
      const prompts = texts.prompts.map((one) => [one.text, ...Object.values(one.data)].join("\n").toLowerCase());
      return (this.texts[chunk].now = { ...texts, lower: texts.completions.map((one, row) => (texts.messages?.[row].map(({ text }) => text).join("\n") ?? one).toLowerCase()), prompts, whole: texts.prompts });
    }));
  }

  /** Filters, sorts and shows the list again. A text is looked for once all texts are unpacked. */
  async apply() {
    if (this.filter.text) await Promise.all(this.facts.chunks.map((_, place) => this.text(place)));
    const matching = this.matching(true);
    this.bars(this.filter.reward.some(Boolean) ? this.matching(false) : matching);
    const { sort, down } = this.filter;
    const keys = this.rows[sort === "reward" ? this.shown : sort];
    const value = (place) => keys[place] ?? (down ? -Infinity : Infinity); // a row without the value comes last
    this.found = matching.sort((one, other) => (value(one) === value(other) ? one - other : (value(one) - value(other)) * (down ? -1 : 1)));
    this.page = 0;
    this.count.textContent = `${this.found.length.toLocaleString("en")} of ${this.rows.step.length.toLocaleString("en")}`;
    this.count.dataset.count = this.found.length;
    this.fill();
    if (!this.found.includes(this.chosen)) await this.choose(this.found[0]); // the pane shows one of the list
  }

  /** Returns the places of the rows that match the filter. */
  matching(byReward) {
    const { step, reward, length, finish, text } = this.filter;
    const within = (values, [low, high]) => {
      if (low === "" && high === "") return () => true;
      const [least, most] = [low === "" ? -Infinity : Number(low), high === "" ? Infinity : Number(high)];
      return (place) => values[place] !== null && values[place] >= least && values[place] <= most;
    };
    const tests = [within(this.rows.step, step), within(this.rows.length, length)];
    if (byReward) tests.push(within(this.rows[this.shown], reward));
    if (finish) tests.push((place) => this.rows.truncated[place] === (finish === "length" ? 1 : 0));
    const wanted = text.toLowerCase();
    if (wanted) tests.push((place) => this.has(place, wanted));
    return this.places.map(({ place }) => place).filter((place) => tests.every((test) => test(place)));
  }

  has(place, wanted) {
    const { chunk, row } = this.places[place], texts = this.texts[chunk].now;
    return texts.lower[row].includes(wanted) || texts.prompts[this.rows.prompt[place]].includes(wanted);
  }

  /** Draws the histogram of the rewards. A click on a bar leads to its rollouts, another one back to all. */
  bars(places) {
    this.drawn = places;
    const values = places.map((place) => this.rows[this.shown][place]).filter((value) => value !== null);
    const all = this.rows[this.shown].filter((value) => value !== null);
    const least = all.reduce((one, other) => Math.min(one, other), Infinity), most = all.reduce((one, other) => Math.max(one, other), -Infinity);
    this.histogram.replaceChildren();
    const width = this.histogram.parentElement?.clientWidth - 24;
    if (!all.length || !(width > 0)) return;
    const size = (most - least) / BARS || 1, counts = Array(BARS).fill(0);
    const bin = (value) => Math.min(BARS - 1, Math.floor((value - least) / size));
    values.forEach((value) => counts[bin(value)]++);
    const top = counts.reduce((one, other) => Math.max(one, other), 1);
    this.histogram.setAttribute("width", width);
    const [low, high] = this.filter.reward.map((edge) => (edge === "" ? null : Number(edge)));
    counts.forEach((count, place) => {
      const from = Number((least + place * size).toPrecision(6)), to = Number((least + (place + 1) * size).toPrecision(6));
      const chosen = low !== null && high !== null && from >= low - size * 1e-3 && to <= high + size * 1e-3;
      const pick = () => this.set({ reward: chosen ? ["", ""] : [String(from), String(to)] });
      const tall = count ? Math.max(2, (count / top) * 76) : 0;
      this.histogram.append(draw("g", {
        class: `bar${chosen ? " chosen" : ""}`, tabindex: count ? 0 : -1, role: "button", "aria-label": `${count} rollouts of reward ${from} to ${to}`,
        click: pick, keydown: (event) => event.key === "Enter" && pick(),
      }, draw("title", {}, `${count} rollouts of reward ${shown(from)} to ${shown(to)}`),
      draw("rect", { class: "hit", x: (place / BARS) * width, y: 0, width: width / BARS, height: 90 }),
      draw("rect", { class: "fill", x: (place / BARS) * width + 1, y: 90 - tall, width: width / BARS - 2, height: tall, rx: 2 })));
    });
    const edges = [[0, least, "start"], [width / 2, (least + most) / 2, "middle"], [width, most, "end"]];
    this.histogram.append(...edges.map(([x, value, anchor]) => draw("text", { class: "tick", x, y: 105, "text-anchor": anchor }, shown(value))));
  }

  /** Changes the filter from elsewhere on the page, and shows it in the controls. */
  set(changes) {
    Object.assign(this.filter, changes);
    for (const [name, values] of Object.entries({ step: this.filter.step, reward: this.filter.reward, length: this.filter.length })) {
      find(`${name}-low`).value = values[0];
      find(`${name}-high`).value = values[1];
    }
    for (const name of ["finish", "text", "sort"]) find(name).value = this.filter[name];
    find("down").checked = this.filter.down;
    return this.apply();
  }

  /** Shows one page of the list. */
  fill() {
    const pages = Math.max(1, Math.ceil(this.found.length / PAGE));
    const shownPlaces = this.found.slice(this.page * PAGE, (this.page + 1) * PAGE);
    this.list.replaceChildren(...shownPlaces.map((place) => this.item(place)));
    if (!shownPlaces.length) this.list.append(make("li", { class: "note" }, "No rollout matches."));
    const turn = (by, label) => make("button", { type: "button", disabled: this.page + by < 0 || this.page + by >= pages, click: () => { this.page += by; this.fill(); } }, label);
    this.pages.replaceChildren(turn(-1, "← previous"), make("span", {}, `page ${this.page + 1} of ${pages}`), turn(1, "next →"));
  }

  item(place) {
    const rows = this.rows, { chunk, row } = this.places[place];
    const preview = make("span", { class: "preview" });
    this.text(chunk).then((texts) => { preview.textContent = visible(texts.completions[row]).replaceAll("\n", " ").slice(0, 160) || "(empty)"; });
    const item = make("li", { tabindex: 0, "data-place": place, click: () => this.choose(place), keydown: (event) => this.move(event, item) },
      make("span", { class: "where" }, `step ${rows.step[place]} · ${rows.group_id[place]}.${rows.sample_index[place]}`),
      make("b", {}, shown(rows[this.shown][place])),
      make("span", { class: rows.truncated[place] ? "tag warn" : "tag" }, `${rows.length[place]} tokens${rows.truncated[place] ? ", cut" : ""}`), preview);
    item.classList.toggle("chosen", place === this.chosen);
    return item;
  }

  /** Goes to the next rollout with the arrow keys. */
  move(event, item) {
    const next = { ArrowDown: item.nextElementSibling, ArrowUp: item.previousElementSibling, Enter: item }[event.key];
    if (!next) return;
    event.preventDefault();
    next.focus();
    this.choose(Number(next.dataset.place));
  }

  /** Shows one rollout. */
  async choose(place) {
    if (place === undefined) return;
    this.chosen = place;
    for (const item of this.list.children) item.classList.toggle("chosen", Number(item.dataset.place) === place);
    const { chunk, row, token } = this.places[place];
    this.pieces ??= unpackJson("pieces");
    this.tokens[chunk] ??= unpack(`tokens-${chunk}`).then((buffer) => new Tokens(buffer));
    const [texts, tokens, pieces] = await Promise.all([this.text(chunk), this.tokens[chunk], this.pieces]);
    if (this.chosen !== place) return; // somebody has chosen another meanwhile
    const values = Object.fromEntries(Object.entries(this.rows).map(([name, column]) => [name, column[place]]));
    const { text, data } = texts.whole[values.prompt];
    const own = tokensOf(tokens, token, values.length, values, pieces, this.facts);
    const fact = (name, value) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
    const errors = Object.entries(texts.errors[row] ?? {}).map(([name, error]) => make("p", { class: "error" }, visible(`${name} failed: ${error}`)));
    this.detail.replaceChildren(
      make("h3", {}, `Step ${values.step}, group ${values.group_id}, sample ${values.sample_index}`,
        make("a", { href: `#rollout=${this.key(place)}`, title: "A link to this rollout", class: "link" }, " #")),
      make("dl", { class: "values" }, fact("reward", shown(values.reward)), this.facts.rewards.map((name) => fact(visible(name), shown(values[`reward/${name}`]))),
        fact("advantage", shown(values.advantage)), fact("tokens", String(values.length)), fact("ended by", values.truncated ? "the limit" : "a stop token"),
        fact("trained on", values.trained ? "yes" : "no"), fact("largest difference", shown(values.gap))),
      ...errors,
      make("h4", {}, "Prompt"), make("pre", { class: "prompt" }, visible(text)),
      ...Object.entries(data).flatMap(([name, value]) => [make("h4", {}, visible(name)), make("pre", { class: "data" }, visible(value))]),
      ...(texts.messages ? texts.messages[row].filter((_, place, all) => place !== all.findLastIndex(({ role }) => role === "assistant")).flatMap(spoken) : []),
      make("h4", {}, "Completion"), make("pre", { class: "completion" }, visible(texts.completions[row])),
      make("h4", {}, "Token by token"), tokenView(own, this.facts.tokenizer));
    document.body.dataset.chosen = this.key(place);
  }

  /** Makes the controls of the filter. */
  controls() {
    const change = (event) => {
      const [name, end] = event.target.id.split("-");
      if (end) this.filter[name][end === "low" ? 0 : 1] = event.target.value;
      else this.filter[name] = event.target.type === "checkbox" ? event.target.checked : event.target.value;
      this.apply();
    };
    const range = (name) => make("span", { class: "control" }, make("span", {}, `${name} `),
      make("input", { id: `${name}-low`, type: "number", step: "any", placeholder: "from", "aria-label": `${name} from`, input: change }), " – ",
      make("input", { id: `${name}-high`, type: "number", step: "any", placeholder: "to", "aria-label": `${name} to`, input: change }));
    const choice = (id, label, options, listener) => make("label", { class: "control" }, `${label} `,
      make("select", { id, change: listener }, options.map(([value, name]) => make("option", { value }, name))));
    const reward = (event) => { this.shown = event.target.value; this.set({ reward: ["", ""] }); };
    return make("form", { class: "controls", submit: (event) => event.preventDefault() },
      make("label", { class: "control grow" }, "Text ", make("input", { id: "text", type: "search", placeholder: "in prompt, answer or completion", input: change })),
      range("step"), range("reward"), range("length"),
      choice("finish", "Ended by", [["", "either"], ["stop", "a stop token"], ["length", "the limit"]], change),
      this.facts.rewards.length > 1 ? choice("which", "Reward", [["reward", "all together"], ...this.facts.rewards.map((name) => [`reward/${name}`, visible(name)])], reward) : null,
      choice("sort", "Sort", [["step", "step"], ["reward", "reward"], ["advantage", "advantage"], ["length", "length"], ["gap", "difference"]], change),
      make("label", { class: "control" }, make("input", { id: "down", type: "checkbox", change }), " highest first"),
      make("button", { type: "button", id: "all", click: () => this.set(structuredClone(EMPTY)) }, "All"));
  }

  element() {
    const { count, total, steps, totalSteps } = this.facts;
    const part = count < total ? ` This report holds ${count.toLocaleString("en")} of ${total.toLocaleString("en")} rollouts, from ${steps} of ${totalSteps} steps.` : "";
    return section("rollouts", "Rollouts",
      make("p", { class: "note" }, `Click a bar of the histogram, or a curve, to see its rollouts.${part} Log-probs are stored to 0.25 %.`),
      this.controls(), make("div", { class: "card" }, make("header", {}, make("h3", {}, "Rewards"), make("span", { class: "at" }, this.count, " rollouts")), this.histogram),
      make("div", { class: "split" }, make("div", { class: "side" }, this.list, this.pages), this.detail));
  }
}
