// Figures as people read them. A dash stands for what is not known.

export const DASH = "–";

export const ms = (value) =>
  value == null ? DASH : value < 10 ? `${value.toFixed(1)} ms` : value < 10000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;

export const percent = (share, digits = 1) => (share == null ? DASH : `${(100 * share).toFixed(digits)} %`);

export const usd = (value) => (value == null ? DASH : `$${value < 0.01 ? value.toPrecision(2) : value.toFixed(value < 1 ? 3 : 2)}`);

export const number = (value, digits = 3) => (value == null ? DASH : value.toFixed(digits));

// An element with text (never HTML: names come from configuration files and clients), a class and children.
export function make(tag, { text, name, children = [], ...attributes } = {}) {
  const element = document.createElement(tag);
  if (text != null) element.textContent = text;
  if (name) element.className = name;
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  element.append(...children);
  return element;
}

export function draw(tag, attributes = {}, children = [], text = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text != null) element.textContent = text;
  element.append(...children);
  return element;
}
