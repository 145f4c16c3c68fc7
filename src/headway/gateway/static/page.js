// Wires the event stream to the page. All state of the page lives here; nothing is stored but the theme and the key.

import { drawAttained, drawTtft } from "./charts.js";
import { showDecision, showOutcome } from "./decisions.js";
import { ms, percent, usd } from "./format.js";
import { showPool } from "./pool.js";
import { follow, KeyWanted, setKey } from "./stream.js";

const MAX_POINTS = 300, STEP_S = 5, RETRY_MS = 2000;
const at = (id) => document.getElementById(id);
const opened = performance.now();
const open = new Map(); // decisions whose outcome is still to come
const points = [];
const steps = [];
let pool = null, paused = false, missed = [];

const on = {
  pool(value) {
    pool = value;
    at("about").textContent = `policy ${value.policy}, ${value.instances.length} instances, configuration ${value.config_hash}, up ${duration(value.uptime_s)}`;
    at("horizon").textContent = value.horizon_s;
    refreshPool();
    refreshScore(value);
    refreshCharts();
  },
  decisions(values) {
    for (const decision of values) {
      open.set(decision.id, decision);
      if (paused) missed.push(decision);
      else showDecision(at("decisions"), decision);
    }
    while (open.size > 4000) open.delete(open.keys().next().value);
    missed = missed.slice(-60);
    if (paused) at("pause").textContent = `Go on (${missed.length} new)`;
  },
  outcomes(values) {
    for (const outcome of values) {
      showOutcome(outcome);
      const decision = open.get(outcome.id);
      open.delete(outcome.id);
      if (!decision) continue;
      if (outcome.ttft_ms != null && decision.predicted_ms != null) {
        points.push({ predicted: decision.predicted_ms, observed: outcome.ttft_ms, model: decision.model });
        if (points.length > MAX_POINTS) points.shift();
      }
      if (decision.target_ms != null && outcome.status !== "cancelled") attained(outcome.ttft_ms != null && outcome.ttft_ms <= decision.target_ms);
    }
  },
};

function attained(met) {
  const step = Math.floor((performance.now() - opened) / 1000 / STEP_S) * STEP_S;
  if (!steps.length || steps[steps.length - 1].at !== step) steps.push({ at: step, met: 0, all: 0 });
  if (steps.length > 240) steps.shift();
  steps[steps.length - 1].all += 1;
  steps[steps.length - 1].met += met ? 1 : 0;
}

function refreshPool() {
  if (pool) showPool(document.querySelector("#pool tbody"), pool, at("filter").value);
}

function refreshScore(value) {
  const score = value.score;
  at("inflight").textContent = value.inflight;
  if (score.num_with_target) {
    at("met").textContent = percent(score.num_in_time / score.num_with_target);
    at("met-note").textContent = `${score.num_in_time} of the last ${score.num_with_target} with a target`;
  }
  if (score.num_priced) {
    at("cost").textContent = usd(score.cost_per_1000_usd);
    const share = score.dearest_per_1000_usd > 0 ? `, ${percent(1 - score.cost_per_1000_usd / score.dearest_per_1000_usd, 0)} less` : "";
    at("cost-note").textContent = `always ${score.dearest}: ${usd(score.dearest_per_1000_usd)}${share}`;
  }
  if (points.length) {
    const errors = points.map((point) => Math.abs(point.observed - point.predicted) / point.observed).sort((a, b) => a - b);
    at("error").textContent = percent(errors[Math.floor(errors.length / 2)], 0);
    at("error-note").textContent = `median of |observed − predicted| ÷ observed over ${points.length} answers`;
  }
}

function refreshCharts() {
  const models = pool ? [...new Set(pool.instances.map((instance) => instance.model))] : [];
  drawTtft(at("ttft"), at("ttft-legend"), points, models);
  drawAttained(at("attained"), steps);
}

const duration = (s) => (s < 120 ? `${Math.round(s)} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);

function link(state, text) {
  if (at("link").textContent !== text) at("link").textContent = text;
  at("link").className = state;
}

async function run() {
  for (;;) {
    try {
      await follow("events", on, () => link("live", "● live"));
      link("lost", "■ the gateway ended the stream; trying again");
    } catch (error) {
      if (error instanceof KeyWanted) {
        link("lost", "■ the admin key is wanted");
        at("key-form").hidden = false;
        return;
      }
      link("lost", "■ no connection; trying again");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value);
  at("key").value = "";
  at("key-form").hidden = true;
  run();
});
at("filter").addEventListener("input", refreshPool);
at("pause").addEventListener("click", () => {
  paused = !paused;
  at("pause").setAttribute("aria-pressed", String(paused));
  at("pause").textContent = paused ? "Go on" : "Pause";
  if (!paused) for (const decision of missed.splice(0)) showDecision(at("decisions"), decision);
});

function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  at("theme").setAttribute("aria-pressed", String(dark));
}
const stored = localStorage.getItem("headway-theme");
theme(stored ? stored === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
at("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme !== "dark";
  localStorage.setItem("headway-theme", dark ? "dark" : "light");
  theme(dark);
});

refreshCharts();
run();
