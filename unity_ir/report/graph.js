// The graph: operators in columns by what they depend on, weights on top of their first user, equal layers folded.

const graph = data.graph;
const nodes = graph.nodes.map(([op, name, type, divided, layout, forward, backward, bytes, operands], number) => ({
  number, op: graph.texts[op], name: graph.texts[name], type: graph.texts[type], divided: graph.texts[divided],
  layout: graph.layouts[layout].map((role) => graph.texts[role]), forward, backward, bytes, operands, users: [], moves: [],
  isLeaf: ["input", "weight", "constant"].includes(graph.texts[op]), box: null,
}));
for (const node of nodes) {
  for (const n of new Set(node.operands)) nodes[n].users.push(node.number);
}
const moves = graph.moves.map(([made, users, what, forward, backward, bytes, forwardKinds, backwardKinds]) => ({
  made, users, what: graph.texts[what], forward, backward, bytes,
  kinds: graph.texts[forwardKinds] || graph.texts[backwardKinds], isForward: graph.texts[forwardKinds] !== "",
}));
const movesBetween = new Map();
for (const move of moves) {
  nodes[move.made].moves.push(move);
  for (const user of move.users) {
    nodes[user].moves.push(move);
    const between = `${move.made} ${user}`;
    movesBetween.set(between, [...(movesBetween.get(between) ?? []), move]);
  }
}
const segments = graph.segments.map(([title, begin, count, like], number) =>
  ({ title, number, like, nodes: nodes.slice(begin, begin + count), isOpen: false }));
for (const segment of segments) for (const node of segment.nodes) node.segment = segment;

const BOX = [138, 44], COLUMN = 200, ROW = 26, TAB = 17, GAP = 14, FRAME = 18, FOLDED = 150, OVERVIEW = 44;

/** Colours by how operators are divided: the most frequent ways have their own. In which stage they are is left out. */
const shades = new Map();
for (const node of nodes) node.way = node.divided.replace(/\bat \d+ by \d+(, )?/g, "").replace(/, $/, "") || node.divided;
{
  const counts = new Map();
  for (const node of nodes) if (!node.isLeaf) counts.set(node.way, (counts.get(node.way) || 0) + 1);
  const ways = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a));
  ways.slice(0, 7).forEach((way, i) => shades.set(way, i));
}

class GraphPicture extends Picture {
  constructor() {
    super("graph-picture");
    [this.left, this.top, this.scale, this.chosen] = [0, 0, 1, null];
    this.lay();
  }

  /** Runs of segments that are drawn one by one, or folded: of equal ones in a row the first is drawn. */
  runs() {
    const found = [];
    for (const segment of segments) {
      const last = found[found.length - 1];
      const isLike = last !== undefined && last.segments[0].like === segment.like;
      if (isLike && !segment.isOpen && last.isFolded) last.segments.push(segment);
      else if (isLike && !segment.isOpen) found.push({ segments: [segment], isFolded: true });
      else found.push({ segments: [segment], isFolded: false });
    }
    return found;
  }

  /** Give every box that is drawn its place. */
  lay() {
    for (const node of nodes) node.box = null;
    this.frames = [];
    this.floor = new Map();
    let x = 0;
    for (const { segments: each, isFolded } of this.runs()) {
      if (isFolded) {
        this.frames.push({ x, width: FOLDED, top: -90, bottom: 90, segments: each, isFolded });
        for (const segment of each) for (const node of segment.nodes) node.box = null;
        x += FOLDED + 2 * FRAME;
        continue;
      }
      const width = this.laySegment(each[0], x + FRAME);
      const boxes = each[0].nodes.map((node) => node.box);
      this.frames.push({
        x, width: width + 2 * FRAME, segments: each, isFolded,
        top: Math.min(...boxes.map((box) => box.y)) - 2 * FRAME,
        bottom: Math.max(...boxes.map((box) => box.y + box.height)) + FRAME,
      });
      this.floor.set(each[0], this.frames[this.frames.length - 1].bottom);
      x += width + 4 * FRAME;
    }
    this.bounds = {
      left: 0, right: x, top: Math.min(...this.frames.map((f) => f.top)), bottom: Math.max(...this.frames.map((f) => f.bottom)),
    };
    this.shown = nodes.filter((node) => node.box !== null);
    this.redraw();
  }

  /** Place a segment's nodes from x on; return its width. */
  laySegment(segment, x) {
    const inside = new Set(segment.nodes.map((node) => node.number));
    const depth = new Map(), columns = [], tabs = new Map(), row = new Map();
    for (const node of segment.nodes) {
      const user = node.isLeaf ? node.users.find((n) => inside.has(n)) : undefined;
      if (user !== undefined) {
        if (!tabs.has(user)) tabs.set(user, []);
        tabs.get(user).push(node);
        continue;
      }
      const before = node.operands.filter((n) => depth.has(n));
      const column = Math.max(-1, ...before.map((n) => depth.get(n))) + 1;
      depth.set(node.number, column);
      (columns[column] ??= []).push(node);
    }
    columns.forEach((column, i) => {
      const wanted = (node) => {
        const before = node.operands.filter((n) => row.has(n));
        return before.length ? before.reduce((sum, n) => sum + row.get(n), 0) / before.length : 0;
      };
      column.sort((a, b) => wanted(a) - wanted(b));
      const heights = column.map((node) => BOX[1] + TAB * (tabs.get(node.number) || []).length);
      let y = -(heights.reduce((sum, h) => sum + h + ROW, -ROW)) / 2;
      column.forEach((node, j) => {
        const own = tabs.get(node.number) || [];
        own.forEach((leaf, t) => {
          leaf.box = { x: x + i * COLUMN + 6, y: y + t * TAB, width: BOX[0] - 12, height: TAB - 2, isTab: true };
        });
        node.box = { x: x + i * COLUMN, y: y + own.length * TAB, width: BOX[0], height: BOX[1], isTab: false };
        row.set(node.number, node.box.y);
        y += heights[j] + ROW;
      });
    });
    return Math.max(0, columns.length - 1) * COLUMN + BOX[0];
  }

  draw(context, width, height) {
    context.save();
    context.translate(-this.left * this.scale, -this.top * this.scale);
    context.scale(this.scale, this.scale);
    const view = { left: this.left, right: this.left + width / this.scale };
    const names = ["panel", "text", "muted", "line", "move", "chosen", "tint", "back"];
    const theme = Object.fromEntries(names.map((n) => [n, colour(n)]));
    for (const frame of this.frames) {
      if (frame.x < view.right && frame.x + frame.width > view.left) this.drawFrame(context, frame, theme);
    }
    const marks = [];
    for (const node of this.shown) {
      for (const n of node.operands) this.drawEdge(context, nodes[n], node, view, theme, marks);
    }
    const most = Math.max(1, ...nodes.map((node) => node.forward + node.backward));
    const ways = new Map([...shades.values(), 7].map((i) => [i, colour(`shade-${i}`)]));
    for (const node of this.shown) {
      if (node.box.x < view.right && node.box.x + node.box.width > view.left) {
        this.drawNode(context, node, most, ways.get(shades.get(node.way) ?? 7), theme);
      }
    }
    for (const mark of marks) this.drawMove(context, ...mark, theme);
    context.restore();
    this.drawOverview(context, width, height, ways, theme);
    this.canvas.dataset.scale = this.scale;
    this.canvas.dataset.left = this.left;
  }

  /** Draw the whole graph small below, with a box around what is seen above. */
  drawOverview(context, width, height, ways, theme) {
    const { left, right, top, bottom } = this.bounds;
    const [across, down] = [width / (right - left), (OVERVIEW - 8) / (bottom - top)];
    const [x, y] = [(at) => (at - left) * across, (at) => height - OVERVIEW + 4 + (at - top) * down];
    context.fillStyle = theme.panel;
    context.fillRect(0, height - OVERVIEW, width, OVERVIEW);
    context.strokeStyle = theme.line;
    context.lineWidth = 1;
    context.strokeRect(-1, height - OVERVIEW + 0.5, width + 2, OVERVIEW);
    for (const frame of this.frames) if (frame.isFolded) {
      context.fillStyle = theme.line;
      context.fillRect(x(frame.x), y(frame.top), frame.width * across, (frame.bottom - frame.top) * down);
    }
    for (const { isLeaf, way, box } of this.shown) {
      context.fillStyle = isLeaf ? theme.line : ways.get(shades.get(way) ?? 7);
      context.fillRect(x(box.x), y(box.y), Math.max(1, box.width * across), Math.max(1, box.height * down));
    }
    const [from, to] = [Math.max(0, x(this.left)), Math.min(width, x(this.left + width / this.scale))];
    context.strokeStyle = theme.chosen;
    context.lineWidth = 1.5;
    if (to > from) context.strokeRect(from + 1, height - OVERVIEW + 2, Math.max(2, to - from - 2), OVERVIEW - 4);
  }

  drawFrame(context, frame, theme) {
    const { x, width, top, bottom, segments: each, isFolded } = frame;
    context.fillStyle = theme.panel;
    context.strokeStyle = theme.line;
    context.lineWidth = 1;
    for (const offset of isFolded ? [10, 5, 0] : [0]) {
      context.beginPath();
      context.roundRect(x + offset, top - offset, width, bottom - top, 8);
      context.fill();
      context.stroke();
    }
    context.fillStyle = theme.muted;
    context.font = "600 12px system-ui, sans-serif";
    if (!isFolded) {
      context.fillText(fitted(context, each[0].title, width - 20), x + 10, top + 18);
      return;
    }
    context.textAlign = "center";
    context.fillStyle = theme.text;
    context.font = "600 14px system-ui, sans-serif";
    const last = each[each.length - 1].title.split(" ").pop();
    context.fillText(each.length > 1 ? `${each[0].title} to ${last}` : each[0].title, x + width / 2, -6);
    context.fillStyle = theme.muted;
    context.font = "12px system-ui, sans-serif";
    context.fillText("as the one before", x + width / 2, 14);
    context.fillText("click to open", x + width / 2, 32);
    context.textAlign = "start";
  }

  drawEdge(context, from, to, view, theme, marks) {
    const start = from.box ?? this.foldedBox(from);
    if (start === null || (start.isTab && start.x + 1 > to.box.x && start.x < to.box.x + to.box.width)) return;
    const [x, y] = [start.x + start.width, start.y + start.height / 2];
    const [x2, y2] = [to.box.x, to.box.y + to.box.height / 2];
    if (Math.min(x, x2) > view.right || Math.max(x, x2) < view.left) return;
    const move = movesBetween.get(`${from.number} ${to.number}`)?.[0];
    const isFar = x2 - x > 4 * COLUMN;
    const isChosen = from.number === this.chosen || to.number === this.chosen;
    // Weights that many layers share would cross everything.
    if (isFar && from.isLeaf && !isChosen) return;
    context.strokeStyle = isChosen ? theme.chosen : move ? theme.move : theme.muted;
    context.globalAlpha = isChosen || move ? 1 : isFar ? 0.25 : 0.6;
    context.lineWidth = isChosen || move ? 1.8 : 1;
    context.beginPath();
    context.moveTo(x, y);
    const bend = Math.max(14, Math.min(70, Math.abs(x2 - x) / 2));
    if (x2 - x > COLUMN) {
      // Below what is between.
      const [low, right] = [this.floor.get(to.segment) - 8, x2 - COLUMN + BOX[0]];
      const corner = Math.min(60, (right - x) / 2);
      context.bezierCurveTo(x + 30, y, x + 30, low, x + 30 + corner, low);
      context.lineTo(x2 - 40 - corner, low);
      context.bezierCurveTo(x2 - 34, low, x2 - 34, y2, x2, y2);
    } else context.bezierCurveTo(x + bend, y, x2 - bend, y2, x2, y2);
    context.stroke();
    context.globalAlpha = 1;
    if (move) marks.push([move, x2 - 9, y2, isChosen]);
  }

  /** Draw a diamond where something moves between devices, and say what. */
  drawMove(context, move, mx, my, isChosen, theme) {
    context.fillStyle = isChosen ? theme.chosen : theme.move;
    context.beginPath();
    context.moveTo(mx - 6, my);
    context.lineTo(mx, my - 6);
    context.lineTo(mx + 6, my);
    context.lineTo(mx, my + 6);
    context.fill();
    if (this.scale < 0.5) return;
    context.font = "10px system-ui, sans-serif";
    const word = fitted(context, move.kinds, COLUMN - BOX[0] - 4);
    const wide = context.measureText(word).width;
    context.fillStyle = theme.panel;
    context.fillRect(mx + 4 - wide, my - 19, wide + 3, 12);
    context.fillStyle = isChosen ? theme.chosen : theme.move;
    context.fillText(word, mx + 6 - wide, my - 10);
  }

  /** Where the edges of what is in a folded frame begin: at its right side; null for the first frames. */
  foldedBox(node) {
    const frame = this.frames.find((each) => each.isFolded && each.segments.includes(node.segment));
    return frame ? { x: frame.x, y: -10, width: frame.width, height: 20, isTab: false } : null;
  }

  drawNode(context, node, most, shade, theme) {
    const { x, y, width, height, isTab } = node.box;
    const isChosen = node.number === this.chosen;
    context.lineWidth = isChosen ? 2.5 : 1;
    context.strokeStyle = isChosen ? theme.chosen : isTab || node.isLeaf ? theme.line : shade;
    context.fillStyle = isTab ? theme.back : theme.panel;
    context.beginPath();
    context.roundRect(x, y, width, height, isTab ? 3 : 5);
    context.fill();
    if (!node.isLeaf) {
      context.globalAlpha = Number(theme.tint);
      context.fillStyle = shade;
      context.fill();
      context.globalAlpha = 1;
    }
    context.stroke();
    const moving = node.moves.some((move) => move.made === node.number && (node.isLeaf || !move.users.length));
    if (moving && node.isLeaf) {
      context.fillStyle = theme.move;
      context.beginPath();
      context.arc(x + width - 7, y + height / 2, 3, 0, 7);
      context.fill();
    }
    if (this.scale < 0.3) return;
    if (node.isLeaf) {
      context.fillStyle = theme.muted;
      context.font = "11px system-ui, sans-serif";
      context.fillText(fitted(context, node.name, width - 18, true), x + 5, y + (isTab ? 11 : height / 2 + 4));
      return;
    }
    context.fillStyle = theme.text;
    context.font = "600 12px system-ui, sans-serif";
    context.fillText(fitted(context, node.name, width - 12), x + 7, y + 16);
    context.fillStyle = theme.muted;
    context.font = "11px system-ui, sans-serif";
    context.fillText(fitted(context, node.divided, width - 12), x + 7, y + 30);
    context.fillStyle = shade;
    context.fillRect(x + 7, y + height - 8, Math.max(1, (width - 14) * (node.forward + node.backward) / most), 3);
  }

  move(dx, dy) {
    this.left += dx / this.scale;
    this.top += dy / this.scale;
    this.redraw();
  }

  zoom(factor, x = this.width / 2, y = this.height / 2) {
    const scale = Math.max(0.04, Math.min(3, this.scale * factor));
    this.left += x / this.scale - x / scale;
    this.top += y / this.scale - y / scale;
    this.scale = scale;
    this.redraw();
  }

  fit() {
    const { left, right, top, bottom } = this.bounds;
    // Smaller than this, only the overview shows something.
    this.scale = Math.max(0.2, Math.min(1.2, this.width / (right - left + 40), (this.height - OVERVIEW) / (bottom - top + 40)));
    this.left = Math.min(left - 16 / this.scale, (left + right) / 2 - this.width / 2 / this.scale);
    this.top = (top + bottom) / 2 - (this.height - OVERVIEW) / 2 / this.scale;
    this.redraw();
  }

  /** Begin at the left, large enough to be read, if all of it is not. */
  begin() {
    this.fit();
    const { left, top, bottom } = this.bounds;
    if (this.scale >= 0.75) return;
    this.scale = Math.max(0.62, Math.min(0.9, (this.height - OVERVIEW) / (bottom - top + 20)));
    this.left = left - 16 / this.scale;
    this.top = (top + bottom) / 2 - (this.height - OVERVIEW) / 2 / this.scale;
  }

  choose(x, y) {
    if (y > this.height - OVERVIEW) {
      const { left, right } = this.bounds;
      this.left = left + x / this.width * (right - left) - this.width / 2 / this.scale;
      this.redraw();
      return;
    }
    const [at, down] = [this.left + x / this.scale, this.top + y / this.scale];
    const isIn = (box) => at >= box.x && at <= box.x + box.width && down >= box.y && down <= box.y + box.height;
    const node = this.shown.find((each) => isIn(each.box));
    if (node) {
      this.select(node, false);
      return;
    }
    const frame = this.frames.find((f) => at >= f.x && at <= f.x + f.width && down >= f.top && down <= f.bottom);
    if (frame && frame.isFolded) {
      this.open(frame.segments);
      return;
    }
    this.select(null, false);
  }

  open(each) {
    for (const segment of each) segment.isOpen = true;
    this.lay();
  }

  /** Open the folded layers after what is chosen, or fold all again. */
  toggle() {
    if (segments.some((segment) => segment.isOpen)) {
      for (const segment of segments) segment.isOpen = false;
      if (this.chosen !== null && nodes[this.chosen].segment.number !== nodes[this.chosen].segment.like) this.select(null, false);
    } else for (const segment of segments) segment.isOpen = true;
    this.lay();
  }

  /** Choose an operator or leaf and show what is known of it; `isFar`: bring it into the middle, too. */
  select(node, isFar = true) {
    this.chosen = node === null ? null : node.number;
    if (node !== null && node.box === null) this.open([node.segment]);
    if (node !== null && isFar) {
      this.scale = Math.max(this.scale, 0.8);
      this.left = node.box.x + node.box.width / 2 - this.width / 2 / this.scale;
      this.top = node.box.y + node.box.height / 2 - this.height / 2 / this.scale;
    }
    showDetails(node);
    this.redraw();
  }

  step(by) {
    const at = this.chosen === null ? (by > 0 ? -1 : 0) : this.shown.findIndex((node) => node.number === this.chosen);
    this.select(this.shown[(at + by + this.shown.length) % this.shown.length]);
  }

  keys() {
    return {
      ArrowLeft: () => this.move(-80, 0), ArrowRight: () => this.move(80, 0),
      ArrowUp: () => this.move(0, -60), ArrowDown: () => this.move(0, 60),
      "+": () => this.zoom(1.25), "=": () => this.zoom(1.25), "-": () => this.zoom(0.8), Home: () => this.fit(),
      n: () => this.step(1), p: () => this.step(-1), f: () => this.toggle(), Escape: () => this.select(null, false),
    };
  }
}

/** Make a button that shows a node in the picture. */
function jump(node) {
  return element("button", { type: "button", onclick: () => graphPicture.select(node) }, node.name);
}

/** Show shape, layout, seconds, bytes and moves of a node beside the graph. */
function showDetails(node) {
  const aside = byId("details");
  aside.replaceChildren();
  if (node === null) {
    const seconds = (each) => each.forward + each.backward;
    const alike = new Map();
    for (const each of nodes) {
      const key = `${each.op} ${each.divided} ${each.type} ${seconds(each)}`;
      if (!each.isLeaf) alike.set(key, [...(alike.get(key) ?? []), each]);
    }
    const slowest = [...alike.values()].sort((a, b) => seconds(b[0]) - seconds(a[0])).slice(0, 10);
    aside.append(
      element("p", { class: "muted" },
        "Choose an operator or a weight: by a click, by n and p in the picture, or by the search."),
      table("", [["slowest"], ["alike", true], ["forward", true], ["backward", true]], slowest.map(([each, ...others]) => [
        [jump(each)], [String(1 + others.length), true], [secondsText(each.forward), true],
        [secondsText(each.backward), true]])));
    return;
  }
  const list = (title, items) => items.length ? [element("h4", {}, title), element("ul", {}, ...items)] : [];
  const rows = [["result", node.type], ["on a device", bytesText(node.bytes)]];
  if (!node.isLeaf) rows.push(["forward", secondsText(node.forward)], ["backward", secondsText(node.backward)]);
  aside.append(
    element("h3", {}, node.isLeaf ? `${node.op} ${node.name}` : node.name),
    element("p", { class: "muted" }, `${node.segment.title}; ${node.divided}`),
    table("", [], rows.map(([word, text]) => [[word], [text]])),
    element("h4", {}, "Layout per mesh axis"),
    table("", [["axis"], ["level"], ["size", true], ["role"]],
      graph.axes.map(([size, level], i) => [[String(i)], [level], [String(size), true], [node.layout[i]]])),
    ...list("Moves", node.moves.map((move) => element("li", {},
      element("span", { class: "move" }, move.made === node.number ? "from it: " : `to it, of ${nodes[move.made].name}: `),
      [move.what, move.forward ? `${secondsText(move.forward)} forward` : "",
        move.backward ? `${secondsText(move.backward)} backward` : "",
        move.bytes ? bytesText(move.bytes) : ""].filter(Boolean).join(", ")))),
    ...list("Reads", [...new Set(node.operands)].map((n) => element("li", {}, jump(nodes[n])))),
    ...list("Read by", node.users.map((n) => element("li", {}, jump(nodes[n])))));
}

for (const [way, i] of shades) {
  const mark = element("span", {}, way);
  mark.style.setProperty("--own", `var(--shade-${i})`);
  byId("graph-legend").append(mark);
}
if (moves.length) {
  const mark = element("span", {}, "moves between devices");
  mark.style.setProperty("--own", "var(--move)");
  byId("graph-legend").append(mark);
}
const graphPicture = new GraphPicture();
buttons("graph-buttons", graphPicture);
byId("graph-buttons").append(element("button", { type: "button", onclick: () => graphPicture.toggle() }, "Layers"));
showDetails(null);
