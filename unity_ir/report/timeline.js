// One iteration: what each class of devices computes and moves, and the memory that it holds, on one axis of time.

const line = data.timeline;

/** Sums of differences from 0. */
function sums(differences) {
  const found = new Float64Array(differences.length);
  let sum = 0;
  differences.forEach((each, i) => { found[i] = sum += each; });
  return found;
}

for (const each of line.classes) {
  for (const lane of each.lanes) {
    lane.begins = new Float64Array(lane.since.length);
    lane.ends = new Float64Array(lane.since.length);
    let now = 0;
    lane.since.forEach((since, i) => {
      lane.begins[i] = now + since;
      lane.ends[i] = now = now + since + lane.length[i];
    });
  }
  each.memory = { at: sums(each.memory.at), bytes: sums(each.memory.bytes) };
  each.peak = each.memory.bytes.reduce((most, bytes) => Math.max(most, bytes), 0);
}

/** The first index whose number is above a limit. */
function firstAbove(numbers, limit) {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

const GUTTER = 96, AXIS = 24, TITLE = 22, LANE = 24, SPACE = 3, HELD = 64, BETWEEN = 14, EDGE = 12;

class TimelinePicture extends Picture {
  constructor() {
    super("timeline-picture");
    [this.from, this.to, this.chosen] = [0, line.length, null];
    this.rows = [];
    let y = AXIS;
    for (const each of line.classes) {
      each.y = y;
      y += TITLE;
      for (const lane of each.lanes) {
        this.rows.push({ lane, of: each, y });
        y += LANE + SPACE;
      }
      each.held = y + SPACE;
      y += HELD + BETWEEN;
    }
    this.canvas.style.height = `${y}px`;
  }

  get span() { return this.width - GUTTER - EDGE; }
  x(ns) { return GUTTER + (ns - this.from) / (this.to - this.from) * this.span; }

  draw(context, width, height) {
    const theme = Object.fromEntries(["panel", "text", "muted", "line", "faint", "chosen", "shade-7"].map((n) => [n, colour(n)]));
    context.font = "12px system-ui, sans-serif";
    this.drawAxis(context, height, theme);
    for (const { lane, of, y } of this.rows) this.drawLane(context, lane, of, y, theme);
    for (const [k, each] of line.classes.entries()) {
      context.fillStyle = theme.text;
      context.font = "600 12px system-ui, sans-serif";
      context.fillText(line.classes.length > 1 ? `class ${k}: ${each.title}` : each.title, 0, each.y + 15);
      context.font = "12px system-ui, sans-serif";
      this.drawMemory(context, each, theme);
    }
    this.canvas.dataset.from = this.from;
    this.canvas.dataset.to = this.to;
  }

  drawAxis(context, height, theme) {
    const step = this.niceStep((this.to - this.from) / Math.max(2, this.span / 110));
    context.fillStyle = theme.muted;
    context.strokeStyle = theme.line;
    context.lineWidth = 1;
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      const x = Math.round(this.x(at)) + 0.5;
      context.beginPath();
      context.moveTo(x, AXIS - 6);
      context.lineTo(x, height);
      context.stroke();
      const label = this.axisText(at, step);
      context.fillText(label, Math.min(x + 3, this.width - context.measureText(label).width), 12);
    }
  }

  niceStep(least) {
    const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
    return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
  }

  axisText(at, step) {
    const [unit, scale] = step >= 1e8 ? ["s", 1e9] : step >= 1e5 ? ["ms", 1e6] : step >= 1e2 ? ["us", 1e3] : ["ns", 1];
    return `${Number((at / scale).toFixed(3))} ${unit}`;
  }

  drawLane(context, lane, of, y, theme) {
    context.fillStyle = theme.muted;
    context.fillText(fitted(context, lane.link ? `${lane.name} link` : lane.name, GUTTER - 10), 0, y + LANE / 2 + 4);
    context.fillStyle = theme.faint;
    context.fillRect(GUTTER, y, this.span, LANE);
    context.save();
    context.beginPath();
    context.rect(GUTTER, y, this.span, LANE);
    context.clip();
    let drawn = -1;
    const kinds = line.labels;
    for (let i = firstAbove(lane.ends, this.from); i < lane.begins.length && lane.begins[i] < this.to; i++) {
      const [x, end] = [this.x(lane.begins[i]), this.x(lane.ends[i])];
      // Tasks within a pixel that has something are not to be seen.
      if (end < drawn) continue;
      const [kind, text] = kinds[lane.label[i]];
      const wide = Math.max(1, end - x - (end - x > 4 ? 1 : 0));
      context.fillStyle = line.colours[kind];
      context.fillRect(x, y, wide, LANE);
      drawn = Math.max(end, x + 1);
      if (wide > 34) {
        // Dark on every colour of the kinds.
        context.fillStyle = "#101418";
        context.fillText(fitted(context, line.texts[text], wide - 8), x + 4, y + LANE / 2 + 4);
      }
    }
    if (this.chosen !== null && this.chosen.lane === lane) {
      const [x, end] = [this.x(lane.begins[this.chosen.i]), this.x(lane.ends[this.chosen.i])];
      context.strokeStyle = theme.chosen;
      context.lineWidth = 2.5;
      context.strokeRect(x + 1, y + 1, Math.max(2, end - x - 2), LANE - 2);
    }
    context.restore();
  }

  drawMemory(context, each, theme) {
    const { at, bytes } = each.memory;
    const top = each.held, most = Math.max(each.peak, 1);
    const y = (size) => top + HELD * (1 - size / most);
    context.fillStyle = theme.muted;
    context.fillText("memory", 0, top + 14);
    context.fillText(bytesText(each.peak), 0, top + 30);
    context.save();
    context.beginPath();
    context.rect(GUTTER, top - 1, this.span, HELD + 2);
    context.clip();
    context.beginPath();
    context.moveTo(GUTTER, top + HELD);
    // The most in each pixel.
    let i = Math.max(0, firstAbove(at, this.from) - 1);
    for (let pixel = 0; pixel <= this.span; pixel++) {
      const until = this.from + (pixel + 1) / this.span * (this.to - this.from);
      let held = bytes[i];
      while (i + 1 < at.length && at[i + 1] < until) held = Math.max(held, bytes[++i]);
      context.lineTo(GUTTER + pixel, y(held));
    }
    context.lineTo(GUTTER + this.span, top + HELD);
    context.globalAlpha = 0.3;
    context.fillStyle = theme["shade-7"];
    context.fill();
    context.globalAlpha = 1;
    context.strokeStyle = theme["shade-7"];
    context.lineWidth = 1.2;
    context.stroke();
    context.restore();
  }

  /** Show the time from `from` to `to`, within the iteration; at least ten nanoseconds. */
  show(from, to) {
    const length = Math.min(line.length, Math.max(10, to - from));
    this.from = Math.max(0, Math.min(from, line.length - length));
    this.to = this.from + length;
    this.redraw();
  }

  move(dx) {
    const by = dx / this.span * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  zoom(factor, x = GUTTER + this.span / 2) {
    const part = Math.max(0, Math.min(1, (x - GUTTER) / this.span));
    const at = this.from + part * (this.to - this.from), length = (this.to - this.from) / factor;
    this.show(at - part * length, at + (1 - part) * length);
  }

  fit() { this.show(0, line.length); }

  choose(x, y) {
    const row = this.rows.find((each) => y >= each.y && y <= each.y + LANE);
    const at = this.from + (x - GUTTER) / this.span * (this.to - this.from);
    if (row === undefined || at < this.from) return;
    const slack = (this.to - this.from) / this.span * 2;
    const i = firstAbove(row.lane.ends, at - slack);
    if (i < row.lane.begins.length && row.lane.begins[i] <= at + slack) this.select(row.lane, i);
  }

  select(lane, i) {
    this.chosen = { lane, i };
    const [kind, text, result] = line.labels[lane.label[i]];
    const [begin, end] = [lane.begins[i], lane.ends[i]];
    const name = line.texts[text];
    const shown = nodes.find((node) => node.isLeaf && name.endsWith(` of ${node.name}`));
    byId("task").replaceChildren(
      element("strong", {}, name), ` — ${line.kinds[kind]}, ${secondsText(end - begin)} from ${secondsText(begin)}`,
      line.texts[result] ? `, makes ${line.texts[result]}` : "",
      shown ? element("button", { type: "button", onclick: () => {
        graphPicture.select(shown);
        byId("graph").scrollIntoView();
      } }, "In the graph") : "");
    if (begin < this.from || end > this.to) {
      const length = this.to - this.from;
      this.show((begin + end - length) / 2, (begin + end + length) / 2);
    }
    this.redraw();
  }

  /** Choose the next task of the lane, or the one before. */
  step(by) {
    if (this.chosen === null) {
      const row = this.rows.find((each) => each.lane.begins.length);
      if (row) this.select(row.lane, Math.min(row.lane.begins.length - 1, firstAbove(row.lane.ends, this.from)));
      return;
    }
    const { lane, i } = this.chosen;
    this.select(lane, (i + by + lane.begins.length) % lane.begins.length);
  }

  /** Choose the task at the same time in the next lane that has any. */
  nextLane() {
    const lanes = this.rows.map((row) => row.lane).filter((lane) => lane.begins.length);
    if (!lanes.length) return;
    const at = this.chosen === null ? this.from : this.chosen.lane.begins[this.chosen.i];
    const next = lanes[(lanes.indexOf(this.chosen?.lane) + 1) % lanes.length];
    this.select(next, Math.min(next.begins.length - 1, firstAbove(next.ends, at)));
  }

  keys() {
    return {
      ArrowLeft: () => this.move(-this.span / 8), ArrowRight: () => this.move(this.span / 8),
      ArrowUp: () => this.zoom(1.5), ArrowDown: () => this.zoom(1 / 1.5), "+": () => this.zoom(1.5), "=": () => this.zoom(1.5),
      "-": () => this.zoom(1 / 1.5), Home: () => this.fit(), n: () => this.step(1), p: () => this.step(-1),
      l: () => this.nextLane(),
      Escape: () => { this.chosen = null; byId("task").replaceChildren(); this.redraw(); },
    };
  }
}

line.kinds.forEach((kind, i) => {
  const mark = element("span", {}, kind);
  mark.style.setProperty("--own", line.colours[i]);
  byId("timeline-legend").append(mark);
});
const timelinePicture = new TimelinePicture();
buttons("timeline-buttons", timelinePicture);
byId("timeline-note").textContent = line.note;
