// Plain SVG charts: predicted against observed TTFT, targets met over time, and an instance's replayed seconds.

import { draw, make, ms, percent } from "./format.js";

const WIDTH = 520, HEIGHT = 300, LEFT = 64, BOTTOM = 40, TOP = 12, RIGHT = 30;
const NUM_COLOURS = 8;

const frame = (label) => draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });

function axes(svg, xTicks, yTicks, xName, yName) {
  for (const [at, text] of xTicks) {
    svg.append(draw("line", { class: "axis", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    svg.append(draw("text", { x: at, y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, [], text));
  }
  for (const [at, text] of yTicks) {
    svg.append(draw("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at }));
    svg.append(draw("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, [], text));
  }
  svg.append(draw("text", { x: (LEFT + WIDTH) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, [], xName));
  const yMiddle = (TOP + HEIGHT - BOTTOM) / 2;
  svg.append(draw("text", { x: 14, y: yMiddle, "text-anchor": "middle", transform: `rotate(-90 14 ${yMiddle})` }, [], yName));
}

// points: [{predicted, observed (ms), model}]; both axes logarithmic over whole decades.
export function drawTtft(place, legend, points, models) {
  const shown = points.filter((point) => point.predicted > 0 && point.observed > 0);
  const values = shown.flatMap((point) => [point.predicted, point.observed]);
  const low = Math.floor(Math.log10(values.length ? Math.min(...values) : 10));
  const high = Math.max(Math.ceil(Math.log10(values.length ? Math.max(...values) : 1000)), low + 1);
  const x = (value) => LEFT + ((Math.log10(value) - low) / (high - low)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((Math.log10(value) - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  const svg = frame(`Predicted against observed time to first token of the last ${shown.length} answers, both in milliseconds`);
  const decades = Array.from({ length: high - low + 1 }, (_, step) => 10 ** (low + step));
  axes(svg, decades.map((v) => [x(v), ms(v)]), decades.map((v) => [y(v), ms(v)]), "predicted TTFT", "observed TTFT");
  svg.append(draw("line", { class: "ideal", x1: x(10 ** low), y1: y(10 ** low), x2: x(10 ** high), y2: y(10 ** high) }));
  for (const point of shown) {
    const dot = draw("circle", { class: "dot", cx: x(point.predicted), cy: y(point.observed), r: 3.2 });
    dot.style.fill = colourOf(models, point.model);
    svg.append(dot);
  }
  place.replaceChildren(svg);
  legend.replaceChildren(
    make("span", { text: "Logarithmic; on the dashed line both agree. " }),
    ...models.slice(0, NUM_COLOURS).map((model) => {
      const swatch = make("span", { name: "swatch" });
      swatch.style.background = colourOf(models, model);
      return make("span", { name: "key", children: [swatch, ` ${model}`] });
    }),
    ...(models.length > NUM_COLOURS ? [`and ${models.length - NUM_COLOURS} more, in grey`] : []),
  );
}

function colourOf(models, model) {
  const place = models.indexOf(model);
  return place < 0 || place >= NUM_COLOURS ? "var(--quiet)" : `var(--c${place})`;
}

// steps: [{at (s since the page opened), met, all}]
export function drawAttained(place, steps) {
  const shown = steps.filter((step) => step.all > 0);
  const first = shown.length ? shown[0].at : 0;
  const newest = shown.length ? shown[shown.length - 1].at : 0;
  const last = first + Math.max(Math.ceil((newest - first) / 15) * 15, 30);
  const x = (at) => LEFT + ((at - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
  const y = (share) => HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP);
  const now = shown.length ? shown[shown.length - 1] : null;
  const svg = frame(now ? `Targets met over time; now ${percent(now.met / now.all)}` : "Targets met over time; nothing answered yet");
  const xTicks = [0, 1, 2, 3].map((part) => first + (part * (last - first)) / 3);
  axes(svg, xTicks.map((at) => [x(at), `${Math.round(at)} s`]), [0, 0.25, 0.5, 0.75, 1].map((s) => [y(s), percent(s, 0)]), "since this page was opened", "targets met");
  const line = shown.map((step) => `${x(step.at).toFixed(1)},${y(step.met / step.all).toFixed(1)}`).join(" ");
  svg.append(draw("polyline", { class: "share", points: line }));
  if (now) svg.append(draw("circle", { class: "dot", cx: x(now.at), cy: y(now.met / now.all), r: 3.5 }));
  place.replaceChildren(svg);
}

// points: [[running, waiting, kv share]]; scaled to the largest total, at least `most`.
export function timeline(points, horizon, most) {
  const width = 150, height = 30;
  const top = Math.max(...points.map(([running, waiting]) => running + waiting), most, 1);
  const x = (step) => ((step / (points.length - 1)) * width).toFixed(1);
  const y = (value) => (height - (value / top) * (height - 2)).toFixed(1);
  const area = (low, high) =>
    points.map((point, step) => `${x(step)},${y(high(point))}`).join(" ") + " " +
    points.map((point, step) => `${x(step)},${y(low(point))}`).reverse().join(" ");
  const [now, end] = [points[0], points[points.length - 1]];
  const label = `now ${now[0]} running and ${now[1]} waiting; in ${horizon} seconds ${end[0]} running and ${end[1]} waiting, ${percent(end[2], 0)} of KV blocks in use`;
  return draw("svg", { class: "timeline", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, [
    draw("title", {}, [], label),
    draw("polygon", { class: "running", points: area(() => 0, (p) => p[0]) }),
    draw("polygon", { class: "waiting", points: area((p) => p[0], (p) => p[0] + p[1]) }),
    draw("polyline", { class: "kv", points: points.map((p, step) => `${x(step)},${(height - 1 - p[2] * (height - 2)).toFixed(1)}`).join(" ") }),
  ]);
}
