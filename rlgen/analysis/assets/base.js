"use strict";

/** Returns the element with an id. */
const find = (id) => document.getElementById(id);

/** Makes an element. Texts become text nodes: nothing is ever parsed as markup. */
function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Makes an SVG element. */
function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Unpacks a part of the page: base64 of gzip. */
async function unpack(id) {
  const text = find(id).textContent;
  const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

async function unpackJson(id) {
  return JSON.parse(new TextDecoder().decode(await unpack(id)));
}

/** Returns a number for people: "0.861", "1.2e-6", "12,300". */
function shown(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

// Characters that would move or hide others: controls, direction marks, line separators, lone surrogates.
const UNPRINTABLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|\p{Surrogate}/gu;

/** Returns a text with such characters as escapes, which a reader can see. */
function visible(text) {
  return text.replace(UNPRINTABLE, (one) => {
    const code = one.codePointAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/** Makes a section with a heading that the navigation lists. */
function section(id, title, ...children) {
  return make("section", { id, "data-title": title }, make("h2", {}, title), ...children);
}

/** Makes a table. Cells are texts or elements. */
function table(head, rows, attributes = {}) {
  const cells = (tag, row) => make("tr", {}, row.map((cell) => make(tag, {}, cell)));
  const body = rows.map((row) => cells("td", row));
  return make("div", { class: "scroll" }, make("table", attributes, make("thead", {}, cells("th", head)), make("tbody", {}, body)));
}

/** Makes the navigation from the sections of the page. */
function navigation(page) {
  const links = [...page.querySelectorAll("section")].map((one) => make("a", { href: `#${one.id}` }, one.dataset.title));
  return make("nav", {}, links);
}
