"use strict";

const SVG = "http://www.w3.org/2000/svg";
const CARD = { width: 190, line: 16, top: 26, most: 8 };
const byId = id => document.getElementById(id);
const color = rank => DATA.colors[rank % DATA.colors.length];
const ink = rank => DATA.inks[rank % DATA.inks.length];
let step = 0;

function make(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// The lines of a card: the collective or the work of this step, then what the rank holds.
function lines(rank) {
  const calls = DATA.bars.filter(bar => bar.start === step && bar.rows.includes(rank));
  const work = DATA.boxes.filter(box => box.row === rank && box.start <= step && step < box.end);
  const held = (DATA.held[step] || [])[rank] || [];
  const shown = held.slice(-CARD.most);
  const more = held.length > shown.length ? [`(${held.length - shown.length} earlier)`] : [];
  return [...calls.map(bar => bar.text), ...work.map(box => `runs ${box.text}`), ...more, ...shown];
}

const count = DATA.rows.length;
const most = Math.min(CARD.most + 1, Math.max(1, ...DATA.held.flat().map(held => held.length))) + 1;
const cardHeight = CARD.top + CARD.line * most + 6;
const [width, height] = [1040, Math.max(430, 2 * cardHeight + 150)];

// Ranks on an ellipse, the first at the top, so that a ring is seen as a ring.
function place(rank) {
  const angle = 2 * Math.PI * rank / count - Math.PI / 2;
  const radius = [width / 2 - CARD.width / 2 - 20, height / 2 - cardHeight / 2 - 8];
  return [width / 2 + radius[0] * Math.cos(angle), height / 2 + radius[1] * Math.sin(angle)];
}

// Where the line from a card's center towards a point leaves the card.
function edge(rank, towards) {
  const [x, y] = place(rank), [dx, dy] = [towards[0] - x, towards[1] - y];
  const scale = Math.min((CARD.width / 2 + 6) / Math.abs(dx || 1e-9),
                         (cardHeight / 2 + 6) / Math.abs(dy || 1e-9), 1);
  return [x + dx * scale, y + dy * scale];
}

function drawArrow(stage, arrow) {
  const start = edge(arrow.source, place(arrow.target)), end = edge(arrow.target, place(arrow.source));
  const [dx, dy] = [end[0] - start[0], end[1] - start[1]], length = Math.hypot(dx, dy) || 1;
  // Bent to one side, so that two messages in opposite directions are apart.
  const bend = Math.min(26, length / 5);
  const middle = [(start[0] + end[0]) / 2 - bend * dy / length,
                  (start[1] + end[1]) / 2 + bend * dx / length];
  const group = make(stage, "g", { class: "arrow" });
  make(group, "title", {}, arrow.hover);
  make(group, "path", { d: `M${start} Q${middle} ${end}`, fill: "none", "stroke-width": 2.5,
                        stroke: color(arrow.source), "marker-end": `url(#tip${arrow.source})` });
  const at = [(start[0] + end[0]) / 4 + middle[0] / 2, (start[1] + end[1]) / 4 + middle[1] / 2];
  return () => make(stage, "text", { x: at[0], y: at[1] + 4, "text-anchor": "middle", class: "label" },
                    arrow.text);
}

function drawStage() {
  const stage = byId("stage");
  stage.replaceChildren();
  stage.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const tips = make(stage, "defs", {});
  DATA.rows.forEach((_, rank) => {
    const tip = make(tips, "marker", { id: `tip${rank}`, viewBox: "0 0 8 8", refX: 6, refY: 4,
                                       markerWidth: 5, markerHeight: 5, orient: "auto" });
    make(tip, "path", { d: "M0,0 L8,4 L0,8 z", fill: color(rank) });
  });
  const bars = DATA.bars.filter(bar => bar.start === step);
  DATA.rows.forEach((name, rank) => {
    const [x, y] = place(rank), [left, top] = [x - CARD.width / 2, y - cardHeight / 2];
    const card = make(stage, "g", { class: "card" });
    const called = bars.some(bar => bar.rows.includes(rank));
    make(card, "rect", { x: left, y: top, width: CARD.width, height: cardHeight, rx: 6,
                         fill: called ? "#f3ead7" : "#fafafa", stroke: color(rank),
                         "stroke-width": 1.5 });
    make(card, "text", { x: left + 10, y: top + 18, fill: ink(rank), class: "name" }, name);
    lines(rank).forEach((text, index) => {
      make(card, "text", { x: left + 10, y: top + CARD.top + 10 + CARD.line * index }, text);
    });
  });
  const labels = DATA.arrows.filter(arrow => arrow.start === step)
    .map(arrow => drawArrow(stage, arrow));
  labels.forEach(draw => draw());
}

function drawList() {
  const here = [...DATA.arrows, ...DATA.bars].filter(one => one.start === step);
  byId("messages").replaceChildren(...here.map(one => {
    const item = document.createElement("li");
    item.textContent = one.hover;
    return item;
  }));
}

function go(to) {
  step = Math.max(0, Math.min(DATA.length, to));
  byId("slider").value = step;
  byId("where").textContent = step === DATA.length ? "the end" : `time ${step} of ${DATA.length}`;
  byId("back").disabled = step === 0;
  byId("on").disabled = step === DATA.length;
  const cursor = byId("cursor");
  cursor.setAttribute("x", DATA.places[step]);
  cursor.setAttribute("width", step === DATA.length ? 3 : DATA.places[step + 1] - DATA.places[step]);
  // Keep the step in view in a long run.
  overview.parentElement.scrollLeft = DATA.places[step] + 30 - innerWidth / 2;
  drawStage();
  drawList();
}

const overview = document.querySelector("#overview svg");
make(overview, "rect", { id: "cursor", y: 46, height: overview.viewBox.baseVal.height - 50 });
byId("back").onclick = () => go(step - 1);
byId("on").onclick = () => go(step + 1);
byId("slider").oninput = event => go(Number(event.target.value));
document.addEventListener("keydown", event => {
  const to = { ArrowLeft: step - 1, ArrowRight: step + 1, Home: 0, End: DATA.length }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  go(to);
});
go(0);
