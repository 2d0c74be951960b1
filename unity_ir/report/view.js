// What all pictures share: elements made of text alone, numbers as text, and a canvas that is moved and zoomed.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

/** Make an element; texts among the children become text nodes, never markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Make a table of real cells: heads and cells are [text or element, whether it is a number]. */
function table(caption, heads, rows, own = -1) {
  const cell = (tag, [content, isNumber], scope) =>
    element(tag, { class: isNumber ? "number" : null, scope }, content);
  return element("table", {}, caption ? element("caption", {}, caption) : null,
    element("thead", {}, element("tr", {}, ...heads.map((head) => cell("th", head, "col")))),
    element("tbody", {}, ...rows.map((row, i) =>
      element("tr", { class: i === own ? "own" : null }, ...row.map((each) => cell("td", each, null))))));
}

/** Make a bar that is filled to a part of 1. */
function bar(part, kind = "") {
  const inner = element("i", { class: kind });
  inner.style.width = `${Math.max(0, Math.min(1, part)) * 100}%`;
  return element("span", { class: "bar", "aria-hidden": "true" }, inner);
}

const digits = (number, count) => number.toFixed(Math.max(1, count - (number >= 1 ? String(Math.trunc(number)).length : 1)));

/** Nanoseconds as text: 17.0 ms. */
function secondsText(ns) {
  if (ns >= 1e9) return `${digits(ns / 1e9, 4)} s`;
  return ns >= 1e6 ? `${digits(ns / 1e6, 3)} ms` : `${digits(ns / 1e3, 3)} us`;
}

/** Bytes as text: 154.1 MB. */
function bytesText(bytes) {
  for (const [unit, scale] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (bytes >= scale) return `${digits(bytes / scale, 3)} ${unit}`;
  }
  return `${bytes} B`;
}

/** A colour of the style sheet, of the light or dark theme. */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Cut a text so that it fits a width of the canvas; of names with dots, the end says more. */
function fitted(context, text, width, keepsEnd = false) {
  if (context.measureText(text).width <= width) return text;
  if (keepsEnd) {
    const parts = text.split(".");
    for (let i = 1; i < parts.length; i++) {
      const end = `…${parts.slice(i).join(".")}`;
      if (context.measureText(end).width <= width) return end;
    }
  }
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    const part = keepsEnd ? `…${text.slice(text.length - middle)}` : `${text.slice(0, middle)}…`;
    if (context.measureText(part).width <= width) low = middle;
    else high = middle - 1;
  }
  return keepsEnd ? `…${text.slice(text.length - low)}` : `${text.slice(0, low)}…`;
}

/** A canvas that calls `draw(context, width, height)` once per frame at most, in CSS pixels, on screens of any density. */
class Picture {
  constructor(id) {
    this.canvas = byId(id);
    this.isAsked = false;
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    this.canvas.addEventListener("focus", () => this.redraw());
    this.canvas.addEventListener("wheel", (event) => {
      // Otherwise the page is scrolled.
      if (document.activeElement !== this.canvas && !event.ctrlKey) return;
      event.preventDefault();
      const box = this.canvas.getBoundingClientRect();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(event.deltaX, 0);
      else this.zoom(Math.exp(-event.deltaY / 400), event.clientX - box.left, event.clientY - box.top);
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.press(event));
    this.canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const act = this.keys()[event.key];
      if (act === undefined) return;
      event.preventDefault();
      act();
    });
  }

  get width() { return this.canvas.clientWidth; }
  get height() { return this.canvas.clientHeight; }

  redraw() {
    if (this.isAsked) return;
    this.isAsked = true;
    requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    this.isAsked = false;
    const density = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(this.width * density), Math.round(this.height * density)];
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(density, 0, 0, density, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    this.draw(context, this.width, this.height);
  }

  /** Drag the picture, or choose what is under a pointer that has not moved. */
  press(down) {
    if (down.button !== 0) return;
    let [x, y, moved] = [down.clientX, down.clientY, 0];
    this.canvas.setPointerCapture(down.pointerId);
    const drag = (event) => {
      moved += Math.abs(event.clientX - x) + Math.abs(event.clientY - y);
      if (moved > 4) this.move(x - event.clientX, y - event.clientY);
      [x, y] = [event.clientX, event.clientY];
    };
    const end = (event) => {
      this.canvas.removeEventListener("pointermove", drag);
      const box = this.canvas.getBoundingClientRect();
      if (moved <= 4) this.choose(event.clientX - box.left, event.clientY - box.top);
    };
    this.canvas.addEventListener("pointermove", drag);
    this.canvas.addEventListener("pointerup", end, { once: true });
  }
}

/** Give a picture its buttons. */
function buttons(id, picture) {
  byId(id).append(
    element("button", { type: "button", "aria-label": "Zoom in", onclick: () => picture.zoom(1.5) }, "+"),
    element("button", { type: "button", "aria-label": "Zoom out", onclick: () => picture.zoom(1 / 1.5) }, "−"),
    element("button", { type: "button", onclick: () => picture.fit() }, "Show all"));
}
