// The stream of decisions, and the dialog that shows every candidate of one of them.

import { DASH, make, ms, number } from "./format.js";
import { getJson } from "./stream.js";

const MAX_SHOWN = 40;
const shown = new Map();

export function showDecision(list, decision) {
  const result = make("span", { text: decision.instance ? "under way" : "turned down", name: decision.instance ? "" : "bad" });
  const button = make("button", {
    type: "button",
    children: [
      make("span", { text: timeOfDay(decision.age_s), title: `request ${decision.request_id}, attempt ${decision.attempt}` }),
      make("span", { text: decision.instance ? `${decision.instance}, ${decision.model}` : "none" }),
      make("span", { text: `${ms(decision.predicted_ms)}${decision.target_ms == null ? "" : ` of ${ms(decision.target_ms)}`}`, title: "predicted TTFT, and the target" }),
      result,
      make("span", { name: "why", text: decision.reason }),
    ],
  });
  button.addEventListener("click", () => explain(decision));
  list.prepend(make("li", { children: [button] }));
  shown.set(decision.id, { decision, result });
  while (list.children.length > MAX_SHOWN) list.lastElementChild.remove();
  if (shown.size > 4 * MAX_SHOWN) shown.delete(shown.keys().next().value);
}

export function showOutcome(outcome) {
  const entry = shown.get(outcome.id);
  if (!entry) return;
  const { decision, result } = entry;
  const late = decision.target_ms != null && (outcome.ttft_ms == null || outcome.ttft_ms > decision.target_ms);
  if (outcome.status !== "ok") {
    result.textContent = outcome.status;
    result.className = outcome.status === "cancelled" ? "warn" : "bad";
  } else {
    result.textContent = `${late ? "▲ late, " : decision.target_ms == null ? "" : "● in time, "}${ms(outcome.ttft_ms)}`;
    result.className = late ? "warn" : "good";
  }
}

const timeOfDay = (age_s) => new Date(Date.now() - 1000 * age_s).toTimeString().slice(0, 8);

async function explain(decision) {
  const dialog = document.getElementById("why");
  document.getElementById("why-reason").textContent = decision.reason;
  const facts = document.getElementById("why-facts");
  facts.textContent = "loading";
  const body = document.querySelector("#candidates tbody");
  body.replaceChildren();
  if (!dialog.open) dialog.showModal();
  try {
    const full = await getJson(`decisions/${encodeURIComponent(decision.id)}`);
    facts.textContent = `Request ${full.request_id}, attempt ${full.attempt}, policy ${full.policy}, configuration ${full.config_hash}; decided in ${full.decision_s == null ? DASH : `${(1e6 * full.decision_s).toFixed(0)} µs`}; target ${ms(full.ttft_target_s == null ? null : 1e3 * full.ttft_target_s)}.`;
    body.replaceChildren(...full.candidates.map((candidate) => candidateRow(candidate, full.chosen)));
  } catch (error) {
    facts.textContent = `The candidates cannot be shown: ${error.message || "the admin key is wanted"}`;
  }
}

function candidateRow(candidate, chosen) {
  const estimate = candidate.estimate;
  const seconds = (value) => (estimate == null ? DASH : value == null ? "never" : ms(1e3 * value));
  const cell = (text, name = "num") => make("td", { text, name });
  const row = make("tr", {
    children: [
      make("th", { scope: "row", text: candidate.instance_id === chosen ? `${candidate.instance_id} (chosen)` : candidate.instance_id }),
      cell(candidate.model, ""), cell(candidate.verdict, candidate.verdict === "feasible" ? "good" : "warn"),
      cell(seconds(estimate?.ttft_s)), cell(seconds(estimate?.ttft_p90_s)), cell(estimate == null ? DASH : estimate.source, ""),
      cell(number(candidate.quality)), cell(candidate.cost_usd == null ? DASH : (1e6 * candidate.cost_usd).toFixed(1)),
      cell(number(candidate.utility)), cell(candidate.num_outstanding),
    ],
  });
  if (candidate.instance_id === chosen) row.className = "chosen";
  return row;
}
