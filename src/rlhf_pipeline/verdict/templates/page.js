"use strict";
const SVG = "http://www.w3.org/2000/svg";
const number = (value, digits = 2) => value == null ? "–" : value.toFixed(digits).replace(/^-(0\.?0*)$/, "$1");
const signed = (value, digits) => (value > 0 ? "+" : "") + number(value, digits);

function add(parent, name, attributes = {}, text) {
  const made = parent.namespaceURI === SVG || name === "svg" ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

function ticks(low, high, count) {  // multiples of 1, 2 or 5 times a power of ten
  const power = 10 ** Math.floor(Math.log10((high - low) / count));
  const step = [1, 2, 5, 10].map(each => each * power).find(each => each * count >= high - low);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(+(k * step).toPrecision(10));
  return found;
}

const tickText = value => Math.abs(value) >= 1e4 ? `${value / 1e3}k` : String(value);

function extent(values, pad) {
  const low = Math.min(...values), high = Math.max(...values), room = (high - low || Math.abs(high) || 1) * pad;
  return high > low || pad ? [low - room, high + room] : [low - .5, high + .5];
}

function ink(chart, index) {  // batches of training are paler than held-out rows
  const soft = chart.series.length > 1 && chart.series[0].name === "training";
  return soft && !index ? "--soft" : `--c${(index - soft) % 5}`;
}

function draw(box, chart, show) {
  const histogram = chart.kind === "histogram", width = box.clientWidth, height = 200;
  const points = chart.series.flatMap((series, index) => series.y.map((y, k) => ({
    x: histogram ? (series.x[k] + series.x[k + 1]) / 2 : series.x[k], y,
    text: `${series.name}: ${y} at ${series.texts?.[k] ?? (histogram ? `${series.x[k]} to ${series.x[k + 1]}` : `${chart.x} ${series.x[k]}`)}`,
  }))).sort((a, b) => a.x - b.x);
  const [x0, x1] = extent(chart.series.flatMap(series => series.x), chart.series[0].texts ? .08 : 0);
  const all = extent(points.map(point => point.y), .08);
  const late = extent(points.filter(point => point.x > x0 + (x1 - x0) * .05).map(point => point.y), .08);
  const begins = points.length > 100 && all[1] - all[0] > 2.5 * (late[1] - late[0]);  // a steep start leaves the chart
  const [y0, y1] = histogram ? [0, all[1]] : begins ? late : all;
  const yTicks = ticks(y0, y1, 5);
  const left = 10 + 6.5 * Math.max(...yTicks.map(tick => tickText(tick).length)), top = chart.mark == null ? 8 : 20;
  const X = x => left + (x - x0) / (x1 - x0) * (width - left - 14), Y = y => height - 38 - (y - y0) / (y1 - y0) * (height - 38 - top);
  box.replaceChildren();
  const svg = add(box, "svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const inside = `clip-path: polygon(${left - 5}px ${top - 5}px, ${width - 9}px ${top - 5}px, ${width - 9}px ${height - 34}px, ${left - 5}px ${height - 34}px) view-box`;
  if (chart.healthy) {
    const [low, high] = [Math.max(chart.healthy[0], y0), Math.min(chart.healthy[1], y1)];
    if (high > low) add(svg, "rect", { class: "band", x: left, width: width - left - 14, y: Y(high), height: Y(low) - Y(high) });
  }
  for (const tick of yTicks) {
    add(svg, "line", { class: "grid", x1: left, x2: width - 14, y1: Y(tick), y2: Y(tick) });
    add(svg, "text", { x: left - 6, y: Y(tick) + 4, "text-anchor": "end" }, tickText(tick));
  }
  for (const tick of ticks(x0, x1, width < 340 ? 4 : 5)) add(svg, "text", { x: X(tick), y: height - 22, "text-anchor": "middle" }, tickText(tick));
  add(svg, "text", { x: (left + width - 14) / 2, y: height - 5, "text-anchor": "middle" }, chart.x);
  if (chart.mark != null) {
    const x = X(chart.mark), right = chart.mark > (x0 + x1) / 2;
    add(svg, "line", { class: "exported", x1: x, x2: x, y1: top - 8, y2: height - 38 });
    add(svg, "text", { x: right ? x - 5 : x + 5, y: 12, "text-anchor": right ? "end" : "start" }, "exported");
  }
  chart.series.forEach((series, index) => {
    const colour = `--ink: var(${ink(chart, index)})`, style = `${colour}; ${inside}`;
    const path = histogram
      ? `M${X(series.x[0])} ${Y(0)}` + series.y.map((y, k) => `V${Y(y)}H${X(series.x[k + 1])}`).join("") + `V${Y(0)}`
      : "M" + series.y.map((y, k) => `${X(series.x[k])} ${Y(y)}`).join("L");
    if (chart.kind !== "points") add(svg, "path", { d: path, style, class: histogram ? "filled" : "" });
    if (series.dots) series.y.forEach((y, k) => add(svg, "circle", { cx: X(series.x[k]), cy: Y(y), r: 3, style: colour }));
  });
  const labels = [];
  chart.series.forEach((series, index) => {
    for (const k of series.texts ? new Set([series.y.length - 1, 0]) : []) {
      const x = X(series.x[k]), y = Y(series.y[k]) + (index ? 18 : -9), anchor = index ? "middle" : x - left > 60 ? "end" : "start";
      if (labels.some(other => Math.abs(other[0] - x) < 50 && Math.abs(other[1] - y) < 12)) continue;
      labels.push([x, y]);
      add(svg, "text", { x, y, "text-anchor": anchor }, series.texts[k]);
    }
  });
  let at = -1;
  const here = add(svg, "circle", { class: "here", r: 6, visibility: "hidden" });
  const move = index => {
    const point = points[at = Math.min(Math.max(index, 0), points.length - 1)], place = { cx: X(point.x), cy: Y(point.y), visibility: "visible" };
    for (const key in place) here.setAttribute(key, place[key]);
    show(point.text);
  };
  box.onpointermove = event => {
    const { left: x, top: y } = box.getBoundingClientRect();
    const far = points.map(point => Math.hypot(X(point.x) - event.clientX + x, (Y(point.y) - event.clientY + y) / 2));
    move(far.indexOf(Math.min(...far)));
  };
  box.onkeydown = event => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step) { event.preventDefault(); move(at + step); }
  };
  box.onpointerleave = box.onblur = () => { here.setAttribute("visibility", "hidden"); show(""); at = -1; };
}

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = JSON.parse(figure.dataset.chart), box = figure.querySelector(".plot");
  if (chart.series.length > 1) chart.series.forEach((series, index) => {
    const item = add(figure.querySelector(".legend"), "li");
    add(item, "i", { style: `--ink: var(${ink(chart, index)})` });
    item.append(series.name);
  });
  let width = 0;
  const show = text => { figure.querySelector("output").textContent = text; };
  new ResizeObserver(() => { if (box.clientWidth && box.clientWidth !== width) { width = box.clientWidth; draw(box, chart, show); } }).observe(box);
}

function differing(first, second) {  // words outside the longest common subsequence
  const [a, b] = [first, second].map(text => text.split(/(\s+)/)), columns = b.length + 1;
  if (a.length * b.length > 4e6) return [[first], [second]].map(pieces => pieces.map(text => [text, false]));
  const length = new Uint16Array((a.length + 1) * columns);
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) {
    length[i * columns + j] = a[i] === b[j] ? 1 + length[(i + 1) * columns + j + 1]
      : Math.max(length[(i + 1) * columns + j], length[i * columns + j + 1]);
  }
  const found = [[], []];
  for (let i = 0, j = 0; i < a.length || j < b.length;) {
    if (i < a.length && j < b.length && a[i] === b[j]) { found[0].push([a[i++], false]); found[1].push([b[j++], false]); }
    else if (j === b.length || (i < a.length && length[(i + 1) * columns + j] >= length[i * columns + j + 1])) found[0].push([a[i++], true]);
    else found[1].push([b[j++], true]);
  }
  const shared = found[0].filter(([text, differs]) => text.trim() && !differs).length;
  const similar = shared * 16 >= a.length + b.length;  // else nearly all of it would be marked
  return found.map(pieces => pieces.map(([text, differs], k) =>  // spaces between marked words are marked, too
    [text, similar && (text.trim() ? differs : Boolean(pieces[k - 1]?.[1] && pieces[k + 1]?.[1]))]));
}

function answers(section, { names, unit, columns, rows }) {
  const size = 20, body = section.querySelector("tbody"), by = name => section.querySelector(`[name="${name}"]`);
  const [previous, next] = section.querySelectorAll(".pages button"), status = section.querySelector("[role=status]");
  const heads = [...section.querySelectorAll("thead th")];
  let sort = { key: -1, down: false }, page = 0;
  const value = (row, key) => {
    const pair = key < 0 ? [row.n] : row.v[key];
    return pair.includes(null) ? null : pair.length > 1 ? pair[1] - pair[0] : pair[0];
  };
  const kinds = {
    all: () => true, gains: row => value(row, 0) > 0, losses: row => value(row, 0) < 0, ties: row => value(row, 0) === 0,
    disagree: row => columns.some((column, key) => column.judge && value(row, 0) * value(row, key) < 0),
  };
  function chosen() {
    const words = by("text").value.toLowerCase().split(/\s+/).filter(Boolean), { key, down } = sort;
    const found = rows.filter(row => kinds[by("kind").value](row) && (!by("source")?.value || row.source === by("source").value)
      && words.every(word => `${row.p}\n${row.a.join("\n")}`.toLowerCase().includes(word)));
    return found.map(row => [value(row, key), row]).sort(([a, one], [b, other]) =>
      (a == null) - (b == null) || (down ? b - a : a - b) || one.n - other.n).map(pair => pair[1]);
  }
  function show() {
    const found = chosen(), pages = Math.max(1, Math.ceil(found.length / size));
    page = Math.min(page, pages - 1);
    body.replaceChildren(...found.slice(page * size, (page + 1) * size).map(line));
    status.textContent = found.length ? `${page * size + 1} to ${Math.min((page + 1) * size, found.length)} of ${found.length} ${unit}` : "No prompt matches.";
    previous.disabled = page === 0;
    next.disabled = page === pages - 1;
    heads.forEach(head => { if (head.dataset.key) head.setAttribute("aria-sort", +head.dataset.key !== sort.key ? "none" : sort.down ? "descending" : "ascending"); });
  }
  function line(row) {
    const made = document.createElement("tr");
    made.setAttribute("role", "row");
    const cell = (label, attributes, text) => add(made, "td", { role: "cell", "data-label": label, ...attributes }, text);
    cell("Number", { class: "number" }, row.n);
    cell("Prompt", { class: "text" }, row.p);
    const marked = by("mark").checked ? differing(...row.a) : row.a.map(text => [[text, false]]);
    marked.forEach((pieces, index) => {
      const box = cell(names[index], { class: "text" });
      let run = null;
      pieces.forEach(([text, differs]) => {
        run = differs ? run ?? add(box, "mark") : null;
        (run ?? box).append(text);
      });
    });
    columns.forEach((column, key) => {
      const pair = row.v[key], box = cell(column.name, { class: "number" }, pair.length > 1 ? signed(value(row, key), column.digits) : number(pair[0], column.digits));
      if (pair.length > 1) add(box, "small", {}, pair.map(each => number(each, column.digits)).join(" → "));
    });
    return made;
  }
  const restart = () => { page = 0; show(); };
  section.addEventListener("input", event => {
    const order = { gains: true, losses: false }[by("kind").value];
    if (event.target.name === "kind") sort = order === undefined ? { key: -1, down: false } : { key: 0, down: order };
    restart();
  });
  heads.forEach(head => head.querySelector("button")?.addEventListener("click", () => {
    const key = +head.dataset.key;
    sort = { key, down: sort.key === key ? !sort.down : key >= 0 };
    restart();
  }));
  const turn = pages => { page += pages; show(); section.scrollIntoView(); };
  previous.addEventListener("click", () => turn(-1));
  next.addEventListener("click", () => turn(1));
  show();
}

const data = document.getElementById("data");
if (data) answers(document.getElementById("answers"), JSON.parse(data.textContent));
