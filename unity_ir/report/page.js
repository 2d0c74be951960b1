// Head, tables and search; then everything is drawn.

byId("name").textContent = `@${data.name}`;
byId("machine").textContent = `on ${data.machine}, one iteration`;
for (const { label, value, note } of data.figures) {
  byId("figures").append(element("div", {}, element("dt", {}, label),
    element("dd", { class: "value" }, value), element("dd", { class: "note" }, note)));
}
for (const [word, text] of data.facts) {
  byId("facts").append(element("dt", {}, word), element("dd", {}, text));
  if (word === "accuracy") byId("accuracy").textContent = `Predictions: ${text}`;
}

{
  const isKnown = data.links.every((each) => each.busy !== null);
  const rows = data.links.map((each) => [
    [each.level], [String(each.size), true], [`${bytesText(each.bandwidth)}/s`, true], [String(each.moves), true],
    [bytesText(each.bytes), true],
    ...(isKnown ? [[secondsText(each.busy * 1e9), true], [`${(each.share * 100).toFixed(1)}%`, true], [bar(each.share, "move")]] : []),
  ]);
  const heads = [["level"], ["joins", true], ["of a link", true], ["moves", true], ["bytes", true],
    ...(isKnown ? [["busy", true], ["share of the step", true], [""]] : [])];
  byId("links").append(
    rows.length ? table("", heads, rows) : element("p", { class: "muted" }, "one device: nothing is moved"),
    element("p", { class: "note" }, "Bytes are received over all devices, and count for each level that a move crosses. ",
      isKnown ? "Busy is the busiest port of a device." : "Of a pipeline it is not known how long links are busy."));
}

{
  const groups = new Map();
  for (const node of nodes) {
    if (node.isLeaf) continue;
    const key = `${node.op}\n${node.divided}`;
    const found = groups.get(key) ?? { op: node.op, divided: node.divided, count: 0, forward: 0, backward: 0 };
    groups.set(key, found);
    found.count += 1;
    found.forward += node.forward;
    found.backward += node.backward;
  }
  for (const move of moves) {
    const key = `\n${move.kinds}`;
    const found = groups.get(key) ?? { op: move.kinds, divided: "move", count: 0, forward: 0, backward: 0 };
    groups.set(key, found);
    found.count += 1;
    found.forward += move.forward;
    found.backward += move.backward;
  }
  const rows = [...groups.values()].sort((a, b) => b.forward + b.backward - a.forward - a.backward);
  const all = Math.max(1, rows.reduce((sum, row) => sum + row.forward + row.backward, 0));
  const most = Math.max(1, ...rows.map((row) => row.forward + row.backward));
  byId("operators").append(table("Kernels and moves one after the other, without the optimizer's update",
    [["operator or move"], ["divided by"], ["how many", true], ["forward", true], ["backward", true], ["share", true], [""]],
    rows.map((row) => [[row.op], [row.divided], [String(row.count), true], [secondsText(row.forward), true],
      [secondsText(row.backward), true], [`${((row.forward + row.backward) / all * 100).toFixed(1)}%`, true],
      [bar((row.forward + row.backward) / most, row.divided === "move" ? "move" : "")]])));
}

if (data.alternatives !== null) {
  byId("alternatives-section").hidden = false;
  const rows = data.alternatives.map((each) => [[each.name],
    [each.seconds === null ? "does not fit" : secondsText(each.seconds * 1e9), true],
    [secondsText(each.waiting * 1e9), true], [bytesText(each.bytes), true]]);
  byId("alternatives").append(table("Plans that people make by hand, of the same model on the same machine",
    [["plan"], ["step", true], ["one after the other", true], ["memory", true]], rows, 0));
}

if (data.difference !== null) {
  byId("difference-section").hidden = false;
  const { names, figures, layouts } = data.difference;
  const [one, other] = [`this: ${names[0]}`, `other: ${names[1]}`];
  byId("difference").append(
    element("div", {}, table("What an iteration takes", [[""], [one, true], [other, true], ["change", true]],
      figures.map(([word, a, b, change]) => [[word], [a, true], [b, true], [change, true]]))),
    element("div", {}, layouts.length ? table("Divided otherwise", [[""], [one], [other], ["how many", true]],
      layouts.map(([word, a, b, count]) => [[word], [a], [b], [String(count), true]]))
      : element("p", {}, "all operators and weights are divided alike")));
}

// Search

const search = byId("search"), found = byId("found");
let hits = [], picked = 0;

function lookUp() {
  const text = search.value.trim().toLowerCase();
  const isHit = (node) => node.name.toLowerCase().includes(text) || node.divided.toLowerCase() === text;
  // Names that begin so come first.
  const order = (node) => (node.name.toLowerCase().startsWith(text) ? 0 : 1);
  hits = text ? nodes.filter(isHit).sort((a, b) => order(a) - order(b)) : [];
  const count = hits.length;
  hits = hits.slice(0, 20);
  picked = 0;
  found.replaceChildren(...hits.map((node, i) => element("li", { role: "option", id: `hit-${i}`, onpointerdown: (event) => {
    event.preventDefault();
    pick(i);
  } }, `${node.name} `, element("small", {}, node.isLeaf ? node.op : node.divided))));
  if (text && !count) found.append(element("li", {}, "nothing has such a name"));
  if (count > hits.length) found.append(element("li", { class: "muted" }, `and ${count - hits.length} more`));
  found.hidden = !text;
  search.setAttribute("aria-expanded", String(!found.hidden));
  mark();
}

function mark() {
  hits.forEach((_, i) => byId(`hit-${i}`).setAttribute("aria-selected", String(i === picked)));
  if (hits.length) {
    search.setAttribute("aria-activedescendant", `hit-${picked}`);
    byId(`hit-${picked}`).scrollIntoView({ block: "nearest" });
  } else search.removeAttribute("aria-activedescendant");
}

function pick(i) {
  if (!hits.length) return;
  graphPicture.select(hits[i]);
  found.hidden = true;
  search.setAttribute("aria-expanded", "false");
  byId("graph").scrollIntoView({ block: "nearest" });
  graphPicture.canvas.focus({ preventScroll: true });
}

search.addEventListener("input", lookUp);
search.addEventListener("blur", () => { found.hidden = true; search.setAttribute("aria-expanded", "false"); });
search.addEventListener("keydown", (event) => {
  if (event.key === "Enter") pick(picked);
  else if (event.key === "Escape") search.blur();
  else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    picked = (picked + (event.key === "ArrowDown" ? 1 : -1) + hits.length) % Math.max(1, hits.length);
    mark();
  } else return;
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target === search || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  search.focus();
  search.select();
});

graphPicture.begin();
graphPicture.drawNow();
timelinePicture.drawNow();
document.documentElement.dataset.drawn = String(Math.round(performance.now()));
