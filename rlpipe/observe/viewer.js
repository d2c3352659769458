"use strict";
// Draws the page of samples from the JSON that rlpipe.observe.viewer embeds. Text of models only
// becomes text nodes, never HTML. The state is in the address after "#", so a view can be linked.

const PAGE = JSON.parse(document.getElementById("data").textContent);
const ROOT = document.getElementById("viewer");
const TOKENS_AT_ONCE = 12000; // tokens that are drawn before "Show more"
const SHORT = 160; // characters of responses that are shown in several columns
const ALL = "all";
const DEFAULTS = {
  view: "browse", set: String(PAGE.first), sort: "differ", status: "", fate: "", rmin: "", rmax: "", lmin: "",
  lmax: "", text: "", by: "advantage", prompt: "", a: "", b: "",
};
const SORTS = { differ: "rewards that differ first", stored: "stored order", low: "lowest reward first",
  high: "highest reward first" };
const COLOURS = { advantage: "advantage", difference: "log-prob, engine − trainer", nothing: "plain" };
const MEANINGS = {
  advantage: "Training makes a token with a positive advantage more likely, with a negative one less.",
  difference: "Log-prob of the engine minus log-prob of the trainer. Near 0 if both have the same weights.",
  nothing: "",
};

const state = { ...DEFAULTS, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
let drawn = 0; // groups that are drawn
let filtersOpen = false; // on a narrow screen; a wide one always shows them

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e6) return String(Number(value.toPrecision(3)));
  return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
}

function rewardsOf(group) {
  return group.samples.map((sample) => sample.reward).filter((reward) => reward !== null);
}

function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function spread(group) {
  const rewards = rewardsOf(group);
  return rewards.length ? Math.max(...rewards) - Math.min(...rewards) : 0;
}

// ---- state and filters

function change(changes) {
  Object.assign(state, changes);
  const kept = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  history.replaceState(null, "", "#" + new URLSearchParams(kept));
  draw();
}

function chosenSets() {
  const sets = PAGE.sets.map((set, position) => ({ set, position }));
  return state.set === ALL ? sets : sets.filter(({ position }) => String(position) === state.set);
}

function within(value, low, high) {
  if (low !== "" && (value === null || value < Number(low))) return false;
  return !(high !== "" && (value === null || value > Number(high)));
}

function matcher() {
  const wanted = state.text.toLowerCase();
  return (group, sample) =>
    (!state.status || statusOf(sample) === state.status) &&
    (!state.fate || group.fate === state.fate) &&
    within(sample.reward, state.rmin, state.rmax) &&
    within(sample.tokens, state.lmin, state.lmax) &&
    (!wanted || searched(group, sample).includes(wanted));
}

function statusOf(sample) {
  return sample.status || "completed";
}

function searched(group, sample) {
  const parts = [PAGE.prompts[group.prompt], group.label || "", (sample.texts || []).join("")];
  return parts.join("\n").toLowerCase();
}

function found() {
  const matches = matcher();
  const groups = [];
  for (const { set } of chosenSets()) {
    for (const group of set.groups) {
      const samples = group.samples.filter((sample) => matches(group, sample));
      if (samples.length) groups.push({ set, group, samples });
    }
  }
  const average = ({ group }) => mean(rewardsOf(group)) ?? 0;
  const orders = {
    differ: (x, y) => spread(y.group) - spread(x.group),
    low: (x, y) => average(x) - average(y),
    high: (x, y) => average(y) - average(x),
  };
  return orders[state.sort] ? groups.sort(orders[state.sort]) : groups;
}

// ---- controls

function select(name, label, options) {
  const list = make("select", { name, "aria-label": label, onchange: (event) => change({ [name]: event.target.value }) });
  for (const [value, text] of options) list.append(make("option", { value, selected: value === state[name] }, text));
  return make("label", {}, make("span", {}, label), list);
}

function input(name, label, type, placeholder) {
  const field = make("input", { name, type, placeholder, value: state[name], step: "any", "aria-label": label });
  field.addEventListener("change", () => change({ [name]: field.value }));
  return field;
}

function range(label, low, high, lowest, highest) {
  return make("label", {}, make("span", {}, label), make("span", { class: "pair" },
    input(low, `least ${label}`, "number", lowest), "–", input(high, `largest ${label}`, "number", highest)));
}

function stepper(label, options, current, choose) {
  const position = options.findIndex(([value]) => value === current);
  const step = (by, sign, title) => make("button", {
    type: "button", title, "aria-label": title, disabled: !options[position + by],
    onclick: () => choose(options[position + by][0]),
  }, sign);
  const list = make("select", { "aria-label": label, onchange: (event) => choose(event.target.value) });
  for (const [value, text] of options) list.append(make("option", { value, selected: value === current }, text));
  return make("label", { class: "wide" }, make("span", {}, label),
    make("span", { class: "pair" }, step(-1, "‹", "previous"), list, step(1, "›", "next")));
}

function values(pick) {
  const all = PAGE.sets.flatMap((set) => set.groups.flatMap(pick));
  return [...new Set(all)].filter(Boolean).sort();
}

function bounds(pick) {
  const all = PAGE.sets.flatMap((set) => set.groups.flatMap(pick)).filter((value) => value !== null);
  return all.length ? [Math.min(...all), Math.max(...all)].map(number) : ["", ""];
}

function views() {
  const tab = (view, text) => make("button", {
    type: "button", class: "tab", "aria-pressed": String(state.view === view), onclick: () => change({ view }),
  }, text);
  return make("div", { class: "tabs" }, tab("browse", "Browse"), tab("compare", "Compare two iterations"));
}

function setOptions() {
  const options = PAGE.sets.map((set, position) => [String(position), set.name]);
  return PAGE.sets.length > 1 ? [...options, [ALL, "all of these"]] : options;
}

function filters() {
  const statuses = values((group) => group.samples.map(statusOf));
  const fates = values((group) => [group.fate]);
  const rewards = bounds((group) => group.samples.map((sample) => sample.reward));
  const lengths = bounds((group) => group.samples.map((sample) => sample.tokens));
  return [
    stepper("Iteration", setOptions(), state.set, (set) => change({ set })),
    select("sort", "Order", Object.entries(SORTS)),
    range("Reward", "rmin", "rmax", ...rewards),
    range("Tokens", "lmin", "lmax", ...lengths),
    select("status", "Status", [["", "any"], ...statuses.map((status) => [status, status])]),
    select("fate", "Outcome", [["", "any"], ...fates.map((fate) => [fate, fate])]),
    make("label", { class: "wide" }, make("span", {}, "Text"), input("text", "Text", "search", "in prompt, response or expected answer")),
    make("button", { type: "button", class: "reset", onclick: () => change({ ...DEFAULTS, set: state.set, by: state.by }) }, "Clear"),
  ];
}

function colours() {
  const chooser = make("div", { class: "by", role: "radiogroup", "aria-label": "colour tokens by" }, "Colour tokens by");
  for (const [by, text] of Object.entries(COLOURS)) {
    chooser.append(make("label", {}, make("input", {
      type: "radio", name: "by", checked: state.by === by, onchange: () => change({ by }),
    }), text));
  }
  if (state.by === "nothing") return chooser;
  const largest = PAGE.largest[state.by];
  const legend = make("span", { class: "legend", title: MEANINGS[state.by] });
  if (largest) {
    const shades = [-1, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 1];
    const boxes = shades.map((share) => make("i", { style: shade(state.by, share * largest) }));
    legend.append(make("b", {}, "−" + number(largest)), ...boxes, make("b", {}, "+" + number(largest)));
  } else legend.append(make("b", {}, "0 everywhere, or not recorded"));
  chooser.append(legend, make("small", {}, MEANINGS[state.by]));
  return chooser;
}

// ---- groups and samples

function shade(by, value) {
  const largest = PAGE.largest[by];
  if (!value || !largest) return null;
  const positive = by === "advantage" ? "--good" : "--c1";
  const negative = by === "advantage" ? "--bad" : "--c2";
  const share = Math.round(8 + 62 * Math.min(1, Math.abs(value) / largest));
  return `background: color-mix(in srgb, var(${value > 0 ? positive : negative}) ${share}%, transparent)`;
}

function at(column, position) {
  return Array.isArray(column) ? column[position] : column;
}

function expandedVersions(sample) {
  return (sample.versions || []).flatMap(([count, version]) => Array(count).fill(version));
}

function token(sample, position, versions, masked) {
  const facts = [String(sample.ids[position])];
  const add = (column, name) => {
    const value = at(sample[column], position);
    if (value !== undefined && value !== null) facts.push(`${name} ${number(value)}`);
  };
  add("logProbs", "log-prob");
  add("differences", "engine − trainer");
  add("advantages", "advantage");
  if (versions.length) facts.push(`weights ${versions[position]}`);
  if (masked) facts.push("not in the loss");
  const column = { advantage: "advantages", difference: "differences" }[state.by];
  // A visible sign for line ends: a token of only a line end would be invisible.
  const text = sample.texts[position].replaceAll("\n", "⏎\n");
  return make("i", {
    class: masked ? "masked" : null, title: facts.join(" · "),
    style: column ? shade(state.by, at(sample[column], position)) : null,
  }, text);
}

function tokens(sample) {
  const box = make("div", { class: "text tokens" });
  const versions = expandedVersions(sample);
  const masked = new Set(sample.masked || []);
  const texts = sample.texts || [];
  const head = sample.cut ? texts.length / 2 : texts.length;
  texts.forEach((_, position) => {
    if (sample.cut && position === head) box.append(make("em", {}, ` … ${sample.cut.toLocaleString("en")} tokens left out … `));
    box.append(token(sample, position, versions, masked.has(position)));
  });
  if (!texts.length) box.append(make("em", {}, "empty response"));
  return box;
}

function kindOf(reward) {
  if (reward === null) return "";
  return reward >= 1 ? " right" : reward > 0 ? " partly" : " wrong";
}

function card(sample) {
  const versions = [...new Set(expandedVersions(sample))];
  const facts = [`#${sample.index}, ${counted(sample.tokens, "token")}`];
  if (statusOf(sample) !== "completed") facts.push(statusOf(sample));
  if (versions.length) facts.push(`weights ${versions[0]}${versions.length > 1 ? "…" + versions.at(-1) : ""}`);
  const score = make("div", { class: "score" },
    make("b", { class: "reward" + kindOf(sample.reward), title: "reward" }, number(sample.reward)));
  for (const [name, value] of Object.entries(sample.parts || {})) score.append(make("div", {}, `${name} ${number(value)}`));
  facts.forEach((fact) => score.append(make("div", {}, fact)));
  if (sample.error) score.append(make("div", { class: "wrong" }, sample.error));
  return make("article", { class: "card sample" }, score, tokens(sample));
}

function cards(samples) {
  const short = samples.every((sample) => (sample.texts || []).join("").length <= SHORT);
  return make("div", { class: short ? "cards short" : "cards" }, ...samples.map(card));
}

function pictures(group) {
  const shown = (PAGE.images[group.prompt] || []).filter((digest) => PAGE.pictures[digest]);
  return shown.map((digest) => make("img", { src: PAGE.pictures[digest], alt: `image ${digest.slice(0, 12)}`, title: digest }));
}

function prompt(group) {
  return [
    ...pictures(group),
    make("div", { class: "prompt text" }, PAGE.prompts[group.prompt]),
    group.label === undefined ? null : make("p", { class: "label" }, "expected: ", make("span", {}, group.label)),
  ];
}

function section({ set, group, samples }) {
  const rewards = rewardsOf(group);
  const total = group.samples.length;
  const facts = [set.name, counted(total, "sample"), group.fate];
  if (samples.length < total) facts[1] = `${samples.length} of ${total} samples match`;
  if (rewards.length) facts.push(`mean reward ${number(mean(rewards))}`);
  if (total > 1 && !spread(group)) facts.push("rewards do not differ: no signal for methods that compare within a group");
  return make("section", { class: "group" }, make("h2", {}, group.id), make("p", {}, facts.filter(Boolean).join(" · ")),
    ...prompt(group), cards(samples));
}

function size({ samples }) {
  return samples.reduce((sum, sample) => sum + (sample.texts || []).length + 1, 0);
}

function more(groups, list, button) {
  let budget = TOKENS_AT_ONCE;
  while (drawn < groups.length && (budget > 0 || drawn === 0)) {
    budget -= size(groups[drawn]);
    list.append(section(groups[drawn++]));
  }
  const left = groups.length - drawn;
  button.hidden = !left;
  button.textContent = `Show more (${counted(left, "group")} left)`;
}

function counts(groups) {
  const samples = groups.reduce((sum, { samples: matching }) => sum + matching.length, 0);
  const sets = chosenSets().map(({ set }) => set);
  const onPage = sets.reduce((sum, set) => sum + set.groups.reduce((count, group) => count + group.samples.length, 0), 0);
  const stored = sets.reduce((sum, set) => sum + set.total, 0);
  const differ = groups.filter(({ group }) => spread(group)).length;
  const parts = [`${counted(groups.length, "group")}, ${counted(samples, "sample")}; rewards differ in ${differ} of the groups.`];
  if (onPage < stored) parts.push(`${(stored - onPage).toLocaleString("en")} of ${stored.toLocaleString("en")} stored samples are left out of this page.`);
  return make("p", { class: "counts", role: "status" }, parts.join(" "));
}

function browse() {
  drawn = 0;
  const groups = found();
  const list = make("div");
  const button = make("button", { type: "button", class: "more" });
  button.addEventListener("click", () => more(groups, list, button));
  const [iteration, ...rest] = filters();
  rest.forEach((filter) => filter.classList.add("filter"));
  const toggle = make("button", { type: "button", class: "toggle", onclick: () => {
    filtersOpen = !filtersOpen;
    draw();
  } }, filtersOpen ? "Hide filters" : "Filters");
  ROOT.append(make("div", { class: filtersOpen ? "chooser open" : "chooser" }, iteration, toggle, ...rest, colours()), counts(groups));
  if (!groups.length) list.append(make("p", {}, PAGE.sets.length ? "No sample matches these filters." : "There are no samples."));
  more(groups, list, button);
  ROOT.append(list, button);
}

// ---- comparison of two sets

function recurring() {
  const byPrompt = new Map();
  PAGE.sets.forEach((set, position) => {
    for (const group of set.groups) {
      const seen = byPrompt.get(group.prompt) || byPrompt.set(group.prompt, new Map()).get(group.prompt);
      if (!seen.has(position)) seen.set(position, group);
    }
  });
  const several = [...byPrompt].filter(([, seen]) => seen.size > 1);
  // Sets are in order of iteration, so the first and the last are the earliest and the latest.
  const changed = ([, seen]) => {
    const means = [...seen.values()].map((group) => mean(rewardsOf(group)) ?? 0);
    return Math.abs(means.at(-1) - means[0]);
  };
  return several.sort((x, y) => changed(y) - changed(x));
}

function column(position, group) {
  const rewards = rewardsOf(group);
  return make("div", {}, make("h2", {}, PAGE.sets[position].name),
    make("p", {}, `mean reward ${number(mean(rewards))} · ${counted(group.samples.length, "sample")} · ${group.fate}`),
    cards(group.samples));
}

function compare() {
  const prompts = recurring();
  if (!prompts.length) {
    ROOT.append(make("p", {}, "No prompt on this page occurs in two iterations."));
    return;
  }
  const chosen = prompts.find(([number_]) => String(number_) === state.prompt) || prompts[0];
  const seen = chosen[1];
  const sets = [...seen.keys()].sort((x, y) => x - y);
  const side = (name, fallback) => (seen.has(Number(state[name])) && state[name] !== "" ? Number(state[name]) : fallback);
  const a = side("a", sets[0]);
  const b = side("b", sets.at(-1));
  const options = sets.map((position) => [String(position), PAGE.sets[position].name]);
  const texts = prompts.map(([number_]) => [String(number_), PAGE.prompts[number_].replace(/\s+/g, " ").slice(0, 90)]);
  ROOT.append(make("div", { class: "chooser" },
    stepper("Prompt", texts, String(chosen[0]), (value) => change({ prompt: value, a: "", b: "" })),
    stepper("Left", options, String(a), (value) => change({ a: value })),
    stepper("Right", options, String(b), (value) => change({ b: value })), colours()));
  ROOT.append(make("p", { class: "counts" }, "Prompts that occur in two or more iterations: " +
    `${counted(prompts.length, "prompt")}. The largest change of the mean reward, from the earliest to the latest, comes first.`));
  ROOT.append(make("section", { class: "group" }, ...prompt(seen.get(a)),
    make("div", { class: "two" }, column(a, seen.get(a)), column(b, seen.get(b)))));
}

function draw() {
  const focused = document.activeElement?.getAttribute("name");
  ROOT.replaceChildren(views());
  if (state.view === "compare") compare();
  else browse();
  if (focused) ROOT.querySelector(`[name="${CSS.escape(focused)}"]`)?.focus();
}

document.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || state.view !== "browse" || event.target.closest("input, select")) return;
  const options = setOptions();
  const next = options[options.findIndex(([value]) => value === state.set) + by];
  if (next) change({ set: next[0] });
});
window.addEventListener("hashchange", () => {
  Object.assign(state, DEFAULTS, Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
  draw();
});
draw();
