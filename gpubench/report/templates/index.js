"use strict";
const FIRST = 300;
const COLUMNS = [["run", "Run"], ["started", "Started"], ["command", "Command"], ["model", "Model"], ["variant", "Variant"], ["result", "Result"],
  ["status", "Status"], ["precision", "Precision"], ["device", "Device"], ["commit", "Commit"], ["experiment", "Experiment"], ["tags", "Tags"]];
const runs = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const state = {key: "started", down: true, all: false};
for (const run of runs) run.text = Object.values(run).join(" ").toLowerCase();

function fill(id, values) {
  for (const [value, label] of values) find(id).append(new Option(label, value));
  find(id).addEventListener("change", draw);
}
const known = (key) => [["", "all"], ...[...new Set(runs.map((run) => run[key]))].filter(Boolean).sort().map((one) => [one, one])];
fill("command", known("command"));
fill("status", known("status"));
fill("sort", COLUMNS.map(([key, label]) => [key, label.toLowerCase()]));
find("sort").value = "started";
find("sort").addEventListener("change", () => { order(find("sort").value); });
find("find").addEventListener("input", draw);
find("more").addEventListener("click", () => { state.all = true; draw(); });
document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());

for (const [key, label] of COLUMNS) {
  const head = document.createElement("th"), button = document.createElement("button");
  head.scope = "col"; head.dataset.key = key; button.type = "button"; button.textContent = label;
  button.addEventListener("click", () => order(key));
  head.append(button); find("head").append(head);
}
function order(key) {
  state.down = key === state.key ? !state.down : key === "started" || key === "result";
  state.key = key; find("sort").value = key; draw();
}
function compare(one, other) {
  const key = state.key === "result" ? "value" : state.key, a = one[key], b = other[key];
  const empty = (value) => value === null || value === "";
  if (empty(a) || empty(b)) return empty(a) - empty(b);
  const found = typeof a === "number" ? a - b : a < b ? -1 : a > b ? 1 : 0;
  return state.down ? -found : found;
}
function cell(run, key, label) {
  const made = document.createElement("td");
  if (key === "run" && run.link) {
    const link = document.createElement("a");
    link.href = run.link; link.textContent = run.run; made.append(link);
  } else made.textContent = run[key];
  if (key === "result" && run.result) {
    const note = document.createElement("small");
    note.textContent = run.metric + (run.reach ? ", \u00b1 " + run.reach : ""); made.append(note);
  }
  if (key === "run" || key === "model" || key === "variant") made.className = key === "run" ? "full" : "";
  if (["started", "result", "command", "commit"].includes(key)) made.className = "nowrap";
  if (key === "status") made.className = "nowrap " + (["failed", "damaged", "interrupted", "running"].includes(run.status) ? run.status : "");
  if (key !== "run" && run[key]) made.dataset.name = label.toLowerCase();
  return made;
}
function draw() {
  const words = find("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = runs.filter((run) => words.every((word) => run.text.includes(word)) &&
    ["command", "status"].every((key) => !find(key).value || run[key] === find(key).value)).sort(compare);
  const shown = state.all ? found : found.slice(0, FIRST);
  find("rows").replaceChildren(...shown.map((run) => {
    const row = document.createElement("tr");
    row.append(...COLUMNS.map(([key, label]) => cell(run, key, label)));
    return row;
  }));
  find("count").textContent = found.length === runs.length ? "" : found.length + " of " + runs.length;
  find("more").hidden = shown.length === found.length;
  for (const head of find("head").children) {
    if (head.dataset.key === state.key) head.ariaSort = state.down ? "descending" : "ascending";
    else head.removeAttribute("aria-sort");
  }
}
draw();
