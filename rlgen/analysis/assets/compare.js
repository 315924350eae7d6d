"use strict";

/** Makes the head of the page: what is compared, each verdict, and what to know before believing it. */
function head(facts) {
  const about = [facts.metric, `curves by ${facts.by}`, `comparison of ${facts.made}`];
  return make("div", { class: "head" },
    make("h1", {}, visible(facts.title)),
    make("p", { class: "about" }, about.map((one) => make("span", {}, visible(one)))),
    make("div", { class: "tiles" }, facts.verdicts.map((verdict) => make("div", { class: `card tile ${verdict.higher ? "good" : ""}` },
      make("span", { class: "label" }, verdict.of), make("b", {}, visible(verdict.sentence)), make("small", {}, visible(verdict.basis))))),
    facts.notes.map((note) => make("p", { class: "note" }, visible(note))));
}

function groups(facts) {
  const letter = (place) => make("span", {}, make("i", { class: `key series-${place % COLOURS}` }), facts.letters[place]);
  const rows = facts.groups.map((group, place) => [letter(place), ...group.map(visible)]);
  const heads = ["", "runs", "seeds", "steps", `${facts.metric}, last quarter`];
  return section("runs", "Runs", make("div", { class: "card" }, table(heads.map(visible), rows)));
}

function differences(facts) {
  const rows = facts.differences.map((row) => row.map(visible));
  const same = make("p", { class: "note" }, "The recipes are the same.");
  return section("differences", "Differences of the recipes", make("div", { class: "card" }, rows.length ? table(["key", ...facts.letters], rows) : same));
}

function main() {
  const facts = JSON.parse(find("facts").textContent);
  const charts = new Charts(null);
  const page = find("page");
  page.append(head(facts), groups(facts), differences(facts), curves(facts.charts, charts, make("p", { class: "note" }, facts.band)));
  page.prepend(navigation(page));
  charts.watch();
  document.body.dataset.ready = "all";
}

main();
