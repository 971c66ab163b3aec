const FIRST = 300;
const COLUMNS = [["run", "Run"], ["started", "Started"], ["command", "Command"], ["model", "Model"], ["variant", "Variant"], ["result", "Result"],
  ["status", "Status"], ["precision", "Precision"], ["device", "Device"], ["commit", "Commit"], ["experiment", "Experiment"], ["tags", "Tags"]];
const {runs, usual, metrics} = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const state = {key: "started", down: true, all: false, chosen: new Set()};
const WORDS = ["run", "model", "variant", "tags"];
const SPARED = ["precision", "device", "commit"];  // where all runs have the same, which is in their reports
const LISTED = COLUMNS.filter(([key]) => new Set(runs.map((run) => run[key]).filter(Boolean)).size > (SPARED.includes(key) ? 1 : 0));
for (const run of runs) run.text = Object.values(run).filter((one) => typeof one === "string").join(" ").toLowerCase();

function fill(id, values) {
  for (const [value, label] of values) find(id).append(new Option(label, value));
  find(id).addEventListener("change", draw);
}
const known = (key) => [["", "all"], ...[...new Set(runs.map((run) => run[key]))].filter(Boolean).sort().map((one) => [one, one])];
fill("command", known("command"));
fill("status", known("status"));
fill("sort", LISTED.map(([key, label]) => [key, label.toLowerCase()]));
find("sort").value = "started";
find("sort").addEventListener("change", () => { order(find("sort").value); });
find("find").addEventListener("input", draw);
find("more").addEventListener("click", () => { state.all = true; draw(); });
document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());

find("head").append(element("th", "Choose"));
find("head").firstChild.scope = "col";
for (const [key, label] of LISTED) {
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
function element(name, text, className) {
  const made = document.createElement(name);
  made.textContent = text ?? ""; made.className = className ?? "";
  return made;
}
function choice(run) {
  const made = element("td", "", "choice");
  if (!run.id) return made;
  const box = document.createElement("input");
  box.type = "checkbox"; box.checked = state.chosen.has(run); box.ariaLabel = ["Choose", run.run, run.variant].filter(Boolean).join(" ");
  box.addEventListener("change", () => { state.chosen[box.checked ? "add" : "delete"](run); show(); });
  made.append(box);
  return made;
}
// Puts words into an element, of which those that are short enough do not break, as at the dashes of an option.
function whole(made, text, longest) {
  text.split(" ").forEach((word, place) => made.append(place ? " " : "", element("span", word, word.length <= longest ? "option" : "")));
}
function cell(run, key, label) {
  const made = document.createElement("td");
  if (key === "run" && run.link) {
    const link = document.createElement("a");
    link.href = run.link; made.append(link);
  } else made.textContent = WORDS.includes(key) ? "" : run[key];
  if (WORDS.includes(key)) whole(made.firstChild ?? made, run[key], key === "run" ? 26 : 20);
  if (key === "result" && run.result) {
    const note = document.createElement("small");
    note.textContent = run.metric + (run.doubt ? ", " + run.doubt : ""); made.append(note);
  }
  if (key === "run" || key === "model" || key === "variant") made.className = { run: "full", model: "", variant: "words" }[key];
  if (["tags", "experiment"].includes(key)) made.className = "words";
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
    row.append(choice(run), ...LISTED.map(([key, label]) => cell(run, key, label)));
    return row;
  }));
  find("count").textContent = found.length === runs.length ? "" : found.length + " of " + runs.length;
  find("more").hidden = shown.length === found.length;
  for (const head of find("head").children) {
    if (head.dataset.key === state.key) head.ariaSort = state.down ? "descending" : "ascending";
    else head.removeAttribute("aria-sort");
  }
}

// Side by side: the chosen runs in a table and a chart, the one that was chosen first as the baseline.
const SVG = "http://www.w3.org/2000/svg";
const THICKNESS = 14;
const called = (run) => [run.run, run.variant].filter(Boolean).join(", ");
function settings(run) {
  return {...usual[run.kind], ...run.settings};
}
function differing(chosen) {
  const facts = ["command", "model", "status", "precision", "device", "host", "commit", "started"];
  const each = chosen.map((run) => ({...Object.fromEntries(facts.map((key) => [key, run[key]])), ...settings(run), "model.name": ""}));
  const shown = (value) => value === null || value === undefined ? "unset" : typeof value === "string" ? value : JSON.stringify(value);
  return Object.keys(each[0]).filter((key) => each.every((one) => key in one)).map((key) => [key, each.map((one) => shown(one[key]))])
    .filter(([, values]) => new Set(values).size > 1);
}
function row(head, cells, className) {
  const made = document.createElement("tr"), first = element("th");
  first.scope = "row";
  for (const name of head.split(/(?<=[._])/)) first.append(name, document.createElement("wbr"));
  made.append(first, ...cells.map((text) => element("td", text, className)));
  return made;
}
function part(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function bars(chosen, name) {
  const found = chosen.filter((run) => run.metrics[name]).map((run) => [called(run), ...run.metrics[name]]);
  const end = 1.25 * Math.max(...found.map(([, , estimate]) => estimate)) || 1;
  find("bars").replaceChildren(...found.map(([who, text, estimate, low, high]) => {
    const made = element("div"), said = element("p", who + ": ");
    said.append(element("b", text));
    made.append(said, bar(metrics[name] + " of " + who + ", " + text, estimate / end, low === null ? [] : [low / end, high / end]));
    return made;
  }));
}
function bar(title, estimate, ends) {
  const place = (share) => Math.min(100, Math.max(0, 100 * share)) + "%", middle = THICKNESS / 2;
  const drawing = part("svg", {class: "drawing", role: "img", width: "100%", height: THICKNESS});
  drawing.append(part("title", {}, title), part("rect", {class: "gauge", x: 0, y: 0, width: place(estimate), height: THICKNESS}));
  if (ends.length) drawing.append(part("line", {class: "error", x1: place(ends[0]), y1: middle, x2: place(ends[1]), y2: middle}));
  for (const share of ends) {
    if (share >= 0 && share <= 1) {
      drawing.append(part("line", {class: "error", x1: place(share), y1: middle - 4, x2: place(share), y2: middle + 4}));
    } else {
      const arrow = part("svg", {x: place(share), y: middle, class: "symbol"});
      arrow.append(part("path", {class: "error-arrow", d: share < 0 ? "M7-5L0 0L7 5Z" : "M-7-5L0 0L-7 5Z"}));
      drawing.append(arrow);
    }
  }
  return drawing;
}
function show() {
  const chosen = [...state.chosen];
  find("chosen").hidden = !chosen.length;
  find("number").textContent = chosen.length === 1 ? "1 run chosen; choose another to compare" : chosen.length + " runs chosen";
  find("compare").disabled = chosen.length < 2;
  if (chosen.length < 2) find("beside").hidden = true;
  if (!find("beside").hidden) compared(chosen);
}
function compared(chosen) {
  find("command-line").textContent = "gpubench compare " + chosen.map((run) => run.id).join(" ");
  const heads = document.createElement("tr");
  heads.append(element("td"), ...chosen.map((run) => {
    const head = element("th"), link = element("a", run.run);
    head.scope = "col"; link.href = run.link; head.append(link);
    if (run.variant) head.append(element("small", run.variant));
    return head;
  }));
  find("beside-head").replaceChildren(heads);
  const known = Object.keys(metrics).filter((name) => chosen.some((run) => run.metrics[name]));
  find("beside-rows").replaceChildren(
    ...known.map((name) => row(metrics[name], chosen.map((run) => run.metrics[name]?.[0]), "nowrap")),
    ...differing(chosen).map(([key, values]) => row(key, values)));
  const before = find("metric").value, drawn = known.filter((name) => chosen.filter((run) => run.metrics[name]).length > 1);
  find("metric").replaceChildren(...drawn.map((name) => new Option(metrics[name], name)));
  if (drawn.includes(before)) find("metric").value = before;
  find("beside-chart").hidden = !drawn.length;
  if (drawn.length) bars(chosen, find("metric").value);
}
find("metric").addEventListener("change", () => bars([...state.chosen], find("metric").value));
find("compare").addEventListener("click", () => { find("beside").hidden = false; show(); find("beside").scrollIntoView(); });
find("clear").addEventListener("click", () => { state.chosen.clear(); show(); draw(); });
draw();
