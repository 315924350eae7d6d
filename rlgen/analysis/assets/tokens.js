"use strict";

const [NONE, RATIO, ZERO, LOW, HIGH, ROW] = [0, 1, 2, 3, 4, 5]; // how a weight follows from its ratio: `Code` in weights.py
const MOST_SHOWN = 4000; // tokens of a completion that are drawn at once

const SCALE = 256; // of stored log-probs

/** Returns scaled 16-bit floats as log-probs. */
function halves(low, high) {
  return Float32Array.from(low, (byte, place) => {
    const bits = byte | (high[place] << 8);
    const sign = bits & 0x8000 ? -1 : 1, power = (bits >> 10) & 31, rest = bits & 1023;
    if (power === 31) return rest ? NaN : sign * Infinity;
    return (sign / SCALE) * (power ? (1 + rest / 1024) * 2 ** (power - 15) : rest * 2 ** -24);
  });
}

/** The tokens of one chunk of rollouts, in columns. */
class Tokens {
  constructor(buffer) {
    const bytes = new Uint8Array(buffer), count = bytes.length / 9;
    const plane = (place) => bytes.subarray(place * count, (place + 1) * count);
    const [a, b, c, d] = [0, 1, 2, 3].map(plane);
    this.id = Uint32Array.from(a, (byte, place) => byte | (b[place] << 8) | (c[place] << 16) | (d[place] << 24));
    this.engine = halves(plane(4), plane(5));
    this.difference = halves(plane(6), plane(7));
    this.flags = plane(8);
  }
}

/** Returns the tokens of one rollout as objects with a value for each quantity; null where there is none. */
function tokensOf(tokens, start, length, row, pieces, caps) {
  return Array.from({ length }, (_, index) => {
    const place = start + index;
    const known = (value) => (Number.isNaN(value) ? null : value);
    const engine = known(tokens.engine[place]), difference = known(tokens.difference[place]);
    const mask = tokens.flags[place] & 1;
    const ratio = difference === null ? null : Math.exp(Math.min(difference, 20));
    return {
      id: pieces.ids[tokens.id[place]],
      text: pieces.texts[tokens.id[place]],
      engine,
      trainer: engine === null || difference === null ? null : engine + difference,
      difference,
      ratio,
      weight: weightOf(tokens.flags[place] >> 1, ratio, row.weight, caps),
      mask,
      advantage: mask ? row.advantage : null,
    };
  });
}

function weightOf(code, ratio, ofRow, caps) {
  return { [NONE]: null, [RATIO]: ratio, [ZERO]: 0, [LOW]: caps.low, [HIGH]: caps.high, [ROW]: ofRow }[code];
}

/** Returns a number from -1 to 1: how strongly and in which direction a ratio is coloured. 0.5 and 2 are full. */
const ofRatio = (value) => (value === 0 ? -1 : Math.max(-1, Math.min(1, Math.log2(value))));

// Each quantity: its name, what it says, how its number is written, and its colour as a number from -1 to 1.
const QUANTITIES = {
  engine: { name: "log-prob, engine", what: "as the engine reported it when it sampled", colour: (v) => Math.min(1, -v / 5), ends: ["certain", "-5 or less"] },
  trainer: { name: "log-prob, trainer", what: "by the trainer, before the first update", colour: (v) => Math.min(1, -v / 5), ends: ["certain", "-5 or less"] },
  difference: { name: "difference", what: "trainer minus engine, in nats", colour: (v) => Math.sign(v) * Math.max(0, Math.min(1, 1 + Math.log10(Math.abs(v) || 1e-9) / 5)), ends: ["-1", "+1"], middle: "1e-5" },
  ratio: { name: "ratio", what: "exp(difference)", colour: ofRatio, ends: ["0.5", "2"], middle: "1" },
  weight: { name: "importance weight", what: "what the correction makes of the ratio", colour: ofRatio, ends: ["0.5", "2"], middle: "1" },
  mask: { name: "mask", what: "1: sampled by the model, and learned from", colour: (v) => v, ends: ["0", "1"] },
  advantage: { name: "advantage", what: "of the completion, for each of its tokens", colour: (v) => Math.max(-1, Math.min(1, v / 2)), ends: ["-2", "+2"], middle: "0" },
};

/** Returns a token as people read it: a line end is shown and ends the line. */
function spelled(text) {
  return visible(text).replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t") || "∅";
}

/** Makes the view of a completion token by token. */
function tokenView(tokens, named) {
  let quantity = "engine";
  const details = make("div", { class: "token-details", "aria-live": "polite" });
  const text = make("div", { class: "tokens", tabindex: 0 });
  const legend = make("div", { class: "scale" });
  const spans = tokens.slice(0, MOST_SHOWN).map((token, place) => make("span", { "data-place": place }, spelled(token.text)));
  const paint = () => {
    const { colour, ends, middle } = QUANTITIES[quantity];
    spans.forEach((span, place) => {
      const value = tokens[place][quantity];
      span.className = value === null ? "none" : colour(value) < 0 ? "minus" : "plus";
      span.style.setProperty("--strength", value === null ? 0 : Math.abs(colour(value)).toFixed(3));
    });
    const steps = middle ? [-1, -0.5, 0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
    legend.replaceChildren(ends[0], ...steps.map((value) => {
      const box = make("i", { class: value < 0 ? "minus" : "plus" });
      box.style.setProperty("--strength", Math.abs(value));
      return box;
    }), ends[1], middle ? make("small", {}, ` middle: ${middle}`) : "");
  };
  const show = (place) => {
    spans.forEach((span, index) => span.classList.toggle("chosen", index === place));
    const token = tokens[place];
    const values = Object.entries(QUANTITIES).map(([key, { name, what }]) => make("div", { "data-quantity": key },
      make("dt", { title: what }, name), make("dd", {}, key === "ratio" || key === "weight" ? precise(token[key]) : shown(token[key]))));
    details.replaceChildren(make("p", {}, `token ${place + 1} of ${tokens.length} · id ${token.id} · `, make("code", {}, spelled(token.text).trimEnd() || "space")), make("dl", {}, values));
  };
  const point = (event) => event.target.dataset.place !== undefined && show(Number(event.target.dataset.place));
  text.addEventListener("pointerover", point);
  text.addEventListener("click", point);
  text.append(...spans);
  if (tokens.length > MOST_SHOWN) text.append(make("em", {}, ` … ${tokens.length - MOST_SHOWN} more tokens`));
  const choice = make("select", { id: "quantity", change: (event) => { quantity = event.target.value; paint(); } },
    Object.entries(QUANTITIES).map(([key, { name }]) => make("option", { value: key }, name)));
  const note = named ? null : make("p", { class: "note" }, "No tokenizer was found beside the run or in the hub's cache: tokens are shown by their ids.");
  paint();
  if (tokens.length) show(0);
  return make("div", { class: "token-view" }, make("div", { class: "controls" }, make("label", { class: "control" }, "Colour ", choice), legend), note, text, details);
}

/** Returns a ratio with the digits that tell it from 1. */
function precise(value) {
  if (value === null || value === undefined) return "–";
  const away = Math.abs(value - 1);
  return away > 0 && away < 0.01 ? value.toFixed(Math.min(9, 2 - Math.floor(Math.log10(away)))) : shown(value, 4);
}
