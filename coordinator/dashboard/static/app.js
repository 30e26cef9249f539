// The page's live part: asks the hub every two seconds and changes only what changed, so that
// scroll position, selected text and keyboard focus stay. Loaded by index.html.
import {drawCurves, drawTraffic} from "./charts.js";
import {ago, bytes, clockTime, count, duration, number, signed} from "./format.js";

const PERIOD = 2000;
const TIMEOUT = 8000;
const SHOWN_ROUNDS = 50;
const SHOWN_EVENTS = 50;
const CURVE_POINTS = 2000;
const FIRST_CHOICES = ["reward", "completion_vs_rule", "loss"];

const $ = (id) => document.getElementById(id);
const state = {
  now: 0, members: [], meanings: {}, metric: null, highlighted: null, lostAt: null, curves: new Map(),
};

// ---- small helpers: every text from the hub goes through textContent, never through markup ----

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

/** Make `parent` hold one child per item, in order, keeping the nodes of items that stay. */
function reconcile(parent, items, keyOf, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let node = old.get(key);
    old.delete(key);
    if (!node) {
      node = create(item);
      node.dataset.key = key;
    }
    if (node !== place) parent.insertBefore(node, place);
    else place = place.nextElementSibling;
    update(node, item);
  }
  for (const node of old.values()) node.remove();
}

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

async function ask(path) {
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort(), TIMEOUT);
  try {
    const answer = await fetch(`api/v1/${path}`, {signal: abort.signal, cache: "no-store"});
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error ?? `HTTP ${answer.status}`);
    return body;
  } finally {
    clearTimeout(timer);
  }
}

// ---- key figures ----

function renderOverview(seen) {
  state.now = seen.now;
  setText($("sentence"), seen.sentence);
  document.title = seen.members ? `${seen.connected}/${seen.members} · fedsched federation` : "fedsched federation";
  const last = seen.last_round;
  const round = seen.current_round ?? last?.number;
  setText($("kpi-round"), round == null ? "–" : count(round));
  setText($("kpi-round-note"), round == null ? "none yet" : seen.current_round ? `under way · ${seen.strategy}` : `finished · ${seen.strategy}`);
  setText($("kpi-members"), seen.members ? `${seen.connected} / ${seen.members}` : "0");
  setText($("kpi-members-note"), seen.members ? "connected / enrolled" : "none enrolled");
  setText($("kpi-duration"), last ? duration(last.duration) : "–");
  setText($("kpi-duration-note"), last ? `round ${last.number}, ${ago(last.finished, seen.now)}` : "no round finished");
  setText($("kpi-in"), bytes(seen.bytes_in));
  setText($("kpi-out"), bytes(seen.bytes_out));
  const total = seen.accepted_updates + seen.rejected_updates;
  setText($("kpi-rejected"), count(seen.rejected_updates));
  $("kpi-rejected").classList.toggle("bad", seen.rejected_updates > 0);
  setText($("kpi-rejected-note"), total ? `of ${count(total)}` : "none received");
}

// ---- members ----

const MEMBER_COLUMNS = [
  ["State", "state-cell"], ["Last seen", ""], ["Pods scheduled", "n"], ["Learning round", "n"],
  ["Gate", ""], ["Update norm", "n"], ["Policy drift", "n"], ["Bytes up", "n"], ["Bytes down", "n"],
];

function createMember(member) {
  const swatch = element("span", {class: "swatch", "aria-hidden": "true"});
  const button = element("button", {type: "button", class: "name", "aria-pressed": "false",
    title: "Emphasise this member in the learning curves"}, swatch, element("span"));
  button.addEventListener("click", () => {
    state.highlighted = state.highlighted === member.name ? null : member.name;
    renderMembers();
    renderCurves();
  });
  const row = element("tr", {role: "row"}, element("th", {scope: "row", role: "rowheader"}, button));
  for (const [label, kind] of MEMBER_COLUMNS) row.append(element("td", {"data-label": label, class: kind, role: "cell"}));
  row.cells[1].append(element("span"));
  return row;
}

function gate(metrics) {
  if (metrics.gate_gain == null) return "–";
  const tries = (metrics.gate_accepted ?? 0) + (metrics.gate_rejected ?? 0);
  const passed = tries ? ` · ${count(metrics.gate_accepted ?? 0)} of ${count(tries)} passed` : "";
  return `${signed(metrics.gate_gain)}${passed}`;
}

function updateMember(row, member) {
  const cells = row.cells;
  const button = cells[0].firstElementChild;
  setText(button.lastElementChild, member.name);
  button.firstElementChild.className = `swatch s${seriesOf(member.name)}`;
  button.setAttribute("aria-pressed", String(state.highlighted === member.name));
  const chip = cells[1].firstElementChild;
  setText(chip, member.state);
  chip.className = `state ${member.state.replace(" ", "-")}`;
  const why = member.refusal?.text ?? (member.revoked ? "may no longer connect" : "");
  if (chip.title !== why) chip.title = why;
  const metrics = member.metrics;
  const update = member.last_update;
  const values = [
    member.last_seen == null ? "never" : ago(member.last_seen, state.now),
    count(metrics.scheduled_pods ?? member.scheduled_pods),
    count(metrics.learning_rounds ?? update?.learning_rounds),
    gate(metrics),
    number(update?.delta_norm) + (update && !update.accepted ? " · set aside" : ""),
    number(metrics.distance_to_global),
    bytes(member.bytes_in),
    bytes(member.bytes_out),
  ];
  values.forEach((value, index) => setText(cells[index + 2], value));
  cells[6].classList.toggle("aside", Boolean(update && !update.accepted));
}

/** Place of a member's colour, 1..7; members beyond the seventh share a neutral one (0). */
function seriesOf(name) {
  const place = state.members.findIndex((member) => member.name === name) + 1;
  return place <= 7 ? place : 0;
}

function renderMembers() {
  show($("members"), state.members.length > 0);
  show($("members-empty"), state.members.length === 0);
  reconcile($("members").tBodies[0], state.members, (m) => m.name, createMember, updateMember);
}

// ---- rounds ----

function createRound() {
  const kinds = ["n", "", "n", "n", "text", "wide", "n wide", "n wide", "n wide"];
  const row = element("tr", {role: "row"}, element("th", {scope: "row", role: "rowheader", class: kinds[0]}));
  for (const kind of kinds.slice(1)) row.append(element("td", {class: kind, role: "cell"}));
  return row;
}

function updateRound(row, round) {
  const done = round.finished != null;
  const values = [
    count(round.number),
    done ? clockTime(round.finished) : round.state === "open" ? "under way" : "interrupted",
    done ? duration(round.duration) : round.state === "open" ? duration(state.now - round.started) : "–",
    done ? `${round.accepted} of ${round.invited}` : "–",
    null,
    round.strategy,
    number(round.global_norm),
    done ? bytes(round.bytes_in) : "–",
    done ? bytes(round.bytes_out) : "–",
  ];
  values.forEach((value, index) => value != null && setText(row.cells[index], value));
  const aside = row.cells[4];
  const lines = round.set_aside.map((entry) => `${entry.member}: ${entry.reason}`);
  const items = lines.length ? lines : ["–"];
  aside.classList.toggle("faint", !lines.length);
  reconcile(aside, items.map((line, index) => ({line, index})), (item) => item.index,
    () => element("p"), (node, item) => setText(node, item.line));
}

function renderRounds(rounds) {
  show($("rounds"), rounds.length > 0);
  show($("rounds-empty"), rounds.length === 0);
  reconcile($("rounds").tBodies[0], rounds, (r) => r.number, createRound, updateRound);
  const finished = rounds.filter((r) => r.finished != null).reverse();
  show($("traffic"), finished.length > 0);
  show($("traffic-legend"), finished.length > 0);
  show($("traffic-empty"), finished.length === 0);
  const last = finished.at(-1);
  if (!last) return;
  setText($("traffic-summary"), `Round ${last.number}: ${bytes(last.bytes_in)} up, ${bytes(last.bytes_out)} down.`);
  drawTraffic($("traffic"), finished);
}

// ---- learning curves ----

function metricChoices() {
  const known = new Set(state.members.flatMap((member) => Object.keys(member.metrics)));
  return Object.keys(state.meanings).filter((name) => known.has(name));
}

function renderChoices() {
  const names = metricChoices();
  const select = $("metric");
  if (!names.includes(state.metric)) {
    state.metric = FIRST_CHOICES.find((name) => names.includes(name)) ?? names[0] ?? null;
  }
  reconcile(select, names, (name) => name, (name) => element("option", {value: name}, name.replaceAll("_", " ")), () => {});
  show($("metric-label"), names.length > 0);
  if (state.metric && select.value !== state.metric) select.value = state.metric;
  setText($("metric-meaning"), state.metric ? state.meanings[state.metric] : "");
}

/** Points after those already held, for every member that has this curve. */
async function updateCurves() {
  const metric = state.metric;
  if (!metric) return;
  const holders = state.members.filter((member) => metric in member.metrics);
  await Promise.all(holders.map(async ({name}) => {
    const key = `${metric}/${name}`;
    const held = state.curves.get(key) ?? [];
    const since = held.length ? held.at(-1)[0] : 0;
    const query = `name=${encodeURIComponent(metric)}&since=${since}&limit=${CURVE_POINTS}`;
    const answer = await ask(`members/${encodeURIComponent(name)}/metrics?${query}`);
    if (answer.points.length) state.curves.set(key, [...held, ...answer.points].slice(-CURVE_POINTS));
  }));
}

function renderCurves() {
  const lines = state.members
    .map(({name}) => ({name, series: seriesOf(name), points: state.curves.get(`${state.metric}/${name}`) ?? []}))
    .filter((line) => line.points.length);
  const empty = $("curves-empty");
  show($("curves"), lines.length > 0);
  show(empty, lines.length === 0);
  setText(empty, state.members.length
    ? "No learning curve yet: members send their figures once their learner runs (`fedsched agent learn`)."
    : "Learning curves appear once a member is enrolled and learning.");
  setText($("curves-summary"), lines.map((line) => `${line.name}: ${number(line.points.at(-1)[1])}`).join("; "));
  if (lines.length) drawCurves($("curves"), state.metric, lines, state.highlighted);
}

// ---- events ----

function renderEvents(events) {
  show($("events"), events.length > 0);
  show($("events-empty"), events.length === 0);
  const seen = new Map();
  const keyed = events.map((event) => {
    const base = `${event.time}/${event.kind}/${event.member}/${event.text}`;
    const twin = seen.get(base) ?? 0;
    seen.set(base, twin + 1);
    return {...event, key: `${base}/${twin}`};
  });
  reconcile($("events"), keyed, (event) => event.key, (event) => {
    const bad = /refus|aside|reject|revok|fail/.test(event.kind) ? " bad" : "";
    const moment = new Date(event.time * 1000);
    const what = event.member && !event.text.includes(event.member) ? `${event.member}: ${event.text}` : event.text;
    return element("li", {},
      element("time", {datetime: moment.toISOString(), title: moment.toLocaleString()}, clockTime(event.time)),
      element("span", {class: `kind${bad}`}, event.kind.replaceAll("_", " ")),
      element("span", {class: "what"}, what));
  }, () => {});
}

// ---- the loop ----

async function refresh() {
  if (!Object.keys(state.meanings).length) state.meanings = (await ask("metrics")).metrics;
  const [seen, members, rounds, events] = await Promise.all([
    ask("overview"), ask("members"), ask(`rounds?limit=${SHOWN_ROUNDS}`), ask(`events?limit=${SHOWN_EVENTS}`),
  ]);
  state.members = members.members;
  renderOverview(seen);
  renderMembers();
  renderRounds(rounds.rounds);
  renderEvents(events.events);
  renderChoices();
  await updateCurves();
  renderCurves();
}

function reachable(error) {
  if (!error) {
    state.lostAt = null;
    setText($("updated"), `Updated ${clockTime(Date.now() / 1000)}, every ${PERIOD / 1000} s.`);
  } else {
    state.lostAt ??= Date.now() / 1000;
    const cause = error instanceof TypeError || error.name === "AbortError" ? "" : ` (${error.message})`;
    setText($("outage"), `Hub unreachable since ${clockTime(state.lostAt)}${cause}. The figures below are from before; this page keeps trying.`);
  }
  show($("outage"), Boolean(error));
  document.body.classList.toggle("stale", Boolean(error));
}

async function loop() {
  if (!document.hidden) {
    try {
      await refresh();
      reachable(null);
    } catch (error) {
      reachable(error);
    }
  }
  setTimeout(loop, PERIOD);
}

$("metric").addEventListener("change", async (event) => {
  state.metric = event.target.value;
  renderChoices();
  renderCurves();
  await updateCurves().then(renderCurves, reachable);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renderCurves);
loop();
