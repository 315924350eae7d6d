"use strict";

/** Makes the head of the page: what was run, how it stands, and the few numbers that matter. */
function head(facts) {
  const { name, step, steps, message } = facts.state;
  return make("div", { class: "head" },
    make("h1", {}, visible(facts.name), make("span", { class: `state ${name}` }, name)),
    make("p", { class: "about" }, [...facts.about, `step ${step} of ${steps}`, `report of ${facts.made}`].map((one) => make("span", {}, visible(one)))),
    message ? make("p", { class: name === "failed" ? "message error" : "message note" }, visible(message)) : null,
    make("div", { class: "tiles" }, facts.summary.map((fact) => make("div", { class: `card tile ${fact.tone}` },
      make("span", { class: "label" }, fact.label), make("b", {}, fact.value), make("small", {}, fact.note)))));
}

function phases(facts) {
  const whole = facts.phases.reduce((sum, phase) => sum + phase.seconds, 0) || 1;
  const bar = make("div", { class: "phases", role: "img", "aria-label": "Shares of the time" }, facts.phases.map((phase, place) => {
    const part = make("i", { class: `series-${place % COLOURS}`, title: `${phase.name}: ${shown(phase.seconds)} s` });
    part.style.flexGrow = phase.seconds;
    return part;
  }));
  const rows = facts.phases.map((phase, place) => [
    make("span", {}, make("i", { class: `key series-${place % COLOURS}` }), phase.name),
    `${shown(phase.seconds)} s`, `${((phase.seconds / whole) * 100).toFixed(1)} %`,
  ]);
  return section("time", "Time", make("div", { class: "card" }, bar, table(["phase", "all steps", "share"], rows, { class: "narrow" })));
}

function health(facts) {
  const ever = facts.health.some((rule) => rule.steps.length);
  const rows = facts.health.map((rule) => {
    const [first, last] = [rule.steps[0], rule.steps.at(-1)];
    const when = rule.steps.length ? `${rule.steps.length} step${last > first ? `s, ${first} to ${last}` : ` (${first})`}. ${rule.remedy}` : "";
    const cells = [make("span", { class: `verdict ${rule.state.replace(" ", "-")}` }, rule.state), rule.what, shown(rule.last), rule.bound];
    return ever ? [...cells, when] : cells;
  });
  const rungs = facts.sentinel.map((rung) => [
    make("span", { class: `verdict ${rung.verdict === "ok" ? "well" : "not-measured"}` }, rung.verdict), rung.name, rung.sentence,
    Object.entries(rung.measured ?? {}).map(([name, value]) => `${name} ${typeof value === "number" ? shown(value) : value}`).join(", "),
  ]);
  return section("health", "Health",
    make("div", { class: "card" }, table(["", "rule", "last value", "broken if", ...(ever ? ["when, and what to do"] : [])], rows)),
    rungs.length ? make("div", { class: "card" }, make("h3", {}, "Do engine and trainer agree? Before step 1:"), table(["", "check", "", "measured"], rungs)) : null);
}

function recipe(facts) {
  const text = make("pre", { id: "recipe-text" }, visible(facts.recipe.resolved));
  const choose = (event) => { text.textContent = visible(facts.recipe[event.target.value]); };
  const choice = make("select", { id: "recipe-which", change: choose },
    make("option", { value: "resolved" }, "with every value (resolved.yaml)"), make("option", { value: "written" }, "as it was written (recipe.yaml)"));
  return section("recipe", "Recipe", make("div", { class: "controls" }, make("label", { class: "control" }, "Show ", choice)), make("div", { class: "card" }, text));
}

function provenance(facts) {
  const words = (value) => (Array.isArray(value) ? value.join(" ") : value && typeof value === "object" ? Object.entries(value).map(([name, one]) => `${name} ${Array.isArray(one) ? one.join(" ") : one}`).join(", ") : String(value ?? "–"));
  const cards = facts.attempts.map((attempt, place) => make("div", { class: "card" }, make("h3", {}, `Attempt ${place + 1}`),
    table(["", ""], Object.entries(attempt).map(([name, value]) => [name, visible(words(value))]), { class: "pairs" })));
  return section("provenance", "Provenance", cards.length ? cards : make("p", { class: "note" }, "No attempt has begun to train."));
}

async function main() {
  const facts = JSON.parse(find("facts").textContent);
  const rollouts = facts.rollouts.count ? new Rollouts(facts.rollouts) : null;
  const charts = new Charts(rollouts && ((step) => {
    rollouts.set({ step: [String(step), String(step)] });
    find("rollouts").scrollIntoView({ behavior: "smooth" });
  }));
  const page = find("page");
  page.append(head(facts), curves(facts.charts, charts), phases(facts), health(facts), ...(rollouts ? [rollouts.element()] : []), recipe(facts), provenance(facts));
  page.prepend(navigation(page));
  charts.watch();
  document.body.dataset.ready = "page";
  performance.mark("page");
  if (rollouts) await rollouts.open();
  performance.mark("rollouts");
  document.body.dataset.ready = "all";
  if (rollouts) await rollouts.prefetch();
}

main();
