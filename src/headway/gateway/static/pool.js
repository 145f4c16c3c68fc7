// The table of instances. Rows are kept and refilled, so that focus and scrolling survive a refresh.

import { timeline } from "./charts.js";
import { DASH, make, number, percent } from "./format.js";

const rows = new Map();

export function showPool(body, pool, filter) {
  const wanted = filter.trim().toLowerCase();
  const present = new Set();
  for (const instance of pool.instances) {
    present.add(instance.id);
    let row = rows.get(instance.id);
    if (!row) {
      row = make("tr", { children: [make("th", { scope: "row", text: instance.id }), ...Array.from({ length: 9 }, () => make("td"))] });
      for (const place of [3, 4, 5, 7]) row.cells[place].className = "num";
      rows.set(instance.id, row);
      body.append(row);
    }
    fill(row.cells, instance, pool.horizon_s);
    row.hidden = wanted !== "" && ![instance.id, instance.model, instance.health].some((text) => text.toLowerCase().includes(wanted));
  }
  for (const [id, row] of rows) {
    if (!present.has(id)) {
      row.remove();
      rows.delete(id);
    }
  }
}

function fill(cells, instance, horizon) {
  cells[1].textContent = instance.model;
  const mark = instance.health === "ok" ? ["good", "● ok"] : instance.health === "draining" || instance.health === "stale" ? ["warn", `▲ ${instance.health}`] : ["bad", `■ ${instance.health}`];
  cells[2].replaceChildren(make("span", { name: mark[0], text: mark[1] }));
  if (instance.problem) cells[2].append(make("span", { name: "problem warn", text: instance.problem }));
  cells[3].textContent = instance.outstanding;
  cells[4].textContent = instance.running == null ? DASH : instance.max_running ? `${instance.running} of ${instance.max_running}` : instance.running;
  cells[5].textContent = instance.waiting ?? DASH;
  if (instance.kv == null) cells[6].textContent = DASH;
  else meter(cells[6], instance.kv);
  cells[7].textContent = instance.snapshot_age_s == null ? DASH : instance.snapshot_age_s < 1 ? `${Math.round(1000 * instance.snapshot_age_s)} ms` : `${number(instance.snapshot_age_s, 1)} s`;
  cells[8].replaceChildren(clock(instance));
  if (instance.timeline) cells[9].replaceChildren(timeline(instance.timeline, horizon, 4));
  else cells[9].textContent = "no replay";
}

function meter(cell, share) {
  if (!cell.firstElementChild) cell.append(make("span", { name: "meter", "aria-hidden": "true", children: [make("span")] }), make("span"));
  cell.firstElementChild.firstElementChild.style.width = `${Math.min(100, 100 * share)}%`;
  cell.lastElementChild.textContent = percent(share, 0);
}

// The profile's clock: observed over predicted TTFT, and whether it is believed.
function clock(instance) {
  if (instance.profile == null) return make("span", { text: "no profile" });
  const ratio = instance.residual == null ? "no answers yet" : `× ${number(instance.residual, 2)}`;
  const title = `${instance.profile}: median of observed over predicted TTFT`;
  return instance.trusted ? make("span", { text: ratio, title }) : make("span", { name: "bad", text: `■ ${ratio}, not trusted`, title });
}
