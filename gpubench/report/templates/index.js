const FIRST = 300;
const COLUMNS = [["run", "Run"], ["started", "Started"], ["command", "Command"], ["model", "Model"], ["variant", "Variant"], ["result", "Result"],
  ["status", "Status"], ["precision", "Precision"], ["device", "Device"], ["commit", "Commit"], ["experiment", "Experiment"], ["tags", "Tags"]];
const {runs, usual, metrics} = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const state = {key: "started", down: true, all: false, chosen: new Set()};
const LISTED = COLUMNS.filter(([key]) => runs.some((run) => run[key]));
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
const PITCH = 46, THICKNESS = 14;
const called = (run) => [run.run, run.variant].filter(Boolean).join(", ");
function settings(run) {
  return {...usual[run.command], ...run.settings};
}
function differing(chosen) {
  const facts = ["command", "model", "status", "precision", "device", "host", "commit", "started"];
  const each = chosen.map((run) => ({...Object.fromEntries(facts.map((key) => [key, run[key]])), ...settings(run), "model.name": ""}));
  const shown = (value) => value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
  return [...new Set(each.flatMap(Object.keys))].map((key) => [key, each.map((one) => shown(one[key]))])
    .filter(([, values]) => new Set(values).size > 1);
}
function row(head, cells, className) {
  const made = document.createElement("tr"), first = element("th", head);
  first.scope = "row";
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
  const largest = Math.max(...found.map(([, , estimate]) => estimate)), end = largest * 1.25;
  const place = (value) => Math.min(100, Math.max(0, 100 * value / end)) + "%";
  const drawing = part("svg", {class: "drawing", role: "img", width: "100%", height: PITCH * found.length + 6});
  drawing.append(part("title", {}, metrics[name] + " of the chosen runs"), part("desc", {}, found.map(([who, text]) => who + " " + text).join("; ")));
  found.forEach(([who, text, estimate, low, high], at) => {
    const top = PITCH * at + 4, y = top + 20, middle = y + THICKNESS / 2;
    drawing.append(part("text", {class: "lane-name", x: 0, y: top + 11}, who + ": " + text),
      part("rect", {class: "gauge", x: 0, y, width: place(Math.max(0, estimate)), height: THICKNESS}));
    if (low === null || high === null) return;
    drawing.append(part("line", {class: "error", x1: place(low), y1: middle, x2: place(high), y2: middle}));
    for (const [edge, inside] of [[low, low >= 0], [high, high <= end]]) {
      if (inside) drawing.append(part("line", {class: "error", x1: place(edge), y1: middle - 4, x2: place(edge), y2: middle + 4}));
      else {
        const arrow = part("svg", {x: place(edge), y: middle, class: "symbol"});
        arrow.append(part("path", {class: "error-arrow", d: edge < 0 ? "M7-5L0 0L7 5Z" : "M-7-5L0 0L-7 5Z"}));
        drawing.append(arrow);
      }
    }
  });
  find("bars").replaceChildren(drawing);
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
